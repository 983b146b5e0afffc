"""Who gets slots, and what a trial that waits for them is told: pure decisions over what waits and what is free."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrial.master.scheduler.queue import Waiting, assignments
from dstrial.master.scheduler.wait_reasons import SlotUser, waiting_text
from dstrial.master.store.nodes import slot_id_of


def waiting(*sizes: int, max_slots: int | None = None) -> list[Waiting]:
    return [Waiting(index, index, size, max_slots) for index, size in enumerate(sizes)]


def test_slots_are_given_in_order_and_never_twice() -> None:
    assert assignments(waiting(1, 2, 1), {0, 1, 2}, {0, 1, 2}, {}) == [(0, [0]), (1, [1, 2])]


def test_a_trial_that_does_not_fit_holds_what_comes_after_it() -> None:
    assert assignments(waiting(2, 1), {1}, {0, 1}, {}) == []


def test_a_trial_that_no_slots_could_hold_holds_nobody() -> None:
    assert assignments(waiting(3, 1), {0, 1}, {0, 1}, {}) == [(1, [0])]


def test_a_trial_without_slots_always_starts() -> None:
    assert assignments(waiting(2, 0), set(), {0, 1}, {}) == [(1, [])]


def test_an_experiment_keeps_to_its_max_slots_and_holds_nobody() -> None:
    trials = [Waiting(1, 7, 1, 1), Waiting(2, 7, 1, 1), Waiting(3, 8, 1, None)]

    assert assignments(trials, {0, 1, 2}, {0, 1, 2}, {}) == [(1, [0]), (3, [1])]
    assert assignments(trials, {1, 2}, {0, 1, 2}, {7: 1}) == [(3, [1])]


def test_a_trial_is_kept_off_nodes_and_one_of_a_single_node_waits_for_one() -> None:
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
def test_nothing_is_given_twice_or_beyond_a_limit(
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


FIRST = SlotUser("trial 1 of experiment 1 (gpt)", 1, 2)
SECOND = SlotUser("task shell-7", 0, 1)


@pytest.mark.parametrize(
    ("num_slots", "num_enabled", "slot_users", "max_slots", "before", "told"),
    [
        pytest.param(
            1,
            2,
            [FIRST],
            None,
            None,
            "waiting for 1 slot: 2 of 2 are in use, by trial 1 of experiment 1 (gpt) on 2",
            id="held by a trial",
        ),
        pytest.param(
            2,
            4,
            [FIRST, SECOND],
            None,
            None,
            "waiting for 2 slots: 3 of 4 are in use, by trial 1 of experiment 1 (gpt) on 2, task shell-7 on 1",
            id="held by several",
        ),
        pytest.param(
            1,
            8,
            [FIRST, SECOND, SECOND, SECOND, SECOND],
            None,
            None,
            "waiting for 1 slot: 6 of 8 are in use, by trial 1 of experiment 1 (gpt) on 2, task shell-7 on 1, task shell-7 on 1, "
            "2 others",
            id="many are counted",
        ),
        pytest.param(
            1,
            4,
            [FIRST],
            None,
            "trial 5",
            "waiting for 1 slot: trial 5 is before it in the queue, and needs more than is free",
            id="behind a larger one",
        ),
        pytest.param(
            2,
            8,
            [SlotUser("trial 3 of experiment 9 (x)", 9, 2)],
            2,
            None,
            "waiting for 2 slots: its experiment uses 2 of the 2 that resources.max_slots allows",
            id="its experiment has as many as it may",
        ),
    ],
)
def test_a_wait_is_told_with_its_reason(
    num_slots: int,
    num_enabled: int,
    slot_users: list[SlotUser],
    max_slots: int | None,
    before: str | None,
    told: str,
) -> None:
    text = waiting_text(
        num_slots, num_enabled, slot_users, experiment_id=9, max_slots=max_slots, before=before
    )
    assert text == told
