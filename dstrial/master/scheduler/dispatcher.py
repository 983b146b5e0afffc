"""Assign free slots to waiting trials and commands, and start them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import math
import secrets
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from dstrial.master.backends.backend import Answer, Key, Node
from dstrial.master.backends.environment import TENSORBOARD_PORTS, choose_ports
from dstrial.master.backends.request import AllocationRequest
from dstrial.master.clock import now_us
from dstrial.master.lifecycle import allocations, endings, resume
from dstrial.master.lifecycle import commands as life
from dstrial.master.lifecycle.storages import StorageWait
from dstrial.master.scheduler import commands as command_start
from dstrial.master.scheduler.queue import Waiting, assignments, by_node, waits_for_others
from dstrial.master.scheduler.reconciler import Reconciler
from dstrial.master.scheduler.resizing import Capacity, Resizing, Stop, note_slots
from dstrial.master.scheduler.resource_requests import describe, requests_of, starts_of, write_answer
from dstrial.master.scheduler.retries import Retries, is_shared_fault
from dstrial.master.scheduler.wait_reasons import WaitReasons
from dstrial.master.store import allocations as allocation_rows
from dstrial.master.store import commands, jobs, nodes, users
from dstrial.master.store import experiments as experiment_rows
from dstrial.master.store import trials as trial_rows
from dstrial.master.store.allocations import Allocation
from dstrial.master.store.database import Connection, Transaction
from dstrial.master.store.reports.logs import add_master_line

if TYPE_CHECKING:
    from dstrial.master.services import Services

logger = logging.getLogger("dstrial.master.scheduler")

_PERIOD_S = 1.0  # interval of polls of the queue if nothing was published
_NODE_GRACE_US = 5_000_000  # grace period in which a node that is down still counts as capacity
_NODE_EXCLUDED = 2  # `trials.is_node_excluded` of a failed trial for which a log policy excludes nodes

_Entry: TypeAlias = "tuple[jobs.WaitingTrial | commands.CommandInfo, Waiting]"


@dataclasses.dataclass(slots=True)
class _Queue:
    live: list[Allocation]
    capacity: Capacity
    disabled: frozenset[int] = frozenset()  # ids of disabled nodes
    largest: int = 0  # largest number of enabled slots on a node
    is_all_off: bool = False  # whether all nodes are disabled
    is_idle: bool = False  # whether no job waits, and no trial is due for a resize
    excluded: Sequence[jobs.WaitingTrial] = ()  # trials whose log policies exclude every node
    rows: Sequence[jobs.WaitingTrial | commands.CommandInfo] = ()
    entries: list[_Entry] = dataclasses.field(default_factory=list)  # one of each row, the most urgent first
    lacking: list[tuple[jobs.WaitingTrial, str | None]] = dataclasses.field(default_factory=list)
    failed: list[tuple[jobs.WaitingTrial, Exception]] = dataclasses.field(default_factory=list)


class Dispatcher:
    """Assigns slots to waiting trials and commands; used by the scheduler's thread."""

    def __init__(
        self, services: Services, reconciler: Reconciler, storage_wait: StorageWait, retries: Retries
    ) -> None:
        self._services = services
        self._database = services.database
        self._backend = services.backend
        self._reconciler = reconciler
        self._storage_wait = storage_wait
        self._retries = retries  # by trial id
        self._reasons = WaitReasons(services)
        self._resizing = Resizing(services.database)
        self._version, self._polled_s = -1, -math.inf  # topic version and time of the last poll
        self._directory = services.state_dir / "allocations"
        self.is_draining = False

    def poll(self) -> bool:
        """Poll the queue if due; return whether a trial or command was started.

        A poll, whose cost grows with the queue, is due after a write that published "scheduler", or after ``_PERIOD_S``.
        """
        version, now_s = self._services.pubsub.version("scheduler"), time.monotonic()
        if self.is_draining or (version == self._version and now_s < self._polled_s + _PERIOD_S):
            return False
        self._version, self._polled_s = version, now_s
        return self._assign()

    def _assign(self) -> bool:
        self._storage_wait.look_again()
        with self._database.read() as connection:
            queue = self._read(connection)
        for row in queue.excluded:
            self._end_without_node(row)
        for row, error in queue.failed:
            self._retry_later(row, error)
        for row, why in queue.lacking:
            self._reasons.lacks_slots(row, len(queue.capacity.enabled), why)
        if queue.is_all_off:
            self._reasons.all_agents_are_off(queue.rows)
        waiting = [one for _, one in queue.entries]
        answer = self._ask_engine(queue, waiting)
        if answer is not None:
            return bool(self._start_all(starts_of(waiting, answer), queue))
        if queue.is_all_off or queue.is_idle:
            return False
        capacity = queue.capacity
        started = self._start_all(
            assignments(waiting, capacity.free, capacity.enabled, capacity.used_by), queue
        )
        self._log_wait_reasons(queue, started)
        if not started:
            self._resize(queue)
        return bool(started)

    def _log_wait_reasons(self, queue: _Queue, started: Sequence[Allocation]) -> None:
        if self.is_draining:
            return
        trials = []
        for row, one in queue.entries:
            if not isinstance(row, jobs.WaitingTrial):
                if row.num_slots > queue.largest:
                    self._reasons.lacks_slots(row, queue.largest)
            elif not self._storage_wait.is_waiting(row.id):
                trials.append((row, one))
        self._reasons.waits_for_slots(trials, [*queue.live, *started], len(queue.capacity.enabled))

    def _read(self, connection: Connection) -> _Queue:
        found = jobs.waiting_trials(connection)
        places = self._backend.nodes()
        excluded_nodes = {
            row.id: nodes.excluded_for(connection, row.id)
            for row in found
            if row.is_node_excluded == _NODE_EXCLUDED
        }
        known = {place.id for place in places}
        excluded = [row for row in found if row.id in excluded_nodes and excluded_nodes[row.id] >= known]
        trials = self._storage_wait.ready(
            [row for row in found if row not in excluded] if excluded else found
        )
        others = commands.waiting(connection)
        self._reasons.forget_others([*found, *others])
        live = allocation_rows.all_live(connection)
        is_empty = not trials and not others
        if is_empty and (self._services.engine is not None or not self._resizing.is_due(connection)):
            return _Queue(live, _capacity(live, (), {}), is_idle=True, excluded=excluded)
        off = jobs.disabled_slots(connection, {slot.id for place in places for slot in place.slots})
        capacity = _capacity(live, places, off)
        if self._services.engine is not None:  # Slurm or Ray does not hold lost slots for a trial
            capacity = dataclasses.replace(capacity, is_settled=True)
        disabled = frozenset(place.id for place in places if nodes.agent_key(place.id) in off)
        queue = _Queue(
            live,
            capacity,
            disabled,
            max(map(len, by_node(capacity.enabled).values()), default=0),
            is_all_off=bool(places) and len(disabled) == len(places),
            excluded=excluded,
            rows=[*trials, *others],
        )
        if not queue.is_all_off:
            self._add_entries(connection, queue, trials, excluded_nodes)
            queue.entries += [
                (row, Waiting(row.task_id, 0, row.num_slots, None, is_on_one_node=True)) for row in others
            ]
            queue.entries.sort(key=lambda pair: (pair[0].priority, pair[0].queue_position))
        return queue

    def _add_entries(
        self,
        connection: Connection,
        queue: _Queue,
        trials: Iterable[jobs.WaitingTrial],
        excluded_nodes: Mapping[int, frozenset[int]],
    ) -> None:
        """Add waiting trials to ``queue.entries``; ``excluded_nodes`` is by trial id."""
        is_single_node = functools.cache(functools.partial(_is_single_node, connection))
        for row in trials:
            if not self._retries.is_due(row.id):
                continue
            try:
                num_slots = self._num_slots(connection, row, queue)
                one = Waiting(
                    row.id,
                    row.experiment_id,
                    num_slots,
                    row.max_slots,
                    is_on_one_node=num_slots > queue.largest and is_single_node(row.experiment_id),
                    excluded_nodes=excluded_nodes.get(row.id, frozenset()),
                )
                one = self._with_choices(connection, row, one, queue)
            except Exception as error:
                if is_shared_fault(error, self._database):
                    raise
                queue.failed.append((row, error))
            else:
                self._retries.forget(row.id)
                queue.entries.append((row, one))

    def _retry_later(self, row: jobs.WaitingTrial, error: Exception) -> None:
        """Back off a trial that could not be scheduled; fail it after the last attempt."""
        logger.error("trial %d could not be scheduled", row.id, exc_info=error)
        if self._retries.record_failure(row.id):
            self._fail(row, f"the master could not schedule it ({type(error).__name__}: {error})")
            self._retries.forget(row.id)

    def _fail(self, row: jobs.WaitingTrial, why: str) -> None:
        def end(tx: Transaction) -> None:
            add_master_line(tx, row.task_id, row.id, f"trial {row.id} has failed: {why}", level="ERROR")
            endings.close_trial(tx, row.id, "ERROR", why=why)

        self._database.write(end)

    def _num_slots(self, connection: Connection, row: jobs.WaitingTrial, queue: _Queue) -> int:
        """Return how many slots a waiting trial needs; fewer if only fewer are enabled."""
        wanted, num_enabled = row.slots_per_trial, len(queue.capacity.enabled)
        available = num_enabled if row.max_slots is None else min(num_enabled, row.max_slots)
        if wanted <= available:
            return wanted
        fitting = self._resizing.slots_to_resume_with(connection, row, available)
        if fitting is not None:
            return fitting
        if wanted > num_enabled and not self._reasons.has_logged_lacking(row, num_enabled):
            trial = trial_rows.require(connection, row.id)
            config = json.loads(experiment_rows.require(connection, row.experiment_id).config)
            queue.lacking.append((row, resume.why_it_waits(connection, trial, config, available)))
        return wanted

    def _with_choices(
        self, connection: Connection, row: jobs.WaitingTrial, one: Waiting, queue: _Queue
    ) -> Waiting:
        """Return ``one`` with ``choices``, the slot counts with which the trial can start."""
        # The free slots of Slurm and Ray are unknown.
        takes_all = len(queue.rows) == 1 and self._services.engine is None
        choices = self._resizing.choices(connection, row, queue.capacity, at_most=None if takes_all else 0)
        if one.num_slots < row.slots_per_trial:
            choices = tuple(count for count in choices if count <= one.num_slots)
        if not choices:
            return one
        # If no checkpoint can resume on the configured number, wait for the best choice.
        num_slots = one.num_slots if one.num_slots in choices else choices[0]
        return dataclasses.replace(one, num_slots=num_slots, choices=choices)

    def _end_without_node(self, row: jobs.WaitingTrial) -> None:
        """Fail a trial whose log policies exclude every node."""
        # Source: Determined 0.38.1, e2e_tests/tests/cluster/test_log_policies.py.
        if not self._services.settings.launch_error:
            return
        names = [place.name for place in self._backend.nodes()]
        where = f"{names[0]}, the only agent" if len(names) == 1 else f"all agents ({', '.join(names)})"
        why = f"a log policy (exclude_node) excludes {where}; no agent is left to restart it on"
        self._fail(row, why)

    def _ask_engine(self, queue: _Queue, waiting: Sequence[Waiting]) -> Answer | None:
        """Request slots from Slurm or Ray; return None if the master assigns them itself."""
        requests = requests_of(waiting, queue.capacity.used_by, queue.disabled, self._describe)
        answer = self._backend.request(requests)
        if answer is not None:
            write_answer(self._database, answer)
        return answer

    def _start_all(self, begins: Iterable[tuple[Key, list[int]]], queue: _Queue) -> list[Allocation]:
        rows = {one.key: row for row, one in queue.entries}
        ports = {port for row in queue.live for port in row.ports.values()}
        started = []
        for key, slots in begins:
            row = rows[key]
            if isinstance(row, jobs.WaitingTrial) and self._storage_wait.holds_up(row):
                continue
            allocation = self._start(row, slots, ports)
            if allocation is not None:
                ports |= set(allocation.ports.values())
                started.append(allocation)
        return started

    def _resize(self, queue: _Queue) -> None:
        """Stop trials that make room for others, leave drained slots, or can grow."""
        capacity = queue.capacity
        most = {node: len(slots) for node, slots in by_node(capacity.enabled).items()}
        first = next(
            (
                (row, one)
                for row, one in queue.entries
                if one.num_slots and waits_for_others(one, most, capacity.used_by)
            ),
            None,
        )
        ending = [row for row in queue.live if row.preempt_us is not None or row.kill_us is not None]
        soon = {slot for row in ending for slot in row.slots}
        with self._database.read() as connection:
            stops: list[Stop] = []
            if first is not None:
                urgency = (first[0].priority, first[0].queue_position)
                stops = self._resizing.preempt_for(connection, first[1], urgency, capacity, soon)
            elif not soon:
                if capacity.drained:
                    stops = self._resizing.leave_drained(connection, capacity)
                stops = stops or self._resizing.grow(connection, capacity)
        for stop in stops:
            self._resizing.stop(*stop)

    def _describe(self, key: Key) -> tuple[str, Mapping[str, Any]]:
        with self._database.read() as connection:
            return describe(connection, key)

    def _start(
        self, waiting: jobs.WaitingTrial | commands.CommandInfo, slots: list[int], used_ports: Iterable[int]
    ) -> Allocation | None:
        """Start a trial or command on slots; return None if it is no longer waiting."""
        first_ports = None  # the ports of a trial
        if isinstance(waiting, commands.CommandInfo):
            first_ports = TENSORBOARD_PORTS if waiting.kind == "TENSORBOARD" else {}
        tokens, hashes = _new_tokens()
        resources: dict[str, Any] = {
            "slots": slots,
            "ports": choose_ports(set(used_ports), first_ports),
            "resources_id": str(uuid.uuid4()),
            "directory": str(self._directory),
            "token_hashes": hashes,
        }

        def assign(tx: Transaction) -> Allocation | None:
            # Checked in the transaction, so that `Scheduler.stop` sees every allocation.
            if self.is_draining:
                return None
            if isinstance(waiting, commands.CommandInfo):
                allocation = life.assign(tx, waiting.task_id, **resources)
            else:
                allocation = allocations.assign(tx, waiting.id, **resources)
            if allocation is not None:
                _insert_node_allocations(tx, allocation.id, slots)
                if isinstance(waiting, jobs.WaitingTrial):
                    note_slots(tx, allocation, len(slots), waiting.slots_per_trial)
            return allocation

        row = self._database.write(assign)
        if row is not None:
            self._reconciler.launch(row, lambda: self._request(row, slots, tokens))
        return row

    def _request(self, row: Allocation, slots: list[int], tokens: dict[str, str]) -> AllocationRequest:
        common = self._common_fields(row, slots, tokens)
        with self._database.read() as connection:
            if row.is_command:
                return command_start.request(self._services, connection, row, common)
            trial = trial_rows.require(connection, row.trial_id)
            experiment = experiment_rows.require(connection, row.experiment_id)
            owner = users.find_by_id(connection, experiment.owner_id)
            model_definition = experiment_rows.model_definition(connection, experiment.id)
        config = json.loads(experiment.config)
        storage = self._services.storages.secure(config["checkpoint_storage"])
        return AllocationRequest(
            **common,
            trial_id=trial.id,
            experiment_id=experiment.id,
            config=config,
            hparams=json.loads(trial.hparams),
            trial_seed=trial.seed,
            steps_completed=row.steps_at_start,
            latest_checkpoint=row.checkpoint_uuid,
            username=owner.username,
            model_definition=model_definition,
            entrypoint=config["entrypoint"],
            interpreter=experiment.interpreter,
            storage=None if storage is None else str(storage),
        )

    def _common_fields(self, row: Allocation, slots: list[int], tokens: dict[str, str]) -> dict[str, Any]:
        services = self._services
        return {
            "allocation_id": row.id,
            "task_id": row.task_id,
            "run_id": row.run_id,
            "directory": Path(row.directory),
            "slots": tuple(slot for slot in services.slots if slot.id in slots),
            "ports": row.ports,
            "session_token": tokens["allocation"],
            "user_token": tokens["user"],
            "master_url": services.address,
            "cluster_id": services.cluster_id,
            "master_id": services.master_id,
            "agent_id": services.agent_id,
            "resources_id": row.resources_id,
            "startup_hook": services.settings.startup_hook or "",
            "log_bytes": services.settings.trial_log_bytes,
        }


def _capacity(live: Sequence[Allocation], places: Sequence[Node], off: Mapping[int, bool]) -> Capacity:
    """Return the free, enabled and drained slots of ``places`` (nodes).

    ``off`` maps disabled slot -> whether it is drained: a running trial may finish on a drained slot.
    """
    # A node that went down within the grace period counts as enabled, so that a short outage shrinks no trial.
    grace_start_us = now_us() - _NODE_GRACE_US
    enabled = {
        slot.id
        for place in places
        if place.why_down is None or place.since_us > grace_start_us
        for slot in place.slots
        if slot.id not in off
    }
    absent = {slot.id for place in places if place.why_down is not None for slot in place.slots}
    in_use: set[int] = set()
    used_by: dict[int, int] = {}
    for row in live:
        in_use.update(row.slots)
        used_by[row.experiment_id] = used_by.get(row.experiment_id, 0) + len(row.slots)
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


def _insert_node_allocations(tx: Transaction, allocation_id: str, slots: Sequence[int]) -> None:
    """Store an allocation's nodes in rank order; leave out the master's machine."""
    others = dict.fromkeys(nodes.node_of(slot_id) for slot_id in slots)
    nodes.insert_parts(tx, allocation_id, [node_id for node_id in others if node_id != nodes.OWN_NODE])


def _new_tokens() -> tuple[dict[str, str], dict[str, str]]:
    tokens = {kind: secrets.token_urlsafe(32) for kind in ("allocation", "user")}
    return tokens, {kind: hashlib.sha256(token.encode()).hexdigest() for kind, token in tokens.items()}
