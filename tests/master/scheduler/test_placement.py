"""Where an allocation's slots are among nodes: pure, for any nodes and any size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dstrial.master.scheduler.queue import by_node, could_ever_fit, place
from dstrial.master.store.nodes import node_of, slot_id_of


def slots(*counts: int) -> dict[int, list[int]]:
    return {node: [slot_id_of(node, index) for index in range(count)] for node, count in enumerate(counts)}


def counts(chosen: list[int] | None) -> dict[int, int] | None:
    return None if chosen is None else {node: len(found) for node, found in by_node(chosen).items()}


def test_what_fits_on_one_node_is_on_the_fullest_that_has_room() -> None:
    assert counts(place(2, slots(8, 3, 2), {0: 8, 1: 8, 2: 8})) == {2: 2}
    assert counts(place(3, slots(8, 3, 2), {0: 8, 1: 8, 2: 8})) == {1: 3}


def test_what_fits_on_one_node_waits_for_one() -> None:
    assert place(4, slots(3, 3), {0: 4, 1: 4}) is None
    assert counts(place(4, slots(3, 3), {0: 3, 1: 3})) == {0: 2, 1: 2}


def test_what_fits_on_none_has_few_nodes_and_equal_parts_where_that_can_be() -> None:
    assert counts(place(4, slots(2, 2, 2), {0: 2, 1: 2, 2: 2})) == {0: 2, 1: 2}
    assert counts(place(4, slots(1, 3, 2), {0: 3, 1: 3, 2: 2})) == {1: 2, 2: 2}
    assert counts(place(5, slots(3, 3), {0: 3, 1: 3})) == {0: 3, 1: 2}


def test_a_command_is_never_divided() -> None:
    assert place(4, slots(2, 2), {0: 2, 1: 2}, is_on_one_node=True) is None
    assert not could_ever_fit(4, {0: 2, 1: 2}, is_on_one_node=True)
    assert could_ever_fit(4, {0: 2, 1: 2})


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6), st.integers(1, 40))
def test_slots_are_free_ones_once_each_as_many_as_asked_for(
    nodes: list[tuple[int, int]], num_slots: int
) -> None:
    free = slots(*(min(unused, capacity) for unused, capacity in nodes))
    capacity = {node: most for node, (_, most) in enumerate(nodes)}

    chosen = place(num_slots, free, capacity)

    total = sum(map(len, free.values()))
    if chosen is None:
        is_waiting_for_one = num_slots <= max(capacity.values(), default=0)
        has_one = any(len(found) >= num_slots for found in free.values())
        assert not has_one
        assert is_waiting_for_one or total < num_slots
        return
    assert len(chosen) == len(set(chosen)) == num_slots
    assert all(slot in free[node_of(slot)] for slot in chosen)
    used = by_node(chosen)
    if num_slots <= max(capacity.values()):
        assert len(used) == 1
    # No fewer nodes would have done.
    most_first = sorted(map(len, free.values()), reverse=True)
    assert sum(most_first[: len(used) - 1]) < num_slots
    # The order of ranks is that of nodes.
    assert [node_of(slot) for slot in chosen] == sorted(node_of(slot) for slot in chosen)
