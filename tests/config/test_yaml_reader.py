import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrial.config.diagnostics import MAX_PROBLEMS, Diagnostics, render
from dstrial.config.documents import (
    DEFAULT_LIMITS,
    TextLimits,
    check_value,
    parse_yaml_value,
    read_yaml_text,
    yaml_text,
)
from dstrial.config.merge import merge_template
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


@given(value=VALUES)
def test_what_is_written_reads_back_as_the_same_values(value: object) -> None:
    assert parse_yaml_value(yaml_text(value)) == value


def test_merged_mappings_give_what_the_mapping_itself_does_not_the_first_before_the_others() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {y: 2, z: 2}\nc: {<<: [*a, *b], z: 3}\n'<<': word\n"
    value = read_yaml_text(text, "exp.yaml").value
    assert value["c"] == {"x": 1, "y": 1, "z": 3}
    assert value["<<"] == "word"


def test_a_key_twice_on_one_line_is_found_with_its_path() -> None:
    with pytest.raises(ConfigError, match=r"exp\.yaml:1: a\[1\]\.b is given twice \(first on line 1\)"):
        read_yaml_text("{a: [0, {b: 1, b: 2}]}", "exp.yaml")


@pytest.mark.parametrize("num_items", [10, 11])
def test_a_lower_limit_of_values_counts_keys_items_and_aliases(num_items: int) -> None:
    # The mapping, two keys, the first list of four, and the second with an alias of it.
    text = "{a: &a [1, 1, 1], b: [" + "1, " * (num_items - 8) + "*a]}"
    limits = TextLimits(num_values=14)
    if num_items == 10:
        read_yaml_text(text, "exp.yaml", limits)
    else:
        with pytest.raises(ConfigError, match="more than 14 values"):
            read_yaml_text(text, "exp.yaml", limits)


def test_the_refusal_says_how_to_raise_the_limit_where_it_can_be_raised() -> None:
    limits = TextLimits(text_bytes=10, raised_by="Raise limits.config_text_bytes in the master's settings.")
    with pytest.raises(ConfigError, match=r"Raise limits\.config_text_bytes"):
        read_yaml_text("a: 12345678", "exp.yaml", limits)


@pytest.mark.parametrize(
    "value", [[["\0"]], {"k" * 2000: 1}, ["x" * DEFAULT_LIMITS.text_bytes, "y"], list(range(100_000))]
)
def test_values_that_came_as_json_have_the_same_limits(value: object) -> None:
    with pytest.raises(ConfigError, match="the template"):
        check_value(value, "the template")


def test_a_check_stops_at_its_hundredth_problem_and_says_so() -> None:
    findings = Diagnostics({}, "exp.yaml")
    with pytest.raises(ConfigError) as refused:
        for number in range(10_000):
            findings.problem(("labels", number), str(number), "a string", "Quote it.")
    assert len(refused.value.problems) == MAX_PROBLEMS + 1
    assert "exp.yaml is wrong in at least 100 places" in str(refused.value)


def test_the_same_finding_is_told_once() -> None:
    findings = Diagnostics({}, "exp.yaml")
    for _ in range(3):
        findings.problem("a", "1", "2", "Write 2.")
        findings.warn("a", "is odd")
        findings.note("a", "is even")
    assert (len(findings.problems), len(findings.warnings), len(findings.notes)) == (1, 1, 1)


def test_a_large_value_is_rendered_by_its_beginning() -> None:
    assert render(list(range(10**6))).startswith("[0, 1, 2, ")
    assert len(render(list(range(10**6)))) == 80


def test_lists_of_a_template_are_united_whatever_their_items_are() -> None:
    template = {
        "labels": ["a", 1, ["x"], {"b": [1]}],
        "log_policies": [{"name": "n", "pattern": "a"}, {"pattern": "b"}],
    }
    config = {
        "labels": ["c", True, {"b": [1]}],
        "log_policies": [{"name": "n", "action": "x"}, {"pattern": "b"}],
    }
    merged = merge_template(template, config)
    assert merged["labels"] == ["c", True, {"b": [1]}, "a", 1, ["x"]]
    assert merged["log_policies"] == [{"name": "n", "pattern": "a", "action": "x"}, {"pattern": "b"}]


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
def test_number_that_json_or_sqlite_lacks_is_refused(text: str, value: float) -> None:
    with pytest.raises(ConfigError, match=r"exp\.yaml:2: .*; expected a finite number of 64 bits"):
        read_yaml_text(f"a: {2**64 - 1}\nb: {text}", "exp.yaml")
    with pytest.raises(ConfigError, match="expected a finite number of 64 bits"):
        check_value({"b": [value]}, "template")
