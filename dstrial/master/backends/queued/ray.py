"""Ray as an engine: a job is a placement group with a bundle for each node.

Placement groups outlive the master. Ray never rejects a group that fits on no node, so this module does. If Ray moves the
bundles of a dead node, this module ends the job.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dstrial.errors import MasterError
from dstrial.hosts.transport import Transport, remote_words
from dstrial.master.backends.backend import Refusal
from dstrial.master.backends.engine import (
    MAX_PENDING,
    EngineJob,
    EngineRefusedError,
    JobRequest,
    NodeCapacity,
    Part,
)
from dstrial.ray import relay
from dstrial.ray.client import BridgeClient, RayRefusedError, require_ray
from dstrial.ray.cluster import CPU, GPU, RayGroup, RayNode, parse_groups, parse_nodes, slots_per_node
from dstrial.visible_text import visible_line

_PREFIX = "dstrial"  # first word of placement groups' names
_CONNECT_S = 40.0  # timeout of an actor's start and the agent's answer
_SHOWN_DIGITS = 8  # leading digits of a placement group's id in a message


class RayEngine:
    """Runs jobs on a Ray cluster, of which the master's machine must be a node.

    Args:
        address: for ``ray.init``; ``auto`` for the cluster of this machine.
        cluster_id: id of the master; part of the names of its placement groups.

    Raises:
        MissingExtraError: Ray is not installed.
        MasterError: the address is one of Ray Client (``ray://``).
    """

    name = "Ray"

    def __init__(self, address: str, cluster_id: str) -> None:
        require_ray("backend: ray")
        if address.startswith("ray://"):
            raise MasterError(
                f"Ray's address is {address}; expected host:port of the head, or auto. Start the master on a machine of the "
                "cluster: Ray's client server cannot forward the output of programs."
            )
        self._bridge = BridgeClient(address)
        self._cluster_id = cluster_id
        self._num_free = 0
        self._nodes: Sequence[RayNode] = ()  # usable nodes at the last poll; any thread may read

    def nodes(self) -> Mapping[str, NodeCapacity]:
        """Return the slots of each node: GPUs, or CPU cores if no node has a GPU."""
        nodes = self._poll_nodes()
        kind = slot_kind(nodes, os.environ)
        return {node.name: NodeCapacity(node.num_slots(kind)) for node in nodes if node.num_slots(kind)}

    def _poll_nodes(self) -> list[RayNode]:
        return usable(parse_nodes(self._bridge.ask("poll")))

    def job_name(self, job_id: str) -> str:
        return f"placement group {job_id[:_SHOWN_DIGITS]}"

    def wants_devices(self) -> bool:
        """Return whether slots are accelerators.

        Raises:
            MasterError: the cluster does not answer.
        """
        try:
            nodes = self._poll_nodes()
        except ConnectionError as error:
            self.close()
            raise MasterError(
                f"{error}; expected the head of a Ray cluster of which this machine is a node. Start Ray here "
                "(`ray start --head`, or `ray start --address=HEAD:6379`), or correct ray.address in the master's config file."
            ) from None
        return slot_kind(nodes, os.environ) == GPU

    def unsatisfiable_reasons(self, request: JobRequest) -> Sequence[Refusal]:
        """Return why the cluster's nodes are too few or too small for a request.

        Empty if the request fits, or before the first poll of the nodes.
        """
        found = bundles_for(request, self._nodes)
        return [found] if self._nodes and isinstance(found, Refusal) else ()

    def submit(self, request: JobRequest) -> str:
        nodes = self._poll_nodes()
        bundles = bundles_for(request, nodes)
        if isinstance(bundles, Refusal):
            raise EngineRefusedError(
                f"{request.key} asks Ray for {request.num_slots} slots; expected {bundles.expected}. {bundles.fix}"
            )
        try:
            answer = self._bridge.ask(
                "reserve",
                name=group_name(self._cluster_id, request, secrets.token_hex(4)),
                bundles=bundles,
                excluded_nodes=[node.id for node in nodes if node.name in request.excluded_nodes],
            )
        except RayRefusedError as error:
            raise EngineRefusedError(f"Ray rejects {request.key}; it says: {error}") from None
        return str(answer["id"])

    def max_pending(self, num_slots: int) -> int:
        """Return how many jobs of ``num_slots`` fit on the free slots, at least one.

        With more pending groups, the oldest could starve: Ray tries new groups first (gcs_placement_group_manager.cc).
        """
        return min(max(self._num_free // max(num_slots, 1), 1), MAX_PENDING)

    def jobs(self) -> Sequence[EngineJob]:
        """Return the master's jobs; cancel jobs that have lost a node."""
        seen = self._bridge.ask("poll")
        nodes = parse_nodes(seen)
        self._nodes = usable(nodes)
        self._num_free = num_free(nodes, slot_kind(self._nodes, os.environ))
        found = []
        for group in parse_groups(seen):
            key = key_of(group.name, self._cluster_id)
            if key is not None and group.state != "REMOVED":
                job = job_of(group, key, nodes)
                found.append(job)
                if job.state == "ended":
                    self.cancel(job.id)
        return found

    def cancel(self, job_id: str) -> None:
        """Remove the placement group, which ends its actors and their programs."""
        self._bridge.ask("remove", id=job_id)

    def transport(self, job_id: str) -> Transport:
        return RayTransport(job_id, self._bridge.socket)

    def close(self) -> None:
        self._bridge.close()


_RAY_ERRORS = (
    (("exec format error",), "another kind of machine than {python} is for", "Use a cluster whose nodes are of one kind."),
    (("no such file or directory", 127), "without Python at {python}",
     "Put the environment on a file system that all nodes mount, or name another interpreter."),
    (("is over", "has no node"), "not the job's any more ({line})", "Nothing is to be done: another job is submitted."),
)  # fmt: skip


class RayTransport(Transport):
    """Starts programs in a placement group, through the Ray driver's UNIX ``socket``."""

    connect_s = _CONNECT_S
    ends_with_parent = True  # the parent is the job's actor
    known_errors = _RAY_ERRORS
    timeout_error = (
        f"silent (Ray has started no actor there within {_CONNECT_S:g} s)",
        "Look at `ray status`, and on {host} at /tmp/ray/session_latest/logs/raylet.out.",
    )
    other_error = (
        "not starting a program",
        "Look at `ray status`, and at `ray list actors --filter state=ALIVE`.",
    )

    def __init__(self, job_id: str, socket: Path) -> None:
        self.job = job_id
        self._socket = socket

    def words(self, host: str, python: str) -> list[str]:
        place = [str(self._socket), self.job, host]
        return [sys.executable, "-I", "-S", str(Path(relay.__file__)), *place, *remote_words(python)]


def usable(nodes: Sequence[RayNode]) -> list[RayNode]:
    """Return the nodes that accept new jobs, sorted by name."""
    return sorted(
        (node for node in nodes if node.is_alive and not node.is_draining), key=lambda node: node.name
    )


def slot_kind(nodes: Sequence[RayNode], environ: Mapping[str, str]) -> str:
    """Return what a slot is: ``GPU`` or ``CPU``.

    ``GPU`` if any node has GPUs and ``DS_ACCELERATOR`` in ``environ`` is not cpu.
    """
    has_gpus = any(node.num_slots(GPU) for node in nodes) and environ.get("DS_ACCELERATOR") != "cpu"
    return GPU if has_gpus else CPU


def num_free(nodes: Sequence[RayNode], kind: str) -> int:
    return sum(int(node.free.get(kind, 0)) for node in usable(nodes))


def check_ray(address: str) -> Mapping[str, int]:
    """Return node name -> number of slots of a Ray cluster; needs no running master.

    Raises:
        MissingExtraError: Ray is not installed.
        MasterError: the cluster does not answer.
    """
    ray = RayEngine(address, "")
    try:
        ray.wants_devices()
        return {name: node.num_slots for name, node in ray.nodes().items()}
    finally:
        ray.close()


def group_name(cluster_id: str, request: JobRequest, token: str) -> str:
    """Return the name of a request's placement group; ``token`` makes it unique."""
    return f"{_PREFIX} {cluster_id} {request.key} {token} {visible_line(request.title)}".rstrip()


def key_of(name: str, cluster_id: str) -> str | None:
    words = name.split(" ")
    return words[2] if len(words) > 3 and words[:2] == [_PREFIX, cluster_id] else None


def bundles_for(request: JobRequest, nodes: Sequence[RayNode]) -> list[dict[str, float]] | Refusal:
    """Return a placement group's bundles, one per node, or why no group fits. Pure."""
    kind = GPU if request.wants_devices else CPU
    nodes = [node for node in nodes if node.name not in request.excluded_nodes]
    counts = [node.num_slots(kind) for node in nodes]
    shares = slots_per_node(request.num_slots, counts, is_on_one_node=request.is_on_one_node)
    if shares is not None:
        return [{kind: float(count)} for count in shares]
    most = max(counts, default=0) if request.is_on_one_node else sum(counts)
    where = "on one node" if request.is_on_one_node else "on all nodes together"
    excluded = ", ".join(sorted(request.excluded_nodes))
    without = f" without {excluded}" if excluded else ""
    return Refusal(
        "resources.slots_per_trial",
        str(request.num_slots),
        f"at most {most}, which the nodes of the Ray cluster have {where}{without}",
        "Lower it, or start Ray on more nodes.",
        is_for_nodes=True,
    )


def job_of(group: RayGroup, key: str, nodes: Sequence[RayNode]) -> EngineJob:
    """Convert the state of a placement group to a job for the request ``key``.

    ``nodes`` are all nodes of Ray. The job counts as ended if a node of the group is dead, although Ray then moves the node's
    bundle.
    """
    kind = GPU if any(GPU in bundle for bundle in group.bundles) else CPU
    counts = [int(bundle.get(kind, 0)) for bundle in group.bundles]
    known = {node.id: node for node in nodes}
    begin = f"placement group {group.id[:_SHOWN_DIGITS]}"
    dead = [known[one] for one in group.node_ids if one in known and not known[one].is_alive]
    if group.state == "RESCHEDULING" or (dead and group.state == "CREATED"):
        why = "; ".join(
            " ".join(f"{node.name} is dead: {node.death_reason or 'no reason'}".split()) for node in dead
        )
        return EngineJob(group.id, key, "ended", f"{begin}: ended ({why or 'one of its nodes is gone'})")
    if group.state != "CREATED":
        return EngineJob(
            group.id,
            key,
            "pending",
            f"{begin}: pending (asks for {' + '.join(map(str, counts))} {kind}; {num_free(nodes, kind)} free)",
        )
    found = [known[one] for one in group.node_ids if one in known]
    parts = tuple(Part(node.name, count) for node, count in zip(found, counts, strict=True))
    names = ", ".join(node.name for node in found)
    leaving = [node.name for node in found if node.is_draining]
    if leaving:
        text = f"{begin}: leaving (Ray drains {', '.join(leaving)})"
        return EngineJob(group.id, key, "leaving", text, parts)
    return EngineJob(group.id, key, "running", f"{begin}: running on {names}", parts)
