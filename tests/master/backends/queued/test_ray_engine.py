"""Pure functions of the Ray engine: bundles, refusals and job states."""

from __future__ import annotations

import pytest

from dstrial.errors import MasterError
from dstrial.master.backends.backend import Refusal
from dstrial.master.backends.engine import EngineJob, JobRequest, JobState, Part
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


def test_bundles_for_splits_cpus_or_accelerators_by_node() -> None:
    assert bundles_for(JobRequest("trial-1", "", 4), TWO) == [{"CPU": 2.0}, {"CPU": 2.0}]
    assert bundles_for(JobRequest("trial-1", "", 1), TWO) == [{"CPU": 1.0}]
    assert bundles_for(JobRequest("trial-1", "", 4, wants_devices=True), [*TWO, node("gpu1")]) == [
        {"GPU": 4.0}
    ]


def lacking(request: JobRequest, nodes: list[RayNode]) -> str:
    found = bundles_for(request, nodes)
    assert isinstance(found, Refusal)
    return found.expected


def test_bundles_for_too_many_slots_returns_refusal() -> None:
    expected = "at most 2, which the nodes of the Ray cluster have on one node"
    assert bundles_for(JobRequest("check", "", 3, is_on_one_node=True), TWO) == Refusal(
        "resources.slots_per_trial", "3", expected, "Lower it, or start Ray on more nodes.", True
    )
    together = "at most 4, which the nodes of the Ray cluster have on all nodes together"
    assert lacking(JobRequest("trial-1", "", 5), TWO) == together
    without = lacking(JobRequest("trial-1", "", 3, excluded_nodes=frozenset({"b"})), TWO)
    assert without == "at most 2, which the nodes of the Ray cluster have on all nodes together without b"
    assert lacking(JobRequest("trial-1", "", 1, wants_devices=True), TWO).startswith("at most 0, ")


def test_slot_kind_usable_nodes_and_free_count() -> None:
    assert slot_kind(TWO, {}) == "CPU"
    assert slot_kind([*TWO, node("gpu1")], {}) == "GPU"
    assert slot_kind([*TWO, node("gpu1")], {"DS_ACCELERATOR": "cpu"}) == "CPU"
    nodes = [node("c", is_draining=True), node("b", 2, 0), node("d", is_alive=False), node("a", 4, 3)]
    assert [one.name for one in usable(nodes)] == ["a", "b"]
    assert (num_free(nodes, "CPU"), num_free(nodes, "GPU")) == (3, 0)


def test_group_name_round_trips_to_job_key() -> None:
    name = group_name("c1", JobRequest("trial-7", "my\x1b title", 1), "t0k3")
    assert name == "dstrial c1 trial-7 t0k3 my\\x1b title"
    assert key_of(name, "c1") == "trial-7"
    assert key_of(name, "c2") is None
    assert key_of("somebody's", "c1") is None
    assert key_of(group_name("c1", JobRequest("command-x", "", 1), "t"), "c1") == "command-x"


@pytest.mark.parametrize(
    ("found", "nodes", "state", "text", "hosts"),
    [
        (group("CREATED", "id-b", "id-a"), TWO, "running", "running on b, a", "ba"),
        (group("PENDING", "", ""), [node("a", free=0), node("b")], "pending", "pending (asks for 2 + 2 CPU; 2 free)", ""),
        (group("CREATED", "id-a", "id-b"), [node("a"), node("b", is_draining=True)], "leaving", "leaving (Ray drains b)", "ab"),
    ],
    ids=["runs", "waits", "leaves a drained node"],
)  # fmt: skip
def test_job_of_maps_group_state(
    found: RayGroup, nodes: list[RayNode], state: JobState, text: str, hosts: str
) -> None:
    parts = tuple(Part(host, 2) for host in hosts)
    expected = EngineJob(_ID, "trial-1", state, f"placement group 4a994c02: {text}", parts)
    assert job_of(found, "trial-1", nodes) == expected


def test_job_of_group_with_lost_node_is_ended() -> None:
    nodes = [node("a"), node("b", is_alive=False, death_reason="health check failed\n")]
    moved = job_of(group("RESCHEDULING", "id-a", ""), "trial-1", nodes)
    lost = job_of(group("CREATED", "id-a", "id-b"), "trial-1", nodes)
    assert (moved.state, moved.parts) == (lost.state, lost.parts) == ("ended", ())
    assert moved.text == "placement group 4a994c02: ended (one of its nodes is gone)"
    assert lost.text == "placement group 4a994c02: ended (b is dead: health check failed)"


def test_engine_refuses_ray_client_address() -> None:
    with pytest.raises(MasterError, match=r"ray://head:10001; expected host:port of the head, or auto"):
        RayEngine("ray://head:10001", "c1")
