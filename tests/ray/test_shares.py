"""Shares of nodes: as few as possible, equal if that can be, none above what a node has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrial.ray.shares import choose_shares


@pytest.mark.parametrize(
    ("num_slots", "capacities", "shares"),
    [
        (1, [2, 2, 2], (1,)),
        (2, [2, 2, 2], (2,)),
        (4, [2, 2, 2], (2, 2)),
        (3, [2, 2, 2], (2, 1)),
        (5, [2, 2, 2], (2, 2, 1)),
        (12, [8, 8, 8], (6, 6)),
        (12, [8, 4, 4], (8, 4)),
        (10, [8, 4, 4], (8, 2)),
        (10, [8, 6, 4], (5, 5)),
        (7, [2, 2, 2], None),
        (1, [], None),
        (1, [0, 0], None),
    ],
)
def test_shares_of_as_few_nodes_as_possible_are_equal_if_that_can_be(
    num_slots: int, capacities: list[int], shares: tuple[int, ...] | None
) -> None:
    assert choose_shares(num_slots, capacities) == shares


def test_what_cannot_be_divided_needs_a_node_that_has_it() -> None:
    assert choose_shares(2, [2, 2], is_on_one_node=True) == (2,)
    assert choose_shares(3, [2, 2], is_on_one_node=True) is None


@given(st.integers(1, 40), st.lists(st.integers(0, 9), max_size=8))
def test_all_slots_are_given_and_every_share_has_a_node_of_its_own(
    num_slots: int, capacities: list[int]
) -> None:
    shares = choose_shares(num_slots, capacities)
    if shares is None:
        assert num_slots > sum(capacities)
        return
    largest = sorted(capacities, reverse=True)
    assert sum(shares) == num_slots
    assert min(shares) >= 1
    assert all(share <= most for share, most in zip(sorted(shares, reverse=True), largest, strict=False))
    assert sum(largest[: len(shares) - 1]) < num_slots
