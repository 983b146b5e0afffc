"""Assign free slots to waiting trials and commands, and start them."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import secrets
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from dstrial.master.backends.backend import AllocationRequest, Answer, Key, Node
from dstrial.master.backends.environment import TENSORBOARD_PORTS, choose_ports
from dstrial.master.clock import now_us
from dstrial.master.lifecycle import allocations, endings
from dstrial.master.lifecycle import commands as life
from dstrial.master.scheduler import commands as command_start
from dstrial.master.scheduler import resizing
from dstrial.master.scheduler.backoff import Backoff
from dstrial.master.scheduler.queue import Waiting, assignments, by_node, waits_for_others
from dstrial.master.scheduler.reconciler import Reconciler
from dstrial.master.scheduler.resource_requests import describe, requests_of, starts_of, write_answer
from dstrial.master.scheduler.wait_reasons import WaitReasons
from dstrial.master.store import allocations as allocation_rows
from dstrial.master.store import commands, jobs, nodes, users
from dstrial.master.store import experiments as experiment_rows
from dstrial.master.store import trials as trial_rows
from dstrial.master.store.allocations import Allocation
from dstrial.master.store.database import Connection, Transaction
from dstrial.master.store.reports.logs import add_master_line
from dstrial.master.store.tokens import hash_token

if TYPE_CHECKING:
    from dstrial.master.services import Services

logger = logging.getLogger("dstrial.master.scheduler")

_PERIOD_S = 1.0  # interval of polls of the queue if nothing was published
_NODE_GRACE_US = 5_000_000  # grace period in which a node that is down still counts as capacity
_NODE_EXCLUDED = 2  # `trials.is_node_excluded` of a failed trial for which a log policy excludes nodes

_Entry: TypeAlias = "tuple[jobs.WaitingTrial | commands.CommandInfo, Waiting]"


@dataclasses.dataclass(slots=True)
class _Queue:
    """The waiting trials and commands and the slots, as read by one poll."""

    live: list[Allocation]
    enabled: frozenset[int] = frozenset()  # ids of slots
    free: frozenset[int] = frozenset()  # enabled and unused
    used_by: Mapping[int, int] = dataclasses.field(default_factory=dict)  # slots in use by experiment
    is_settled: bool = True  # False if a node went down less than the grace period ago
    disabled: frozenset[int] = frozenset()  # ids of disabled nodes
    is_all_off: bool = False  # whether all nodes are disabled
    is_idle: bool = False  # whether no job waits, and no trial may grow
    excluded: Sequence[jobs.WaitingTrial] = ()  # trials whose log policies exclude every node
    rows: Sequence[jobs.WaitingTrial | commands.CommandInfo] = ()  # of all waiting trials and commands
    entries: list[_Entry] = dataclasses.field(
        default_factory=list
    )  # trials and commands that may start, the most urgent first
    # Trials that need more slots than are enabled.
    lacking: list[jobs.WaitingTrial] = dataclasses.field(default_factory=list)
    # Trials whose checkpoint or config could not be read, with the error.
    failed: list[tuple[jobs.WaitingTrial, Exception]] = dataclasses.field(default_factory=list)

    @property
    def largest(self) -> int:
        """The largest number of enabled slots on a node."""
        return max(map(len, by_node(self.enabled).values()), default=0)


class Dispatcher:
    """Assigns slots to waiting trials and commands; used by the scheduler's thread."""

    def __init__(self, services: Services, reconciler: Reconciler, backoff: Backoff) -> None:
        self._services = services
        self._database = services.database
        self._backend = services.backend
        self._reconciler = reconciler
        self._backoff = backoff  # by trial id
        self._reasons = WaitReasons(services.database)
        self._version, self._polled_s = -1, -math.inf  # topic version and time of the last poll
        self._directory = services.state_dir / "allocations"
        self.is_draining = False

    def poll(self) -> bool:
        """Poll the queue if due; return whether a trial or command was started.

        The cost of a poll grows with the queue. Thus a poll is due only after a write that published "scheduler", or
        ``_PERIOD_S`` after the last poll.
        """
        version, now_s = self._services.pubsub.version("scheduler"), time.monotonic()
        if self.is_draining or (version == self._version and now_s < self._polled_s + _PERIOD_S):
            return False
        self._version, self._polled_s = version, now_s
        return self._assign()

    def _assign(self) -> bool:
        with self._database.read() as connection:
            queue = self._read(connection)
        for row in queue.excluded:
            self._end_without_node(row)
        for row, error in queue.failed:
            logger.error("trial %d could not be scheduled", row.id, exc_info=error)
            self._back_off(row, f"the master could not schedule it ({type(error).__name__}: {error})")
        for row in queue.lacking:
            self._reasons.lacks_slots(row, len(queue.enabled))
        if queue.is_all_off:
            text = f"the agent is disabled, so nothing starts. Enable it: `det agent enable {self._services.agent_id}`"
            self._reasons.log((one, ("off", one.run_id), text) for one in queue.rows)
        queue.entries = [
            (row, one)
            for row, one in queue.entries
            if not (self._backoff.has_failed(one.key) and self._is_without_storage(row))
        ]
        waiting = [one for _, one in queue.entries]
        answer = self._ask_engine(queue, waiting)
        if answer is not None:
            return bool(self._start_all(starts_of(waiting, answer), queue))
        if queue.is_all_off or queue.is_idle:
            return False
        started = self._start_all(assignments(waiting, queue.free, queue.enabled, queue.used_by), queue)
        self._log_wait_reasons(queue, started)
        if not started:
            self._grow(queue)
        return bool(started)

    def _back_off(self, row: jobs.WaitingTrial, why: str) -> None:
        self._reasons.log([(row, why, why)])
        self._backoff.record_failure(row.id)

    def _is_without_storage(self, row: jobs.WaitingTrial | commands.CommandInfo) -> bool:
        """Return whether a trial's checkpoint storage is unavailable.

        If it is, log this in the trial's log and postpone the trial. Always False for commands.
        """
        if not isinstance(row, jobs.WaitingTrial):
            return False
        trouble = self._services.storages.trouble_of(row.experiment_id)
        if trouble is None:
            self._backoff.forget(row.id)
            return False
        self._back_off(row, f"waiting for its checkpoint storage: {trouble}")
        return True

    def _log_wait_reasons(self, queue: _Queue, started: Sequence[Allocation]) -> None:
        if self.is_draining:
            return
        trials = []
        for row, one in queue.entries:
            if isinstance(row, commands.CommandInfo):
                if row.num_slots > queue.largest:
                    self._reasons.lacks_slots(row, queue.largest)
            elif not self._backoff.has_failed(row.id):
                trials.append((row, one))
        self._reasons.waits_for_slots(trials, [*queue.live, *started], len(queue.enabled))

    def _read(self, connection: Connection) -> _Queue:
        found = jobs.waiting_trials(connection)
        all_nodes = self._backend.nodes()
        excluded_nodes = {
            row.id: nodes.excluded_for(connection, row.id)
            for row in found
            if row.is_node_excluded == _NODE_EXCLUDED
        }
        known = {node.id for node in all_nodes}
        excluded = [row for row in found if row.id in excluded_nodes and excluded_nodes[row.id] >= known]
        trials = [row for row in found if row not in excluded] if excluded else found
        others = commands.waiting(connection)
        self._reasons.forget_others([*found, *others])
        live = allocation_rows.all_live(connection)
        is_empty = not trials and not others
        if is_empty and (self._services.engine is not None or not resizing.may_grow(connection)):
            return _Queue(live, is_idle=True, excluded=excluded)
        off = jobs.disabled_slots(connection, {slot.id for node in all_nodes for slot in node.slots})
        queue = _with_slots(live, all_nodes, off)
        queue.excluded, queue.rows = excluded, [*trials, *others]
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
        """Add waiting trials to ``queue.entries``, except those in backoff.

        Trials that raise an error are added to ``queue.failed``. ``excluded_nodes`` maps trial id -> node ids.
        """
        is_single_node = functools.cache(functools.partial(resizing.is_single_node, connection))
        largest = queue.largest
        for row in trials:
            if self._backoff.delay_s(row.id):
                continue
            try:
                num_slots = self._num_slots(connection, row, queue)
                choices = self._choices(connection, row, num_slots, queue)
                # If no checkpoint can resume on the configured number, wait for the best choice.
                num_slots = choices[0] if choices and num_slots not in choices else num_slots
                one = Waiting(
                    row.id,
                    row.experiment_id,
                    num_slots,
                    row.max_slots,
                    is_on_one_node=num_slots > largest and is_single_node(row.experiment_id),
                    excluded_nodes=excluded_nodes.get(row.id, frozenset()),
                    choices=choices,
                )
            except Exception as error:  # noqa: BLE001 - must not stop other trials; logged by the caller
                queue.failed.append((row, error))
            else:
                queue.entries.append((row, one))

    def _num_slots(self, connection: Connection, row: jobs.WaitingTrial, queue: _Queue) -> int:
        """Return the slot count for a waiting trial: ``slots_per_trial``, or fewer.

        A trial gets fewer slots only if not enough are available and its checkpoint can resume on fewer. If too few slots are
        enabled and it cannot, add the trial to ``queue.lacking``.
        """
        wanted, num_enabled = row.slots_per_trial, len(queue.enabled)
        available = num_enabled if row.max_slots is None else min(num_enabled, row.max_slots)
        if wanted <= available:
            return wanted
        fitting = resizing.slots_to_resume_with(connection, row, available)
        if fitting is None and wanted > num_enabled:
            queue.lacking.append(row)
        return wanted if fitting is None else fitting

    def _choices(
        self, connection: Connection, row: jobs.WaitingTrial, num_slots: int, queue: _Queue
    ) -> tuple[int, ...]:
        """Return the slot counts with which an elastic trial can start, best first.

        Empty if the trial can start with ``num_slots`` only.
        """
        # The free slots of Slurm and Ray are unknown, and these engines do not reserve lost slots for a trial.
        is_engine = self._services.engine is not None
        found = resizing.start_choices(
            connection,
            row,
            may_exceed=len(queue.rows) == 1 and not is_engine,
            may_shrink=queue.is_settled or is_engine,
        )
        return tuple(n for n in found if n <= num_slots) if num_slots < row.slots_per_trial else found

    def _end_without_node(self, row: jobs.WaitingTrial) -> None:
        """Fail a trial whose log policies exclude every node, if ``launch_error`` is set."""
        # Source: Determined 0.38.1, e2e_tests/tests/cluster/test_log_policies.py.
        if not self._services.settings.launch_error:
            return
        names = [node.name for node in self._backend.nodes()]
        where = f"{names[0]}, the only agent" if len(names) == 1 else f"all agents ({', '.join(names)})"
        why = f"a log policy (exclude_node) excludes {where}; no agent is left to restart it on"

        def end(tx: Transaction) -> None:
            add_master_line(tx, row.task_id, row.id, f"trial {row.id} has failed: {why}", level="ERROR")
            endings.close_trial(tx, row.id, "ERROR", why=why)

        self._database.write(end)

    def _ask_engine(self, queue: _Queue, waiting: Sequence[Waiting]) -> Answer | None:
        """Request slots from Slurm or Ray, and return the answer.

        Returns None if the master assigns the slots itself.
        """
        requests = requests_of(waiting, queue.used_by, queue.disabled, self._describe)
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
            if self._is_without_storage(row):
                continue
            allocation = self._start(row, slots, ports)
            if allocation is not None:
                ports |= set(allocation.ports.values())
                started.append(allocation)
        return started

    def _grow(self, queue: _Queue) -> None:
        """Stop one trial, after a checkpoint, so that it resumes on more slots.

        No-op if no trial can grow, a trial or command waits for slots, an allocation is stopping, or a node has just gone down.
        """
        capacity = {node: len(slots) for node, slots in by_node(queue.enabled).items()}
        is_ending = any(row.preempt_us is not None or row.kill_us is not None for row in queue.live)
        if not queue.is_settled or is_ending:
            return
        if any(one.num_slots and waits_for_others(one, capacity, queue.used_by) for _, one in queue.entries):
            return
        with self._database.read() as connection:
            found = resizing.find_growth(connection, queue.free, queue.enabled, queue.used_by)
        if found is not None:
            resizing.stop(self._database, *found)

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
        tokens = {kind: secrets.token_urlsafe(32) for kind in ("allocation", "user")}
        resources: dict[str, Any] = {
            "slots": slots,
            "ports": choose_ports(set(used_ports), first_ports),
            "resources_id": str(uuid.uuid4()),
            "directory": str(self._directory),
            "token_hashes": {kind: hash_token(token) for kind, token in tokens.items()},
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
                    resizing.note_slots(tx, allocation, len(slots), waiting.slots_per_trial)
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


def _with_slots(live: list[Allocation], all_nodes: Sequence[Node], off: Mapping[int, bool]) -> _Queue:
    """Return a queue that has the slots of ``all_nodes`` and no entries yet.

    ``off`` has the disabled slots and nodes as keys, as ``jobs.disabled_slots`` returns them.
    """
    # A node that went down within the grace period counts as enabled, so that a short outage shrinks no trial.
    grace_start_us = now_us() - _NODE_GRACE_US
    enabled = {
        slot.id
        for node in all_nodes
        if node.why_down is None or node.since_us > grace_start_us
        for slot in node.slots
        if slot.id not in off
    }
    absent = {slot.id for node in all_nodes if node.why_down is not None for slot in node.slots}
    in_use: set[int] = set()
    used_by: dict[int, int] = {}
    for row in live:
        in_use.update(row.slots)
        used_by[row.experiment_id] = used_by.get(row.experiment_id, 0) + len(row.slots)
    disabled = frozenset(node.id for node in all_nodes if nodes.agent_key(node.id) in off)
    return _Queue(
        live,
        enabled=frozenset(enabled),
        free=frozenset(enabled - absent - in_use),
        used_by=used_by,
        is_settled=enabled.isdisjoint(absent),
        disabled=disabled,
        is_all_off=bool(all_nodes) and len(disabled) == len(all_nodes),
    )


def _insert_node_allocations(tx: Transaction, allocation_id: str, slots: Sequence[int]) -> None:
    """Store on which nodes besides the master's machine an allocation runs.

    ``slots`` are slot ids in rank order.
    """
    others = dict.fromkeys(nodes.node_of(slot_id) for slot_id in slots)
    nodes.insert_parts(tx, allocation_id, [node_id for node_id in others if node_id != nodes.OWN_NODE])
