"""The thread that assigns slots to waiting trials and commands, and reconciles what runs with its rows.

Everything it does is idempotent: a master that is killed between a row and its effect finds the row at its next start.
A problem of one trial is that trial's, never the thread's.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import math
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from dstrial.errors import MasterError
from dstrial.master import backends
from dstrial.master.advice import text_of
from dstrial.master.backends import AllocationRequest, run_of
from dstrial.master.backends.backend import Answer, Key
from dstrial.master.clock import now_us
from dstrial.master.lifecycle import allocations, endings, resume
from dstrial.master.lifecycle import commands as life
from dstrial.master.lifecycle.storages import StorageWait
from dstrial.master.scheduler import commands as command_start
from dstrial.master.scheduler.heartbeat_timeout import HeartbeatTimeout
from dstrial.master.scheduler.janitor import Janitor
from dstrial.master.scheduler.placement import by_node
from dstrial.master.scheduler.queue import (
    Waiting,
    assignments,
    waits_for_others,
)
from dstrial.master.scheduler.reconciler import Reconciler, release
from dstrial.master.scheduler.resizing import Capacity, Resizing, note_slots
from dstrial.master.scheduler.resource_requests import begins_of, describe, requests_of, write_answer
from dstrial.master.scheduler.retries import Retries
from dstrial.master.scheduler.wait_reasons import WaitReasons
from dstrial.master.store import allocations as allocation_rows
from dstrial.master.store import commands, jobs, nodes, users
from dstrial.master.store import experiments as experiment_rows
from dstrial.master.store import trials as trial_rows
from dstrial.master.store.allocations import Allocation
from dstrial.master.store.database import Connection, SqlError, Transaction
from dstrial.master.store.reports.logs import add_master_line

if TYPE_CHECKING:
    from dstrial.master.services import Services

logger = logging.getLogger("dstrial.master.scheduler")

_Lacking: TypeAlias = "tuple[jobs.WaitingTrial, int, str | None]"  # `WaitReasons.lacks_slots`

_TICK_S = 0.05
_IDLE_TICK_S = 1.0
_QUEUE_PERIOD_S = 1.0  # between polls of the queue without a published change
# How long a master that ends stores what killed trials have printed.
_REST_OF_OUTPUT_S = 15.0
# For how long a node that is gone still counts.
_MOMENT_US = 5_000_000

_THREAD = "scheduler"  # key of `_retries` for the thread's own failures

# Of `trials.is_node_excluded`: it has failed, and a log policy keeps it from this machine.
_EXCLUDED = 2


@dataclasses.dataclass(frozen=True, slots=True)
class _Fitting:
    """How many slots a trial could go on with, cached by the other fields."""

    run_id: int  # allocations that the trial had had
    available: int
    version: int  # of the queue; the config is the same where it is
    config_hash: int
    num_slots: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Queue:
    """Who waits for slots at one poll, and the slots there are."""

    live: list[Allocation]
    capacity: Capacity
    excluded: list[jobs.WaitingTrial] = dataclasses.field(default_factory=list)  # trials without a node left
    rows: list[jobs.WaitingTrial] = dataclasses.field(default_factory=list)
    trials: list[Waiting] = dataclasses.field(
        default_factory=list
    )  # of ``rows``, in order; empty where all nodes are disabled
    lacking: list[_Lacking] = dataclasses.field(default_factory=list)
    others: list[commands.CommandInfo] = dataclasses.field(default_factory=list)  # commands
    enabled: set[int] = dataclasses.field(default_factory=set)
    largest: int = 0  # most enabled slots of a node
    disabled: frozenset[int] = frozenset()  # nodes
    is_idle: bool = False  # nobody waits and nothing is due; the rest is empty
    is_all_off: bool = False


class Scheduler:
    """Owns the slots of this machine and the processes of trials and commands."""

    def __init__(self, services: Services, retries: Retries | None = None) -> None:
        self._services = services
        self._retries = retries or Retries()  # by allocation or trial id, and _THREAD
        self._database = services.database
        self._event = services.pubsub.listen("scheduler")
        self._storages = services.storages
        self._backend = services.backend
        self._janitor = Janitor(
            services.database,
            services.pubsub,
            services.settings.log_retention_days,
            venvs_path=services.state_dir / "venvs",
            storages=self._storages,
        )
        self._heartbeat_timeout = HeartbeatTimeout(services.database, services.settings.detached_timeout_s)
        self._directory = services.state_dir / "allocations"
        self._reasons = WaitReasons(services)
        self._storage_wait = StorageWait(services.database, services.storages)
        self._reconciler = Reconciler(services, self._storage_wait, self._retries)
        self._version = -1  # of the topic at the last poll of allocations
        self._fitting: dict[int, _Fitting] = {}
        self._resizing = Resizing(services.database)
        self._queue_version, self._queue_polled_s = -1, -math.inf  # of the topic, and when
        self._is_begun = False
        self._is_draining = False
        self._is_stopping = False
        self._is_killing = False
        self._is_without_rows = False
        self._thread = threading.Thread(target=self._run, name="dstrial-scheduler", daemon=True)

    def start(self) -> None:
        """Take back what a previous master left running, and start."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        with self._database.read() as connection:
            live = allocation_rows.all_live(connection)
        self._reconciler.adopt(live)
        self._remove_left_over({row.id for row in live})
        with self._database.read() as connection:
            rows = jobs.waiting_trials(connection)
            _, lacking = self._waiting(connection, rows, len(self._services.slots))
        for one in lacking:
            self._reasons.lacks_slots(*one)
        self._janitor.start()
        self._thread.start()

    def _waiting(
        self, connection: Connection, rows: list[jobs.WaitingTrial], num_enabled: int
    ) -> tuple[list[Waiting], list[_Lacking]]:
        """Return which trials wait for how many slots, and which need more than there are.

        A trial that can resume may wait for fewer slots than configured.
        """
        waiting, lacking = [], []
        for row in rows:
            wanted, most = row.slots_per_trial, row.max_slots
            available = num_enabled if most is None else min(num_enabled, most)
            num_slots = wanted
            if wanted > available:
                fitting = self._slots_to_go_on_with(connection, row, available)
                if fitting is not None:
                    num_slots = fitting
                elif wanted > num_enabled and not self._reasons.has_said_lacking(row, num_enabled):
                    trial = trial_rows.require(connection, row.id)
                    config = json.loads(experiment_rows.require(connection, row.experiment_id).config)
                    why = resume.why_it_waits(connection, trial, config, available)
                    lacking.append((row, num_enabled, why))
            waiting.append(Waiting(row.id, row.experiment_id, num_slots, most))
        return waiting, lacking

    def _slots_to_go_on_with(
        self, connection: Connection, row: jobs.WaitingTrial, available: int
    ) -> int | None:
        """Return what ``resume`` says, asked again only after a change."""
        known = self._fitting.get(row.id)
        if known is not None and (known.run_id, known.available) != (row.run_id, available):
            known = None
        if known is not None and known.version == self._queue_version:
            return known.num_slots
        text = experiment_rows.require(connection, row.experiment_id).config
        if known is None or known.config_hash != hash(text):
            trial = trial_rows.require(connection, row.id)
            num_slots = resume.slots_to_go_on_with(connection, trial, json.loads(text), available)
        else:
            num_slots = known.num_slots
        self._fitting[row.id] = _Fitting(row.run_id, available, self._queue_version, hash(text), num_slots)
        return num_slots

    def _end_without_node(self, row: jobs.WaitingTrial) -> None:
        """End a trial excluded from every machine; without ``launch_error`` it waits.

        Source: Determined 0.38.1, e2e_tests/tests/cluster/test_log_policies.py: ERROR with ``launch_error``, else QUEUED.
        """
        if not self._services.settings.launch_error:
            return
        names = [place.name for place in self._backend.nodes()]
        where = f"{names[0]}, the only agent" if len(names) == 1 else f"all agents ({', '.join(names)})"
        why = f"a log policy (exclude_node) keeps it from {where}; nothing is left that it could be started on again"

        def end(tx: Transaction) -> None:
            text = f"trial {row.id} has failed: {why}"
            add_master_line(tx, row.task_id, row.id, text, level="ERROR")
            endings.close_trial(tx, row.id, "ERROR", why=why)

        self._database.write(end)

    def stop(self, *, graceful: bool, timeout_s: float) -> None:
        """Free all slots and end; experiments keep their state for the next start.

        If ``graceful``, trials save a checkpoint first and are killed after ``timeout_s``. May be called again, from another
        thread, to kill what was being stopped gracefully.
        """
        if not graceful:
            self._is_killing = True
        if not self._is_draining:
            self._is_draining = True
            deadline_s = time.monotonic() + timeout_s
            while self._can_end_trials() and not self._is_killing and time.monotonic() < deadline_s:
                self._event.set()
                time.sleep(_TICK_S)
            self._is_killing = True
            give_up_at_s = time.monotonic() + _REST_OF_OUTPUT_S
            while self._can_end_trials() and (time.monotonic() < give_up_at_s or self._has_processes()):
                self._event.set()
                time.sleep(_TICK_S)
            self._is_stopping = True
            self._event.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._janitor.stop()

    def _can_end_trials(self) -> bool:
        """Stop every trial's processes; return whether any are left that the thread will end.

        If the back end cannot begin, nothing can be stopped: trials go on, and the next master adopts them.
        """
        if not self._is_begun:
            return not self._services.scheduler_problem
        return self._release_all()

    def _release_all(self) -> bool:
        """Stop every trial's processes; return whether any are left."""
        is_kill = self._is_killing

        def ask(tx: Transaction) -> bool:
            live = allocation_rows.all_live(tx.connection)
            for row in live:
                wants = row.kill_us is None if is_kill else row.preempt_us is None and row.kill_us is None
                if wants:
                    release(tx, row, "the master is going down", is_kill=is_kill)
            return bool(live)

        try:
            return self._database.write(ask)
        except (SqlError, MasterError) as error:
            return self._release_without_rows(error)

    def _release_without_rows(self, error: Exception) -> bool:
        """Stop what can be stopped where nothing can be written; False if nothing runs.

        Trials that may save wait for room. Those that are to be killed are, and the next master takes them for lost, which counts
        as no restart.
        """
        if not self._is_without_rows:
            self._is_without_rows = True
            logger.error("allocations are ended without a note in the database: %s", error)
        if self._is_killing:
            with self._database.read() as connection:
                live = allocation_rows.all_live(connection)
            for row in live:
                self._backend.kill(run_of(row), leaves_record=False)
        return self._has_processes()

    def _has_processes(self) -> bool:
        """Say whether any allocation runs; the next master takes in what others left."""
        with self._database.read() as connection:
            live = allocation_rows.all_live(connection)
        return any(self._backend.observe(run_of(row)) is None for row in live)

    def _run(self) -> None:
        while not self._is_stopping:
            try:
                if not self._is_begun:
                    self._services.note_scheduler("connecting to the nodes")
                    self._backend.begin()
                    self._is_begun = True
                wait_s = self._tick()
            except Exception as error:
                logger.exception("the scheduler has failed and tries again")
                self._services.scheduler_problem = text_of(error)
                self._retries.failed(_THREAD)
                wait_s = self._retries.postponed().get(_THREAD, 0.0)
            else:
                self._services.scheduler_problem = ""
                self._retries.forget(_THREAD)
            self._event.wait(wait_s)
            self._event.clear()

    def _tick(self) -> float:
        """Do what is due; return in how many seconds there may be more."""
        self._services.note_scheduler("reading the allocations")
        version = self._services.pubsub.version("scheduler")  # before the rows are read
        with self._database.read() as connection:
            live = allocation_rows.all_live(connection)
        wait_s = min(self._reconciler.poll(live, is_all_due=version != self._version), _IDLE_TICK_S)
        self._version = version
        self._services.note_scheduler("assigning slots")
        if not self._is_draining and self._is_queue_due() and self._assign():
            wait_s = 0.0
        self._heartbeat_timeout.check()
        self._backend.look(is_busy=bool(live))
        self._services.note_scheduler("waiting")
        return wait_s

    # What waits

    def _is_queue_due(self) -> bool:
        """Say whether to poll the queue, and note that it is done.

        Every write that may change which trial is next publishes "scheduler". Polls at each pass would cost a part of a core that
        grows with the number of waiting trials.
        """
        version, now_s = self._services.pubsub.version("scheduler"), time.monotonic()
        if version == self._queue_version and now_s < self._queue_polled_s + _QUEUE_PERIOD_S:
            return False
        self._queue_version, self._queue_polled_s = version, now_s
        return True

    def _assign(self) -> list[Allocation]:
        """Give free slots to waiting trials and commands; return what has begun."""
        self._storage_wait.look_again()
        with self._database.read() as connection:
            queue = self._queue(connection)
        for one in queue.lacking:
            self._reasons.lacks_slots(*one)
        if queue.is_idle:
            self._backend.request(())
            return []
        for row in queue.excluded:
            self._end_without_node(row)
        if queue.is_all_off:
            self._backend.request(())
            self._reasons.all_agents_are_off([*queue.rows, *queue.others])
            return []
        for command in queue.others:
            self._reasons.command_lacks_slots(command, queue.largest)
        waiting = _by_urgency(
            [*zip(queue.rows, queue.trials, strict=True)],
            [
                (row, Waiting(row.task_id, 0, row.num_slots, None, is_on_one_node=True))
                for row in queue.others
            ],
        )
        answer = self._ask_engine(queue, waiting)
        if answer is not None:
            return self._begin_all(begins_of(waiting, answer), queue)
        capacity = queue.capacity
        begins = assignments(waiting, capacity.free, queue.enabled, capacity.used_by)
        begun = self._begin_all(begins, queue)
        for_slots = [
            pair
            for pair in zip(queue.rows, queue.trials, strict=True)
            if not self._storage_wait.is_waiting(pair[0].id)
        ]
        if not self._is_draining:
            self._reasons.waits_for_slots(for_slots, [*queue.live, *begun], len(queue.enabled))
        if not begun:
            urgency: dict[int | str, tuple[int, float]] = {
                row.id: (row.priority, row.queue_position) for row in queue.rows
            }
            urgency.update({row.task_id: (row.priority, row.queue_position) for row in queue.others})
            self._resize([one for one in waiting if one.num_slots], urgency, queue.live, capacity)
        return begun

    def _queue(self, connection: Connection) -> _Queue:
        found = jobs.waiting_trials(connection)
        places = self._backend.nodes()
        kept_off = {
            row.id: nodes.excluded_for(connection, row.id)
            for row in found
            if row.is_node_excluded == _EXCLUDED
        }
        known = {place.id for place in places}
        excluded = [row for row in found if row.id in kept_off and kept_off[row.id] >= known]
        rows = self._storage_wait.ready([row for row in found if row not in excluded] if excluded else found)
        others = commands.waiting(connection)
        self._reasons.forget_others([*found, *others])
        live = allocation_rows.all_live(connection)
        is_idle = not rows and not others and not excluded
        if is_idle and (self._services.engine is not None or not self._resizing.is_due(connection)):
            return _Queue(live, _capacity(live, set(), set(), {}), is_idle=True)
        off = jobs.disabled_slots(connection, {slot.id for place in places for slot in place.slots})
        # A node that is gone for a moment counts, so that nothing goes on with fewer slots because of it.
        some_time_ago_us = now_us() - _MOMENT_US
        enabled = {
            slot.id
            for place in places
            if place.why_down is None or place.since_us > some_time_ago_us
            for slot in place.slots
            if slot.id not in off
        }
        absent = {slot.id for place in places if place.why_down is not None for slot in place.slots}
        capacity = _capacity(live, enabled, absent, off)
        if self._services.engine is not None:  # What comes back to an engine is not kept for who had it.
            capacity = dataclasses.replace(capacity, is_settled=True)
        disabled = frozenset(place.id for place in places if nodes.agent_key(place.id) in off)
        queue = _Queue(
            live,
            capacity,
            excluded=excluded,
            rows=rows,
            others=others,
            enabled=enabled,
            largest=max(map(len, by_node(enabled).values()), default=0),
            disabled=disabled,
            is_all_off=len(disabled) == len(places),
        )
        if queue.is_all_off:
            return queue
        waiting, lacking = self._waiting(connection, queue.rows, len(queue.enabled))
        trials = self._trials_of(connection, queue, waiting, kept_off)
        return dataclasses.replace(queue, trials=trials, lacking=lacking)

    def _trials_of(
        self,
        connection: Connection,
        queue: _Queue,
        waiting: Sequence[Waiting],
        kept_off: Mapping[int, frozenset[int]],
    ) -> list[Waiting]:
        """Return what each trial of a queue waits for; ``kept_off``: excluded nodes."""
        is_single_node = functools.cache(functools.partial(_is_single_node, connection))
        is_alone = len(queue.rows) + len(queue.others) == 1
        return [
            self._with_choices(
                connection,
                row,
                dataclasses.replace(
                    one,
                    kept_off=kept_off.get(int(one.key), frozenset()),
                    is_on_one_node=one.num_slots > queue.largest and is_single_node(one.experiment_id),
                ),
                queue.capacity,
                is_alone=is_alone,
            )
            for row, one in zip(queue.rows, waiting, strict=True)
        ]

    def _ask_engine(self, queue: _Queue, waiting: Sequence[Waiting]) -> Answer | None:
        """Request slots from the engine; None where the master has its own."""
        requests = requests_of(waiting, queue.capacity.used_by, queue.disabled, self._describe)
        answer = self._backend.request(requests)
        if answer is not None:
            write_answer(self._database, answer)
        return answer

    def _begin_all(self, begins: Iterable[tuple[Key, list[int]]], queue: _Queue) -> list[Allocation]:
        by_id = {row.id: row for row in queue.rows}
        ports = {port for row in queue.live for port in row.ports.values()}
        begun = []
        for key, slots in begins:
            if isinstance(key, str):
                allocation = self._begin_command(key, slots, ports)
            elif self._storage_wait.holds_up(by_id[key]):
                allocation = None
            else:
                allocation = self._begin_trial(key, slots, by_id[key].slots_per_trial, ports)
            if allocation is not None:
                ports |= set(allocation.ports.values())
                begun.append(allocation)
        return begun

    def _with_choices(
        self,
        connection: Connection,
        row: jobs.WaitingTrial,
        one: Waiting,
        capacity: Capacity,
        *,
        is_alone: bool,
    ) -> Waiting:
        """Return a waiting trial with the numbers of slots it can begin with.

        One for which nobody else waits takes all free slots, up to ``max_slots``; an engine's slots are not known to be free.
        """
        is_engine = self._services.engine is not None
        choices = self._resizing.choices(
            connection, row, capacity, at_most=None if is_alone and not is_engine else 0
        )
        if one.num_slots < row.slots_per_trial:
            choices = tuple(count for count in choices if count <= one.num_slots)
        if not choices:
            return one
        # It waits for what it asks for, if nothing less can be had.
        num_slots = one.num_slots if one.num_slots in choices else choices[0]
        return dataclasses.replace(one, num_slots=num_slots, choices=choices)

    def _resize(
        self,
        waiting: list[Waiting],
        urgency: Mapping[int | str, tuple[int, float]],
        live: list[Allocation],
        capacity: Capacity,
    ) -> None:
        """Let trials make room, leave drained slots, or take free ones."""
        most = {node: len(slots) for node, slots in by_node(capacity.enabled).items()}
        first = next((one for one in waiting if waits_for_others(one, most, capacity.used_by)), None)
        ending = [row for row in live if row.preempt_us is not None or row.kill_us is not None]
        soon = {slot for row in ending for slot in row.slots}
        with self._database.read() as connection:
            if first is not None:
                self._resizing.make_room(connection, first, urgency[first.key], capacity, soon)
            elif not soon:
                if capacity.drained:
                    self._resizing.leave_drained(connection, capacity)
                self._resizing.change_sizes(connection, capacity)

    def _describe(self, key: Key) -> tuple[str, Mapping[str, Any]]:
        with self._database.read() as connection:
            return describe(connection, key)

    def _begin_trial(
        self, trial_id: int, slots: list[int], num_wanted: int, used_ports: Iterable[int]
    ) -> Allocation | None:
        """Give a trial slots, perhaps fewer than configured, and start its processes."""
        ports = backends.choose_ports(set(used_ports))
        tokens, hashes = _new_tokens()

        row = self._assigned(allocations.assign, trial_id, slots, ports, hashes, num_wanted)
        if row is None:
            return None
        self._reconciler.launch(row, lambda: self._request(row, slots, ports, tokens))
        return row

    def _assigned(
        self,
        assign: Callable[..., Allocation | None],
        key: Key,
        slots: list[int],
        ports: dict[str, int],
        hashes: dict[str, str],
        num_wanted: int | None = None,
    ) -> Allocation | None:
        def write(tx: Transaction) -> Allocation | None:
            # In the transaction, so that `_release_all` sees either the allocation or that there will be none.
            if self._is_draining:
                return None
            allocation = assign(
                tx,
                key,
                slots=slots,
                ports=ports,
                resources_id=str(uuid.uuid4()),
                directory=str(self._directory),
                token_hashes=hashes,
            )
            if allocation is not None:
                _add_parts(tx, allocation.id, slots)
                if num_wanted is not None:
                    note_slots(tx, allocation, len(slots), num_wanted)
            return allocation

        return self._database.write(write)

    def _begin_command(self, task_id: str, slots: list[int], used_ports: Iterable[int]) -> Allocation | None:
        services = self._services
        with self._database.read() as connection:
            first_ports = command_start.first_ports(connection, task_id)
        ports = backends.choose_ports(set(used_ports), first_ports)
        tokens, hashes = _new_tokens()

        row = self._assigned(life.assign, task_id, slots, ports, hashes)
        if row is None:
            return None

        def request() -> AllocationRequest:
            given = tuple(slot for slot in services.slots if slot.id in slots)
            with self._database.read() as connection:
                return command_start.request(services, connection, row, given, ports, tokens)

        self._reconciler.launch(row, request)
        return row

    def _request(
        self, row: Allocation, slots: list[int], ports: dict[str, int], tokens: dict[str, str]
    ) -> AllocationRequest:
        with self._database.read() as connection:
            trial = trial_rows.require(connection, row.trial_id)
            experiment = experiment_rows.require(connection, row.experiment_id)
            owner = users.find_by_id(connection, experiment.owner_id)
            model_definition = experiment_rows.model_definition(connection, experiment.id)
        config = json.loads(experiment.config)
        services = self._services
        storage = self._storages.secure(config["checkpoint_storage"])
        return AllocationRequest(
            allocation_id=row.id,
            task_id=row.task_id,
            trial_id=trial.id,
            experiment_id=experiment.id,
            run_id=row.run_id,
            directory=Path(row.directory),
            slots=tuple(slot for slot in services.slots if slot.id in slots),
            ports=ports,
            config=config,
            hparams=json.loads(trial.hparams),
            trial_seed=trial.seed,
            steps_completed=row.steps_at_start,
            latest_checkpoint=row.checkpoint_uuid,
            session_token=tokens["allocation"],
            user_token=tokens["user"],
            username=owner.username,
            master_url=services.address,
            cluster_id=services.cluster_id,
            master_id=services.master_id,
            agent_id=services.agent_id,
            resources_id=row.resources_id,
            model_definition=model_definition,
            entrypoint=config["entrypoint"],
            interpreter=experiment.interpreter,
            startup_hook=services.settings.startup_hook or "",
            log_bytes=services.settings.trial_log_bytes,
            storage=None if storage is None else str(storage),
        )

    def _remove_left_over(self, live: set[str]) -> None:
        """Remove directories of ended allocations for which there was no time."""
        for directory in self._directory.iterdir():
            if directory.name not in live:
                backends.kill(backends.find(directory), directory)
                backends.remove(directory)


def _capacity(
    live: Sequence[Allocation], enabled: set[int], absent: set[int], off: Mapping[int, bool]
) -> Capacity:
    """Return a poll's slots; ``off``: disabled slots -> whether they are drained."""
    in_use: set[int] = set()
    used_by: dict[int, int] = {}
    for holder in live:
        slots = holder.slots
        in_use.update(slots)
        used_by[holder.experiment_id] = used_by.get(holder.experiment_id, 0) + len(slots)
    return Capacity(
        free=frozenset(enabled - absent - in_use),
        enabled=frozenset(enabled),
        drained=frozenset(slot for slot, may_finish in off.items() if may_finish and slot >= 0),
        used_by=used_by,
        is_settled=enabled.isdisjoint(absent),
    )


def _is_single_node(connection: Connection, experiment_id: int) -> bool:
    config = json.loads(experiment_rows.require(connection, experiment_id).config)
    return bool((config.get("resources") or {}).get("is_single_node"))


def _add_parts(tx: Transaction, allocation_id: str, slots: Sequence[int]) -> None:
    """Store an allocation's nodes besides the master's own, in the order of its ranks."""
    others = dict.fromkeys(nodes.node_of(slot_id) for slot_id in slots)
    nodes.insert_parts(tx, allocation_id, [node_id for node_id in others if node_id != nodes.OWN_NODE])


def _by_urgency(*groups: Iterable[tuple[jobs.WaitingTrial | commands.CommandInfo, Waiting]]) -> list[Waiting]:
    """Merge what waits by priority, then place in the queue; stable for equals."""
    found = [pair for group in groups for pair in group]
    return [one for _, one in sorted(found, key=lambda pair: (pair[0].priority, pair[0].queue_position))]


def _new_tokens() -> tuple[dict[str, str], dict[str, str]]:
    """Return the tokens of a new allocation by kind, and their hashes."""
    tokens = {kind: secrets.token_urlsafe(32) for kind in ("allocation", "user")}
    return tokens, {kind: hashlib.sha256(token.encode()).hexdigest() for kind, token in tokens.items()}
