import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrial.config import merge_deepspeed, overwrite_deepspeed_config
from dstrial.errors import ConfigError

KEYS = st.sampled_from(["a", "b", "c", "zero_optimization", "stage"])
SCALARS = st.one_of(st.booleans(), st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=2))
CONFIGS = st.recursive(
    st.dictionaries(KEYS, SCALARS), lambda inner: st.dictionaries(KEYS, SCALARS | inner), max_leaves=8
)
OVERWRITES = st.recursive(
    st.dictionaries(KEYS, SCALARS | st.none()),
    lambda inner: st.dictionaries(KEYS, SCALARS | inner | st.none()),
    max_leaves=8,
)


def leaves(config, path=()):
    for key, value in config.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def nodes(config, path=()):
    for key, value in config.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from nodes(value, (*path, key))


def lookup(config, path):
    for part in path:
        if not isinstance(config, dict) or part not in config:
            return KeyError
        config = config[part]
    return config


@given(CONFIGS, OVERWRITES)
def test_neither_input_is_changed(base, overwrite):
    before = copy.deepcopy((base, overwrite))
    merged = merge_deepspeed(base, overwrite)
    for _, value in leaves(merged):
        if isinstance(value, list):
            value.append("changed afterwards")

    assert (base, overwrite) == before


@given(CONFIGS, OVERWRITES)
def test_every_overwritten_leaf_is_in_the_result_and_every_null_is_gone(base, overwrite):
    merged = merge_deepspeed(base, overwrite)

    for path, value in leaves(overwrite):
        assert lookup(merged, path) == (KeyError if value is None else value)


@given(CONFIGS, OVERWRITES)
def test_what_is_not_overwritten_stays(base, overwrite):
    merged = merge_deepspeed(base, overwrite)
    touched = {path for path in nodes(overwrite) if not isinstance(lookup(overwrite, path), dict)}
    touched |= {path for path in nodes(overwrite) if not isinstance(lookup(base, path), dict)}

    for path, value in leaves(base):
        if all(path[: len(other)] != other and other[: len(path)] != path for other in touched):
            assert lookup(merged, path) == value


@given(CONFIGS)
def test_nothing_to_overwrite_gives_an_equal_copy(base):
    assert merge_deepspeed(base, {}) == base
    assert merge_deepspeed(base, {}) is not base


@given(CONFIGS, OVERWRITES)
def test_merging_twice_changes_nothing_more(base, overwrite):
    once = merge_deepspeed(base, overwrite)

    assert merge_deepspeed(once, overwrite) == once


def test_a_null_of_the_base_is_kept():
    assert merge_deepspeed({"steps_per_print": None}, {}) == {"steps_per_print": None}


def test_a_mapping_replaces_what_is_none():
    assert merge_deepspeed({"zero_optimization": True}, {"zero_optimization": {"stage": 2}}) == {
        "zero_optimization": {"stage": 2}
    }


def test_a_list_is_replaced_not_joined():
    assert merge_deepspeed({"betas": [0.9, 0.99]}, {"betas": [0.5]}) == {"betas": [0.5]}


def test_a_file_is_overwritten_in_memory_only(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 4, "fp16": {"enabled": True}}))
    merged = overwrite_deepspeed_config(str(path), {"fp16": None, "train_batch_size": 8})

    assert merged == {"train_batch_size": 8}
    assert json.loads(path.read_text())["train_batch_size"] == 4


def test_a_duplicate_key_in_the_file_is_an_error(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"fp16": {"enabled": true,\n "enabled": false}}')

    with pytest.raises(ConfigError, match=r"ds\.json:2: fp16\.enabled is given twice \(first on line 1\)"):
        overwrite_deepspeed_config(str(path), {})


def test_anything_but_a_path_or_a_dict_is_a_type_error():
    with pytest.raises(TypeError, match="expected the path of a DeepSpeed JSON file or a dict"):
        overwrite_deepspeed_config([("train_batch_size", 4)], {})
