"""Run each allocation in a job of an engine with a queue: Slurm or Ray.

For a waiting trial, the master submits a job, which is *pending* in the engine's queue. Once the job has nodes, it is
*running*: the master connects to an agent on each node, and starts the allocation when all agents answer. While the engine
reclaims the nodes, the job is *leaving*: the allocation saves a checkpoint and ends. The job is *ended* when it has lost its
nodes, or is cancelled after its allocation. A restarted trial gets a new job.

A separate thread calls the engine, because these calls may block.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from dstrial.file_writes import replace_file
from dstrial.hosts.hostfile import Host
from dstrial.master.backends.backend import (
    AllocationExit,
    AllocationRequest,
    Answer,
    Key,
    Node,
    NodeAllocation,
    Refusal,
    ResourceRequest,
    RunRef,
    SlotsGoneError,
    SupervisorHandle,
)
from dstrial.master.backends.engine import Engine, EngineJob, EngineRefusedError, JobRequest
from dstrial.master.backends.hosts.backend import LinkedBackend
from dstrial.master.backends.hosts.link import AgentSettings, HostLink
from dstrial.master.backends.local import LocalBackend
from dstrial.master.backends.queued.jobs import (
    NodeTable,
    Plan,
    TrackedJob,
    WaitingRequest,
    free_indices,
    key_text,
    plan,
    size_of,
    submitted_text,
)
from dstrial.master.backends.status import ENGINE_NAME, ShownEngine, StatusFile
from dstrial.master.store.nodes import index_of, slot_id_of
from dstrial.visible_text import visible_line

logger = logging.getLogger("dstrial.master.engine")

_JOB_NAME = "job.json"  # file in an allocation's directory with the job's id, for a restarted master
_BEGIN_S = 8.0  # timeout of the first poll and of links to running allocations
_POLL_S = 1.0  # interval of polls of the engine; a poll runs one or two commands
_IDLE_POLL_S = 5.0  # interval of polls when nothing has changed for `_BUSY_S`
_BUSY_S = 60.0
_RETRY_S = 5.0  # backoff after the engine has not answered
_NODES_PERIOD_S = 20.0  # interval of queries of all nodes, which are slow on a large cluster
_REJECTED_RETRY_S = 30.0  # backoff of a rejected request
_CLOSE_LINKS_S = 3.0  # timeout of closing links; afterwards they close in the background
_CLOSE_S = 15.0  # timeout of cancelling unused jobs when the master ends


class QueuedBackend(LinkedBackend):
    """Runs allocations with slots in jobs of Slurm or Ray, others on its own machine.

    Args:
        local: runs the allocations without slots.
        engine: Slurm or Ray.
        settings: for the agents on the jobs' nodes.
        ids_of: maps node names to permanent ids.
        notify: wakes the scheduler; called from any thread.
        wants_devices: whether slots are accelerators.
    """

    def __init__(
        self,
        local: LocalBackend,
        engine: Engine,
        settings: AgentSettings,
        ids_of: Callable[[Sequence[str]], Mapping[str, int]],
        notify: Callable[[], None],
        state_dir: Path,
        *,
        wants_devices: bool,
    ) -> None:
        super().__init__(local, state_dir)
        self._engine = engine
        self._settings = settings
        self._notify_scheduler = notify
        self._engine_status = StatusFile(state_dir / ENGINE_NAME)
        self._wants_devices = wants_devices
        self._lock = threading.RLock()
        self._waiting: dict[str, WaitingRequest] = {}
        self._has_requests = False  # whether the scheduler has called `request`
        self._jobs: dict[str, TrackedJob] = {}
        self._job_of: dict[str, TrackedJob] = {}  # by allocation
        self._nodes = NodeTable(ids_of, engine.name, "cuda" if wants_devices else "cpu")
        self._capacity_s = -_NODES_PERIOD_S
        self._unreachable_reason: str | None = f"{engine.name} has not answered yet"
        self._changed_s = time.monotonic()
        self._wake = threading.Event()
        self._is_closing = threading.Event()
        self._has_tried = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dstrial-engine", daemon=True)
        with contextlib.suppress(ConnectionError):  # the first poll retries
            self._update_capacity()
            self._nodes.update(())

    # Called by the scheduler

    def begin(self) -> None:
        self._thread.start()
        give_up_at_s = time.monotonic() + _BEGIN_S
        self._has_tried.wait(_BEGIN_S)
        with self._lock:
            links = [link for job in self._jobs.values() for link in job.links.values()]
        for link in links:
            link.has_tried.wait(max(give_up_at_s - time.monotonic(), 0))

    def nodes(self) -> tuple[Node, ...]:
        return self._nodes.nodes

    def request(self, requests: Iterable[ResourceRequest]) -> Answer:
        slots: dict[Key, Sequence[int]] = {}
        refused: dict[Key, str] = {}
        messages: dict[Key, str] = {}
        with self._lock:
            before, self._waiting, self._has_requests = self._waiting, {}, True
            for request in requests:
                name = key_text(request.key)
                waiting = before.pop(name, None)
                if waiting is None or size_of(waiting.request) != size_of(request):
                    waiting = waiting or WaitingRequest(request)
                    waiting.retry_s, waiting.text = 0.0, ""
                    self._note_change()
                waiting.request = request
                self._waiting[name] = waiting
                if waiting.failure is not None:
                    refused[request.key], waiting.failure = waiting.failure, None
                elif (found := self._slots_for(name, request)) is not None:
                    slots[request.key] = found
                elif (text := self._job_text(name)) and waiting.logged != text:
                    waiting.logged = messages[request.key] = text
            if before:
                self._note_change()
        return Answer(slots, refused, messages)

    def _slots_for(self, name: str, request: ResourceRequest) -> list[int] | None:
        """Return the slot ids of a request's job; None if no allocation can start there.

        None if the request has no unused running job, the job is too small, or an agent on one of its nodes does not answer.
        """
        for job in self._jobs.values():
            nodes = [link.node() for link in job.links.values()]
            if job.seen.key == name and job.is_free and nodes and all(one.why_down is None for one in nodes):
                return job.slots_for(request)
        return None

    def unsatisfiable_reasons(self, request: ResourceRequest) -> Sequence[Refusal]:
        if self._unreachable_reason is not None:
            return ()
        try:
            found = self._engine.unsatisfiable_reasons(
                self._job_request("check", request, request.num_slots, frozenset())
            )
        except OSError as error:
            logger.info("%s did not check a request: %s", self._engine.name, error)
            return ()
        return [one for one in found if not (one.is_for_nodes and request.may_wait)]

    def job_text(self, key: Key) -> str:
        with self._lock:
            return self._job_text(key_text(key))

    def _job_text(self, name: str) -> str:
        waiting = self._waiting.get(name)
        if waiting is not None and self._unreachable_reason is not None:
            return f"waiting for {self._engine.name}: {self._unreachable_reason}"
        jobs = [one for one in self._jobs.values() if one.seen.key == name]
        if waiting is not None:
            jobs = [one for one in jobs if not one.was_used]  # without the job of the last allocation
        texts = [one.seen.text for one in jobs if one.end is None and not one.is_cancelled]
        return texts[-1] if texts else "" if waiting is None else waiting.text

    def leaving_reason(self, run: RunRef) -> str | None:
        with self._lock:
            job = self._find_job(run)
            return job.seen.text if job is not None and job.state == "leaving" else None

    def submit(self, request: AllocationRequest, run: RunRef) -> SupervisorHandle | None:
        if not run.is_on_own_node:
            wanted = {slot_id for on_node in run.allocated for slot_id in on_node.slots}
            with self._lock:
                free = [job for job in self._jobs.values() if job.is_free]
                job = next(
                    (
                        one
                        for one in free
                        if wanted <= {slot for on_node in one.allocated for slot in on_node.slots}
                    ),
                    None,
                )
                if job is None:
                    raise SlotsGoneError(f"its {self._engine.name} job ended before the allocation started")
                job.begin(run)
                self._waiting.pop(job.seen.key, None)
                self._job_of[run.allocation_id] = job
                run.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                replace_file(run.directory / _JOB_NAME, json.dumps({"job": job.seen.id}), is_private=True)
        return super().submit(request, run)

    def observe(self, run: RunRef) -> AllocationExit | None:
        """Return how an allocation ended; None if it runs or its job's nodes are unknown."""
        with self._lock:
            job = self._find_job(run)
            if job is not None and not job.seen.parts and not job.links and job.end is None:
                return None
        return super().observe(run)

    def find(self, run: RunRef) -> SupervisorHandle | None:
        with self._lock:
            self._find_job(run)
        return super().find(run)

    def forget(self, run: RunRef) -> None:
        super().forget(run)
        with self._lock:
            job = self._job_of.pop(run.allocation_id, None)
            if job is not None:
                job.run = None
            self._note_change()

    def poll(self, *, is_busy: bool) -> None:
        super().poll(is_busy=is_busy)
        with self._lock:
            there = [job.seen for job in self._jobs.values() if job.end is None and not job.is_cancelled]
            jobs = [f"{job.text} for {job.key}" for job in there]
            why_away = self._unreachable_reason
        self._engine_status.write([ShownEngine(self._engine.name, why_away, jobs)])

    def close(self) -> None:
        self._is_closing.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
        _close_links(self._jobs.values())
        self._engine_status.delete()
        self._local.close()

    # Called with the lock held

    def _find_job(self, run: RunRef) -> TrackedJob | None:
        """Return the job in which an allocation runs; None if the job is unknown.

        A restarted master reads the job's id from a file in the allocation's directory.
        """
        job = self._job_of.get(run.allocation_id)
        if job is None and not run.is_on_own_node:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                job_id = str(json.loads((run.directory / _JOB_NAME).read_text(encoding="utf-8"))["job"])
                seen = EngineJob(job_id, "", "running", "")  # updated by the first poll
                job = self._jobs.setdefault(job_id, TrackedJob(seen, self._engine.job_name(job_id)))
                job.begin(run)
                self._job_of[run.allocation_id] = job
        return job

    def _link_to(self, run: RunRef, on_node: NodeAllocation) -> HostLink | None:
        with self._lock:
            job = self._find_job(run)
            return None if job is None else job.links.get(on_node.node_id)

    def _unlinked_reason(self, run: RunRef, on_node: NodeAllocation) -> str:
        del on_node
        with self._lock:
            job = self._find_job(run)
        return "its job is not known" if job is None else job.end or f"{job.name} has no such node"

    # Run in the engine's thread

    def _run(self) -> None:
        while not self._is_closing.is_set():
            self._wake.clear()
            try:
                self._poll()
                period_s = _POLL_S if time.monotonic() < self._changed_s + _BUSY_S else _IDLE_POLL_S
            except ConnectionError as error:
                self._note_unreachable(str(error))
                period_s = _RETRY_S
            except Exception:
                logger.exception("polling %s failed; retrying", self._engine.name)
                period_s = _RETRY_S
            self._has_tried.set()
            self._is_closing.wait(_POLL_S)
            self._wake.wait(max(period_s - _POLL_S, 0.0))
        with contextlib.suppress(ConnectionError):
            self._cancel_unused()
        self._engine.close()

    def _poll(self) -> None:
        if time.monotonic() > self._capacity_s + _NODES_PERIOD_S:
            self._update_capacity()
        seen = {job.id: job for job in self._engine.jobs()}
        self._nodes.learn({part.host for job in seen.values() for part in job.parts})
        with self._lock:
            was_away = self._unreachable_reason is not None and self._has_tried.is_set()
            changed = self._track(seen)
            todo = self._plan()
            submitted = [(name, self._waiting[name]) for name in todo.submitted]
        self._cancel([job for job, _ in todo.cancelled])
        for name, waiting in submitted:
            self._submit(name, waiting)
        # Only after the submissions: a controller that has just started answers, but may reject jobs for now.
        with self._lock:
            self._unreachable_reason = None
            over = [job for job in self._jobs.values() if job.end is not None and job.run is None]
            for job in over:
                del self._jobs[job.seen.id]
        _close_links(over)
        if was_away:
            logger.info("%s answers again", self._engine.name)
        with self._lock:
            changed = self._nodes.update(self._jobs.values()) or changed
        if changed or was_away or todo.cancelled or todo.submitted:
            self._changed_s = time.monotonic()
            self._notify_scheduler()

    def _note_change(self) -> None:
        self._changed_s = time.monotonic()
        self._wake.set()

    def _note_unreachable(self, why: str) -> None:
        with self._lock:
            is_new = self._unreachable_reason is None or not self._has_tried.is_set()
            if is_new:  # keep the first text: each command words it differently
                self._unreachable_reason = visible_line(why)
        if is_new:
            logger.warning("%s does not answer; retrying: %s", self._engine.name, why)
            self._notify_scheduler()

    def _update_capacity(self) -> None:
        self._nodes.set_capacity(self._engine.nodes())
        self._capacity_s = time.monotonic()

    def _track(self, seen: Mapping[str, EngineJob]) -> bool:
        """Update jobs from ``seen``, the engine's report by job id.

        Also adds jobs of an earlier master, and connects to the nodes of jobs that have started. Returns whether any job has
        changed.
        """
        changed = False
        for job_id, job in self._jobs.items():
            if job.report(seen.get(job_id)):
                changed = True
                waiting = self._waiting.get(job.seen.key)
                if job.end is not None and waiting is not None and not (job.was_used or job.is_cancelled):
                    waiting.count_failure(job.seen.key, job.end)
        for now in seen.values():
            if now.state != "ended" and now.id not in self._jobs:  # submitted by an earlier master
                changed = True
                self._jobs[now.id] = TrackedJob(now, self._engine.job_name(now.id))
        for job in self._jobs.values():
            if job.seen.parts and not job.links and job.end is None and not job.is_cancelled:
                self._open_links(job)
        return changed

    def _open_links(self, job: TrackedJob) -> None:
        """Connect to the agents on a job's nodes, and set the job's slot ids.

        The ids are those of the job's allocation or, if the job has none yet, the lowest free ids of each node.
        """
        run = job.run
        allocated = {} if run is None else {on_node.node_id: on_node for on_node in run.allocated}
        taken = [on_node for one in self._jobs.values() for on_node in one.allocated]
        settings = dataclasses.replace(self._settings, transport=self._engine.transport(job.seen.id))
        for part in job.seen.parts:
            node_id = self._nodes.ids[part.host]
            if run is None:
                used = {
                    index_of(slot)
                    for on_node in taken
                    if on_node.node_id == node_id
                    for slot in on_node.slots
                }
                ids = tuple(slot_id_of(node_id, index) for index in free_indices(part.num_slots, used))
                allocated[node_id] = NodeAllocation(node_id, ids)
            elif node_id not in allocated:  # the allocation does not use this node
                continue
            on_node = allocated[node_id]
            link = job.links[node_id] = HostLink(
                node_id,
                Host(part.host, tuple(range(len(on_node.slots))), is_filtered=True),
                settings,
                self._on_link,
                slot_ids=on_node.slots,
                job_id=job.seen.id,
            )
            if run is not None:  # an agent kills all allocations that its link does not list
                link.recover(run.allocation_id, self._new_remote_run(run, on_node, link, None))
            link.start()
        job.allocated = tuple(allocated.values())

    def _on_link(self) -> None:
        self._note_change()
        self._notify_scheduler()

    def _plan(self) -> Plan:
        """Return the jobs to cancel and submit; mark the former as cancelled.

        Empty before the first call of ``request``, because the waiting requests are not known yet.
        """
        if not self._has_requests:
            return Plan()
        requests = {name: one.request for name, one in self._waiting.items()}
        now_s = time.monotonic()
        due = [name for name, one in self._waiting.items() if one.failure is None and now_s > one.retry_s]
        if self._is_closing.is_set():
            due = []
        largest = max((request.num_slots for request in requests.values()), default=1)
        todo = plan(requests, due, self._jobs.values(), self._engine.max_pending(largest))
        for name in todo.deferred:
            self._waiting[name].text = f"waits until fewer jobs are pending in {self._engine.name}"
        for job, why in todo.cancelled:
            waiting = self._waiting.get(job.seen.key)
            if waiting is not None and job.is_free and job.links:
                waiting.count_failure(job.seen.key, why)
            if job.cancel():
                logger.info("%s for %s is cancelled: %s", job.name, job.seen.key, why)
        return todo

    def _cancel(self, jobs: Sequence[TrackedJob]) -> None:
        _close_links(jobs, for_good=True)
        for job in jobs:
            self._engine.cancel(job.seen.id)

    def _cancel_unused(self) -> None:
        with self._lock:
            unused = [job for job in self._jobs.values() if job.run is None and job.end is None]
            for job in unused:
                job.cancel()
        self._cancel(unused)

    def _submit(self, name: str, waiting: WaitingRequest) -> None:
        """Submit a job for a request, with fewer slots if the engine rejects its count.

        The slot counts are tried in the order ``num_slots``, ``fewer``. If all are rejected, set a time for a retry.
        """
        request = waiting.request
        excluded = self._nodes.names_of(request.excluded_nodes)
        first: EngineRefusedError | None = None
        for count in (request.num_slots, *request.fewer):
            job_request = self._job_request(name, request, count, excluded)
            try:
                job_id = self._engine.submit(job_request)
            except EngineRefusedError as error:
                first = first or error
                continue
            job_name = self._engine.job_name(job_id)
            logger.info("%s is submitted: %s, %d slots", job_name, name, count)
            text = submitted_text(job_name, self._engine.name, count, request, job_request.title)
            with self._lock:
                seen = EngineJob(job_id, name, "pending", text)
                self._jobs[job_id] = TrackedJob(seen, job_name, size_of(request))
            return
        without = f" without {', '.join(sorted(excluded))}" if excluded else ""
        with self._lock:
            if size_of(waiting.request) == size_of(request):  # not replaced meanwhile by another size
                waiting.retry_s = time.monotonic() + _REJECTED_RETRY_S
            waiting.text = f"{self._engine.name} rejects its job{without}; retrying: {first}"

    def _job_request(
        self, name: str, request: ResourceRequest, num_slots: int, excluded: frozenset[str]
    ) -> JobRequest:
        title, config = request.describe()
        settings = config.get(self._engine.name.lower())
        return JobRequest(
            key=name,
            title=title,
            num_slots=num_slots,
            is_on_one_node=request.is_on_one_node,
            excluded_nodes=excluded,
            wants_devices=self._wants_devices,
            settings=settings if isinstance(settings, Mapping) else {},
        )


def _close_links(jobs: Iterable[TrackedJob], *, for_good: bool = False) -> None:
    """Close jobs' connections to nodes; return after a timeout even if some are open.

    With ``for_good``, the nodes are not used again: the agents there delete their files.
    """
    threads = [
        threading.Thread(target=link.close, kwargs={"for_good": for_good}, name="dstrial-close", daemon=True)
        for job in jobs
        for link in job.links.values()
    ]
    for thread in threads:
        thread.start()
    give_up_at_s = time.monotonic() + _CLOSE_LINKS_S
    for thread in threads:
        thread.join(max(give_up_at_s - time.monotonic(), 0))
