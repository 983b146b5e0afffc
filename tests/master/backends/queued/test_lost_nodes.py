"""Which nodes count as lost by the master's own links: pure."""

from __future__ import annotations

from dstrial.master.backends.queued.lost_nodes import KEPT_S, LinkState, LostNodes

WHY = "host3 is silent: nothing was heard for 10 s"


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
    assert lost.look([], (), KEPT_S + 1) == {}
