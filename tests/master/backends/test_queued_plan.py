"""What is asked of an engine's queue and given back: pure, for any jobs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dstrial.master.backends.backend import Wish
from dstrial.master.backends.queued.backend import asked_text
from dstrial.master.backends.queued.plan import (
    LOST_NODE_S,
    KnownJob,
    LinkState,
    LostNodes,
    Plan,
    chosen_counts,
    free_indices,
    key_text,
    plan,
)

_TITLE = "trial 7 of experiment 2 (gpt)"
WHY = "host3 is silent: nothing was heard for 10 s"


def test_who_waits_gets_one_job_the_most_urgent_first() -> None:
    assert plan(["b", "a"], {"a", "b"}, []) == Plan((), ("b", "a"))
    assert plan(["b", "a"], {"a", "b"}, [KnownJob("1", "b", "pending")]) == Plan((), ("a",))
    assert plan(["b", "a"], {"a", "b"}, [KnownJob("1", "b", "running")]).asked_for == ("a",)


def test_no_more_than_so_many_wait_at_once() -> None:
    assert plan(["a", "b", "c"], {"a", "b", "c"}, [], 2).asked_for == ("a", "b")
    jobs = [KnownJob("1", "a", "pending"), KnownJob("2", "d", "running", is_in_use=True)]
    made = plan(["a", "b", "c"], {"a", "b", "c", "d"}, jobs, 2)
    assert (made.asked_for, made.left) == (("b",), ("c",))


def test_what_nobody_wants_is_given_back_and_what_runs_is_not() -> None:
    jobs = [KnownJob("1", "a", "pending"), KnownJob("2", "b", "running", is_in_use=True)]
    assert plan([], set(), jobs) == Plan((("1", "nobody wants it any more"),), ())
    assert plan([], {"a", "b"}, jobs) == Plan((), ())


def test_a_job_that_leaves_is_given_back_once_nothing_runs_in_it_and_another_is_asked_for() -> None:
    assert plan([], {"a"}, [KnownJob("1", "a", "leaving", is_in_use=True)]) == Plan((), ())
    left = plan(["a"], {"a"}, [KnownJob("1", "a", "leaving")])
    assert left == Plan((("1", "its nodes were asked for"),), ("a",))


def test_a_job_of_no_use_is_replaced_and_of_two_the_one_that_runs_stays() -> None:
    useless = plan(["a"], {"a"}, [KnownJob("1", "a", "running", why_useless="host2 is gone")])
    assert useless == Plan((("1", "host2 is gone"),), ("a",))
    twice = [KnownJob("1", "a", "pending"), KnownJob("2", "a", "running")]
    assert plan(["a"], {"a"}, twice) == Plan((("1", "there is another one for the same"),), ())


_JOBS = st.lists(
    st.builds(
        KnownJob,
        st.uuids().map(str),
        st.sampled_from("abcd"),
        st.sampled_from(("pending", "running", "leaving")),
        st.booleans(),
        st.sampled_from((None, "down")),
    ),
    max_size=8,
)


@given(st.lists(st.sampled_from("abcd"), unique=True), st.sets(st.sampled_from("abcd")), _JOBS)
def test_nobody_gets_two_and_nothing_in_use_is_given_back(
    wanted: list[str], kept: set[str], jobs: list[KnownJob]
) -> None:
    made = plan(wanted, kept | set(wanted), jobs, 3)
    given_back = {job_id for job_id, _ in made.given_back}
    left = [job for job in jobs if job.id not in given_back]
    assert not any(job.id in given_back for job in jobs if job.is_in_use)
    for key in made.asked_for:
        assert key in wanted
        assert key not in [job.key for job in left]
    unused = [job.key for job in left if not job.is_in_use]
    assert len(unused) == len(set(unused))
    assert not made.asked_for or len(made.asked_for) + sum(job.state == "pending" for job in left) <= 3 + sum(
        job.state == "pending" and job.is_in_use for job in left
    )


def test_slots_are_taken_from_one_part_where_one_has_enough() -> None:
    assert chosen_counts(2, {0: 1, 1: 2}) == {1: 2}
    assert chosen_counts(3, {0: 1, 1: 2}) == {0: 1, 1: 2}
    assert chosen_counts(2, {0: 1, 2: 4}, is_on_one_node=True) == {2: 2}
    assert chosen_counts(2, {0: 1, 1: 1}, is_on_one_node=True) is None
    assert chosen_counts(4, {0: 1, 1: 2}) is None


def test_numbers_of_slots_are_those_that_no_other_job_has() -> None:
    assert free_indices(2, {0, 2}) == [1, 3]
    assert key_text(7) == "trial-7"
    assert key_text("ab-cd") == "command-ab-cd"


def test_who_grows_has_a_second_job_until_it_moves_and_the_larger_one_stays() -> None:
    small = KnownJob("1", "a", "running", is_in_use=True, num_slots=1)
    asked = KnownJob("2", "a", "pending")
    large = KnownJob("2", "a", "running", num_slots=2)

    assert plan(["a"], {"a"}, [small], growing=["a"]).asked_for == ("a",)
    assert plan(["a"], {"a"}, [small, asked], growing=["a"]) == Plan((), ())
    assert plan(["a"], {"a"}, [small, large], growing=["a"]) == Plan((), ())
    left = KnownJob("1", "a", "running", num_slots=1)
    assert [job for job, _ in plan(["a"], {"a"}, [left, large]).given_back] == ["1"]
    assert [job for job, _ in plan([], {"a"}, [small, asked]).given_back] == ["2"], (
        "it wants no more any longer"
    )


def test_who_waits_to_grow_holds_up_nobody() -> None:
    jobs = [KnownJob("1", "a", "running", is_in_use=True), KnownJob("2", "a", "pending")]
    made = plan(["b", "a"], {"a", "b"}, jobs, 1, growing=["a"])
    assert made == Plan((), ("b",))
    assert plan(["b", "a"], {"a", "b"}, [jobs[0]], 1, growing=["a"]).left == ()


def link(job_id: str = "1", *, is_up: bool = False, why_lost: str | None = WHY) -> LinkState:
    return LinkState(job_id, 3, is_up, None if is_up else why_lost)


def test_a_node_is_lost_as_soon_as_a_link_to_it_is_and_well_when_one_is_up() -> None:
    lost = LostNodes()
    assert lost.look([link(is_up=True)], (), 0) == {}
    assert lost.look([link(why_lost=None)], (), 1) == {}, "it may be connected again"
    assert lost.look([link()], (), 2) == {3: WHY}
    assert lost.look([link(), link("2", is_up=True)], (), 3) == {}, "another job's programs answer there"
    assert lost.look([link()], (), 4) == {}
    assert lost.look([link(is_up=True)], (), 5) == {}
    assert lost.look([link()], (), 6) == {3: WHY}, "once more"


def test_what_the_engine_says_counts_from_then_on() -> None:
    lost = LostNodes()
    assert lost.look([link()], (), 0) == {3: WHY}
    assert lost.look([link()], {3}, 1) == {}, "the engine says it"
    assert lost.look([link()], (), 2) == {}, "it is well again, and this job's link never comes up"
    assert lost.look([link(), link("2")], (), 3) == {3: WHY}, "the link of a later job does"


def test_a_loss_is_remembered_when_its_job_is_over_and_not_for_ever() -> None:
    lost = LostNodes()
    lost.look([link()], (), 0)
    assert lost.look([], (), 1) == {3: WHY}
    assert lost.look([], (), LOST_NODE_S + 1) == {}


def wish(num_slots: int, *, is_on_one_node: bool = False) -> Wish:
    return Wish(7, num_slots, is_on_one_node, frozenset(), lambda: (_TITLE, {}))


def test_it_says_who_is_asked_for_what_and_for_whom() -> None:
    assert asked_text("job 12", "Slurm", 4, wish(4), _TITLE) == (
        "job 12: pending (Slurm is asked for 4 slots for trial 7 of experiment 2 (gpt))"
    )
    assert asked_text("placement group 1a2b3c4d", "Ray", 1, wish(1, is_on_one_node=True), _TITLE) == (
        "placement group 1a2b3c4d: pending (Ray is asked for 1 slot on one node for trial 7 of experiment 2 (gpt))"
    )


def test_it_says_that_fewer_are_asked_for_than_are_wanted() -> None:
    assert asked_text("job 12", "Slurm", 2, wish(4), _TITLE).endswith(
        "is asked for 2 slots for trial 7 of experiment 2 (gpt), for 4 are more than there are)"
    )
