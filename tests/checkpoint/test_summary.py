import dataclasses

from hypothesis import given
from hypothesis import strategies as st
from sample_layouts import PLACE, PLAIN_LAYOUT

from dstrial.checkpoint.layout import Layout, ParameterPlace
from dstrial.checkpoint.summary import (
    ABSENT,
    Difference,
    compare,
    count_parameters,
    own_places,
    tied_names,
)

leaves = st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab", max_size=2)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("xyz", min_size=1), inner, max_size=3)
    ),
    max_leaves=8,
)
mappings = st.dictionaries(st.text("xyz", min_size=1), trees, max_size=4)


def place(name: str, **changes: object) -> ParameterPlace:
    return dataclasses.replace(PLACE, name=name, shape=(3, 2), **changes)  # type: ignore[arg-type]


def layout(*places: ParameterPlace, **changes: object) -> Layout:
    return dataclasses.replace(PLAIN_LAYOUT, parameters=places, **changes)  # type: ignore[arg-type]


def test_tied_parameters_are_counted_once() -> None:
    tied = layout(
        place("embed"),
        place("head", tied_to="embed"),
        place("frozen", trainable=False, group_idx=None),
        place("left.out", group_idx=None),
        place("embed", tied_to="embed", stage=1, model_part=1),
    )
    counts = count_parameters(tied)
    assert [one.name for one in own_places(tied)] == ["embed", "frozen", "left.out"]
    assert (counts.num_parameters, counts.num_elements) == (3, 18)
    assert (counts.num_frozen, counts.num_frozen_elements, counts.num_not_optimized) == (1, 6, 1)
    assert counts.tied == tied_names(tied) == {"head": "embed"}


def test_count_parameters_sums_model_parallel_slices() -> None:
    cut = layout(place("w"), place("w", model_part=1), model_parallel_size=2)
    assert count_parameters(cut).num_elements == 12


def test_compare_names_leaves_by_dotted_path() -> None:
    a = {"lr": 1, "zero": {"stage": 1, "same": 0}, "groups": [{"lr": 1}, {"lr": 2}], "sizes": [1, 2]}
    b = {
        "lr": 1,
        "zero": {"stage": 3, "same": 0},
        "groups": [{"lr": 1}, {"lr": 3}],
        "sizes": [1, 3],
        "new": {},
    }
    assert compare(a, b) == [
        Difference("zero.stage", 1, 3),
        Difference("groups.1.lr", 2, 3),
        Difference("sizes", [1, 2], [1, 3]),
        Difference("new", ABSENT, {}),
    ]


def test_difference_str_shows_old_and_new_value() -> None:
    assert str(Difference("zero.stage", 1, "auto")) == "zero.stage: 1 -> 'auto'"


@given(mappings, mappings)
def test_compare_is_symmetric_and_reflexive(a: dict[str, object], b: dict[str, object]) -> None:
    forth, back = compare(a, b), compare(b, a)
    assert compare(a, a) == []
    assert {(one.key, repr(one.a), repr(one.b)) for one in forth} == {
        (one.key, repr(one.b), repr(one.a)) for one in back
    }
