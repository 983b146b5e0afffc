"""Stops trials that go on with other slots, chosen by :mod:`~.elasticity`."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from dstrial.config.experiment_config.dstrial_section import Elasticity, elasticity_of
from dstrial.master.clock import now_us
from dstrial.master.lifecycle import endings, resume
from dstrial.master.scheduler.elasticity import Running, grown, leaves_drained, select_preemption_victims
from dstrial.master.scheduler.queue import Waiting
from dstrial.master.store import allocations as allocation_rows
from dstrial.master.store import checkpoints as checkpoint_rows
from dstrial.master.store import experiments as experiment_rows
from dstrial.master.store import jobs as rows
from dstrial.master.store import trials as trial_rows
from dstrial.master.store.allocations import Allocation
from dstrial.master.store.database import Connection, Database, Transaction
from dstrial.master.store.jobs import WaitingTrial
from dstrial.master.store.reports import metrics as metric_rows
from dstrial.master.store.reports.logs import add_master_line

logger = logging.getLogger("dstrial.master.scheduler")

# Group of metrics in which a trial has a mark for each change of its slots, at the batch from which it goes on.
SLOTS_GROUP = "resources"
_POLL_S = 1.0  # between looks at trials that may change their slots
_MAX_KNOWN = 10_000  # entries of the cache before it is cleared


@dataclasses.dataclass(frozen=True, slots=True)
class Capacity:
    """The slots at one poll of the queue."""

    free: frozenset[int]  # enabled and unused
    enabled: frozenset[int]
    drained: frozenset[int]  # disabled, and their trials may finish
    used_by: Mapping[int, int]  # slots by experiment
    is_settled: bool  # no node has gone a moment ago, which may come back


Stop: TypeAlias = "tuple[int, str]"  # a trial's id, and why it stops


@dataclasses.dataclass(slots=True)
class _Known:
    """Numbers of slots of a trial, for a checkpoint, a config and excluded numbers."""

    key: tuple[Any, ...]
    choices: tuple[int, ...]
    saves: bool  # checkpoints from time to time


class Resizing:
    """Called by the scheduler's thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: dict[tuple[int, int, int], _Known] = {}  # by trial and bounds
        # The newest checkpoint when a change was wished for, by allocation: it follows the next one.
        self._wished: dict[str, str] = {}
        self._looked_s = -_POLL_S

    def is_due(self, connection: Connection) -> bool:
        """Say whether trials are to be looked at though nothing waits."""
        if time.monotonic() < self._looked_s + _POLL_S:
            return False
        self._looked_s = time.monotonic()
        found = rows.resizable_trials(connection)
        self._wished = {
            key: uuid for key, uuid in self._wished.items() if key in {one.allocation_id for one in found}
        }
        return any(_may_change(one) for one in found)

    def choices(
        self, connection: Connection, row: WaitingTrial, capacity: Capacity, *, at_most: int | None
    ) -> tuple[int, ...]:
        """Return numbers of slots to begin with, the best first; none for its own only.

        ``at_most`` is for a trial that may take more than it asks for; None for ``max_slots``.
        """
        if row.section is None:
            return ()
        elasticity = _elasticity(row.section, row.slots_per_trial)
        if not elasticity.is_asked_for:
            return ()
        most = elasticity.at_most
        if at_most is not None:
            most = min(most, max(at_most, elasticity.wish))
        at_least = elasticity.wish
        if elasticity.at_least is not None and capacity.is_settled:
            at_least = elasticity.at_least
        return self._choices(connection, row.id, row.experiment_id, at_least, most).choices

    def slots_to_resume_with(self, connection: Connection, row: WaitingTrial, available: int) -> int | None:
        """Return the most slots that a trial's checkpoint can use; None without one."""
        at_least = _elasticity(row.section, row.slots_per_trial).at_least or 1
        return next(
            iter(self._choices(connection, row.id, row.experiment_id, at_least, available).choices), None
        )

    def make_room(
        self,
        connection: Connection,
        first: Waiting,
        urgency: tuple[int, float],
        capacity: Capacity,
        soon: Collection[int],
    ) -> list[Stop]:
        """Return the trials of lower priority to stop so that the first waiting can begin.

        ``soon`` are ids of slots whose trials and commands end already.
        """
        running = [
            one
            for row in rows.resizable_trials(connection)
            if row.priority > urgency[0] and (one := self._running(connection, row)) is not None
        ]
        chosen = select_preemption_victims(
            first,
            urgency,
            running,
            free={*capacity.free, *soon} & capacity.enabled,
            enabled=capacity.enabled,
            used_by=capacity.used_by,
        )
        who = f"trial {first.key}" if isinstance(first.key, int) else f"task {first.key}"
        why = f"it makes room for {who}, whose priority is higher, and goes on with fewer slots"
        return [(one.trial_id, why) for one in chosen]

    def leave_drained(self, connection: Connection, capacity: Capacity) -> list[Stop]:
        """Return a trial on drained slots that can go on elsewhere.

        The next one follows once this one has what it takes.
        """
        for row in rows.resizable_trials(connection):
            if capacity.drained.isdisjoint(json.loads(row.slots)):
                continue
            one = self._running(connection, row)
            if one is not None and leaves_drained(one, capacity.drained, capacity.free):
                return [(row.trial_id, "its slots are being drained, and it goes on with others")]
        return []

    def change_sizes(self, connection: Connection, capacity: Capacity) -> list[Stop]:
        """Return one trial at most that takes what is free; nothing waits."""
        if not capacity.is_settled:
            return []
        for row in rows.resizable_trials(connection):
            elasticity = _elasticity(row.section, row.slots_per_trial)
            num_slots = len(json.loads(row.slots))
            if num_slots >= elasticity.at_most or not _is_due(row, elasticity):
                continue
            one = self._running(connection, row, at_most=elasticity.at_most)
            if one is None:
                continue
            used = capacity.used_by.get(row.experiment_id, 0)
            target = grown(one, free=capacity.free, enabled=capacity.enabled, used=used)
            if target > num_slots and self._at_next_checkpoint(connection, row, elasticity):
                why = f"it grows from {num_slots} to {target} slots, which nobody else wants"
                return [(row.trial_id, why)]
        return []

    def _at_next_checkpoint(
        self, connection: Connection, row: rows.ResizableTrial, elasticity: Elasticity
    ) -> bool:
        """Say whether a trial has just saved a checkpoint, or never does in between."""
        latest = checkpoint_rows.latest_completed(connection, row.trial_id)
        if latest is None:
            return False
        known = self._choices(connection, row.trial_id, row.experiment_id, 1, elasticity.at_most)
        uuid = self._wished.setdefault(row.allocation_id, str(latest.uuid))
        return not known.saves or uuid != str(latest.uuid)

    def stop(self, trial_id: int, why: str) -> None:
        """Stop a trial with a checkpoint, unless it has changed; outside of any snapshot."""

        def ask(tx: Transaction) -> bool:
            allocation = allocation_rows.live(tx.connection, trial_id)
            trial = trial_rows.require(tx.connection, trial_id)
            if allocation is None or not allocation.is_ready or trial.state != "ACTIVE":
                return False
            if allocation.preempt_us is not None or allocation.kill_us is not None:
                return False
            endings.release(tx, trial_id, why)
            return True

        if self._database.write(ask):
            logger.info("trial %d stops: %s", trial_id, why)

    def _running(
        self, connection: Connection, row: rows.ResizableTrial, at_most: int | None = None
    ) -> Running | None:
        """Return a trial with its choices; None where it has none, or may not change.

        Without ``at_most`` the choices have fewer slots than there are.
        """
        elasticity = _elasticity(row.section, row.slots_per_trial)
        slots = tuple(json.loads(row.slots))
        if at_most is None and elasticity.at_least is None:
            return None
        at_least = elasticity.at_least or 1
        known = self._choices(connection, row.trial_id, row.experiment_id, at_least, at_most or len(slots))
        if not known.choices:
            return None
        config = json.loads(experiment_rows.require(connection, row.experiment_id).config)
        return Running(
            row.trial_id,
            row.experiment_id,
            (row.priority, row.queue_position),
            slots,
            known.choices,
            row.max_slots,
            is_on_one_node=bool((config.get("resources") or {}).get("is_single_node")),
        )

    def _choices(
        self, connection: Connection, trial_id: int, experiment_id: int, at_least: int, at_most: int
    ) -> _Known:
        """Return what ``resume`` says, asked again after a change of checkpoint or config."""
        latest = checkpoint_rows.latest_completed(connection, trial_id)
        text = experiment_rows.require(connection, experiment_id).config
        unusable = rows.unusable_counts(connection, trial_id)
        key = (None if latest is None else latest.uuid, hash(text), unusable)
        cached_as = trial_id, at_least, at_most
        known = self._known.get(cached_as)
        if known is None or known.key != key:
            if len(self._known) > _MAX_KNOWN:
                self._known.clear()
            config = json.loads(text)
            trial = trial_rows.require(connection, trial_id)
            found = resume.choices(connection, trial, config, at_least=at_least, at_most=at_most)
            known = self._known[cached_as] = _Known(key, found, _saves(config))
        return known


def note_slots(tx: Transaction, allocation: Allocation, num_slots: int, num_wanted: int) -> None:
    """Note another number of slots in a trial's log and metrics."""
    before = rows.slots_of_run_before(tx.connection, allocation.trial_id, allocation.run_id)
    is_changed = before not in (0, num_slots)
    if num_slots < num_wanted:
        text = (
            f"the trial asks for {num_wanted} slots and goes on from its checkpoint with {num_slots}, the most that "
            "there are for it and that share its batch, which stays as it was"
        )
        if is_changed:
            text += f"; before it had {before}"
    elif is_changed:
        text = f"the trial goes on from its checkpoint with {num_slots} slots, after {before}; its batch stays as it was"
    else:
        return
    level = "WARNING" if num_slots < num_wanted else "INFO"
    add_master_line(
        tx, allocation.task_id, allocation.trial_id, text, level=level, allocation_id=allocation.id
    )
    if is_changed:
        metric_rows.add_report(
            tx,
            trial_id=allocation.trial_id,
            run_id=allocation.run_id,
            group=SLOTS_GROUP,
            steps=allocation.steps_at_start,
            end_us=now_us(),
            metrics={"slots": num_slots},
        )


def _may_change(row: rows.ResizableTrial) -> bool:
    """Say whether a trial could have more slots, or may have to lose some."""
    elasticity = _elasticity(row.section, row.slots_per_trial)
    return elasticity.is_asked_for or len(json.loads(row.slots)) < row.slots_per_trial


def _is_due(row: rows.ResizableTrial, elasticity: Elasticity) -> bool:
    return (now_us() - row.start_us) / 1e6 >= elasticity.period_s


def _elasticity(section: str | None, wish: int) -> Elasticity:
    found = json.loads(section) if section else {}
    return elasticity_of(found if isinstance(found, Mapping) else {}, wish)


def _saves(config: Mapping[str, Any]) -> bool:
    period = config.get("min_checkpoint_period")
    counts: Iterable[Any] = period.values() if isinstance(period, Mapping) else (period,)
    return any(isinstance(count, int | Sequence) and bool(count) for count in counts)
