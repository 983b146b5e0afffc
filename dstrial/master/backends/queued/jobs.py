"""Track an engine's jobs and nodes; decide which jobs to submit and cancel."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from dstrial.master.backends.backend import Node, NodeAllocation, ResourceRequest, RunRef
from dstrial.master.backends.devices import Slot, SlotKind
from dstrial.master.backends.engine import EngineJob, JobState, NodeCapacity
from dstrial.master.backends.hosts.link import HostLink
from dstrial.master.clock import now_us
from dstrial.master.store.nodes import OWN_NODE, index_of, node_of, slot_id_of

logger = logging.getLogger("dstrial.master.engine")

_MAX_FAILURES = 3  # consecutive job failures after which a request fails


@dataclasses.dataclass(slots=True)
class WaitingRequest:
    """A request for a Slurm or Ray job, until an allocation starts in the job."""

    request: ResourceRequest
    num_failures: int = 0  # consecutive jobs that have ended before the allocation started
    failure: str | None = None  # why the request fails; None while it waits
    retry_s: float = 0.0  # time from which another job may be submitted, monotonic seconds
    text: str = ""  # why the request has no job, for users
    logged: str = ""  # last message to the trial's or command's log

    def count_failure(self, key: str, why: str) -> None:
        """Count a job that ended unused; set ``failure`` after ``_MAX_FAILURES`` in a row."""
        logger.warning("for %s: %s", key, why)
        self.num_failures += 1
        if self.num_failures >= _MAX_FAILURES:
            self.num_failures = 0
            self.failure = f"{_MAX_FAILURES} jobs in a row failed before it began; the last one: {why}"


@dataclasses.dataclass(slots=True)
class TrackedJob:
    """A job's last report from Slurm or Ray, and the master's own state of the job."""

    seen: EngineJob  # the engine's last report
    name: str  # for users
    # result of :func:`size_of` for the request; None for a job of an earlier master
    size: tuple[int, bool, frozenset[int]] | None = None
    # the job's slots once it has nodes, in rank order; no other job has these slots
    allocated: tuple[NodeAllocation, ...] = ()
    links: dict[int, HostLink] = dataclasses.field(default_factory=dict)  # by node id
    run: RunRef | None = None  # the allocation that runs in the job
    was_used: bool = False  # whether an allocation has started in the job, which is used only once
    is_cancelled: bool = False  # whether the master has cancelled the job
    end: str | None = None  # how the job ended; None while the engine lists it

    @property
    def state(self) -> JobState:
        return "ended" if self.end is not None else self.seen.state

    @property
    def is_free(self) -> bool:
        """Whether an allocation may start in the job."""
        return self.state == "running" and not self.was_used and not self.is_cancelled

    def report(self, now: EngineJob | None) -> bool:
        """Update the job from Slurm's or Ray's report; return whether it has changed.

        ``now`` is None if the job is no longer listed.
        """
        if self.end is not None or now == self.seen:
            return False
        if now is None or now.state == "ended":
            self.end = f"{self.name} has ended" if now is None else now.text
            for link in self.links.values():
                link.lose_all(self.end)
        else:
            self.seen = now
        return True

    def begin(self, run: RunRef) -> None:
        """Record that an allocation uses the job."""
        self.run, self.was_used, self.allocated = run, True, self.allocated or run.allocated

    def cancel(self) -> bool:
        """Mark the job as cancelled; return False if it was cancelled before.

        The slot ids are immediately free for other jobs, even while Slurm or Ray still ends this job.
        """
        is_new, self.is_cancelled, self.allocated = not self.is_cancelled, True, ()
        return is_new

    def unusable_nodes(self) -> dict[int, str]:
        """Return node id -> reason, of the job's nodes whose agent cannot be reached."""
        return {
            node_id: reason
            for node_id, link in self.links.items()
            if link.has_tried.is_set() and (reason := link.lost_reason()) is not None
        }

    def slots_for(self, request: ResourceRequest) -> list[int] | None:
        """Return the job's slot ids that a request would use, in rank order.

        The count is ``num_slots`` of the request, or the first count in ``fewer`` that fits. None if the job is too small.
        """
        available = {part: len(on_node.slots) for part, on_node in enumerate(self.allocated)}
        for count in (request.num_slots, *request.fewer):
            chosen = chosen_counts(count, available, is_on_one_node=request.is_on_one_node)
            if chosen is not None:
                return [slot for part, num in chosen.items() for slot in self.allocated[part].slots[:num]]
        return None

    def unusable_reason(self, request: ResourceRequest) -> str | None:
        """Return why the request's allocation can never run in the job; None if it can."""
        if self.was_used or self.is_cancelled:
            return "its allocation has ended"
        if self.state == "leaving":
            return "it is losing its nodes"
        if self.state == "pending":
            return "another size is requested" if self.size not in (None, size_of(request)) else None
        if not self.links:
            return None
        if unusable := self.unusable_nodes():
            return "; ".join(unusable.values())
        if request.excluded_nodes & self.links.keys():
            return "it has a node that is disabled for this trial"
        if self.slots_for(request) is None:
            num_slots = sum(len(on_node.slots) for on_node in self.allocated)
            return f"it has {num_slots} slots, which cannot be used as {request.num_slots} are requested"
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Jobs to cancel and requests to submit jobs for, decided after each poll."""

    cancelled: tuple[tuple[TrackedJob, str], ...] = ()  # jobs to cancel, with the reason
    submitted: tuple[str, ...] = ()  # keys of requests to submit a job for, in this order
    deferred: tuple[str, ...] = ()  # keys of requests that wait until fewer jobs are pending


def plan(
    requests: Mapping[str, ResourceRequest], due: Sequence[str], jobs: Iterable[TrackedJob], max_pending: int
) -> Plan:
    """Return which jobs to cancel and submit, so that each request has one job. Pure.

    Args:
        requests: waiting requests by :func:`key_text`.
        due: keys for which a job may be submitted now, the most urgent first.
        jobs: all jobs; those that have ended or have an allocation are never cancelled.
        max_pending: maximum number of pending jobs.
    """
    cancelled: list[tuple[TrackedJob, str]] = []
    served: set[str] = set()
    num_pending = 0
    for job in sorted(jobs, key=lambda one: one.state != "running"):
        if job.run is not None or job.end is not None or (job.is_cancelled and job.state == "leaving"):
            continue
        key = job.seen.key
        if key not in requests:
            reason: str | None = "its allocation is no longer requested"
        elif key in served:
            reason = "there is another job for the same allocation"
        else:
            reason = job.unusable_reason(requests[key])
        if reason is not None:
            cancelled.append((job, reason))
        else:
            served.add(key)
            num_pending += job.state == "pending"
    waiting = [key for key in due if key not in served]
    num_submitted = max(max_pending - num_pending, 0)
    return Plan(tuple(cancelled), tuple(waiting[:num_submitted]), tuple(waiting[num_submitted:]))


def size_of(request: ResourceRequest) -> tuple[int, bool, frozenset[int]]:
    """Return a request's number of slots, ``is_on_one_node`` and excluded nodes.

    A job serves a request only if it was submitted with the same values.
    """
    return request.num_slots, request.is_on_one_node, request.excluded_nodes


def chosen_counts(
    num_slots: int, available: Mapping[int, int], *, is_on_one_node: bool = False
) -> dict[int, int] | None:
    """Return how many slots to use on each of a job's nodes; None if it has too few.

    ``available`` and the result map node index -> number of slots, in rank order. An allocation that fits on one node is not
    divided; with ``is_on_one_node``, it is never divided.
    """
    for part, count in available.items():
        if count >= num_slots:
            return {part: num_slots}
    if is_on_one_node or sum(available.values()) < num_slots:
        return None
    left, chosen = num_slots, {}
    for part, count in available.items():
        if left > 0:
            chosen[part] = min(count, left)
            left -= chosen[part]
    return chosen


def free_indices(num: int, taken: Collection[int]) -> list[int]:
    """Return the ``num`` lowest slot indices of a node that are not ``taken``."""
    free = (index for index in range(num + len(taken)) if index not in taken)
    return [index for index, _ in zip(free, range(num), strict=False)]


def key_text(key: int | str) -> str:
    """Return the key of a trial's or command's job: ``trial-7``, ``command-TASK_ID``."""
    return f"command-{key}" if isinstance(key, str) else f"trial-{key}"


def submitted_text(job_name: str, engine: str, num_slots: int, request: ResourceRequest, title: str) -> str:
    slots = f"{num_slots} slot{'s' if num_slots != 1 else ''}"
    where = " on one node" if request.is_on_one_node else ""
    fewer = "" if num_slots == request.num_slots else f", for {request.num_slots} are more than there are"
    return f"{job_name}: pending ({engine} is asked for {slots}{where} for {title}{fewer})"


class NodeTable:
    """The nodes of Slurm or Ray, with permanent ids of nodes and slots.

    The engine's thread writes; any thread may read ``nodes``.

    Args:
        ids_of: maps node names to permanent ids.
        engine: ``Slurm`` or ``Ray``, for messages.
        kind: device kind of all slots (cpu, cuda, rocm).
    """

    def __init__(
        self, ids_of: Callable[[Sequence[str]], Mapping[str, int]], engine: str, kind: SlotKind
    ) -> None:
        self._ids_of = ids_of
        self._engine = engine
        self._kind: SlotKind = kind
        self._capacity: Mapping[str, NodeCapacity] = {}
        # Nodes that do not answer, although the engine reports them as up -> reason.
        self._silent: dict[int, str] = {}
        self.ids: dict[str, int] = {}
        self.nodes: tuple[Node, ...] = ()

    def set_capacity(self, capacity: Mapping[str, NodeCapacity]) -> None:
        self.learn(capacity.keys())
        self._capacity = dict(capacity)

    def learn(self, names: Collection[str]) -> None:
        """Assign permanent ids to the named nodes that have none."""
        if new := sorted(name for name in names if name not in self.ids):
            self.ids = {**self.ids, **self._ids_of(new)}

    def names_of(self, excluded: frozenset[int]) -> frozenset[str]:
        """Return the names of nodes to avoid: those in ``excluded``, and silent nodes."""
        return frozenset(name for name, id_ in self.ids.items() if id_ in excluded or id_ in self._silent)

    def update(self, jobs: Iterable[TrackedJob]) -> bool:
        """Recompute ``nodes`` from capacity and jobs; return whether any node changed."""
        jobs = [job for job in jobs if job.end is None]
        links = [link for job in jobs for link in job.links.values()]
        ends = [link.node() for link in links]
        up = {end.id for end in ends if end.why_down is None}
        # The engine may take minutes to detect a dead node.
        self._silent = {
            link.node_id: self._silent.get(link.node_id) or link.lost_reason() or "silent"
            for link in links
            if link.is_silent and link.node_id not in up
        }
        known = {slot.id: slot for end in ends if end.why_down is None for slot in end.slots}
        used = [slot_id for job in jobs for on_node in job.allocated for slot_id in on_node.slots]
        before = {node.id: node for node in self.nodes}
        nodes = []
        for name, node_id in sorted(self.ids.items(), key=lambda pair: pair[1]):
            if node_id == OWN_NODE:
                continue
            old, capacity = before.get(node_id), self._capacity.get(name, NodeCapacity(0, is_up=False))
            counts = [index_of(slot_id) + 1 for slot_id in used if node_of(slot_id) == node_id]
            count = max([capacity.num_slots, 0 if old is None else len(old.slots), *counts])
            slots = tuple(
                known.get(slot_id_of(node_id, index))
                or Slot(slot_id_of(node_id, index), self._kind, "", f"{name}-{index}")
                for index in range(count)
            )
            why = self._silent.get(node_id) if capacity.is_up else f"down, as {self._engine} says"
            is_same = old is not None and (old.why_down is None) == (why is None)
            since_us = old.since_us if old is not None and is_same else now_us()
            nodes.append(Node(node_id, name, name, slots, why, since_us))
        changed = tuple(nodes) != self.nodes
        self.nodes = tuple(nodes)
        return changed
