"""Change the number of slots of trials.

A trial that lost slots resumes from its checkpoint on fewer ones. If slots are free and no job waits, a running trial is
stopped with a checkpoint and restarted on more slots.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping

from dstrial.config.experiment_config.dstrial_section import Elasticity, elasticity_of
from dstrial.master.clock import now_us
from dstrial.master.lifecycle import endings, resume
from dstrial.master.scheduler.queue import Waiting, assignments
from dstrial.master.store import allocations as allocation_rows
from dstrial.master.store import checkpoints as checkpoint_rows
from dstrial.master.store import experiments as experiment_rows
from dstrial.master.store import jobs as rows
from dstrial.master.store import trials as trial_rows
from dstrial.master.store.allocations import Allocation
from dstrial.master.store.database import Connection, Database, Transaction
from dstrial.master.store.jobs import WaitingTrial
from dstrial.master.store.reports.logs import add_master_line

logger = logging.getLogger("dstrial.master.scheduler")


def may_grow(connection: Connection) -> bool:
    """Return whether a running elastic trial has fewer slots than its maximum."""
    return any(
        len(json.loads(row.slots)) < _elasticity(row.section, row.slots_per_trial).at_most
        for row in rows.resizable_trials(connection)
    )


def start_choices(
    connection: Connection, row: WaitingTrial, *, may_exceed: bool, may_shrink: bool
) -> tuple[int, ...]:
    """Return the slot counts with which an elastic trial can start, best first.

    Empty if only ``slots_per_trial`` is possible. ``may_exceed`` allows counts above it, ``may_shrink`` counts below it.
    """
    if row.section is None:
        return ()
    elasticity = _elasticity(row.section, row.slots_per_trial)
    if not elasticity.is_asked_for:
        return ()
    at_least = elasticity.at_least if may_shrink else None
    at_most = elasticity.at_most if may_exceed else elasticity.wish
    return _choices(connection, row.id, row.experiment_id, at_least or elasticity.wish, at_most)


def slots_to_resume_with(connection: Connection, row: WaitingTrial, available: int) -> int | None:
    """Return the largest slot count up to ``available`` on which a trial can resume.

    None if there is no such count.
    """
    at_least = _elasticity(row.section, row.slots_per_trial).at_least or 1
    return next(iter(_choices(connection, row.id, row.experiment_id, at_least, available)), None)


def find_growth(
    connection: Connection, free: Collection[int], enabled: Collection[int], used_by: Mapping[int, int]
) -> tuple[int, str] | None:
    """Return (trial id, reason) of a trial that can grow, or None.

    The trial runs, has a checkpoint that can resume on more slots, and enough slots are free. The caller must stop the trial.
    ``free`` and ``enabled`` are slot ids; ``used_by`` maps experiment id -> number of slots in use.
    """
    for row in rows.resizable_trials(connection):
        elasticity = _elasticity(row.section, row.slots_per_trial)
        slots = json.loads(row.slots)
        is_due = now_us() - row.start_us >= elasticity.period_s * 1e6
        if not is_due or checkpoint_rows.latest_completed(connection, row.trial_id) is None:
            continue
        more = _choices(connection, row.trial_id, row.experiment_id, len(slots) + 1, elasticity.at_most)
        if not more:
            continue
        one = Waiting(
            row.trial_id,
            row.experiment_id,
            more[0],
            row.max_slots,
            is_on_one_node=is_single_node(connection, row.experiment_id),
            choices=more,
        )
        target = grown(one, slots, free, enabled, used_by.get(row.experiment_id, 0))
        if target > len(slots):
            return row.trial_id, f"it grows from {len(slots)} to {target} slots, which are free"
    return None


def is_single_node(connection: Connection, experiment_id: int) -> bool:
    """Return whether ``resources.is_single_node`` of an experiment's config is set."""
    config = json.loads(experiment_rows.require(connection, experiment_id).config)
    return bool((config.get("resources") or {}).get("is_single_node"))


def grown(
    one: Waiting, slots: Collection[int], free: Collection[int], enabled: Collection[int], used: int
) -> int:
    """Return the slot count to which a running trial can grow now; 0 if none.

    ``one.choices`` are the counts to try, best first. ``slots`` are the ids of the trial's present slots, which count as free.
    ``used`` is the number of slots that its experiment uses.
    """
    available = {*free, *slots} & set(enabled)
    found = assignments([one], available, enabled, {one.experiment_id: used - len(slots)})
    return max((len(taken) for _, taken in found), default=0)


def stop(database: Database, trial_id: int, why: str) -> None:
    """Ask a trial to save a checkpoint and stop; no-op if it is stopping or has ended.

    Also a no-op if the trial's code has not contacted the master yet.
    """

    def ask(tx: Transaction) -> bool:
        allocation = allocation_rows.live(tx.connection, trial_id)
        trial = trial_rows.require(tx.connection, trial_id)
        if allocation is None or not allocation.is_ready or trial.state != "ACTIVE":
            return False
        if allocation.preempt_us is not None or allocation.kill_us is not None:
            return False
        endings.release(tx, trial_id, why)
        return True

    if database.write(ask):
        logger.info("trial %d stops: %s", trial_id, why)


def note_slots(tx: Transaction, allocation: Allocation, num_slots: int, num_wanted: int) -> None:
    """Log ``num_slots`` if lower than ``num_wanted`` or different from the last run."""
    before = rows.slots_of_run_before(tx.connection, allocation.trial_id, allocation.run_id)
    if num_slots < num_wanted:
        text = (
            f"the trial requests {num_wanted} slots and resumes from its checkpoint with {num_slots}, the most available "
            "ones that divide its batch; the batch is unchanged"
        )
    elif before not in (0, num_slots):
        text = f"the trial resumes from its checkpoint with {num_slots} slots, after {before}; its batch is unchanged"
    else:
        return
    level = "WARNING" if num_slots < num_wanted else "INFO"
    add_master_line(
        tx, allocation.task_id, allocation.trial_id, text, level=level, allocation_id=allocation.id
    )


def _choices(
    connection: Connection, trial_id: int, experiment_id: int, at_least: int, at_most: int
) -> tuple[int, ...]:
    trial = trial_rows.require(connection, trial_id)
    config = json.loads(experiment_rows.require(connection, experiment_id).config)
    return resume.choices(connection, trial, config, at_least=at_least, at_most=at_most)


def _elasticity(section: str | None, wish: int) -> Elasticity:
    found = json.loads(section) if section else {}
    return elasticity_of(found if isinstance(found, Mapping) else {}, wish)
