"""Detached (unmanaged) runs: trials that the master neither starts nor stops.

A script with ``determined.experimental.core_v2`` creates an experiment and a trial, or finds them by external id. It sends a
heartbeat every minute. The master does not schedule these trials, runs no searcher and garbage-collects no checkpoints. The
experiment is active while any of its trials is active, and ends in the worst state of its trials.

Source: Determined 0.38.1, ``determined/experimental/core_v2/_unmanaged.py`` and ``determined/core/_heartbeat.py``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from dstrial.config.experiment_config.submission import Submission
from dstrial.master.clock import now_us
from dstrial.master.lifecycle import endings
from dstrial.master.lifecycle.endings import DELETING, TERMINAL
from dstrial.master.store import checkpoints as checkpoint_rows
from dstrial.master.store import experiments as experiment_rows
from dstrial.master.store import projects, tasks
from dstrial.master.store import trials as trial_rows
from dstrial.master.store.database import Connection, Transaction
from dstrial.master.store.errors import Hint, InvalidError
from dstrial.master.store.reports.logs import add_master_line
from dstrial.master.webhooks import events

# State that ends a trial -> its description in the log.
_ENDS = {"COMPLETED": "has completed", "CANCELED": "was canceled", "ERROR": "has reported an error"}


@dataclasses.dataclass(frozen=True, slots=True)
class StartPoint:
    """Run id of a new detached run, and the checkpoint from which the run starts."""

    run_id: int
    checkpoint_uuid: str | None  # None for a fresh start
    steps: int  # batches completed


def create(
    tx: Transaction, *, submission: Submission, owner_id: int, project_id: int, external_id: str | None
) -> int:
    """Create an experiment of detached runs, or find the one with ``external_id``.

    Returns the experiment's id. ``external_id`` is an id that the script chose; if it is None, always create an experiment.
    """
    known = None if external_id is None else experiment_rows.by_external_id(tx.connection, external_id)
    if known is not None:
        _refuse_deleting(known)
        return int(known.id)
    projects.refuse_shut(projects.require(tx.connection, project_id), "take another experiment")
    experiment_id = experiment_rows.insert(
        tx,
        submission=submission,
        owner_id=owner_id,
        state="ACTIVE",
        parent_id=None,
        project_id=project_id,
    )
    experiment_rows.update(tx, experiment_id, unmanaged=True, external_id=external_id)
    experiment_rows.add_model_definition(tx, experiment_id, b"")
    tx.publish(f"experiment:{experiment_id}")
    return experiment_id


def create_trial(
    tx: Transaction, experiment_id: int, hparams: Mapping[str, Any] | None, external_id: str | None
) -> int:
    """Create a detached trial, or find one by ``external_id``; return the trial's id.

    If ``external_id`` is None, always create a trial. ``hparams``, unless None, replace the hyperparameters of a found trial.
    """
    experiment = _require(tx, experiment_id)
    _refuse_deleting(experiment)
    known = (
        None if external_id is None else trial_rows.by_external_id(tx.connection, experiment_id, external_id)
    )
    if known is None:
        return trial_rows.insert_detached(tx, experiment_id, hparams or {}, external_id, now_us())
    if hparams is not None:
        trial_rows.update(tx, known.id, hparams=json.dumps(dict(hparams)))
    return int(known.id)


def start(tx: Transaction, trial_id: int, *, resumes: bool) -> StartPoint:
    """Start a new run of a detached trial; reports of earlier runs are then rejected.

    If ``resumes``, the run starts from the trial's latest COMPLETED checkpoint, otherwise without a checkpoint.
    """
    trial = trial_rows.require(tx.connection, trial_id)
    experiment = _require(tx, trial.experiment_id)
    _refuse_deleting(experiment)
    projects.refuse_shut(projects.require(tx.connection, experiment.project_id), "be changed")
    _reopen(tx, trial)
    latest = checkpoint_rows.latest_completed(tx.connection, trial_id) if resumes else None
    run_id = trial.run_id + 1
    trial_rows.update(tx, trial_id, run_id=run_id, runner_state="UNSPECIFIED", heartbeat_us=now_us())
    since = "without a checkpoint" if latest is None else f"from checkpoint {latest.uuid}"
    _log_line(tx, trial, f"detached run {run_id} of trial {trial_id} starts {since}")
    if latest is None:
        return StartPoint(run_id, None, 0)
    return StartPoint(run_id, str(latest.uuid), int(latest.steps))


def note_heartbeat(tx: Transaction, trial: trial_rows.Trial, *, is_current_run: bool = False) -> None:
    """Record a detached trial's heartbeat; set a trial that timed out back to ACTIVE.

    ``is_current_run`` says whether the trial's newest run sent the heartbeat. If so, a COMPLETED or ERROR trial also becomes
    ACTIVE, as an earlier run may have set that state. No-op for trials that the master runs.
    """
    if trial.heartbeat_us is None:
        return
    trial_rows.update(tx, trial.id, heartbeat_us=now_us())
    experiment = experiment_rows.require(tx.connection, trial.experiment_id)
    if experiment.state in DELETING:
        return
    # A user sets CANCELED, so it is final. COMPLETED or ERROR may come from the script of an earlier run.
    if trial.is_lost or (is_current_run and trial.state in ("COMPLETED", "ERROR")):
        _reopen(tx, trial, is_archived=bool(experiment.archived))
        _log_line(tx, trial, f"trial {trial.id} is active again: its script sent a heartbeat")


def set_state(tx: Transaction, trial_id: int, state: str | None) -> None:
    """Record the state that a detached run reports; None records only a heartbeat.

    ``state`` is RUNNING, COMPLETED, CANCELED or ERROR. A terminal state is final, unless it was set by a heartbeat timeout.
    """
    trial = trial_rows.require(tx.connection, trial_id)
    experiment = _require(tx, trial.experiment_id)
    if state not in (None, "RUNNING", *_ENDS):
        raise InvalidError(
            f"state is STATE_{state}; expected STATE_RUNNING, STATE_COMPLETED, STATE_CANCELED or STATE_ERROR. Send one of these."
        )
    note_heartbeat(tx, trial)
    if state is None or state == "RUNNING" or experiment.state in DELETING:
        return
    if trial.state in TERMINAL and not trial.is_lost:
        return
    why = f"its script {_ENDS[state]}"
    _log_line(tx, trial, f"trial {trial_id} has ended: {why}", "ERROR" if state == "ERROR" else "INFO")
    endings.close_trial(tx, trial_id, state, why=why if state == "ERROR" else None)


def give_up_silent(tx: Transaction, before_us: int) -> int:
    """Set detached trials without a heartbeat since ``before_us`` to ERROR.

    Also set detached experiments to ERROR that started before ``before_us`` and have no trial. Returns how many trials, without
    these experiments, were set to ERROR.
    """
    rows = trial_rows.silent_since(tx.connection, before_us)
    for row in rows:
        assert row.heartbeat_us is not None
        minutes = (now_us() - row.heartbeat_us) / 60e6
        why = f"no heartbeat of its script for {minutes:.1f} minutes"
        _log_line(tx, row, f"trial {row.id} timed out: {why}", "ERROR")
        endings.close_trial(tx, row.id, "ERROR", why=why)
        trial_rows.update(tx, row.id, is_lost=True)
    for experiment_id in experiment_rows.detached_without_trial(tx.connection, before_us):
        endings.finish_experiment(tx, experiment_id, "ERROR", "its script ended before it created a trial")
    return len(rows)


def has_silent_runs(connection: Connection, before_us: int) -> bool:
    """Return whether ``give_up_silent`` would end a trial or an experiment."""
    return bool(
        trial_rows.silent_since(connection, before_us)
        or experiment_rows.detached_without_trial(connection, before_us)
    )


def refuse_detached(row: experiment_rows.Experiment, verb: str) -> None:
    """Raise ``InvalidError`` if a script, not the master, runs an experiment's trials.

    ``verb`` is the rejected action in the message, for example "pause".
    """
    if row.unmanaged:
        raise InvalidError(
            f"experiment {row.id} has detached runs; "
            f"expected one whose processes the master starts, to {verb} it.",
            Hint.KILL_DETACHED,
        )


def _require(tx: Transaction, experiment_id: int) -> experiment_rows.Experiment:
    row = experiment_rows.require(tx.connection, experiment_id)
    if not row.unmanaged:
        raise InvalidError(
            f"experiment {experiment_id} is not one of detached runs; expected one that a script has created with "
            "determined.experimental.core_v2. Use the external ids of such a one."
        )
    return row


def _refuse_deleting(row: experiment_rows.Experiment) -> None:
    if row.state in DELETING:
        raise InvalidError(
            f"experiment {row.id} is being deleted; expected one that stays. Wait until it is gone."
        )


def _reopen(tx: Transaction, trial: trial_rows.Trial, *, is_archived: bool = False) -> None:
    """Set a terminal trial and its experiment back to ACTIVE.

    ``is_archived`` is the experiment's archived flag after the call.
    """
    trial_rows.update(tx, trial.id, state="ACTIVE", end_us=None, is_closed=False, is_lost=False)
    tasks.update(tx, trial.task_id, end_us=None)
    experiment_rows.update(
        tx, trial.experiment_id, state="ACTIVE", end_us=None, end_reason=None, archived=is_archived
    )
    events.notify_state(tx, trial.experiment_id)
    tx.publish(f"trial:{trial.id}", f"experiment:{trial.experiment_id}")


def _log_line(tx: Transaction, trial: trial_rows.Trial, text: str, level: str = "INFO") -> None:
    add_master_line(tx, trial.task_id, trial.id, text, level=level)
