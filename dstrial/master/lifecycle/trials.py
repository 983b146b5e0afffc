"""Handle trials' reports (metrics, checkpoints, progress), and kill trials."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dstrial.master.clock import now_us
from dstrial.master.lifecycle import detached_runs, endings
from dstrial.master.lifecycle.endings import TERMINAL
from dstrial.master.store import allocations as allocation_rows
from dstrial.master.store import checkpoints as checkpoint_rows
from dstrial.master.store import trials as trial_rows
from dstrial.master.store.database import Transaction
from dstrial.master.store.errors import InvalidError
from dstrial.master.store.reports import metrics as metric_rows
from dstrial.master.store.reports.logs import add_master_line

_INVALID_HP_GRACE_US = 10_000_000  # time in which a trial with invalid hyperparameters may exit by itself


def report_metrics(
    tx: Transaction,
    trial_id: int,
    run_id: int,
    group: str,
    steps: int | None,
    end_us: int,
    metrics: dict[str, Any],
    per_batch: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Store a metric report and pass a validation to the searcher, in one transaction.

    ``steps`` is the number of completed batches, None for profiling reports. ``per_batch`` has the metrics of each batch. No-op
    for a repeated report.
    """
    is_new = metric_rows.add_report(
        tx,
        trial_id=trial_id,
        run_id=run_id,
        group=group,
        steps=steps,
        end_us=end_us,
        metrics=metrics,
        per_batch=per_batch,
    )
    if not is_new:
        return
    allocation_rows.note_report(tx, trial_id, run_id, has_trained=steps is not None)
    tx.publish(f"trial:{trial_id}")
    trial = trial_rows.require(tx.connection, trial_id)
    detached_runs.note_heartbeat(tx, trial, is_current_run=True)
    if group == "validation":
        tx.publish(f"experiment:{trial.experiment_id}")
        if trial.state in TERMINAL:
            return
        if not trial.is_stopped_by_searcher:
            endings.validation_completed(tx, trial, metrics)
        elif steps is not None and steps >= metric_rows.last_validation(tx.connection, trial_id):
            # The trial crashed while it stopped, restarted, and has reached its last validation again.
            endings.stop_trial(tx, trial_id, "STOPPING_COMPLETED", endings.STOPPED_BY_SEARCHER)


def report_checkpoint(tx: Transaction, trial: trial_rows.Trial, **columns: Any) -> None:
    """Store a checkpoint that a trial reports; a repeated report updates the row.

    ``columns`` are the arguments of ``store.checkpoints.add_checkpoint``.
    """
    checkpoint_rows.add_checkpoint(tx, trial=trial, **columns)
    tx.publish(f"trial:{trial.id}", f"experiment:{trial.experiment_id}")


def report_progress(tx: Transaction, trial_id: int, progress: float) -> None:
    trial = trial_rows.require(tx.connection, trial_id)
    share = min(max(progress, 0.0), 1.0) if progress == progress else 0.0
    trial_rows.update(tx, trial_id, progress=share)
    endings.update_progress(tx, trial.experiment_id)
    tx.publish(f"trial:{trial_id}", f"experiment:{trial.experiment_id}")


def set_runner_state(tx: Transaction, trial_id: int, state: str) -> None:
    """Store the activity that a trial reports, for example training or restoring."""
    trial_rows.require(tx.connection, trial_id)
    trial_rows.update(tx, trial_id, runner_state=state)
    tx.publish(f"trial:{trial_id}")


def early_exit(tx: Transaction, trial_id: int, reason: str) -> None:
    """Mark a trial's hyperparameters as invalid; kill it unless it exits within 10 s.

    Raises ``InvalidError`` unless ``reason`` is INVALID_HP or INIT_INVALID_HP.
    """
    if reason not in ("INVALID_HP", "INIT_INVALID_HP"):
        raise InvalidError(f"reason is {reason!r}; expected EXITED_REASON_INVALID_HP.")
    trial = trial_rows.require(tx.connection, trial_id)
    trial_rows.update(tx, trial_id, early_exit="INVALID_HP")
    allocation = allocation_rows.live(tx.connection, trial_id)
    if allocation is not None:
        allocation_rows.update(tx, allocation.id, preempt_deadline_us=now_us() + _INVALID_HP_GRACE_US)
    add_master_line(
        tx, trial.task_id, trial_id, "the trial says that its hyperparameters are invalid", level="WARNING"
    )
    tx.publish("scheduler", f"trial:{trial_id}")


def kill_trial(tx: Transaction, trial_id: int) -> None:
    """Kill one trial but not its experiment; no-op if the trial has ended."""
    trial_rows.require(tx.connection, trial_id)
    endings.stop_trial(tx, trial_id, "STOPPING_KILLED", "the trial was killed")


def set_metadata(tx: Transaction, trial_id: int, metadata: dict[str, Any]) -> None:
    trial_rows.require(tx.connection, trial_id)
    trial_rows.update(tx, trial_id, metadata=json.dumps(metadata))
    tx.publish(f"trial:{trial_id}")
