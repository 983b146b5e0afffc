import json
import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dstrial.config.diagnostics import MAX_PROBLEMS, Diagnostics, render
from dstrial.config.documents import (
    MAX_TEXT_BYTES,
    check_value,
    parse_yaml_value,
    read_json,
    read_yaml,
    read_yaml_text,
    yaml_text,
)
from dstrial.errors import ConfigError

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


def paths(value, path=()):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from paths(inner, (*path, key))


@given(value=VALUES, indent=st.sampled_from([None, 2, "\t"]), ascii_only=st.booleans())
def test_every_json_key_has_line_number(value, indent, ascii_only, tmp_path_factory):
    path = tmp_path_factory.mktemp("json") / "ds.json"
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    path.write_text(text, encoding="utf-8")
    document = read_json(path, "ds.json")

    assert document.value == value
    assert set(document.lines) == {(), *paths(value)}
    lines = path.read_text(encoding="utf-8").split("\n")
    for key_path, place in document.lines.items():
        if key_path and isinstance(key_path[-1], str):
            line = lines[int(place.rpartition(":")[2]) - 1]
            assert json.dumps(key_path[-1], ensure_ascii=ascii_only) in line


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": Infinity}', '{"a": 1} // comment', "{'a': 1}", ""])
def test_non_strict_json_is_rejected(text, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(text)

    with pytest.raises(ConfigError, match=r"ds\.json"):
        read_json(path, "ds.json")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("5e7", 5e7),
        ("1.5", 1.5),
        ("010", 10),
        ("0x1f", 31),
        ("yes", "yes"),
        ("off", "off"),
        ("true", True),
        ("~", None),
        ("", None),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("[1, 2.0, a]", [1, 2.0, "a"]),
    ],
)
def test_yaml_scalars_follow_version_1_2(text, value):
    parsed = parse_yaml_value(text)

    assert parsed == value
    assert type(parsed) is type(value)


def test_yaml_keys_items_and_merged_keys_have_lines():
    text = "# comment\nbase: &base\n  lr: 1\n  wd: 2\nother:\n  <<: *base\n  lr: 3\nlabels:\n  - a\n  - b\n"
    document = read_yaml_text(text, "exp.yaml")

    assert document.value["other"] == {"lr": 3, "wd": 2}
    assert document.lines[("labels", 1)] == "exp.yaml:10"
    assert document.lines[("other", "lr")] == "exp.yaml:7"
    assert document.lines[("other", "wd")] == "exp.yaml:4"


def test_unreadable_file_raises_config_error(tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9")

    with pytest.raises(ConfigError, match=r"latin\.yaml: the file is not UTF-8 text; expected a text file"):
        read_yaml(tmp_path / "latin.yaml", "latin.yaml")
    with pytest.raises(ConfigError, match=r"none\.yaml: the file is missing; .* Correct the path\."):
        read_yaml(tmp_path / "none.yaml", "none.yaml")
    with pytest.raises(ConfigError, match=r"dir: the file is unreadable \(Is a directory\)"):
        read_yaml(tmp_path, "dir")


@pytest.mark.parametrize(
    ("text", "line"), [("a:\n\tb: 1", 2), ("a: 1\n\tb: 2", 2), ("a:\n  b:\n  \tc: 1", 3), ("a: |\n\tx", 2)]
)
def test_yaml_tab_indentation_is_reported(text, line):
    with pytest.raises(ConfigError, match=rf"e\.yaml:{line}: .*indented with a tab.*Indent with spaces\."):
        read_yaml_text(text, "e.yaml")


def test_duplicate_yaml_key_is_reported_with_path():
    with pytest.raises(ConfigError, match=r"exp\.yaml:1: a\[1\]\.b is given twice \(first on line 1\)"):
        read_yaml_text("{a: [0, {b: 1, b: 2}]}", "exp.yaml")


@given(value=VALUES)
def test_yaml_text_round_trips(value: object) -> None:
    assert parse_yaml_value(yaml_text(value)) == value
    words = {
        "words": ["2e-3", "1e5", "0x1f", "yes", "True", "null", "1_000", "a: b"],
        "numbers": [2e-3, 1, True, None],
    }
    assert parse_yaml_value(yaml_text(words)) == yaml.safe_load(yaml_text(words)) == words


def test_yaml_merge_prefers_own_then_first_mapping() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {y: 2, z: 2}\nc: {<<: [*a, *b], z: 3}\n'<<': word\n"
    value = read_yaml_text(text, "exp.yaml").value
    assert value["c"] == {"x": 1, "y": 1, "z": 3}
    assert value["<<"] == "word"


@pytest.mark.parametrize("num_items", [99_996, 99_997])
def test_value_limit_counts_keys_items_and_aliases(num_items: int) -> None:
    # Counted values: mapping (1), keys (2), list a (4), list b (1), its num_items - 8 numbers, alias of a (4).
    text = "{a: &a [1, 1, 1], b: [" + "1, " * (num_items - 8) + "*a]}"
    if num_items == 99_996:
        read_yaml_text(text, "exp.yaml")
    else:
        with pytest.raises(ConfigError, match="more than 100000 values"):
            read_yaml_text(text, "exp.yaml")


@pytest.mark.parametrize("value", [[["\0"]], ["x" * MAX_TEXT_BYTES, "y"], list(range(100_000))])
def test_check_value_applies_limits_of_documents(value: object) -> None:
    with pytest.raises(ConfigError, match="the template"):
        check_value(value, "the template")


def test_diagnostics_stop_after_100_problems() -> None:
    findings = Diagnostics({}, "exp.yaml")
    with pytest.raises(ConfigError) as refused:
        for number in range(10_000):
            findings.problem(("labels", number), str(number), "a string", "Quote it.")
    assert len(refused.value.problems) == MAX_PROBLEMS + 1
    assert "exp.yaml is wrong in at least 100 places" in str(refused.value)


def test_rendered_value_is_shortened() -> None:
    assert render(list(range(10**6))).startswith("[0, 1, 2, ")
    assert len(render(list(range(10**6)))) == 80


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (".inf", math.inf),
        ("-.INF", -math.inf),
        (".nan", math.nan),
        ("1e999", math.inf),
        (str(2**64), 2**64),
        (str(-(2**63) - 1), -(2**63) - 1),
    ],
)
def test_number_beyond_json_or_sqlite_is_rejected(text: str, value: float) -> None:
    with pytest.raises(ConfigError, match=r"exp\.yaml:2: .*; expected a finite number of 64 bits"):
        read_yaml_text(f"a: {2**64 - 1}\nb: {text}", "exp.yaml")
    with pytest.raises(ConfigError, match="expected a finite number of 64 bits"):
        check_value({"b": [value]}, "template")
