import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dstrial.config.documents import parse_yaml_value, read_json, read_yaml, read_yaml_text, yaml_text
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
def test_every_key_of_any_json_has_the_line_it_stands_on(value, indent, ascii_only, tmp_path_factory):
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


def test_json_numbers_are_read_as_json_reads_them(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"bucket":\t5e7, "lr": 1e-5, "on": "yes", "octal": "0o7"}')

    assert read_json(path, "ds.json").value == {"bucket": 5e7, "lr": 1e-5, "on": "yes", "octal": "0o7"}


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": Infinity}', '{"a": 1} // comment', "{'a': 1}", ""])
def test_what_is_not_strict_json_is_refused(text, tmp_path):
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


def test_yaml_keys_and_items_have_lines(tmp_path):
    path = tmp_path / "exp.yaml"
    path.write_text("# comment\nsearcher:\n  name: single\nlabels:\n  - a\n  - b\n")
    lines = read_yaml(path, "exp.yaml").lines

    assert lines[("searcher", "name")] == "exp.yaml:3"
    assert lines[("labels", 1)] == "exp.yaml:6"


def test_a_key_that_overrides_a_merged_one_is_not_a_duplicate(tmp_path):
    path = tmp_path / "exp.yaml"
    path.write_text("base: &base\n  lr: 1\n  wd: 2\nother:\n  <<: *base\n  lr: 3\n")
    document = read_yaml(path, "exp.yaml")

    assert document.value["other"] == {"lr": 3, "wd": 2}
    assert document.lines[("other", "lr")] == "exp.yaml:6"
    assert document.lines[("other", "wd")] == "exp.yaml:3"


def test_a_file_that_contains_itself_is_refused(tmp_path):
    path = tmp_path / "exp.yaml"
    path.write_text("a: &a\n  b: *a\n")

    with pytest.raises(ConfigError, match=r"exp\.yaml:1: .* an alias of what it stands in"):
        read_yaml(path, "exp.yaml")


def test_an_unreadable_file_is_a_config_error(tmp_path):
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
def test_yaml_tab_indentation_is_named(text, line):
    with pytest.raises(ConfigError, match=rf"e\.yaml:{line}: .*indented with a tab.*Indent with spaces\."):
        read_yaml_text(text, "e.yaml")


def test_a_character_that_yaml_does_not_have_is_a_config_error():
    with pytest.raises(ConfigError, match="the changed config: the text is not YAML"):
        read_yaml_text("a: \0", "the changed config")


def test_written_yaml_reads_back_as_the_same_values() -> None:
    value = {
        "words": ["2e-3", "1e5", "0x1f", "yes", "True", "null", "1_000", "a: b"],
        "numbers": [2e-3, 1, True, None],
    }
    assert parse_yaml_value(yaml_text(value)) == value
    assert yaml.safe_load(yaml_text(value)) == value


def test_merging_twice_in_a_mapping_is_a_key_given_twice():
    text = "a: &a {x: 1}\nb:\n  <<: *a\n  <<: {x: 2}\n"
    with pytest.raises(ConfigError, match=r"exp\.yaml:4: b\.<< is given twice \(first on line 3\)"):
        read_yaml_text(text, "exp.yaml")


def test_an_anchor_that_is_defined_twice_is_told():
    with pytest.raises(ConfigError, match="an anchor defined a second time"):
        read_yaml_text("a: &x 1\nb: &x 2\n", "exp.yaml")
