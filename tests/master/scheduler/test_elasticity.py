"""Pure decisions: which trials shrink, grow or leave drained slots."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dstrial.master.scheduler.queue import Waiting, assignments
from dstrial.master.scheduler.resizing import Running, can_leave_drained, grown, select_preemption_victims
from dstrial.master.store.nodes import slot_id_of

LOW, HIGH = (42, 1.0), (10, 1.0)


def running(
    trial_id: int, *slots: int, choices: tuple[int, ...] = (4, 2, 1), urgency: tuple[int, float] = LOW
) -> Running:
    return Running(trial_id, trial_id, urgency, slots, choices)


def victims_for(num_slots: int, *trials: Running, free: tuple[int, ...] = (), total: int = 4) -> list[int]:
    used = {one.experiment_id: one.num_slots for one in trials}
    found = select_preemption_victims(
        Waiting("urgent", 0, num_slots, None),
        HIGH,
        trials,
        free=set(free),
        enabled=set(range(total)),
        used_by=used,
    )
    return [one.trial_id for one in found]


def test_trial_takes_first_free_choice_within_max_slots() -> None:
    def started(free: set[int], *choices: int, max_slots: int | None = None, used: int = 0) -> list[int]:
        one = Waiting(1, 7, 4, max_slots, choices=choices)
        return [len(slots) for _, slots in assignments([one], free, set(range(4)), {7: used})]

    assert started({0, 1, 2}, 4, 2, 1) == [2]
    assert started({0, 1, 2, 3}, 4, 2, 1) == [4]
    assert started({0}, 4, 2) == []
    assert started(set(range(4)), 4, 2, 1, max_slots=3) == [2]
    assert started(set(range(4)), 4, 2, 1, max_slots=3, used=2) == [1]


def test_preemption_victims_are_selected_only_if_sufficient() -> None:
    all_slots = running(1, 0, 1, 2, 3)
    assert victims_for(2, all_slots) == [1]
    assert victims_for(3, all_slots) == [1]
    assert victims_for(4, all_slots) == [], "nothing would be left of it"
    assert victims_for(3, running(1, 0, 1, 2, 3, choices=(4, 2))) == [], "it does not suffice"
    assert victims_for(1, running(1, 0, 1), free=(2, 3)) == [], "it fits anyway"
    assert victims_for(2, running(1, 0, 1, 2, 3, urgency=HIGH)) == [], "it is not more urgent"


def test_preemption_selects_least_urgent_victims_first() -> None:
    first = running(1, 0, 1, choices=(2, 1), urgency=(42, 1.0))
    second = running(2, 2, 3, choices=(2, 1), urgency=(42, 2.0))

    assert victims_for(1, first, second) == [2]
    assert victims_for(2, first, second) == [2, 1]


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(1, 8),
    st.integers(0, 3),
    st.integers(1, 3),
)
def test_preemption_lets_victims_and_urgent_trial_run(
    sizes: list[int], wanted: int, num_free: int, at_least: int
) -> None:
    slots = iter(range(100))
    trials = [
        running(
            key, *(next(slots) for _ in range(size)), choices=tuple(range(size, min(at_least, size) - 1, -1))
        )
        for key, size in enumerate(sizes)
    ]
    total = sum(sizes) + num_free
    free = tuple(range(sum(sizes), total))
    asked = victims_for(wanted, *trials, free=free, total=total)
    if asked:
        victims = [one for one in trials if one.trial_id in asked]
        left = {slot for one in victims for slot in one.slots} | set(free)
        waiting = [Waiting("urgent", 0, wanted, None), *(one.waiting(one.choices) for one in victims)]
        assert len(assignments(waiting, left, set(range(total)), {})) == len(waiting)


def test_can_leave_drained_requires_other_usable_slots() -> None:
    one = running(1, 0, 1, choices=(2, 1))

    assert can_leave_drained(one, {1}, set()), "it keeps slot 0"
    assert can_leave_drained(one, {0, 1}, {5})
    assert not can_leave_drained(one, {0, 1}, set())
    assert not can_leave_drained(one, {7}, {5})
    assert not can_leave_drained(running(1, 0, 1, choices=(2,)), {1}, set())


def test_grown_picks_largest_free_and_allowed_choice() -> None:
    one = running(1, 0, choices=(4, 3, 2, 1))
    four = set(range(4))

    assert grown(one, free={1, 2, 3}, enabled=four, used=1) == 4
    assert grown(one, free={2, 3}, enabled=four, used=1) == 3
    assert grown(running(1, 0, choices=(4, 1)), free={2, 3}, enabled=four, used=1) == 1
    limited = Running(1, 1, LOW, (0,), (4, 3, 2, 1), max_slots=4)
    assert grown(limited, free={1, 2, 3}, enabled=four, used=3) == 2, (
        "two more are used by another trial of it"
    )


def test_single_node_trial_grows_on_its_node() -> None:
    slots = {slot_id_of(node, index) for node in (1, 2) for index in (0, 1)}
    first = slot_id_of(1, 0)
    one = Running(1, 1, LOW, (first,), (4, 3, 2, 1), is_on_one_node=True)

    assert grown(one, free=slots - {first}, enabled=slots, used=1) == 2
