"""Ray as an engine: what is asked for, refused, and said of a placement group; pure."""

from __future__ import annotations

import pytest

from dstrial.errors import MasterError
from dstrial.master.backends.backend import Refusal
from dstrial.master.backends.engine import EngineJob, JobRequest, Part
from dstrial.master.backends.queued.ray import (
    RayEngine,
    bundles_for,
    group_name,
    job_of,
    key_of,
    num_free,
    slot_kind,
    usable,
)
from dstrial.ray.cluster import RayGroup, RayNode

_ID = "4a994c022f7ba3a2aee6"


def node(name: str, cpus: int = 2, free: int | None = None, **values: object) -> RayNode:
    total = {"CPU": float(cpus), **({"GPU": 4.0} if name.startswith("gpu") else {})}
    left = {"CPU": float(cpus if free is None else free)}
    return RayNode(f"id-{name}", name, bool(values.pop("is_alive", True)), total, left, **values)  # type: ignore[arg-type]


def group(state: str, *places: str) -> RayGroup:
    return RayGroup(_ID, "", state, ({"CPU": 2.0},) * len(places), places)


TWO = [node("a"), node("b")]


def test_a_bundle_for_each_share_of_cores_or_accelerators() -> None:
    assert bundles_for(JobRequest("trial-1", "", 4), TWO) == [{"CPU": 2.0}, {"CPU": 2.0}]
    assert bundles_for(JobRequest("trial-1", "", 1), TWO) == [{"CPU": 1.0}]
    assert bundles_for(JobRequest("trial-1", "", 4, wants_devices=True), [*TWO, node("gpu1")]) == [
        {"GPU": 4.0}
    ]


def lacking(request: JobRequest, nodes: list[RayNode]) -> str:
    found = bundles_for(request, nodes)
    assert isinstance(found, Refusal)
    return found.expected


def test_bundles_for_more_than_the_nodes_have_is_a_refusal() -> None:
    expected = "at most 2, which the nodes of the Ray cluster have on one node (a 2, b 2)"
    assert bundles_for(JobRequest("check", "", 3, is_on_one_node=True), TWO) == Refusal(
        "resources.slots_per_trial", "3", expected, "Lower it, or start Ray on more nodes.", True
    )
    together = "at most 4, which the nodes of the Ray cluster have on all nodes together (a 2, b 2)"
    assert lacking(JobRequest("trial-1", "", 5), TWO) == together
    without = lacking(JobRequest("trial-1", "", 3, excluded_nodes=frozenset({"b"})), TWO)
    assert without.startswith("at most 2, ")
    assert without.endswith("(a 2; b must not be used)")
    assert lacking(JobRequest("trial-1", "", 1, wants_devices=True), TWO).startswith("at most 0, ")
    assert lacking(JobRequest("trial-1", "", 1), []).endswith("(none)")
    many = lacking(JobRequest("trial-1", "", 99), [node(f"n{number}") for number in range(20)])
    assert many.endswith("n7 2, and 12 others)")


def test_slots_are_accelerators_where_any_node_has_some() -> None:
    assert slot_kind(TWO, {}) == "CPU"
    assert slot_kind([*TWO, node("gpu1")], {}) == "GPU"
    assert slot_kind([*TWO, node("gpu1")], {"DS_ACCELERATOR": "cpu"}) == "CPU"


def test_nodes_that_are_dead_or_drained_take_nothing_new() -> None:
    nodes = [node("c"), node("b", is_draining=True), node("d", is_alive=False), node("a")]
    assert [one.name for one in usable(nodes)] == ["a", "c"]


def test_free_slots_are_those_of_nodes_that_take_what_is_new() -> None:
    nodes = [node("a", 4, 3), node("b", 2, 0), node("c", 2, is_draining=True), node("d", 2, is_alive=False)]
    assert num_free(nodes, "CPU") == 3
    assert num_free(nodes, "GPU") == 0


def test_a_placement_group_is_known_again_by_its_name() -> None:
    name = group_name("c1", JobRequest("trial-7", "my\x1b title", 1), "t0k3")
    assert name == "dstrial c1 trial-7 t0k3 my\\x1b title"
    assert key_of(name, "c1") == "trial-7"
    assert key_of(name, "c2") is None
    assert key_of("somebody's", "c1") is None
    assert key_of(group_name("c1", JobRequest("command-x", "", 1), "t"), "c1") == "command-x"


def test_a_group_with_all_its_nodes_runs() -> None:
    job = job_of(group("CREATED", "id-b", "id-a"), "trial-1", TWO)
    text = "placement group 4a994c02: running on b, a"
    assert job == EngineJob(_ID, "trial-1", "running", text, (Part("b", 2), Part("a", 2)))


def test_what_waits_says_what_it_asks_for_and_what_is_free() -> None:
    job = job_of(group("PENDING", "", ""), "trial-1", [node("a", free=0), node("b")])
    assert (job.state, job.parts) == ("pending", ())
    assert job.text == (
        "placement group 4a994c02: pending (asks for 2 CPUs on each of 2 nodes; free now: a 0 of 2, b 2 of 2)"
    )


def test_what_waits_counts_only_nodes_that_live() -> None:
    job = job_of(group("PENDING", "", ""), "trial-1", [node("a"), node("b", is_alive=False)])
    assert job.text == (
        "placement group 4a994c02: pending (asks for 2 CPUs on each of 2 nodes; free now: a 2 of 2)"
    )


@pytest.mark.parametrize(
    ("lost", "first"),
    [
        (group("RESCHEDULING", "id-a", ""), ()),
        (group("RESCHEDULING", "id-a", ""), ("id-a", "id-b")),
        (group("CREATED", "id-a", "id-c"), ("id-a", "id-b")),
        (group("CREATED", "id-a", "id-b"), ()),
    ],
)
def test_a_group_that_has_lost_a_node_is_over_though_ray_moves_it(
    lost: RayGroup, first: tuple[str, ...]
) -> None:
    dead = node("b", is_alive=False, death_reason="health check failed\n")
    job = job_of(lost, "trial-1", [node("a"), dead, node("c")], first)
    assert (job.state, job.parts) == ("ended", ())
    if "id-b" in (*lost.node_ids, *first):
        assert job.text == "placement group 4a994c02: ended (b is dead: health check failed)"
    else:
        assert job.text == "placement group 4a994c02: ended (one of its nodes is gone)"


def test_a_group_with_a_drained_node_leaves() -> None:
    job = job_of(group("CREATED", "id-a", "id-b"), "trial-1", [node("a"), node("b", is_draining=True)])
    assert job.state == "leaving"
    assert job.text == "placement group 4a994c02: leaving (Ray drains b)"
    assert [part.host for part in job.parts] == ["a", "b"]


def test_an_address_of_rays_client_server_is_refused() -> None:
    with pytest.raises(MasterError, match=r"ray://head:10001; expected host:port of the head, or auto"):
        RayEngine("ray://head:10001", "c1")
