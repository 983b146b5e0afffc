from __future__ import annotations

import json
import pathlib

from hypothesis import given
from hypothesis import strategies as st

from dstrial.engine.export import (
    DTYPES,
    TensorSpec,
    find_model_files,
    header_bytes,
    in_file_order,
    shards_of,
)


def test_find_model_files_prefers_first_directory(tmp_path: pathlib.Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for directory, text in ((first, "1"), (second, "2")):
        directory.mkdir()
        (directory / "tokenizer.json").write_text(text)
        (directory / "model_def.py").write_text(text)
    (second / "config.json").write_text('{"architectures": ["Wide"]}')
    found = find_model_files([tmp_path / "nowhere", first, second])
    assert found == [first / "tokenizer.json", second / "config.json"]


def test_find_model_files_skips_unrelated_configs(tmp_path: pathlib.Path) -> None:
    for text in ('{"train_batch_size": 8}', "[1]", "no json", '"text"'):
        (tmp_path / "config.json").write_text(text)
        assert find_model_files([tmp_path]) == []


specs = st.lists(
    st.builds(
        TensorSpec,
        st.text("abc.", min_size=1, max_size=6),
        st.sampled_from(sorted(DTYPES)),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ),
    unique_by=lambda spec: spec.name,
)


def read(header: bytes) -> dict[str, dict[str, object]]:
    length = int.from_bytes(header[:8], "little")
    assert len(header) == 8 + length
    values: dict[str, dict[str, object]] = json.loads(header[8:])
    return values


def test_header_follows_safetensors_format() -> None:
    header = header_bytes(
        [TensorSpec("w", "F32", (2, 3)), TensorSpec("n", "I64", ())], {"format": "pt", "v": "w"}
    )
    assert read(header) == {
        "__metadata__": {"format": "pt", "v": "w"},
        "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "n": {"dtype": "I64", "shape": [], "data_offsets": [24, 32]},
    }


@given(specs)
def test_tensors_are_contiguous_and_aligned(given_specs: list[TensorSpec]) -> None:
    ordered = in_file_order(given_specs)
    assert sorted(ordered, key=lambda spec: spec.name) == sorted(given_specs, key=lambda spec: spec.name)
    header = header_bytes(ordered, {})
    assert len(header) % 8 == 0
    end = 0
    for name, entry in read(header).items():
        (spec,) = (spec for spec in ordered if spec.name == name)
        begin, after = entry["data_offsets"]  # type: ignore[misc]
        assert (begin, after) == (end, end + spec.num_bytes)
        assert begin % DTYPES[spec.dtype].itemsize == 0
        end = after


@given(specs, st.integers(1, 400))
def test_shards_are_filled_up_to_limit(given_specs: list[TensorSpec], limit: int) -> None:
    shards = shards_of(given_specs, limit)
    assert [spec for shard in shards for spec in shard] == given_specs
    assert len(shards) == 1 or all(shards)
    for shard, following in zip(shards, [*shards[1:], []], strict=True):
        size = sum(spec.num_bytes for spec in shard)
        assert size <= limit or len(shard) == 1
        assert not following or size + following[0].num_bytes > limit
