from hypothesis import given
from hypothesis import strategies as st

from dstrial.checkpoint.summary import ABSENT, Difference, compare

leaves = st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab", max_size=2)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("xyz", min_size=1), inner, max_size=3)
    ),
    max_leaves=8,
)
mappings = st.dictionaries(st.text("xyz", min_size=1), trees, max_size=4)


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
def test_compare_is_symmetric(a: dict[str, object], b: dict[str, object]) -> None:
    forth, back = compare(a, b), compare(b, a)
    assert {(one.key, repr(one.a), repr(one.b)) for one in forth} == {
        (one.key, repr(one.b), repr(one.a)) for one in back
    }


@given(mappings)
def test_compare_with_itself_is_empty(a: dict[str, object]) -> None:
    assert compare(a, a) == []
