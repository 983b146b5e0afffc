"""Change the number of slots of running trials.

A running trial is stopped with a checkpoint and restarted on another number of slots. A trial shrinks if a more urgent job
waits or its node is drained, and grows if slots are free and no job waits.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

from dstrial.config.experiment_config.dstrial_section import Elasticity, elasticity_of
from dstrial.master.clock import now_us
from dstrial.master.lifecycle import endings, resume
from dstrial.master.scheduler.queue import Waiting, assignments, by_node, could_ever_fit, place
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


@dataclasses.dataclass(frozen=True, slots=True)
class Running:
    """A running trial whose number of slots may change."""

    trial_id: int
    experiment_id: int
    urgency: tuple[int, float]  # (priority, queue position); smaller is more urgent
    slots: tuple[int, ...]
    choices: tuple[int, ...]  # slot counts on which the newest checkpoint can resume, descending
    max_slots: int | None = None  # limit of the experiment's slots in use; None for no limit
    is_on_one_node: bool = False  # whether the slots must be on one node

    @property
    def num_slots(self) -> int:
        return len(self.slots)

    def waiting(self, choices: Sequence[int]) -> Waiting:
        """Return the trial as a queue entry that can start with one of ``choices`` slots."""
        return Waiting(
            self.trial_id,
            self.experiment_id,
            choices[0],
            self.max_slots,
            is_on_one_node=self.is_on_one_node,
            choices=tuple(choices),
        )


def select_preemption_victims(
    first: Waiting,
    urgency: tuple[int, float],
    running: Sequence[Running],
    *,
    free: Collection[int],
    enabled: Collection[int],
    used_by: Mapping[int, int],
) -> list[Running]:
    """Return the trials to stop so that the first job in the queue can start.

    Victims have a lower priority and can continue on the remaining slots; the least urgent come first. Empty if the job could
    still not start, or can start without victims. ``urgency`` is (priority, queue position) of ``first``. ``free`` are ids of
    slots that are unused or being released; ``used_by`` maps experiment id -> number of slots in use.
    """
    if _all_fit([first], free, enabled, used_by):
        return []  # slots that are being released suffice
    chosen: list[Running] = []
    candidates = sorted(running, key=lambda one: one.urgency, reverse=True)
    for one in candidates:
        fewer = [count for count in one.choices if count < one.num_slots]
        if one.urgency[0] <= urgency[0] or not fewer:
            continue
        chosen.append(one)
        theirs = {slot for victim in chosen for slot in victim.slots}
        used = dict(used_by)
        for victim in chosen:
            used[victim.experiment_id] = used.get(victim.experiment_id, 0) - victim.num_slots
        wait = [
            victim.waiting([count for count in victim.choices if count <= victim.num_slots])
            for victim in sorted(chosen, key=lambda victim: victim.urgency)
        ]
        if _all_fit([first, *wait], {*free, *theirs}, enabled, used):
            return chosen
    return []


def _all_fit(
    waiting: Sequence[Waiting],
    free: Collection[int],
    enabled: Collection[int],
    used_by: Mapping[int, int],
) -> bool:
    return len(assignments(waiting, free, enabled, used_by)) == len(waiting)


def can_leave_drained(one: Running, drained: Collection[int], free: Collection[int]) -> bool:
    """Return whether a trial on ``drained`` slots can continue without these slots."""
    kept = [slot for slot in one.slots if slot not in drained]
    if len(kept) == one.num_slots:
        return False
    left = {*free, *kept}
    capacity = {node: len(slots) for node, slots in by_node(left).items()}
    return any(
        place(count, by_node(left), capacity, is_on_one_node=one.is_on_one_node) is not None
        for count in one.choices
        if count <= one.num_slots
    )


def grown(one: Running, *, free: Collection[int], enabled: Collection[int], used: int) -> int:
    """Return the largest slot count to which a trial can grow.

    This is the trial's current count if it cannot grow. ``free`` and ``enabled`` are slot ids; ``used`` is the
    number of slots that the trial's experiment uses.
    """
    left = by_node({*free, *(slot for slot in one.slots if slot in set(enabled))})
    capacity = {node: len(slots) for node, slots in by_node(enabled).items()}
    for count in one.choices:
        if count <= one.num_slots:
            break
        if one.max_slots is not None and used - one.num_slots + count > one.max_slots:
            continue
        if not could_ever_fit(count, capacity, is_on_one_node=one.is_on_one_node):
            continue
        if place(count, left, capacity, is_on_one_node=one.is_on_one_node) is not None:
            return count
    return one.num_slots


logger = logging.getLogger("dstrial.master.scheduler")

SLOTS_GROUP = "resources"  # metric group with a report for each change of a trial's slots
_POLL_S = 1.0  # interval of checks whether a trial can be resized
_MAX_CACHED = 10_000  # entries of the cache before it is cleared


@dataclasses.dataclass(frozen=True, slots=True)
class Capacity:
    """Free, enabled and drained slots at one poll of the scheduler's queue."""

    free: frozenset[int]  # enabled and unused
    enabled: frozenset[int]
    drained: frozenset[int]  # disabled; running trials may finish
    used_by: Mapping[int, int]  # number of slots in use by experiment
    is_settled: bool  # whether no node went down within the grace period


Stop: TypeAlias = "tuple[int, str]"  # a trial's id, and why it stops


class Resizing:
    """Chooses trials to resize, and their slots; used by the scheduler's thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        # (trial id, bounds) -> (key: checkpoint, config, unusable counts), choices; valid only for an equal key.
        self._cache: dict[tuple[int, int, int], tuple[tuple[Any, ...], tuple[int, ...]]] = {}
        self._polled_s = -_POLL_S

    def is_due(self, connection: Connection) -> bool:
        """Return whether the scheduler should check now for trials to resize.

        True at most once per ``_POLL_S`` seconds, and only if a running trial's slot count may change.
        """
        if time.monotonic() < self._polled_s + _POLL_S:
            return False
        self._polled_s = time.monotonic()
        return any(_may_change(one) for one in rows.resizable_trials(connection))

    def choices(
        self, connection: Connection, row: WaitingTrial, capacity: Capacity, *, at_most: int | None
    ) -> tuple[int, ...]:
        """Return the slot counts with which a trial can start, best first.

        Empty if only ``slots_per_trial`` is possible. Counts above ``slots_per_trial`` are at most ``at_most``; None means that
        only the config limits them.
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
        return self._choices(connection, row.id, row.experiment_id, at_least, most)

    def slots_to_resume_with(self, connection: Connection, row: WaitingTrial, available: int) -> int | None:
        """Return the most slots, up to ``available``, that a trial can resume on, or None."""
        at_least = _elasticity(row.section, row.slots_per_trial).at_least or 1
        return next(iter(self._choices(connection, row.id, row.experiment_id, at_least, available)), None)

    def preempt_for(
        self,
        connection: Connection,
        first: Waiting,
        urgency: tuple[int, float],
        capacity: Capacity,
        soon: Collection[int],
    ) -> list[Stop]:
        """Return the trials of lower priority to stop so that ``first`` can start.

        ``urgency`` is (priority, queue position) of ``first``; ``soon`` are the ids of slots that are being released.
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
        name = f"trial {first.key}" if isinstance(first.key, int) else f"task {first.key}"
        why = f"it is preempted by {name}, which has a higher priority, and resumes with fewer slots"
        return [(one.trial_id, why) for one in chosen]

    def leave_drained(self, connection: Connection, capacity: Capacity) -> list[Stop]:
        """Return at most one trial to stop because it can resume without drained slots."""
        for row in rows.resizable_trials(connection):
            if capacity.drained.isdisjoint(json.loads(row.slots)):
                continue
            one = self._running(connection, row)
            if one is not None and can_leave_drained(one, capacity.drained, capacity.free):
                return [(row.trial_id, "its slots are being drained, and it resumes on others")]
        return []

    def grow(self, connection: Connection, capacity: Capacity) -> list[Stop]:
        """Return at most one trial to stop because it can resume on more slots."""
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
            if target > num_slots and checkpoint_rows.latest_completed(connection, row.trial_id) is not None:
                why = f"it grows from {num_slots} to {target} slots, which are free"
                return [(row.trial_id, why)]
        return []

    def stop(self, trial_id: int, why: str) -> None:
        """Ask a trial to save a checkpoint and stop; no-op if it is stopping or over."""

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
        """Return a running trial with the slot counts on which it can resume, or None."""
        elasticity = _elasticity(row.section, row.slots_per_trial)
        slots = tuple(json.loads(row.slots))
        if at_most is None and elasticity.at_least is None:
            return None
        at_least = elasticity.at_least or 1
        found = self._choices(connection, row.trial_id, row.experiment_id, at_least, at_most or len(slots))
        if not found:
            return None
        config = json.loads(experiment_rows.require(connection, row.experiment_id).config)
        return Running(
            row.trial_id,
            row.experiment_id,
            (row.priority, row.queue_position),
            slots,
            found,
            row.max_slots,
            is_on_one_node=bool((config.get("resources") or {}).get("is_single_node")),
        )

    def _choices(
        self, connection: Connection, trial_id: int, experiment_id: int, at_least: int, at_most: int
    ) -> tuple[int, ...]:
        """Return the slot counts within bounds on which a trial can resume; cached."""
        latest = checkpoint_rows.latest_completed(connection, trial_id)
        text = experiment_rows.require(connection, experiment_id).config
        unusable = rows.unusable_counts(connection, trial_id)
        key = (None if latest is None else latest.uuid, hash(text), unusable)
        cached_as = trial_id, at_least, at_most
        known, found = self._cache.get(cached_as, (None, ()))
        if known != key:
            if len(self._cache) > _MAX_CACHED:
                self._cache.clear()
            trial = trial_rows.require(connection, trial_id)
            found = resume.choices(connection, trial, json.loads(text), at_least=at_least, at_most=at_most)
            self._cache[cached_as] = key, found
        return found


def note_slots(tx: Transaction, allocation: Allocation, num_slots: int, num_wanted: int) -> None:
    """Log if a trial's slot count changed or is lower than requested.

    A change is also stored as a metric report in group ``SLOTS_GROUP``.
    """
    before = rows.slots_of_run_before(tx.connection, allocation.trial_id, allocation.run_id)
    is_changed = before not in (0, num_slots)
    if num_slots < num_wanted:
        text = (
            f"the trial requests {num_wanted} slots and resumes from its checkpoint with {num_slots}, the most available "
            "ones that divide its batch; the batch is unchanged"
        )
        if is_changed:
            text += f"; before it had {before}"
    elif is_changed:
        text = f"the trial resumes from its checkpoint with {num_slots} slots, after {before}; its batch is unchanged"
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
    """Return whether a running trial's slot count may change."""
    elasticity = _elasticity(row.section, row.slots_per_trial)
    return elasticity.is_asked_for or len(json.loads(row.slots)) < row.slots_per_trial


def _is_due(row: rows.ResizableTrial, elasticity: Elasticity) -> bool:
    return (now_us() - row.start_us) / 1e6 >= elasticity.period_s


def _elasticity(section: str | None, wish: int) -> Elasticity:
    found = json.loads(section) if section else {}
    return elasticity_of(found if isinstance(found, Mapping) else {}, wish)
