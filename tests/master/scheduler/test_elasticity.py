"""Which trials change their number of slots: pure decisions over what runs, what waits and what was measured."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dstrial.master.scheduler.elasticity import (
    Running,
    Stage,
    grown,
    has_to_move,
    is_due_to_grow,
    larger,
    leaves_drained,
    not_worth,
    who_makes_room,
)
from dstrial.master.scheduler.queue import Waiting, assignments
from dstrial.master.store.nodes import slot_id_of

LOW, HIGH = (42, 1.0), (10, 1.0)


def running(
    trial_id: int, *slots: int, choices: tuple[int, ...] = (4, 2, 1), urgency: tuple[int, float] = LOW
) -> Running:
    return Running(trial_id, trial_id, urgency, slots, choices)


def room_for(num_slots: int, *trials: Running, free: tuple[int, ...] = (), total: int = 4) -> list[int]:
    used = {one.experiment_id: one.num_slots for one in trials}
    found = who_makes_room(
        Waiting("urgent", 0, num_slots, None),
        HIGH,
        trials,
        free=set(free),
        enabled=set(range(total)),
        used_by=used,
    )
    return [one.trial_id for one in found]


def test_a_trial_begins_with_the_first_of_its_choices_that_is_free() -> None:
    def begun(free: set[int], *choices: int) -> list[int]:
        one = Waiting(1, 1, 4, None, choices=choices)
        return [len(slots) for _, slots in assignments([one], free, set(range(4)), {})]

    assert begun({0, 1, 2}, 4, 2, 1) == [2]
    assert begun({0, 1, 2, 3}, 4, 2, 1) == [4]
    assert begun({0}, 4, 2) == []


def test_choices_keep_to_the_slots_that_an_experiment_may_use() -> None:
    one = Waiting(1, 7, 4, 3, choices=(4, 2, 1))

    assert [slots for _, slots in assignments([one], set(range(4)), set(range(4)), {})] == [[0, 1]]
    assert [slots for _, slots in assignments([one], set(range(4)), set(range(4)), {7: 2})] == [[0]]


def test_one_of_a_lower_priority_makes_room_and_goes_on_with_what_is_left() -> None:
    assert room_for(2, running(1, 0, 1, 2, 3)) == [1]
    assert room_for(3, running(1, 0, 1, 2, 3)) == [1]


def test_nobody_makes_room_where_that_is_not_enough_or_nothing_would_be_left() -> None:
    assert room_for(4, running(1, 0, 1, 2, 3)) == []
    assert room_for(3, running(1, 0, 1, 2, 3, choices=(4, 2))) == []


def test_nobody_makes_room_for_what_fits_anyway_or_is_not_more_urgent() -> None:
    assert room_for(1, running(1, 0, 1), free=(2, 3)) == []
    assert room_for(2, running(1, 0, 1, 2, 3, urgency=HIGH)) == []


def test_the_least_urgent_makes_room_first_and_no_more_than_are_needed() -> None:
    first = running(1, 0, 1, choices=(2, 1), urgency=(42, 1.0))
    second = running(2, 2, 3, choices=(2, 1), urgency=(42, 2.0))

    assert room_for(1, first, second) == [2]
    assert room_for(2, first, second) == [2, 1]


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(1, 8),
    st.integers(0, 3),
    st.integers(1, 3),
)
def test_whoever_is_asked_goes_on_and_the_urgent_one_begins(
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
    asked = room_for(wanted, *trials, free=free, total=total)
    if asked:
        victims = [one for one in trials if one.trial_id in asked]
        left = {slot for one in victims for slot in one.slots} | set(free)
        waiting = [Waiting("urgent", 0, wanted, None), *(one.waiting(one.choices) for one in victims)]
        assert len(assignments(waiting, left, set(range(total)), {})) == len(waiting)


def test_a_trial_leaves_drained_slots_only_for_others_that_will_do() -> None:
    one = running(1, 0, 1, choices=(2, 1))

    assert leaves_drained(one, {1}, set()), "it keeps slot 0"
    assert leaves_drained(one, {0, 1}, {5})
    assert not leaves_drained(one, {0, 1}, set())
    assert not leaves_drained(one, {7}, {5})
    assert not leaves_drained(running(1, 0, 1, choices=(2,)), {1}, set())


def test_a_trial_grows_to_the_most_that_share_its_batch_and_may_be_used() -> None:
    one = running(1, 0, choices=(4, 3, 2, 1))
    four = set(range(4))

    assert grown(one, free={1, 2, 3}, enabled=four, used=1) == 4
    assert grown(one, free={2, 3}, enabled=four, used=1) == 3
    assert grown(running(1, 0, choices=(4, 1)), free={2, 3}, enabled=four, used=1) == 1
    limited = Running(1, 1, LOW, (0,), (4, 3, 2, 1), max_slots=4)
    assert grown(limited, free={1, 2, 3}, enabled=four, used=3) == 2, (
        "two more are used by another trial of it"
    )


def test_a_trial_of_one_node_grows_on_one_node_only() -> None:
    slots = {slot_id_of(node, index) for node in (1, 2) for index in (0, 1)}
    first = slot_id_of(1, 0)
    one = Running(1, 1, LOW, (first,), (4, 3, 2, 1), is_on_one_node=True)

    assert grown(one, free=slots - {first}, enabled=slots, used=1) == 2


def stage(
    num_slots: int,
    start: int,
    first_s: float,
    batch_s: float,
    asked_s: float | None = None,
    num: int = 10,
    *,
    start_s: float = 0.0,
    end_s: float | None = None,
) -> Stage:
    first, last = (start + 1, first_s), (start + num, first_s + (num - 1) * batch_s)
    return Stage(num_slots, start, start_s, asked_s, end_s, num, first, last)


def test_more_slots_are_worth_what_they_save_until_the_next_change() -> None:
    before = stage(2, 0, first_s=0.0, batch_s=10.0, asked_s=100.0)
    # It took 20 s from being asked to the beginning of the first batch, which is reported at 125.
    faster = stage(4, 10, first_s=125.0, batch_s=5.0)

    assert not_worth([before, faster], period_s=30.0) is None, "30 s at twice the speed save 30 s"
    verdict = not_worth([before, faster], period_s=19.0)
    assert verdict is not None
    assert (verdict.num_slots, verdict.more, verdict.before_s, verdict.after_s) == (2, 4, 10.0, 5.0)
    assert verdict.cost_s == 20.0
    assert verdict.text == "with 4 slots a batch takes 5 s, with 2 it took 10 s; the change took 20 s"


def test_slots_that_make_it_slower_are_never_worth_it() -> None:
    assert not_worth([stage(1, 0, 0.0, 1.0, 10.0), stage(2, 10, 12.0, 2.0)], period_s=1e9) is not None


def test_nothing_is_judged_that_was_not_measured_long_enough() -> None:
    before = stage(2, 0, first_s=0.0, batch_s=1.0, asked_s=100.0)

    assert not_worth([before, stage(4, 10, first_s=121.0, batch_s=1.0, num=10)], 600.0) is None, "9 s of 20"
    assert not_worth([before, stage(4, 10, first_s=121.0, batch_s=1.0, num=30)], 600.0) is not None
    assert not_worth([before, Stage(4, 10, 0.0, None, None, 0, None, None)], 600.0) is None
    assert not_worth([stage(2, 0, 0.0, 1.0, None), stage(4, 10, 121.0, 9.0)], 600.0) is None, (
        "a failure, no change"
    )
    assert not_worth([stage(4, 0, 0.0, 1.0, 10.0), stage(2, 10, 12.0, 9.0)], 600.0) is None, "it shrank"


def test_what_lies_between_a_stop_and_the_next_beginning_is_no_cost_of_slots() -> None:
    # Paused for two hours: 8 s until it has stopped, and 12 s from its beginning to the first batch.
    before = stage(2, 0, first_s=0.0, batch_s=10.0, asked_s=100.0, end_s=108.0)
    faster = stage(4, 10, first_s=7325.0, batch_s=5.0, num=3000, start_s=7308.0)

    assert not_worth([before, faster], period_s=600.0) is None, "twice as fast"
    assert not_worth([before, faster], period_s=30.0) is None
    verdict = not_worth([before, faster], period_s=19.0)
    assert verdict is not None
    assert verdict.cost_s == 20.0


def asked(
    one: Running, *, wish: int, spare: dict[int, int] | None = None, used: int = 0, before: int = 0
) -> int:
    return larger(one, wish=wish, spare=spare or {}, used=used or one.num_slots, before=before)


def test_up_to_its_wish_a_trial_waits_in_the_queue_of_an_engine() -> None:
    assert asked(running(1, 0), wish=4) == 4
    assert asked(running(1, 0, 1), wish=2) == 2, "it has what it asks for"
    assert asked(running(1, 0, choices=(3, 1)), wish=4) == 3, "as many as share its batch"
    assert asked(running(1, 0, 1, choices=(2, 1)), wish=4) == 2


def test_beyond_its_wish_a_trial_takes_what_nobody_uses_for_all_of_the_larger_job() -> None:
    one = running(1, 0, 1, choices=(8, 6, 4, 2))
    assert asked(one, wish=2, spare={1: 2, 2: 2}) == 4
    assert asked(one, wish=2, spare={1: 4, 2: 3}) == 6
    assert asked(one, wish=2, spare={1: 3}) == 2, "its own two would be free only afterwards"
    assert asked(one, wish=4, spare={1: 3}) == 4, "that is its wish"
    assert asked(one, wish=4, spare={1: 4, 2: 4}) == 8


def test_on_one_node_and_within_what_its_experiment_may_use() -> None:
    one = Running(1, 1, LOW, (0, 1), (8, 4, 2), is_on_one_node=True)
    assert asked(one, wish=2, spare={1: 3, 2: 4}) == 4
    assert asked(one, wish=2, spare={1: 3, 2: 3}) == 2
    capped = Running(1, 1, LOW, (0, 1), (8, 4, 2), max_slots=6)
    assert asked(capped, wish=8, spare={1: 9}) == 4
    assert asked(capped, wish=8, spare={1: 9}, used=5) == 2, "others of its experiment have three"


def test_what_was_asked_for_stays_while_it_may_be_had() -> None:
    one = running(1, 0, 1, choices=(8, 6, 4, 2))
    assert asked(one, wish=2, spare={1: 9}, before=4) == 4
    assert asked(one, wish=2, spare={1: 4}, before=6) == 4, "somebody has taken some of it"
    assert asked(one, wish=2, spare={}, before=4) == 2


@given(
    st.integers(1, 4),
    st.sets(st.integers(1, 16), max_size=8),
    st.integers(1, 16),
    st.dictionaries(st.integers(1, 4), st.integers(0, 8)),
    st.integers(0, 16),
    st.none() | st.integers(1, 16),
)
def test_it_never_asks_for_fewer_for_what_it_cannot_use_or_for_what_others_have(
    has: int, choices: set[int], wish: int, spare: dict[int, int], before: int, most: int | None
) -> None:
    one = Running(1, 1, LOW, tuple(range(has)), tuple(sorted({has, *choices}, reverse=True)), most)
    count = larger(one, wish=wish, spare=spare, used=has, before=before)
    assert count >= has
    assert count in one.choices
    if count > has:
        assert count <= wish or count <= sum(spare.values())
        assert most is None or count <= most


def test_who_has_less_than_it_asks_for_gives_its_job_back_where_only_its_own_slots_are_missing() -> None:
    # Nodes have 1,024 slots at most: these are of node 0.
    one = running(1, 0, 1, choices=(8, 4, 3, 2))
    assert has_to_move(one, 3, wish=4, spare={1: 1})
    assert not has_to_move(one, 3, wish=4, spare={1: 3}), "it fits beside it"
    assert not has_to_move(one, 4, wish=4, spare={1: 1}), "nor does it in its place"
    assert not has_to_move(one, 3, wish=4, spare={}), "others may wait"
    assert not has_to_move(one, 8, wish=4, spare={1: 6}), "it keeps what it has asked for"
    alone = Running(1, 1, LOW, (0, 1), (3, 2), is_on_one_node=True)
    assert has_to_move(alone, 3, wish=4, spare={0: 1})
    assert not has_to_move(alone, 3, wish=4, spare={1: 1}), "on another node"


def test_what_a_trial_has_is_measured_before_it_takes_more() -> None:
    def stage(num_reports: int) -> Stage:
        return Stage(1, 0, 0.0, None, None, num_reports, (5, 2.0), (5 * num_reports, 2.0 * num_reports))

    assert not is_due_to_grow([stage(3)], 9.0, 10.0)
    assert is_due_to_grow([stage(3)], 10.0, 10.0)
    assert not is_due_to_grow([stage(3), stage(2)], 29.0, 10.0), "more could never be judged"
    assert is_due_to_grow([stage(2)], 30.0, 10.0), "it reports too seldom"
    assert not is_due_to_grow([], 29.0, 10.0)
