"""Pure decisions: slots and nodes of allocations, growth, and reasons for waiting."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrial.master.scheduler.queue import Waiting, assignments, by_node, could_ever_fit, place
from dstrial.master.scheduler.resizing import grown
from dstrial.master.scheduler.wait_reasons import waiting_text
from dstrial.master.store.allocations import Allocation
from dstrial.master.store.nodes import node_of, slot_id_of


def waiting(*sizes: int) -> list[Waiting]:
    return [Waiting(index, index, size, None) for index, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "free", "num_enabled", "expected"),
    [
        ((1, 2, 1), {0, 1, 2}, 3, [(0, [0]), (1, [1, 2])]),
        ((2, 1), {1}, 2, []),
        ((3, 1), {0, 1}, 2, [(1, [0])]),
        ((2, 0), set(), 2, [(1, [])]),
    ],
    ids=["in order", "the first holds later ones", "one that never fits holds none", "no slots"],
)
def test_assignments_follow_queue_order(
    sizes: tuple[int, ...], free: set[int], num_enabled: int, expected: list[tuple[int, list[int]]]
) -> None:
    assert assignments(waiting(*sizes), free, set(range(num_enabled)), {}) == expected


def test_experiment_at_max_slots_blocks_no_others() -> None:
    trials = [Waiting(1, 7, 1, 1), Waiting(2, 7, 1, 1), Waiting(3, 8, 1, None)]

    assert assignments(trials, {0, 1, 2}, {0, 1, 2}, {}) == [(1, [0]), (3, [1])]
    assert assignments(trials, {1, 2}, {0, 1, 2}, {7: 1}) == [(3, [1])]


def test_assignments_respect_excluded_nodes_and_single_node() -> None:
    on = [slot_id_of(node, index) for node in (1, 2) for index in (0, 1)]
    first, second = on[:2], on[2:]
    waiting = Waiting(1, 1, 2, None, excluded_nodes=frozenset({1}))

    assert assignments([waiting], on, on, {}) == [(1, second)]
    assert assignments([waiting], first, on, {}) == []
    assert assignments([Waiting(1, 1, 2, None, excluded_nodes=frozenset({1, 2}))], on, on, {}) == []
    assert assignments([Waiting(1, 1, 4, None)], on, on, {}) == [(1, on)]
    assert assignments([Waiting(1, 1, 4, None, is_on_one_node=True)], on, on, {}) == []


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.none() | st.integers(0, 5)), max_size=12),
    st.sets(st.integers(0, 7)),
)
def test_assignments_are_unique_and_within_limits(
    given_: list[tuple[int, int, int | None]], free: set[int]
) -> None:
    limits = {experiment: limit for _, experiment, limit in given_}
    trials = [
        Waiting(i, experiment, size, limits[experiment]) for i, (size, experiment, _) in enumerate(given_)
    ]

    chosen = assignments(trials, free, free, {})

    slots = [slot for _, taken in chosen for slot in taken]
    assert len(slots) == len(set(slots))
    assert set(slots) <= free
    for experiment, limit in limits.items():
        used = sum(len(taken) for trial_id, taken in chosen if trials[trial_id].experiment_id == experiment)
        assert limit is None or used <= limit
    assert all(len(taken) == trials[trial_id].num_slots for trial_id, taken in chosen)


def user(trial_id: int, experiment_id: int, num_slots: int) -> Allocation:
    blank = dict.fromkeys(field.name for field in dataclasses.fields(Allocation))
    given = {"task_id": "shell-7", "trial_id": trial_id, "experiment_id": experiment_id}
    return Allocation(**{**blank, **given, "slots": tuple(range(num_slots))})  # type: ignore[arg-type]


FIRST, SECOND, OWN = user(1, 1, 2), user(0, 0, 1), user(3, 9, 2)
BY_FIRST = "are in use, by trial 1 of experiment 1 on 2"


@pytest.mark.parametrize(
    ("num_slots", "num_enabled", "live", "max_slots", "before", "text"),
    [
        (1, 2, [FIRST], None, None, f"1 slot: 2 of 2 {BY_FIRST}"),
        (2, 4, [FIRST, SECOND], None, None, f"2 slots: 3 of 4 {BY_FIRST}, task shell-7 on 1"),
        (1, 8, [FIRST, *[SECOND] * 4], None, None, f"1 slot: 6 of 8 {BY_FIRST}, task shell-7 on 1, task shell-7 on 1, 2 others"),
        (1, 4, [FIRST], None, "trial 5", "1 slot: trial 5 is before it in the queue, and needs more than is free"),
        (2, 8, [OWN], 2, None, "2 slots: its experiment uses 2 of the 2 that resources.max_slots allows"),
    ],
    ids=["held by a trial", "held by several", "many are counted", "behind a larger one", "at max_slots"],
)  # fmt: skip
def test_waiting_text_names_reason(
    num_slots: int, num_enabled: int, live: list[Allocation], max_slots: int | None, before: str | None, text: str
) -> None:  # fmt: skip
    one = Waiting(4, 9, num_slots, max_slots)
    assert waiting_text(one, num_enabled, live, before) == f"waiting for {text}"


def slots(*counts: int) -> dict[int, list[int]]:
    return {node: [slot_id_of(node, index) for index in range(count)] for node, count in enumerate(counts)}


def counts(chosen: list[int] | None) -> dict[int, int] | None:
    return None if chosen is None else {node: len(found) for node, found in by_node(chosen).items()}


@pytest.mark.parametrize(
    ("num_slots", "free", "capacity", "expected"),
    [
        (2, (8, 3, 2), (8, 8, 8), {2: 2}),
        (3, (8, 3, 2), (8, 8, 8), {1: 3}),
        (4, (3, 3), (4, 4), None),
        (4, (3, 3), (3, 3), {0: 2, 1: 2}),
        (4, (2, 2, 2), (2, 2, 2), {0: 2, 1: 2}),
        (4, (1, 3, 2), (3, 3, 2), {1: 2, 2: 2}),
        (5, (3, 3), (3, 3), {0: 3, 1: 2}),
    ],
)
def test_place_uses_one_node_or_equal_parts(
    num_slots: int, free: tuple[int, ...], capacity: tuple[int, ...], expected: dict[int, int] | None
) -> None:
    """A request that fits on one node waits for one."""
    assert counts(place(num_slots, slots(*free), dict(enumerate(capacity)))) == expected


def test_place_never_splits_single_node_request() -> None:
    assert place(4, slots(2, 2), {0: 2, 1: 2}, is_on_one_node=True) is None
    assert not could_ever_fit(4, {0: 2, 1: 2}, is_on_one_node=True)
    assert could_ever_fit(4, {0: 2, 1: 2})


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6), st.integers(1, 40))
def test_place_returns_free_slots_on_fewest_nodes(nodes: list[tuple[int, int]], num_slots: int) -> None:
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
    # Fewer nodes would not suffice.
    most_first = sorted(map(len, free.values()), reverse=True)
    assert sum(most_first[: len(used) - 1]) < num_slots
    # Ranks are ordered by node.
    assert [node_of(slot) for slot in chosen] == sorted(node_of(slot) for slot in chosen)


FOUR = set(range(4))


@pytest.mark.parametrize(
    ("free", "choices", "max_slots", "used", "expected"),
    [
        ({0, 1, 2}, (4, 2, 1), None, 0, [2]),
        (FOUR, (4, 2, 1), None, 0, [4]),
        ({0}, (4, 2), None, 0, []),
        (FOUR, (4, 2, 1), 3, 0, [2]),
        (FOUR, (4, 2, 1), 3, 2, [1]),
    ],
)
def test_trial_takes_first_free_choice_within_max_slots(
    free: set[int], choices: tuple[int, ...], max_slots: int | None, used: int, expected: list[int]
) -> None:
    one = Waiting(1, 7, 4, max_slots, choices=choices)
    assert [len(slots) for _, slots in assignments([one], free, FOUR, {7: used})] == expected


@pytest.mark.parametrize(
    ("free", "choices", "max_slots", "used", "expected"),
    [
        ({1, 2, 3}, (4, 3, 2), None, 1, 4),
        ({2, 3}, (4, 3, 2), None, 1, 3),
        ({2, 3}, (4,), None, 1, 0),
        pytest.param({1, 2, 3}, (4, 3, 2), 4, 3, 2, id="two more are used by another trial"),
    ],
)
def test_grown_picks_largest_free_and_allowed_choice(
    free: set[int], choices: tuple[int, ...], max_slots: int | None, used: int, expected: int
) -> None:
    one = Waiting(1, 1, choices[0], max_slots, choices=choices)
    assert grown(one, [0], free, FOUR, used) == expected


def test_single_node_trial_grows_on_its_node() -> None:
    slots = {slot_id_of(node, index) for node in (1, 2) for index in (0, 1)}
    first = slot_id_of(1, 0)
    one = Waiting(1, 1, 4, None, is_on_one_node=True, choices=(4, 3, 2))

    assert grown(one, [first], slots - {first}, slots, 1) == 2
