"""Runs each allocation in a job of its own, of an engine that has a queue.

A job is submitted when a trial waits, and is *pending* in the engine's queue; it is *running* once it has nodes, to each of
which a link is opened. The allocation begins when all of them answer. A job is *leaving* while the engine asks for its nodes:
the allocation saves and ends. It is *ended* when the engine has taken the nodes, or when the allocation has ended and the
master has cancelled the job. A trial that begins again, with as many slots or others, has another job.

One thread polls the engine and may wait for it; the scheduler's thread leaves requests and takes slots.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from dstrial.file_writes import replace_file
from dstrial.hosts.hostfile import Host
from dstrial.master.backends.backend import (
    AllocationExit,
    Answer,
    Key,
    Node,
    Refusal,
    ResourceRequest,
    RunRef,
    Share,
    SlotsGoneError,
    SupervisorHandle,
)
from dstrial.master.backends.devices import Slot, SlotKind
from dstrial.master.backends.engine import (
    Engine,
    EngineJob,
    EngineRefusedError,
    JobRequest,
    JobState,
    NodeCapacity,
)
from dstrial.master.backends.hosts.backend import LinkedBackend
from dstrial.master.backends.hosts.link import AgentSettings, HostLink
from dstrial.master.backends.local import LocalBackend
from dstrial.master.backends.queued.plan import KnownJob, Plan, chosen_counts, free_indices, key_text, plan
from dstrial.master.backends.request import AllocationRequest
from dstrial.master.clock import now_us
from dstrial.master.store.nodes import OWN_NODE, index_of, slot_id_of
from dstrial.visible_text import visible_line

logger = logging.getLogger("dstrial.master.engine")

SHOWN_NAME = "engine.json"  # file of the state directory that `shown_engine` reads
_JOB_NAME = "job.json"  # file of an allocation's directory: its job, for the next master
_BEGIN_S = 8.0  # timeout of the first poll and of the links to what runs
_POLL_S = 1.0  # a poll is a command of the engine's
_IDLE_POLL_S = 10.0  # period of polls when nothing has changed for `_BUSY_S`
_BUSY_S = 60.0
_RETRY_S = 5.0  # backoff after the engine has not answered, and of an unheard cancellation
_NODES_PERIOD_S = 20.0
_REJECTED_RETRY_S = 30.0  # backoff of a rejected request
_MAX_FAILURES = 3  # consecutive job failures after which a request fails
_UNREACHABLE_S = (
    120.0  # for how long a node that did not answer is excluded; Slurm may take minutes to notice
)
_CLOSE_LINKS_S = 3.0  # after it, links to nodes that do not answer close in the background
_CLOSE_S = 15.0


@dataclasses.dataclass(frozen=True, slots=True)
class ShownEngine:
    """An engine in ``dstrial status``.

    Attributes:
        why_away: why it does not answer; None while it does.
        jobs: a line for people a job.
    """

    name: str
    why_away: str | None
    jobs: list[str]


def shown_engine(state_dir: Path) -> ShownEngine | None:
    """Return the engine of a state directory's master; None without one."""
    try:
        return ShownEngine(**json.loads((state_dir / SHOWN_NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


@dataclasses.dataclass(slots=True)
class _Waiting:
    """A request until its allocation begins, or nobody makes it any more.

    Attributes:
        num_failures: consecutive jobs that have ended before the allocation began.
        failure: why it is given up; None while it is not.
        retry_s: when another job may be submitted.
        text: why it has no job.
        logged: what its log says already.
    """

    request: ResourceRequest
    num_failures: int = 0
    failure: str | None = None
    retry_s: float = 0.0
    text: str = ""
    logged: str = ""


@dataclasses.dataclass(slots=True)
class RunningJob:
    """A job from its submission until no allocation needs it any more.

    Attributes:
        seen: as the engine has reported it last.
        name: for people.
        size: of the request for which it was submitted; None for a job of an earlier master.
        shares: its slots once it has nodes, in rank order; a slot belongs to no other job.
        links: by node id.
        was_used: whether an allocation has begun in it.
        cancelled_s: when it was cancelled last; None while it is not.
        end: how it ended; None while the engine has it.
    """

    seen: EngineJob
    name: str
    size: tuple[int, bool, frozenset[int]] | None = None
    shares: tuple[Share, ...] = ()
    links: dict[int, HostLink] = dataclasses.field(default_factory=dict)
    was_used: bool = False
    cancelled_s: float | None = None
    end: str | None = None

    @property
    def state(self) -> JobState:
        if self.end is not None:
            return "ended"
        is_leaving = self.seen.state == "running" and self.leaving_reason() is not None
        return "leaving" if is_leaving else self.seen.state

    def leaving_reason(self) -> str | None:
        """Return why it loses its nodes soon, by the engine or one of its agents."""
        if self.seen.state == "leaving":
            return self.seen.text
        reason = next(filter(None, (link.why_leaving() for link in self.links.values())), None)
        return None if reason is None else f"{self.name} is being ended: {reason}"

    def unusable_nodes(self) -> dict[int, str]:
        """Return the nodes on which nothing can begin, with the reason."""
        return {
            node_id: reason
            for node_id, link in self.links.items()
            if link.has_tried.is_set() and (reason := link.why_lost()) is not None
        }

    def slots_for(self, request: ResourceRequest) -> list[int] | None:
        """Return an allocation's slots in rank order; None if there are too few."""
        available = {part: len(share.slots) for part, share in enumerate(self.shares)}
        for count in (request.num_slots, *request.fewer):
            chosen = chosen_counts(count, available, is_on_one_node=request.is_on_one_node)
            if chosen is not None:
                return [slot for part, num in chosen.items() for slot in self.shares[part].slots[:num]]
        return None

    def unusable_reason(self, request: ResourceRequest) -> str | None:
        """Return why no allocation can begin in it; None if one can."""
        if self.state == "pending":
            return "another size is requested" if self.size not in (None, _size_of(request)) else None
        if not self.links:
            return None
        if unusable := self.unusable_nodes():
            return "; ".join(unusable.values())
        if request.excluded_nodes & self.links.keys():
            return "it has a node that is disabled for this trial"
        if self.slots_for(request) is None:
            num_slots = sum(len(share.slots) for share in self.shares)
            return f"it has {num_slots} slots, which cannot be used as {request.num_slots} are requested"
        return None


class QueuedBackend(LinkedBackend):
    """Runs what has slots in jobs of an engine, and the rest on the master's machine.

    Args:
        engine: the engine; one thread calls it.
        ids_of: returns permanent ids of nodes by name.
        tell: wakes the scheduler; any thread calls it.
        wants_devices: whether slots are accelerators.
        section: key of the engine's settings in the experiment's config.
    """

    def __init__(
        self,
        local: LocalBackend,
        engine: Engine,
        settings: AgentSettings,
        ids_of: Callable[[Sequence[str]], Mapping[str, int]],
        tell: Callable[[], None],
        state_dir: Path,
        *,
        wants_devices: bool,
        section: str,
        shown_hosts_name: str,
    ) -> None:
        super().__init__(local, state_dir / shown_hosts_name)
        self._engine = engine
        self._settings = settings
        self._ids_of = ids_of
        self._tell_scheduler = tell
        self._shown_engine_in = state_dir / SHOWN_NAME
        self._shown_engine: ShownEngine | None = None
        self._wants_devices = wants_devices
        self._section = section
        self._lock = threading.RLock()
        self._waiting: dict[str, _Waiting] | None = None  # None until the scheduler has asked
        self._jobs: dict[str, RunningJob] = {}
        self._job_of: dict[str, str | None] = {}  # by allocation
        self._runs: dict[str, RunRef] = {}
        self._capacity: Mapping[str, NodeCapacity] = {}
        self._capacity_s = -_NODES_PERIOD_S
        self._unreachable: dict[int, tuple[str, float]] = {}  # why, and until when
        self._node_ids: dict[str, int] = {}
        self._nodes: tuple[Node, ...] = ()
        self._why_away: str | None = f"{engine.name} has not been asked yet"
        self._has_answered = False
        self._changed_s = time.monotonic()
        self._wake = threading.Event()
        self._is_closing = threading.Event()
        self._has_tried = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dstrial-engine", daemon=True)
        with contextlib.suppress(ConnectionError):  # It is asked again, and what runs is taken back.
            self._update_capacity()
            self._update_nodes()

    # What the scheduler asks

    def begin(self) -> None:
        self._thread.start()
        give_up_at_s = time.monotonic() + _BEGIN_S
        self._has_tried.wait(_BEGIN_S)
        with self._lock:
            links = [link for job in self._jobs.values() for link in job.links.values()]
        for link in links:
            link.has_tried.wait(max(give_up_at_s - time.monotonic(), 0))

    def nodes(self) -> tuple[Node, ...]:
        return self._nodes

    def request(self, requests: Iterable[ResourceRequest]) -> Answer:
        slots: dict[Key, Sequence[int]] = {}
        refused: dict[Key, str] = {}
        told: dict[Key, str] = {}
        with self._lock:
            before, self._waiting = self._waiting or {}, {}
            for request in requests:
                name = key_text(request.key)
                one = before.pop(name, None)
                if one is None or _size_of(one.request) != _size_of(request):
                    one = one or _Waiting(request)
                    one.retry_s, one.text = 0.0, ""
                    self._note_change()
                one.request = request
                self._waiting[name] = one
                if one.failure is not None:
                    refused[request.key], one.failure = one.failure, None
                elif (found := self._slots_for(name, request)) is not None:
                    slots[request.key] = found
                elif (text := self._job_text(name)) and one.logged != text:
                    one.logged = told[request.key] = text
            if before:
                self._note_change()
        return Answer(slots, refused, told)

    def _slots_for(self, name: str, request: ResourceRequest) -> list[int] | None:
        """Return slots of a job in which an allocation can begin now; None without one."""
        for job in self._jobs.values():
            is_ready = job.seen.key == name and self._is_free(job) and bool(job.links)
            if is_ready and all(link.node().why_down is None for link in job.links.values()):
                return job.slots_for(request)
        return None

    def _is_free(self, job: RunningJob) -> bool:
        return job.state == "running" and not job.was_used and job.cancelled_s is None

    def unsatisfiable_reasons(self, request: ResourceRequest) -> Sequence[Refusal]:
        """Nothing is rejected while the engine does not answer."""
        if self._why_away is not None:
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
        waiting = (self._waiting or {}).get(name)
        if waiting is not None and self._why_away is not None:
            return f"waiting for {self._engine.name}: {self._why_away}"
        jobs = [one for one in self._jobs.values() if one.seen.key == name]
        if waiting is not None:
            jobs = [one for one in jobs if not one.was_used]  # the job of the trial's last allocation
        texts = [one.seen.text for one in jobs if one.end is None and one.cancelled_s is None]
        return texts[-1] if texts else "" if waiting is None else waiting.text

    def why_leaving(self, run: RunRef) -> str | None:
        if run.is_on_own_node:
            return None
        with self._lock:
            job = self._jobs.get(self._job_id(run) or "")
            return None if job is None or job.end is not None else job.leaving_reason()

    def submit(self, request: AllocationRequest, run: RunRef) -> SupervisorHandle | None:
        if not run.is_on_own_node:
            wanted = {slot_id for share in run.shares for slot_id in share.slots}
            with self._lock:
                free = [job for job in self._jobs.values() if self._is_free(job)]
                job = next(
                    (one for one in free if wanted <= {slot for share in one.shares for slot in share.slots}),
                    None,
                )
                if job is None:
                    raise SlotsGoneError(f"its job of {self._engine.name} has ended before it began there")
                job.was_used = True
                (self._waiting or {}).pop(job.seen.key, None)
                self._job_of[run.allocation_id] = job.seen.id
                self._runs[run.allocation_id] = run
                run.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                replace_file(run.directory / _JOB_NAME, json.dumps({"job": job.seen.id}), is_private=True)
        return super().submit(request, run)

    def observe(self, run: RunRef) -> AllocationExit | None:
        """Nothing has ended before the engine has answered."""
        if not run.is_on_own_node:
            with self._lock:
                job = self._jobs.get(self._job_id(run) or "")
                if not self._has_answered or (job is not None and not job.links and job.end is None):
                    return None
        return super().observe(run)

    def find(self, run: RunRef) -> SupervisorHandle | None:
        if not run.is_on_own_node:
            with self._lock:
                self._job_id(run)
        return super().find(run)

    def forget(self, run: RunRef) -> None:
        super().forget(run)
        with self._lock:
            job = self._jobs.get(self._job_of.pop(run.allocation_id, None) or "")
            if job is not None:
                job.was_used = True
            self._runs.pop(run.allocation_id, None)
            self._note_change()

    def look(self, *, is_busy: bool) -> None:
        super().look(is_busy=is_busy)
        with self._lock:
            there = [job.seen for job in self._jobs.values() if job.end is None and job.cancelled_s is None]
            jobs = [f"{job.text} for {job.key}" for job in there]
            shown = ShownEngine(self._engine.name, self._why_away, jobs)
        if shown != self._shown_engine:
            self._shown_engine = shown
            with contextlib.suppress(OSError):  # The next change shows it.
                text = json.dumps(dataclasses.asdict(shown))
                replace_file(self._shown_engine_in, text, sync=False, is_private=True)

    def close(self) -> None:
        self._is_closing.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
        _close_links([link for job in self._jobs.values() for link in job.links.values()])
        self._shown_engine_in.unlink(missing_ok=True)
        self._local.close()

    # Allocations and their jobs; under the lock

    def _job_id(self, run: RunRef) -> str | None:
        """Return the job of a run; a run of an earlier master has it in its directory."""
        if run.allocation_id not in self._job_of:
            job_id: str | None = None
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                job_id = str(json.loads((run.directory / _JOB_NAME).read_text(encoding="utf-8"))["job"])
            self._job_of[run.allocation_id] = job_id
            self._runs[run.allocation_id] = run
        return self._job_of[run.allocation_id]

    def _link_to(self, run: RunRef, share: Share) -> HostLink | None:
        with self._lock:
            job = self._jobs.get(self._job_id(run) or "")
            return None if job is None else job.links.get(share.node_id)

    def _why_unlinked(self, run: RunRef, share: Share) -> str:
        del share
        with self._lock:
            job_id = self._job_id(run)
        return f"{self._engine.job_name(job_id)} has ended" if job_id else "its job is not known"

    # The engine's thread

    def _run(self) -> None:
        while not self._is_closing.is_set():
            self._wake.clear()
            try:
                self._poll()
                period_s = _POLL_S if time.monotonic() < self._changed_s + _BUSY_S else _IDLE_POLL_S
            except ConnectionError as error:
                self._note_away(str(error))
                period_s = _RETRY_S
            except Exception:
                logger.exception("%s is asked again after a problem", self._engine.name)
                period_s = _RETRY_S
            self._has_tried.set()
            self._is_closing.wait(_POLL_S)
            self._wake.wait(max(period_s - _POLL_S, 0.0))
        with contextlib.suppress(ConnectionError):
            self._cancel_unused()
        self._engine.close()

    def _poll(self) -> None:
        """Poll the engine once; cancel and submit what follows."""
        if time.monotonic() > self._capacity_s + _NODES_PERIOD_S:
            self._update_capacity()
        seen = {job.id: job for job in self._engine.jobs()}
        self._learn_names({part.host for job in seen.values() for part in job.parts})
        with self._lock:
            was_away = self._why_away is not None and self._has_tried.is_set()
            changed = self._update_jobs(seen)
            self._has_answered = True
            todo = self._plan()
            submitted = [(name, self._waiting[name]) for name in todo.submitted] if self._waiting else []
        self._cancel(todo.cancelled)
        for name, waiting in submitted:
            self._submit(name, waiting)
        # Only now: a controller that has just begun answers, and rejects what it cannot place yet.
        with self._lock:
            self._why_away = None
            ended = [job for job in self._jobs.values() if job.end is not None]
            closed = [job for job in ended if job.seen.id not in self._job_of.values()]
            for job in closed:
                del self._jobs[job.seen.id]
        _close_links([link for job in closed for link in job.links.values()])
        if was_away:
            logger.info("%s answers again", self._engine.name)
        with self._lock:
            changed = self._update_nodes() or changed
        if changed or was_away or todo.cancelled or todo.submitted:
            self._changed_s = time.monotonic()
            self._tell_scheduler()

    def _note_change(self) -> None:
        self._changed_s = time.monotonic()
        self._wake.set()

    def _note_away(self, why: str) -> None:
        with self._lock:
            is_new = self._why_away is None or not self._has_tried.is_set()
            if is_new:  # Each command says it in other words.
                self._why_away = visible_line(why)
        if is_new:
            logger.warning("%s does not answer, and is asked again: %s", self._engine.name, why)
            self._tell_scheduler()

    def _update_capacity(self) -> None:
        capacity = dict(self._engine.nodes())
        self._learn_names(capacity)
        self._capacity, self._capacity_s = capacity, time.monotonic()

    def _learn_names(self, names: Collection[str]) -> None:
        new = sorted(name for name in names if name not in self._node_ids)
        if new:
            found = self._ids_of(new)
            with self._lock:
                self._node_ids.update(found)

    def _update_jobs(self, seen: Mapping[str, EngineJob]) -> bool:
        """Record the engine's jobs; return whether anything is new."""
        changed = False
        for job_id, job in self._jobs.items():
            now = seen.get(job_id)
            if job.end is not None:
                continue
            if now is None or now.state == "ended":
                changed = True
                self._end(job, f"{job.name} has ended" if now is None else now.text)
            elif now != job.seen:
                changed = True
                job.seen = now
        for now in seen.values():
            if now.state != "ended" and now.id not in self._jobs:  # of an earlier master
                changed = True
                self._jobs[now.id] = RunningJob(now, self._engine.job_name(now.id))
        for job in self._jobs.values():
            if job.seen.parts and not job.links and job.end is None and job.cancelled_s is None:
                self._open_links(job)
        return changed

    def _end(self, job: RunningJob, why: str) -> None:
        job.end = why
        for link in job.links.values():
            link.lose_all(why)
        if not job.was_used and job.cancelled_s is None and job.seen.id not in self._job_of.values():
            self._count_failure(job.seen.key, why)

    def _count_failure(self, name: str, why: str) -> None:
        """Count a job in which no allocation has begun; some in a row fail the request."""
        waiting = (self._waiting or {}).get(name)
        if waiting is None:
            return
        logger.warning("for %s: %s", name, why)
        waiting.num_failures += 1
        if waiting.num_failures >= _MAX_FAILURES:
            waiting.num_failures = 0
            waiting.failure = f"{_MAX_FAILURES} jobs in a row failed before it began; the last one: {why}"

    def _open_links(self, job: RunningJob) -> None:
        """Assign ids to a job's slots, and open links to its nodes."""
        runs = [run for key, run in self._runs.items() if self._job_of.get(key) == job.seen.id]
        known = {share.node_id: share for run in runs for share in run.shares}
        taken = [share for one in self._jobs.values() for share in one.shares]
        taken += [share for run in self._runs.values() for share in run.shares]
        shares, parts = [], []
        for part in job.seen.parts:
            node_id = self._node_ids[part.host]
            if runs and node_id not in known:  # of an earlier master, whose allocation does not use this node
                continue
            used = [index_of(slot) for share in taken if share.node_id == node_id for slot in share.slots]
            ids = tuple(slot_id_of(node_id, index) for index in free_indices(part.num_slots, used))
            shares.append(known.get(node_id) or Share(node_id, ids))
            parts.append(part)
        job.shares, job.was_used = tuple(shares), bool(runs)
        settings = dataclasses.replace(self._settings, transport=self._engine.transport(job.seen.id))
        for part, share in zip(parts, shares, strict=True):
            link = job.links[share.node_id] = HostLink(
                share.node_id,
                Host(part.host, tuple(range(len(share.slots))), is_filtered=True),
                settings,
                self._on_link,
                slot_ids=share.slots,
                place=job.seen.id,
            )
            for run in runs:  # An agent ends what it has not been told of.
                link.recover(run.allocation_id, self._new_part(run, share, link, None))
            link.start()

    def _on_link(self) -> None:
        self._note_change()
        self._tell_scheduler()

    def _plan(self) -> Plan:
        """Decide what to do; nothing before the scheduler's first request."""
        if self._waiting is None:
            return Plan((), ())
        now_s = time.monotonic()
        in_use = set(self._job_of.values())
        known = []
        for job in self._jobs.values():
            if job.end is not None:
                continue
            if job.cancelled_s is not None:
                is_unheard = job.seen.state in ("pending", "running") and now_s > job.cancelled_s + _RETRY_S
                if not is_unheard:
                    continue
            waiting = self._waiting.get(job.seen.key)
            reason = None if waiting is None else job.unusable_reason(waiting.request)
            if job.was_used or job.cancelled_s is not None:
                reason = "its allocation has ended"
            known.append(KnownJob(job.seen.id, job.seen.key, job.state, job.seen.id in in_use, reason))
        due = [name for name, one in self._waiting.items() if one.failure is None and now_s > one.retry_s]
        if self._is_closing.is_set():
            due = []
        largest = max((one.request.num_slots for one in self._waiting.values()), default=1)
        todo = plan(self._waiting.keys(), due, known, self._engine.max_pending(largest))
        for name in todo.deferred:
            self._waiting[name].text = f"waits for its turn to ask {self._engine.name}"
        return self._take(todo)

    def _take(self, todo: Plan) -> Plan:
        """Mark the jobs that are to be cancelled, so that nothing begins in them."""
        for job_id, why in todo.cancelled:
            job = self._jobs[job_id]
            is_first, job.cancelled_s = job.cancelled_s is None, time.monotonic()
            if is_first:
                logger.info("%s for %s is cancelled: %s", job.name, job.seen.key, why)
            if is_first and job.links and job.state == "running" and not job.was_used:
                self._count_failure(job.seen.key, why)
            job.shares = ()  # The next job may have these slots while the engine still ends this one.
        return todo

    def _cancel(self, cancelled: Sequence[tuple[str, str]]) -> None:
        with self._lock:
            jobs = [self._jobs[job_id] for job_id, _ in cancelled]
            links = [link for job in jobs for link in job.links.values()]
        _close_links(links, for_good=True)
        for job_id, _ in cancelled:
            self._engine.cancel(job_id)

    def _cancel_unused(self) -> None:
        """Cancel the jobs without an allocation: the master ends."""
        with self._lock:
            in_use = set(self._job_of.values())
            unused = [job for job in self._jobs.values() if job.seen.id not in in_use and job.end is None]
            todo = self._take(Plan(tuple((job.seen.id, "the master ends") for job in unused), ()))
        self._cancel(todo.cancelled)

    def _submit(self, name: str, waiting: _Waiting) -> None:
        """Submit a job with as many slots as the engine accepts."""
        request = waiting.request
        first: EngineRefusedError | None = None
        for count in (request.num_slots, *request.fewer):
            job_request = self._job_request(name, request, count, self._excluded_nodes(request))
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
                self._jobs[job_id] = RunningJob(seen, job_name, _size_of(request))
            return
        excluded = sorted(self._excluded_nodes(request))
        without = f" without {', '.join(excluded)}" if excluded else ""
        with self._lock:
            if _size_of(waiting.request) == _size_of(request):  # else another size is requested meanwhile
                waiting.retry_s = time.monotonic() + _REJECTED_RETRY_S
            waiting.text = f"{self._engine.name} has nothing for it now{without}, and is asked again: {first}"

    def _job_request(
        self, name: str, request: ResourceRequest, num_slots: int, excluded: frozenset[str]
    ) -> JobRequest:
        title, config = request.describe()
        settings = config.get(self._section)
        return JobRequest(
            key=name,
            title=title,
            num_slots=num_slots,
            is_on_one_node=request.is_on_one_node,
            excluded_nodes=excluded,
            wants_devices=self._wants_devices,
            settings=settings if isinstance(settings, Mapping) else {},
        )

    def _excluded_nodes(self, request: ResourceRequest) -> frozenset[str]:
        excluded = request.excluded_nodes | self._unreachable.keys()
        return frozenset(name for name, node_id in self._node_ids.items() if node_id in excluded)

    def _update_unreachable(self) -> None:
        """Note which nodes do not answer, though the engine may call them up."""
        now_s = time.monotonic()
        # A job that loses its nodes loses its links, too.
        jobs = [job for job in self._jobs.values() if job.state == "running" and job.cancelled_s is None]
        for job in jobs:
            for node_id, reason in job.unusable_nodes().items():
                if job.links[node_id].is_silent:
                    self._unreachable[node_id] = (reason, now_s + _UNREACHABLE_S)
        up = {link.node_id for job in jobs for link in job.links.values() if link.node().why_down is None}
        down = {self._node_ids[name] for name, capacity in self._capacity.items() if not capacity.is_up}
        self._unreachable = {
            node_id: (reason, until_s)
            for node_id, (reason, until_s) in self._unreachable.items()
            if node_id not in up and node_id not in down and now_s < until_s
        }

    def _update_nodes(self) -> bool:
        """Rebuild the nodes; return whether one has changed."""
        self._update_unreachable()
        kind: SlotKind = "cuda" if self._wants_devices else "cpu"
        jobs = [job for job in self._jobs.values() if job.end is None]
        ends = [link.node() for job in jobs for link in job.links.values()]
        real = {slot.id: slot for end in ends if end.why_down is None for slot in end.slots}
        before = {node.id: node for node in self._nodes}
        nodes = []
        for name, node_id in sorted(self._node_ids.items(), key=lambda pair: pair[1]):
            if node_id == OWN_NODE:
                continue
            old, capacity = before.get(node_id), self._capacity.get(name, NodeCapacity(0, is_up=False))
            in_use = [
                index_of(slot)
                for job in jobs
                for one in job.shares
                if one.node_id == node_id
                for slot in one.slots
            ]
            count = max(capacity.num_slots, max(in_use, default=-1) + 1, 0 if old is None else len(old.slots))
            ids = [slot_id_of(node_id, index) for index in range(count)]
            slots = tuple(
                real.get(one) or Slot(one, kind, "", f"{name}-{index}") for index, one in enumerate(ids)
            )
            why = self._unreachable.get(node_id, (None, 0.0))[0]
            why = why if capacity.is_up else f"down, as {self._engine.name} says"
            is_same = old is not None and (old.why_down is None) == (why is None)
            since_us = old.since_us if old is not None and is_same else now_us()
            nodes.append(Node(node_id, name, name, slots, why, since_us))
        changed = tuple(nodes) != self._nodes
        self._nodes = tuple(nodes)
        return changed


def _size_of(request: ResourceRequest) -> tuple[int, bool, frozenset[int]]:
    """Return what another job is submitted for if it changes."""
    return request.num_slots, request.is_on_one_node, request.excluded_nodes


def _close_links(links: Sequence[HostLink], *, for_good: bool = False) -> None:
    """Close links side by side; those to dead nodes go on closing behind the caller."""
    threads = [
        threading.Thread(target=link.close, kwargs={"for_good": for_good}, name="dstrial-close", daemon=True)
        for link in links
    ]
    for thread in threads:
        thread.start()
    give_up_at_s = time.monotonic() + _CLOSE_LINKS_S
    for thread in threads:
        thread.join(max(give_up_at_s - time.monotonic(), 0))


def submitted_text(job_name: str, engine: str, num_slots: int, request: ResourceRequest, title: str) -> str:
    slots = f"{num_slots} slot{'s' if num_slots != 1 else ''}"
    where = " on one node" if request.is_on_one_node else ""
    fewer = "" if num_slots == request.num_slots else f", for {request.num_slots} are more than there are"
    return f"{job_name}: pending ({engine} is asked for {slots}{where} for {title}{fewer})"
