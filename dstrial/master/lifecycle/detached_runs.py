"""Detached runs: trials that others start and end, and that report their state.

A script with ``determined.experimental.core_v2`` creates an experiment and a trial, or finds those that it made before by ids
of its own, and sends a heartbeat every minute. Nothing is scheduled, searched or collected for them. An experiment of detached
runs is as its trials are: active while one is, and ended as the worst of them has.

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
from dstrial.master.lifecycle.states import DELETING, TERMINAL
from dstrial.master.store import checkpoints as checkpoint_rows
from dstrial.master.store import experiments as experiment_rows
from dstrial.master.store import projects, tasks
from dstrial.master.store import trials as trial_rows
from dstrial.master.store.database import Connection, Transaction
from dstrial.master.store.errors import Hint, InvalidError
from dstrial.master.store.reports.logs import add_master_line
from dstrial.master.webhooks import events

_ENDS = {"COMPLETED": "has completed", "CANCELED": "was canceled", "ERROR": "has reported an error"}


@dataclasses.dataclass(frozen=True, slots=True)
class StartPoint:
    """Where a run of a detached trial begins."""

    run_id: int
    checkpoint_uuid: str | None  # None to begin anew
    steps: int  # batches completed


def create(
    tx: Transaction, *, submission: Submission, owner_id: int, project_id: int, external_id: str | None
) -> int:
    """Store an experiment of detached runs, or find it by its external id."""
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
    """Store a detached trial, or find it by its external id and set its hparams."""
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
    """Begin another run of a detached trial; refuse the last one's reports."""
    trial = trial_rows.require(tx.connection, trial_id)
    experiment = _require(tx, trial.experiment_id)
    _refuse_deleting(experiment)
    projects.refuse_shut(projects.require(tx.connection, experiment.project_id), "be changed")
    _reopen(tx, trial)
    latest = checkpoint_rows.latest_completed(tx.connection, trial_id) if resumes else None
    run_id = trial.run_id + 1
    trial_rows.update(tx, trial_id, run_id=run_id, runner_state="UNSPECIFIED", heartbeat_us=now_us())
    since = "anew" if latest is None else f"from checkpoint {latest.uuid}"
    _log_line(tx, trial, f"detached run {run_id} of trial {trial_id} has begun {since}")
    if latest is None:
        return StartPoint(run_id, None, 0)
    return StartPoint(run_id, str(latest.uuid), int(latest.steps))


def note_heartbeat(tx: Transaction, trial: trial_rows.Trial, *, is_current_run: bool = False) -> None:
    """Record a heartbeat; a trial that was given up is active again."""
    if trial.heartbeat_us is None:
        return
    trial_rows.update(tx, trial.id, heartbeat_us=now_us())
    experiment = experiment_rows.require(tx.connection, trial.experiment_id)
    if experiment.state in DELETING:
        return
    # CANCELED is a person's decision. Another end may come from an earlier run's script, which knows no better.
    if trial.is_lost or (is_current_run and trial.state in ("COMPLETED", "ERROR")):
        _reopen(tx, trial, is_archived=bool(experiment.archived))
        _log_line(tx, trial, f"trial {trial.id} was heard of again")


def set_state(tx: Transaction, trial_id: int, state: str | None) -> None:
    """Take a detached run's state: RUNNING, or an end; None for a heartbeat.

    A trial that a person has ended stays ended.
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
    """End runs in ERROR without a heartbeat since ``before_us``; return how many.

    Experiments that never got a trial end, too.
    """
    rows = trial_rows.silent_since(tx.connection, before_us)
    for row in rows:
        assert row.heartbeat_us is not None
        minutes = (now_us() - row.heartbeat_us) / 60e6
        why = f"nothing was heard of its script for {minutes:.1f} minutes"
        _log_line(tx, row, f"trial {row.id} is given up: {why}", "ERROR")
        endings.close_trial(tx, row.id, "ERROR", why=why)
        trial_rows.update(tx, row.id, is_lost=True)
    for experiment_id in experiment_rows.detached_without_trial(tx.connection, before_us):
        endings.finish_experiment(tx, experiment_id, "ERROR", "its script ended before it had a trial")
    return len(rows)


def has_silent_runs(connection: Connection, before_us: int) -> bool:
    return bool(
        trial_rows.silent_since(connection, before_us)
        or experiment_rows.detached_without_trial(connection, before_us)
    )


def refuse_detached(row: experiment_rows.Experiment, verb: str) -> None:
    """Refuse (400) to ``verb`` an experiment whose processes are not the master's own."""
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
    """Make an ended trial active again, and its experiment with it."""
    trial_rows.update(tx, trial.id, state="ACTIVE", end_us=None, is_closed=False, is_lost=False)
    tasks.update(tx, trial.task_id, end_us=None)
    experiment_rows.update(
        tx, trial.experiment_id, state="ACTIVE", end_us=None, end_reason=None, archived=is_archived
    )
    events.notify_state(tx, trial.experiment_id)
    tx.publish(f"trial:{trial.id}", f"experiment:{trial.experiment_id}")


def _log_line(tx: Transaction, trial: trial_rows.Trial, text: str, level: str = "INFO") -> None:
    add_master_line(tx, trial.task_id, trial.id, text, level=level)
