"""Runs allocations in jobs of an engine that has a queue.

Each trial that wants to run has one job. A thread calls the engine and may wait for it; the scheduler's thread leaves requests
and takes results. A running job is a set of nodes, with a link to each, for its trial alone; the trial begins there again after
a failure. The job is released when its trial is over or cannot use it any more.
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
    Lent,
    Node,
    Refusal,
    RunRef,
    Share,
    SlotsGoneError,
    SupervisorHandle,
    Wish,
)
from dstrial.master.backends.devices import Slot, SlotKind
from dstrial.master.backends.engine import (
    Engine,
    EngineJob,
    EngineNotNowError,
    EngineRefusedError,
    JobRequest,
)
from dstrial.master.backends.hosts.backend import LinkedBackend
from dstrial.master.backends.hosts.link import AgentSettings, HostLink
from dstrial.master.backends.local import LocalBackend
from dstrial.master.backends.queued.plan import (
    KnownJob,
    LinkState,
    LostNodes,
    Plan,
    chosen_counts,
    free_indices,
    key_text,
    plan,
)
from dstrial.master.backends.request import AllocationRequest
from dstrial.master.clock import now_us
from dstrial.master.store.nodes import OWN_NODE, index_of, slot_id_of
from dstrial.visible_text import visible_line

logger = logging.getLogger("dstrial.master.engine")

SHOWN_NAME = "engine.json"  # file of the state directory that `shown_engine` reads
_JOB_NAME = "job.json"  # file of an allocation's directory: its job, for the next master
_BEGIN_S = 8.0
_SOON_S = 1.0
_LATER_S = 10.0
_RECENTLY_S = 60.0
_AGAIN_S = 5.0
_CAPACITY_PERIOD_S = 60.0
_SPARE_S = 3.0  # a trial that ends and begins again is unnamed between two looks at the queue: its job stays
_AVOIDED_S = 600.0  # for how long a useless node is excluded from requests
_MOST_FAILURES = 3  # consecutive job failures after which the request fails
_SETTLE_S = 60.0  # after a reconnect the engine rejects jobs until its nodes have registered
_GROW_AGAIN_S = 300.0  # backoff of a larger job that failed
_NOT_KNOWN_YET = -1  # stands for the nodes of a job that has just got them
_SPARE_ASKED_S = 30.0  # for how long idle slots are polled after the scheduler's question
_REFUSED_AGAIN_S = 30.0  # backoff of a rejected request that may be accepted later
_UNHEARD_S = 60.0  # backoff of `why_never` while the engine does not answer
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
class _RunningJob:
    """A job that has nodes.

    Attributes:
        called: its name for people.
        shares: all its slots, in rank order; a slot belongs to no other job.
        links: by node id.
        was_used: whether an allocation has begun in it.
        end: how it ended; None while the engine has it.
    """

    called: str
    job: EngineJob
    shares: tuple[Share, ...]
    links: dict[int, HostLink]
    was_used: bool = False
    end: str | None = None

    def num_slots(self) -> int:
        return sum(len(share.slots) for share in self.shares)

    def why_leaving(self) -> str | None:
        if self.job.state == "leaving":
            return self.job.text
        told = next(filter(None, (link.why_leaving() for link in self.links.values())), None)
        return None if told is None else f"{self.called} is being ended: {told}"


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
        self._wishes: dict[str, Wish] = {}
        self._named_s: dict[str, float] = {}
        self._requested_s: float | None = None  # When the scheduler has last said who waits and runs.
        self._capacity: dict[str, int] = {}
        self._down: Mapping[str, int] = {}
        self._capacity_s = -_CAPACITY_PERIOD_S
        self._spare: Mapping[str, int] = {}
        self._spare_asked_s = -_SPARE_ASKED_S  # When the scheduler has last asked what nobody uses.
        self._node_ids: dict[str, int] = {}
        self._nodes: tuple[Node, ...] = ()
        self._jobs: dict[str, EngineJob] = {}
        self._useless: set[str] = set()
        self._going: frozenset[str] = frozenset()  # What is just being given back.
        self._left: frozenset[str] = frozenset()  # Who waits with us, because others wait with the engine.
        self._given_back_s: dict[str, float] = {}  # When a job was given back that the engine may still show.
        self._asked: dict[str, tuple[int, bool, frozenset[int]]] = {}
        self._held: dict[str, _RunningJob] = {}
        self._job_of: dict[str, str | None] = {}  # Of allocations.
        self._runs: dict[str, RunRef] = {}
        self._recorded: dict[
            str, tuple[Share, ...]
        ] = {}  # Of jobs in which an earlier master has begun something.
        self._avoided_s: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._lost_nodes = LostNodes()
        self._is_any_lost = False
        self._refused: dict[str, str] = {}
        self._later_s: dict[
            str, float
        ] = {}  # Until when those are not asked for again that were refused now.
        self._grows_later_s: dict[str, float] = {}  # The same of those who would grow.
        self._why_later: dict[str, str] = {}
        self._told: dict[str, str] = {}
        self._why_away: str | None = f"{engine.name} has not been asked yet"
        self._is_known = False
        self._back_s = -_SETTLE_S
        self._unheard_s = -_UNHEARD_S  # When it has last not answered whether it could ever start something.
        self._changed_s = time.monotonic()
        self._wake = threading.Event()
        self._is_closing = threading.Event()
        self._has_tried = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dstrial-engine", daemon=True)
        with contextlib.suppress(ConnectionError):  # It is asked again, and what runs is taken back.
            self._ask_capacity()
            self._show_nodes()

    # What the scheduler asks

    def begin(self) -> None:
        self._thread.start()
        give_up_at_s = time.monotonic() + _BEGIN_S
        self._has_tried.wait(_BEGIN_S)
        with self._lock:
            links = [link for held in self._held.values() for link in held.links.values()]
        for link in links:
            link.has_tried.wait(max(give_up_at_s - time.monotonic(), 0))

    def nodes(self) -> tuple[Node, ...]:
        return self._nodes

    def request(self, wishes: Iterable[Wish], kept: Collection[Key]) -> Answer:
        slots: dict[Key, Sequence[int]] = {}
        refused: dict[Key, str] = {}
        told: dict[Key, str] = {}
        with self._lock:
            before = {key: wish.num_slots for key, wish in self._wishes.items()}
            off = {key: wish.off for key, wish in self._wishes.items()}
            self._wishes = {key_text(wish.key): wish for wish in wishes}
            for name, wish in self._wishes.items():
                if name in self._later_s and off.get(name, wish.off) != wish.off:
                    del self._later_s[name]  # Nodes are switched on that it waits for, most likely.
                    self._wake.set()
            if before != {key: wish.num_slots for key, wish in self._wishes.items()}:
                self._changed_s = time.monotonic()
                self._wake.set()
            for known in (self._later_s, self._grows_later_s, self._why_later):
                for name in known.keys() - self._wishes.keys():
                    del known[name]
            # What nobody has heard must not end who waits again some days later.
            there = {*self._wishes, *map(key_text, kept)}
            for heard in (self._refused, self._failures):
                for name in heard.keys() - there:
                    del heard[name]
            leaving = {job.key for job in self._jobs.values() if job.state == "leaving"}
            now_s = self._requested_s = time.monotonic()
            for name in there:
                self._named_s[name] = now_s
            for name, wish in self._wishes.items():
                if name in self._refused and not wish.is_growth:
                    refused[wish.key] = self._refused.pop(name)
                    continue
                found = self._slots_for(name, wish)
                if found is not None:
                    slots[wish.key] = found
                    continue
                text = "" if name in leaving or wish.is_growth else self._job_text(name)
                if text and self._told.get(name) != text:
                    self._told[name] = told[wish.key] = text
        return Answer(slots, refused, told)

    def why_never(self, wish: Wish) -> Sequence[Refusal]:
        """Nothing is refused while the engine is away; a trial that has run waits."""
        with self._lock:
            now_s = time.monotonic()
            if self._why_away is not None or now_s < max(
                self._back_s + _SETTLE_S, self._unheard_s + _UNHEARD_S
            ):
                return ()
        try:
            found = self._engine.why_never(self._job_request("check", wish, frozenset()))
        except OSError as error:
            logger.info("%s was not heard about what was submitted: %s", self._engine.name, error)
            with self._lock:
                self._unheard_s = time.monotonic()
            return ()
        return [one for one in found if not (one.is_for_nodes and wish.has_run)]

    def job_text(self, key: Key) -> str:
        with self._lock:
            return self._job_text(key_text(key))

    def _job_text(self, name: str) -> str:
        jobs = [job for job in self._jobs.values() if job.key == name and job.state != "ended"]
        if self._why_away is not None and (not jobs or name in self._wishes):
            return f"waiting for {self._engine.name}: {self._why_away}" if name in self._wishes else ""
        if jobs:
            return jobs[-1].text
        return self._why_later.get(name) or (
            f"waits for its turn to ask {self._engine.name}" if name in self._left else ""
        )

    def lent(self, key: Key) -> Lent:
        name = key_text(key)
        with self._lock:
            in_use = set(self._job_of.values())
            spare = {self._node_ids[host]: count for host, count in self._spare.items()}
            most = 0
            for held in self._held.values():
                if held.job.key != name or self._is_gone(held) or held.why_leaving() is not None:
                    continue
                most = max(
                    most,
                    sum(len(one.slots) for one in held.shares if _may_come(held.links[one.node_id])),
                )
                if held.job.id in in_use:  # It runs, and may grow.
                    self._spare_asked_s = time.monotonic()
                    continue
                for share in held.shares:
                    spare[share.node_id] = spare.get(share.node_id, 0) + len(share.slots)
            for job in self._jobs.values():
                if job.key == name and job.is_beginning and job.id in self._asked:
                    spare[_NOT_KNOWN_YET] = self._asked[job.id][0]
            return Lent(most, spare)

    def why_leaving(self, run: RunRef) -> str | None:
        if run.is_on_own_node:
            return None
        with self._lock:
            held = self._held_by(run)
            return None if held is None else held.why_leaving()

    def submit(self, request: AllocationRequest, run: RunRef) -> SupervisorHandle | None:
        if not run.is_on_own_node:
            with self._lock:
                held = self._holder_of(run.shares)
                if held is None:
                    raise SlotsGoneError(f"its job of {self._engine.name} has ended before it began there")
                held.was_used = True
                self._job_of[run.allocation_id] = held.job.id
                self._failures.pop(held.job.key, None)
                record = {
                    "job": held.job.id,
                    "shares": [[one.node_id, list(one.slots)] for one in held.shares],
                }
                run.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                replace_file(run.directory / _JOB_NAME, json.dumps(record), is_private=True)
        return super().submit(request, run)

    def observe(self, run: RunRef) -> AllocationExit | None:
        """Nothing has ended before the engine has answered."""
        if not run.is_on_own_node:
            with self._lock:
                job_id = self._job_id(run)
                is_there = job_id in self._jobs and job_id not in self._held
                if not self._is_known or is_there:
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
            self._recorded.pop(self._job_of.pop(run.allocation_id, None) or "", None)
            self._runs.pop(run.allocation_id, None)
            self._changed_s = time.monotonic()
        self._wake.set()

    def look(self, *, is_busy: bool) -> None:
        super().look(is_busy=is_busy)
        with self._lock:
            jobs = [f"{job.text} for {job.key}" for job in self._jobs.values() if job.state != "ended"]
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
        for held in self._held.values():
            for link in held.links.values():
                link.close()
        self._shown_engine_in.unlink(missing_ok=True)
        self._local.close()

    # Jobs and what runs in them; all of it under the lock

    def _job_id(self, run: RunRef) -> str | None:
        """Return the job of a run; a run of an earlier master has it in its directory."""
        if run.allocation_id not in self._job_of:
            job_id: str | None = None
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                record = json.loads((run.directory / _JOB_NAME).read_text(encoding="utf-8"))
                job_id = str(record["job"])
                self._recorded[job_id] = tuple(
                    Share(int(node_id), tuple(map(int, ids))) for node_id, ids in record["shares"]
                )
            self._job_of[run.allocation_id] = job_id
            self._runs[run.allocation_id] = run
        return self._job_of[run.allocation_id]

    def _held_by(self, run: RunRef) -> _RunningJob | None:
        return self._held.get(self._job_id(run) or "")

    def _holder_of(self, shares: Sequence[Share]) -> _RunningJob | None:
        wanted = {slot_id for share in shares for slot_id in share.slots}
        for held in self._held.values():
            slots = {slot_id for share in held.shares for slot_id in share.slots}
            if not self._is_gone(held) and wanted <= slots:
                return held
        return None

    def _is_gone(self, held: _RunningJob) -> bool:
        return held.end is not None or held.job.id in self._going

    def _link_to(self, run: RunRef, share: Share) -> HostLink | None:
        with self._lock:
            held = self._held_by(run)
            return None if held is None else held.links.get(share.node_id)

    def _why_unlinked(self, run: RunRef, share: Share) -> str:
        del share
        with self._lock:
            job_id = self._job_id(run)
        return f"{self._engine.called(job_id)} has ended" if job_id else "its job is not known"

    def _slots_for(self, name: str, wish: Wish) -> list[int] | None:
        """Return slots of a running job for a request, in rank order; None without one.

        The job with the most usable slots wins: one that a trial leaves to grow may have lost nodes, and be as large by its
        name.
        """
        found: list[int] | None = None
        for held in sorted(self._held.values(), key=_RunningJob.num_slots, reverse=True):
            if held.job.key == name and not self._is_gone(held) and held.job.state == "running":
                if held.job.id in self._job_of.values() or held.why_leaving() is not None:
                    continue
                if self._why_unwanted(held, wish) is not None:
                    continue
                counts = self._usable(held, wish, only_up=True)
                if counts is not None and (found is None or sum(counts.values()) > len(found)):
                    shares = held.shares
                    found = [slot for part, count in counts.items() for slot in shares[part].slots[:count]]
        return found

    def _usable(self, held: _RunningJob, wish: Wish, *, only_up: bool) -> dict[int, int] | None:
        """Return the slots of each part for a request; fewer if no more come.

        ``only_up`` counts nodes that answer now; without it nodes count that may still come.
        """
        up: dict[int, int] = {}
        hopeful: dict[int, int] = {}
        for part, share in enumerate(held.shares):
            link = held.links[share.node_id]
            if share.node_id in wish.kept_off:
                continue
            is_up = link.node().why_down is None
            if is_up:
                up[part] = len(share.slots)
            if _may_come(link):
                hopeful[part] = len(share.slots)
        for count in (wish.num_slots, *wish.fewer):
            found = chosen_counts(count, hopeful, is_on_one_node=wish.is_on_one_node)
            if found is not None:
                return chosen_counts(count, up, is_on_one_node=wish.is_on_one_node) if only_up else found
        return None

    def _why_unwanted(self, held: _RunningJob, wish: Wish) -> str | None:
        """Return why a job has the wrong size for a request; None if it has not."""
        links = [(len(share.slots), held.links[share.node_id]) for share in held.shares]
        if wish.is_move and sum(n for n, link in links if _may_come(link)) < wish.num_slots:
            return f"it has {held.num_slots()} slots, and {wish.num_slots} are asked for in its place"
        asked = self._asked.get(held.job.id)
        if wish.is_growth or asked is None or asked[0] <= wish.num_slots:
            return None  # It may be larger because its user has said of what size jobs are.
        up = [n for n, link in links if link.node().why_down is None and link.host.name in self._capacity]
        too_many = sum(up) > wish.num_slots
        return f"it has {held.num_slots()} slots, and {wish.num_slots} are enough" if too_many else None

    def _why_useless(self, job: EngineJob) -> str | None:
        """Return why a request cannot use its job; None if it can, or nothing waits."""
        wish = self._wishes.get(job.key)
        if wish is None:
            return None
        asked = self._asked.get(job.id)
        if job.state == "pending":
            now = (wish.num_slots, wish.is_on_one_node, wish.kept_off)
            return "something else is wanted now" if asked is not None and asked != now else None
        held = self._held.get(job.id)
        if held is None:
            return None
        unwanted = self._why_unwanted(held, wish)
        if unwanted is not None:
            return unwanted
        if self._usable(held, wish, only_up=False) is not None:
            return None
        down = [
            f"{link.host.name} is {link.node().why_down}"
            for link in held.links.values()
            if link.node().why_down is not None
        ]
        return (
            "; ".join(down) or f"it has {held.num_slots()} slots, not as they are needed ({wish.num_slots})"
        )

    # The engine's thread

    def _run(self) -> None:
        while not self._is_closing.is_set():
            self._wake.clear()
            try:
                self._work()
                period_s = self._period_s()
            except ConnectionError as error:
                self._now_away(str(error))
                period_s = _AGAIN_S
            except Exception:
                logger.exception("%s is asked again after a problem", self._engine.name)
                period_s = _AGAIN_S
            self._has_tried.set()
            # Never more often, whoever wakes it: each look is a command of the engine's.
            self._is_closing.wait(_SOON_S)
            self._wake.wait(max(period_s - _SOON_S, 0.0))
        with contextlib.suppress(ConnectionError):
            self._give_all_back()
        self._engine.close()

    def _period_s(self) -> float:
        with self._lock:
            is_lively = time.monotonic() < self._changed_s + _RECENTLY_S
        return _SOON_S if is_lively else _LATER_S

    def _now_away(self, why: str) -> None:
        with self._lock:
            is_new = self._why_away is None or not self._has_tried.is_set()
            if is_new:  # Each command says it in other words.
                self._why_away = visible_line(why)
        if is_new:
            logger.warning("%s does not answer, and is asked again: %s", self._engine.name, why)
            self._tell_scheduler()

    def _work(self) -> None:
        """Poll the engine once, and carry out the plan."""
        period_s = _AGAIN_S if self._is_any_lost else _CAPACITY_PERIOD_S
        if time.monotonic() > self._capacity_s + period_s:
            self._ask_capacity()
        # Before the jobs: what they have got meanwhile counts twice for a moment, and not as lost.
        spare = self._engine.spare() if time.monotonic() < self._spare_asked_s + _SPARE_ASKED_S else {}
        if not spare.keys() <= self._capacity.keys():  # A node has come back.
            self._ask_capacity()
        self._learn_names(spare)
        jobs = self._without_given_back(self._engine.jobs())
        self._learn_names({part.host for job in jobs for part in job.parts})
        with self._lock:
            was_away = self._why_away is not None and self._has_tried.is_set()
            changed = self._take_jobs(jobs) or spare != self._spare
            self._spare = spare
            self._is_known = True
            todo = self._plan()
            self._going = frozenset(job_id for job_id, _ in todo.given_back)
            wishes = dict(self._wishes)
        if was_away:
            self._back_s = time.monotonic()
        try:
            for job in jobs:
                if job.has_rest:
                    self._engine.cancel(job.id)
            for job_id, why in todo.given_back:
                self._give_back(job_id, why)
        finally:
            self._going = frozenset()  # What was not reached is planned anew.
        for name in todo.asked_for:
            self._ask_for(name, wishes[name])
        with self._lock:  # Only now: one that has just begun answers, and does not know its nodes yet.
            self._why_away = None
        if was_away:
            logger.info("%s answers again", self._engine.name)
        self._close_ended()
        with self._lock:
            changed = self._show_nodes() or changed
        if changed or was_away or todo.given_back or todo.asked_for:
            with self._lock:
                self._changed_s = time.monotonic()
            self._tell_scheduler()

    def _without_given_back(self, jobs: Sequence[EngineJob]) -> list[EngineJob]:
        """Leave out released jobs, and cancel those again that the engine still has."""
        shown = {job.id for job in jobs}
        self._given_back_s = {job_id: at_s for job_id, at_s in self._given_back_s.items() if job_id in shown}
        for job in jobs:
            at_s = self._given_back_s.get(job.id)
            if (
                at_s is not None
                and job.state in ("pending", "running")
                and time.monotonic() > at_s + _AGAIN_S
            ):
                self._given_back_s[job.id] = time.monotonic()
                self._engine.cancel(job.id)
        return [job for job in jobs if job.id not in self._given_back_s]

    def _ask_capacity(self) -> None:
        capacity = dict(self._engine.capacity())
        down = self._engine.down()
        self._learn_names({*capacity, *down})
        self._capacity, self._down, self._capacity_s = capacity, down, time.monotonic()

    def _learn_names(self, names: Collection[str]) -> None:
        new = [name for name in names if name not in self._node_ids]
        if new:
            found = self._ids_of(sorted(new))
            with self._lock:
                self._node_ids.update(found)

    def _take_jobs(self, jobs: Sequence[EngineJob]) -> bool:
        """Record the jobs; return whether anything is new."""
        found = {job.id: job for job in jobs}
        before, self._jobs = self._jobs, found
        for job_id, held in self._held.items():
            now = found.get(job_id)
            if now is not None and now.state != "ended":
                held.job = now
            elif held.end is None:
                held.end = now.text if now is not None else f"{self._engine.called(job_id)} has ended"
                for link in held.links.values():
                    link.lose_all(held.end)
                if not held.was_used:
                    self._failed(held.job.key, held.end)
        for job_id, job in before.items():
            now = found.get(job_id)
            if job.state == "pending" and job_id not in self._held and (now is None or now.state == "ended"):
                called = self._engine.called(job_id)
                self._failed(job.key, f"{called} has ended before it began" if now is None else now.text)
        for job in jobs:
            if job.state in ("running", "leaving") and job.parts and job.id not in self._held:
                self._held[job.id] = self._hold(job)
        return before != found

    def _failed(self, name: str, why: str) -> None:
        """Count a job that came to nothing; some in a row end the request."""
        if name not in self._wishes:
            return
        if self._wishes[name].is_growth:
            self._grows_later_s[name] = time.monotonic() + _GROW_AGAIN_S
            logger.info("for %s, which would grow: %s", name, why)
            return
        self._failures[name] = self._failures.get(name, 0) + 1
        logger.warning("for %s: %s", name, why)
        if self._failures[name] >= _MOST_FAILURES:
            del self._failures[name]
            self._refused[name] = f"{_MOST_FAILURES} jobs in a row came to nothing; of the last one: {why}"

    def _hold(self, job: EngineJob) -> _RunningJob:
        """Assign ids to a job's slots, and open links to its nodes."""
        shares = self._recorded.pop(job.id, None)
        asked = [(self._node_ids[part.host], part.num_slots) for part in job.parts]
        if shares is None or [(one.node_id, len(one.slots)) for one in shares] != asked:
            shares = tuple(
                Share(node_id, tuple(slot_id_of(node_id, index) for index in self._free(node_id, count)))
                for node_id, count in asked
            )
        settings = dataclasses.replace(self._settings, transport=self._engine.transport(job.id))
        links = {}
        for part, share in zip(job.parts, shares, strict=True):
            link = links[share.node_id] = HostLink(
                share.node_id,
                Host(part.host, tuple(range(part.num_slots)), is_filtered=True),
                settings,
                self._on_link,
                slot_ids=share.slots,
                place=job.id,
            )
            # An agent ends what it has not been told of.
            for run in self._runs.values():
                if self._job_of.get(run.allocation_id) == job.id:
                    for one in run.shares:
                        if one.node_id == share.node_id:
                            link.recover(run.allocation_id, self._new_part(run, one, link, None))
            link.start()
        return _RunningJob(self._engine.called(job.id), job, shares, links)

    def _free(self, node_id: int, count: int) -> list[int]:
        taken = {
            index_of(slot_id)
            for shares in (*(held.shares for held in self._held.values()), *self._recorded.values())
            for share in shares
            if share.node_id == node_id
            for slot_id in share.slots
        }
        return free_indices(count, taken)

    def _on_link(self) -> None:
        self._changed_s = time.monotonic()
        self._wake.set()
        self._tell_scheduler()

    def _plan(self) -> Plan:
        # By the scheduler's time: one that is late has not said that nobody wants a job.
        asked_s = self._requested_s
        if asked_s is None:
            return Plan((), ())
        self._named_s = {key: at_s for key, at_s in self._named_s.items() if asked_s < at_s + _SPARE_S}
        in_use = set(self._job_of.values())
        known = []
        for job in self._jobs.values():
            held = self._held.get(job.id)
            state = job.state
            if held is not None and held.end is None and held.why_leaving() is not None:
                state = "leaving"
            if state != "ended":
                num_slots = 0 if held is None else held.num_slots()
                why = self._why_useless(job)
                known.append(KnownJob(job.id, job.key, state, job.id in in_use, why, num_slots))
        self._useless = {one.id for one in known if one.state == "running" and one.why_useless is not None}
        wanted = (
            []
            if self._is_closing.is_set()
            else [
                key
                for key, wish in self._wishes.items()
                if key not in self._refused
                and time.monotonic()
                > (self._grows_later_s if wish.is_growth else self._later_s).get(key, 0.0)
            ]
        )
        growing = [name for name, wish in self._wishes.items() if wish.is_growth]
        largest = max((wish.num_slots for wish in self._wishes.values()), default=1)
        found = plan(wanted, self._named_s, known, self._engine.most_pending(largest), growing=growing)
        self._left = frozenset(found.left)
        return found

    def _give_back(self, job_id: str, why: str) -> None:
        """Release a job; avoid its nodes for a while if they were of no use."""
        with self._lock:
            if job_id in self._job_of.values():  # Of an earlier master's, and found only now.
                return
            held = self._held.get(job_id)
            job = self._jobs.pop(job_id, None)
            self._asked.pop(job_id, None)
            if held is not None:
                now_s = time.monotonic()
                is_useless = job_id in self._useless
                for link in held.links.values() if is_useless else ():
                    if link.node().why_down is not None:
                        self._avoided_s[link.host.name] = now_s + _AVOIDED_S
                if is_useless and not held.was_used:
                    self._failed(held.job.key, why)
                held.end = held.end or f"{self._engine.called(job_id)} is given back: {why}"
        what = self._engine.called(job_id)
        logger.info("%s%s is given back: %s", what, f" for {job.key}" if job else "", why)
        if held is not None:
            for link in held.links.values():
                link.close(for_good=True)
        self._given_back_s[job_id] = time.monotonic()
        self._engine.cancel(job_id)

    def _ask_for(self, name: str, wish: Wish) -> None:
        request = self._job_request(name, wish, self._kept_off(wish))
        try:
            job_id, num_slots = self._submit(request, wish)
        except EngineRefusedError as error:
            if time.monotonic() < self._back_s + _SETTLE_S:
                logger.info("%s is asked again for %s: %s", self._engine.name, name, error)
                return
            has_with_all = not wish.is_growth and self._has_with_all(request, wish)
            with self._lock:
                if wish.is_growth:
                    self._grows_later_s[name] = time.monotonic() + _REFUSED_AGAIN_S
                elif (
                    wish.has_run or isinstance(error, EngineNotNowError) or self._has_with_all(request, wish)
                ):
                    # Nodes are down that it had, and it has a checkpoint; or others are, or its user has too many jobs.
                    self._later_s[name] = time.monotonic() + _REFUSED_AGAIN_S
                    without = self._without_text(wish) if has_with_all else ""
                    self._why_later[name] = (
                        f"{self._engine.name} has nothing for it now{without}, and is asked again: {error}"
                    )
                else:
                    self._refused[name] = str(error)
            self._tell_scheduler()
            return
        with self._lock:
            self._later_s.pop(name, None)
            self._why_later.pop(name, None)
            self._asked[job_id] = (wish.num_slots, wish.is_on_one_node, wish.kept_off)
            text = asked_text(self._engine.called(job_id), self._engine.name, num_slots, wish, request.title)
            self._jobs[job_id] = EngineJob(job_id, name, "pending", text)

    def _job_request(self, name: str, wish: Wish, kept_off: frozenset[str]) -> JobRequest:
        title, config = wish.describe()
        settings = config.get(self._section)
        return JobRequest(
            key=name,
            title=title,
            num_slots=wish.num_slots,
            is_on_one_node=wish.is_on_one_node,
            kept_off=kept_off,
            wants_devices=self._wants_devices,
            settings=settings if isinstance(settings, Mapping) else {},
        )

    def _submit(self, request: JobRequest, wish: Wish) -> tuple[str, int]:
        """Request a job; return its id and its number of slots.

        The number is smaller if larger ones are rejected and the request accepts fewer.

        Raises:
            EngineRefusedError: the first rejection for now, else the first one.
        """
        first: EngineRefusedError | None = None
        not_now: EngineNotNowError | None = None
        for kept_off in dict.fromkeys((request.kept_off, self._kept_off(wish, avoids=False))):
            for count in (wish.num_slots, *wish.fewer):
                try:
                    job_id = self._engine.submit(
                        dataclasses.replace(request, num_slots=count, kept_off=kept_off)
                    )
                except EngineNotNowError as error:
                    not_now = not_now or error
                    continue
                except EngineRefusedError as error:
                    first = first or error
                    continue
                return self._asked_for(request.key, job_id, count)
        if not_now is not None and not (wish.fewer or wish.has_run or wish.is_growth):
            # Nodes are down, and the engine has it wait for them; who may go on with fewer asks again instead.
            job_id = self._engine.submit(dataclasses.replace(request, kept_off=kept_off, may_wait=True))
            return self._asked_for(request.key, job_id, wish.num_slots)
        raise not_now or first or EngineRefusedError(f"{self._engine.name} was not asked")

    def _asked_for(self, name: str, job_id: str, num_slots: int) -> tuple[str, int]:
        logger.info("%s is asked for: %s, %d slots", self._engine.called(job_id), name, num_slots)
        return job_id, num_slots

    def _has_with_all(self, request: JobRequest, wish: Wish) -> bool:
        """Return whether a rejected request would be accepted with the disabled nodes."""
        if not wish.off:
            return False
        left = dataclasses.replace(wish, kept_off=wish.kept_off - wish.off)
        try:
            return not self._engine.why_never(
                dataclasses.replace(request, kept_off=self._kept_off(left, avoids=False))
            )
        except OSError:
            return True

    def _without_text(self, wish: Wish) -> str:
        names = sorted(name for name, node_id in self._node_ids.items() if node_id in wish.off)
        return f" without {', '.join(names)}, which {'is' if len(names) == 1 else 'are'} switched off"

    def _kept_off(self, wish: Wish, *, avoids: bool = True) -> frozenset[str]:
        now_s = time.monotonic()
        self._avoided_s = {name: at_s for name, at_s in self._avoided_s.items() if now_s < at_s}
        kept_off = {name for name, node_id in self._node_ids.items() if node_id in wish.kept_off}
        # It may be had with the nodes that were of no use some minutes ago.
        return frozenset({*kept_off, *(self._avoided_s if avoids else ())})

    def _close_ended(self) -> None:
        """Drop ended jobs once nothing runs in them."""
        with self._lock:
            in_use = set(self._job_of.values())
            over = [
                job_id for job_id, held in self._held.items() if held.end is not None and job_id not in in_use
            ]
            closed = [self._held.pop(job_id) for job_id in over]
            for job_id in over:
                self._asked.pop(job_id, None)
        for held in closed:
            for link in held.links.values():
                link.close()

    def _give_all_back(self) -> None:
        """Release idle jobs: the master ends."""
        with self._lock:
            in_use = set(self._job_of.values())
            over = [job.id for job in self._jobs.values() if job.id not in in_use and job.state != "ended"]
            self._going = frozenset(over)
        for job_id in over:
            self._give_back(job_id, "the master ends")

    def _why_lost(self) -> Mapping[int, str]:
        """Return why nodes count as lost that their engine reports as up."""
        links = [
            LinkState(
                held.job.id,
                node_id,
                link.node().why_down is None,
                link.why_lost() if link.has_tried.is_set() else None,
            )
            for held in self._held.values()
            if held.end is None
            for node_id, link in held.links.items()
        ]
        down = {node_id for name, node_id in self._node_ids.items() if name not in self._capacity}
        lost = self._lost_nodes.look(links, down, time.monotonic())
        self._is_any_lost = bool(lost)
        return lost

    def _show_nodes(self) -> bool:
        """Rebuild the nodes; return whether one has changed."""
        kind: SlotKind = "cuda" if self._wants_devices else "cpu"
        real: dict[int, Slot] = {}
        for held in self._held.values():
            if held.end is None:
                for link in held.links.values():
                    node = link.node()
                    real.update({slot.id: slot for slot in node.slots if node.why_down is None})
        most: dict[int, int] = {}
        for held in self._held.values():
            for share in held.shares:
                top = max(map(index_of, share.slots), default=-1) + 1
                most[share.node_id] = max(most.get(share.node_id, 0), top)
        lost = self._why_lost()
        before = {node.id: node for node in self._nodes}
        nodes = []
        for name, node_id in sorted(self._node_ids.items(), key=lambda pair: pair[1]):
            if node_id == OWN_NODE:
                continue
            old = before.get(node_id)
            count = max(
                self._capacity.get(name, 0),
                self._down.get(name, 0),
                most.get(node_id, 0),
                0 if old is None else len(old.slots),
            )
            slots = []
            for index in range(count):
                slot_id = slot_id_of(node_id, index)
                slots.append(real.get(slot_id) or Slot(slot_id, kind, "", f"{name}-{index}"))
            why = lost.get(node_id) if name in self._capacity else f"down, as {self._engine.name} says"
            same = old is not None and (old.why_down is None) == (why is None)
            since_us = old.since_us if old is not None and same else now_us()
            nodes.append(Node(node_id, name, name, tuple(slots), why, since_us))
        shown = tuple(nodes)
        changed = shown != self._nodes
        self._nodes = shown
        return changed


def _may_come(link: HostLink) -> bool:
    """Return whether a node answers, or may do so soon."""
    return not link.has_tried.is_set() or link.why_lost() is None


def asked_text(called: str, engine: str, num_slots: int, wish: Wish, title: str) -> str:
    slots = f"{num_slots} slot{'s' if num_slots != 1 else ''}"
    where = " on one node" if wish.is_on_one_node else ""
    fewer = "" if num_slots == wish.num_slots else f", for {wish.num_slots} are more than there are"
    return f"{called}: pending ({engine} is asked for {slots}{where} for {title}{fewer})"
