"""Stop and end trials and experiments, and pass events to the searcher.

The functions are mutually recursive: at the end of a trial, the searcher may stop other trials.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from dstrial.config.schema import DEFAULT_PREEMPTION_TIMEOUT_S
from dstrial.errors import SearchError
from dstrial.master.clock import now_us
from dstrial.master.store import allocations as allocation_rows
from dstrial.master.store import background_jobs, tasks
from dstrial.master.store import checkpoints as checkpoint_rows
from dstrial.master.store import experiments as experiment_rows
from dstrial.master.store import trials as trial_rows
from dstrial.master.store.database import Transaction
from dstrial.master.store.reports.logs import add_master_line
from dstrial.master.webhooks import events
from dstrial.search import Action, Create, ExitReason, Searcher, Shutdown

TERMINAL = frozenset({"COMPLETED", "CANCELED", "ERROR"})
STOPPING = frozenset({"STOPPING_COMPLETED", "STOPPING_CANCELED", "STOPPING_ERROR", "STOPPING_KILLED"})
DELETING = frozenset({"DELETING", "DELETE_FAILED"})

END_OF = {
    "STOPPING_COMPLETED": "COMPLETED",
    "STOPPING_CANCELED": "CANCELED",
    "STOPPING_KILLED": "CANCELED",
    "STOPPING_ERROR": "ERROR",
}
"""Stopping state -> its terminal state."""

_SEVERITY = {"STOPPING_COMPLETED": 1, "STOPPING_CANCELED": 2, "STOPPING_ERROR": 3, "STOPPING_KILLED": 4}


def may_follow(state: str, stopping: str) -> bool:
    """Return whether ``state`` is not terminal and less severe than ``stopping``.

    ``stopping`` is the STOPPING_… state into which a trial or experiment is to change. Severity increases in the order
    STOPPING_COMPLETED, STOPPING_CANCELED, STOPPING_ERROR, STOPPING_KILLED; ACTIVE and PAUSED are less severe. False for
    DELETING and DELETE_FAILED.
    """
    if state in TERMINAL or state in DELETING:
        return False
    return _SEVERITY[stopping] > _SEVERITY.get(state, 0)


STOPPED_BY_SEARCHER = "the searcher has stopped this trial"


def stop_trial(tx: Transaction, trial_id: int, stopping: str, why: str) -> None:
    """End a trial by preemption, or by a kill for STOPPING_KILLED and STOPPING_ERROR.

    A preempted trial first saves a checkpoint; a trial without an allocation ends immediately. No-op if the trial has ended or
    is already stopping with equal or higher severity (``may_follow``). ``stopping`` is a STOPPING_… state; ``why`` (without a
    full stop) is logged.
    """
    trial = trial_rows.require(tx.connection, trial_id)
    if not may_follow(trial.state, stopping):
        return
    trial_rows.update(tx, trial_id, state=stopping)
    tx.publish(f"trial:{trial_id}")
    if allocation_rows.live(tx.connection, trial_id) is None:
        close_trial(tx, trial_id, END_OF[stopping])
    else:
        release(tx, trial_id, why, is_kill=stopping in ("STOPPING_KILLED", "STOPPING_ERROR"))


def release(tx: Transaction, trial_id: int, why: str, *, is_kill: bool = False) -> None:
    """Request preemption or a kill of a trial's allocation; no-op if it has none.

    The allocation is killed if ``is_kill`` is true or the trial's code has not contacted the master yet. ``why`` is logged.
    """
    allocation = allocation_rows.live(tx.connection, trial_id)
    if allocation is None:
        return
    now = now_us()
    if is_kill or not allocation.is_ready:
        if allocation.kill_us is None:
            allocation_rows.update(tx, allocation.id, kill_us=now, kill_reason=why)
            text, level = f"forcibly killing allocation: {why}", "INFO"
            if allocation.preempt_us is not None:
                level = "WARNING"
            add_master_line(tx, allocation.task_id, trial_id, text, level=level, allocation_id=allocation.id)
    elif allocation.preempt_us is None:
        experiment = experiment_rows.require(tx.connection, allocation.experiment_id)
        timeout_s = json.loads(experiment.config).get("preemption_timeout") or DEFAULT_PREEMPTION_TIMEOUT_S
        deadline = now + int(timeout_s) * 1_000_000
        allocation_rows.update(tx, allocation.id, preempt_us=now, preempt_deadline_us=deadline)
        text = f"gracefully terminating allocation: {why}"
        add_master_line(tx, allocation.task_id, trial_id, text, allocation_id=allocation.id)
    tx.publish("scheduler", f"allocation:{allocation.id}")


def close_trial(
    tx: Transaction, trial_id: int, state: str, reason: ExitReason | None = None, why: str | None = None
) -> None:
    """Set a trial without an allocation to a terminal state, and notify the searcher.

    ``reason`` is the early-exit reason for the searcher. If it is None, ``state`` decides: ERROR means ``ERRORED``, CANCELED
    means ``USER_CANCELED``, COMPLETED no early exit. ``why``, unless None, is stored as the end reason of the experiment.
    """
    now = now_us()
    columns: dict[str, Any] = {"state": state, "end_us": now, "is_closed": True}
    if state == "COMPLETED":
        columns["progress"] = 1
    trial_rows.update(tx, trial_id, **columns)
    trial = trial_rows.require(tx.connection, trial_id)
    tasks.update(tx, trial.task_id, end_us=now)
    tx.publish(f"trial:{trial_id}", f"logs:trial:{trial_id}", f"logs:{trial.task_id}", "scheduler")
    if reason is None and state != "COMPLETED":
        reason = ExitReason.ERRORED if state == "ERROR" else ExitReason.USER_CANCELED
    if why is not None:
        experiment_rows.update(tx, trial.experiment_id, end_reason=f"trial {trial_id}: {why}")
    _notify_searcher(tx, trial, reason)
    finish_if_over(tx, trial.experiment_id)


def stop_experiment(tx: Transaction, experiment_id: int, stopping: str, why: str) -> bool:
    """Stop an experiment and its trials.

    Returns True if this call stops the experiment; False if it has ended or is already stopping with equal or higher severity.
    ``stopping`` and ``why`` are as for ``stop_trial``.
    """
    row = experiment_rows.require(tx.connection, experiment_id)
    if not may_follow(row.state, stopping):
        return False
    experiment_rows.update(tx, experiment_id, state=stopping)
    tx.publish(f"experiment:{experiment_id}", "scheduler")
    for trial_id in trial_rows.open_ids(tx.connection, experiment_id):
        stop_trial(tx, trial_id, stopping, why)
    finish_if_over(tx, experiment_id)
    return True


def _fail_experiment(tx: Transaction, experiment_id: int, why: str) -> None:
    """Kill an experiment's trials, and end the experiment in ERROR.

    ``why`` is logged for each trial and stored as the end reason.
    """
    experiment_rows.update(tx, experiment_id, end_reason=why)
    for trial_id in trial_rows.open_ids(tx.connection, experiment_id):
        trial = trial_rows.require(tx.connection, trial_id)
        add_master_line(tx, trial.task_id, trial_id, f"the experiment has failed: {why}", level="ERROR")
    stop_experiment(tx, experiment_id, "STOPPING_ERROR", "the experiment has failed")


def finish_if_over(tx: Transaction, experiment_id: int) -> None:
    """End a stopping or unmanaged (script-run) experiment if its trials have ended."""
    row = experiment_rows.require(tx.connection, experiment_id)
    if trial_rows.open_ids(tx.connection, experiment_id):
        return
    if row.state in STOPPING:
        finish_experiment(tx, experiment_id, END_OF[row.state], None)
    elif row.unmanaged:
        ends = {trial.state for trial in trial_rows.of_experiment(tx.connection, experiment_id)}
        worst = next(state for state in ("ERROR", "CANCELED", "COMPLETED") if state in ends)
        finish_experiment(tx, experiment_id, worst, None)


def finish_experiment(tx: Transaction, experiment_id: int, state: str, reason: str | None) -> None:
    """Set an experiment to a terminal state; no-op if it is in a terminal state.

    COMPLETED clears the stored end reason. Other states store ``reason``, unless an end reason is already stored. Checkpoint
    garbage collection is enqueued, except for an unmanaged experiment, which a script runs, not the master.
    """
    row = experiment_rows.require(tx.connection, experiment_id)
    if row.state in TERMINAL:
        return
    columns: dict[str, Any] = {"state": state, "end_us": now_us()}
    if state == "COMPLETED":
        columns.update(progress=1, end_reason=None)
    elif row.end_reason is None:
        columns["end_reason"] = reason
    experiment_rows.update(tx, experiment_id, **columns)
    tx.publish(f"experiment:{experiment_id}")
    events.notify_state(tx, experiment_id)
    if not row.unmanaged:
        background_jobs.request(tx, "gc", experiment_id)


def begin_search(tx: Transaction, experiment_id: int, config: Mapping[str, Any]) -> None:
    """Create an experiment's searcher and the first trials that the searcher requests."""
    row = experiment_rows.require(tx.connection, experiment_id)
    searcher = Searcher.new(config, int(config["reproducibility"]["experiment_seed"]))
    _apply_actions(tx, row, config, searcher, searcher.initial_trials())


def validation_completed(tx: Transaction, trial: trial_rows.Trial, metrics: dict[str, Any]) -> None:
    """Pass a trial's validation to the searcher, and carry out the searcher's actions.

    If the searcher raises ``SearchError``, the experiment ends in ERROR.
    """
    _send_to_searcher(tx, trial.experiment_id, lambda s: s.validation_completed(trial.request_id, metrics))


def _notify_searcher(tx: Transaction, trial: trial_rows.Trial, reason: ExitReason | None) -> None:

    def event(searcher: Searcher) -> list[Action]:
        actions: list[Action] = []
        if reason is not None:
            actions += searcher.trial_exited_early(trial.request_id, reason)
        return actions + searcher.trial_exited(trial.request_id)

    _send_to_searcher(tx, trial.experiment_id, event)


def _send_to_searcher(tx: Transaction, experiment_id: int, event: Callable[[Searcher], list[Action]]) -> None:
    """Call ``event`` with an experiment's searcher; carry out the returned actions.

    If ``event`` raises ``SearchError``, the experiment ends in ERROR. No-op if the experiment has no searcher, is stopping, or
    has ended.
    """
    row = experiment_rows.require(tx.connection, experiment_id)
    if row.searcher_snapshot is None or row.state in STOPPING or row.state in TERMINAL:
        return
    config = json.loads(row.config)
    searcher = Searcher.restore(config, json.loads(row.searcher_snapshot))
    try:
        actions = event(searcher)
    except SearchError as error:
        _fail_experiment(tx, experiment_id, str(error))
        return
    _apply_actions(tx, row, config, searcher, actions)


def update_progress(tx: Transaction, experiment_id: int) -> None:
    row = experiment_rows.require(tx.connection, experiment_id)
    if row.unmanaged:
        experiment_rows.average_progress(tx, experiment_id)
    if row.searcher_snapshot is None or row.state in TERMINAL:
        return
    searcher = Searcher.restore(json.loads(row.config), json.loads(row.searcher_snapshot))
    _store_progress(tx, experiment_id, searcher)


def _store_progress(tx: Transaction, experiment_id: int, searcher: Searcher) -> None:
    shares = trial_rows.progress_by_request(tx.connection, experiment_id)
    experiment_rows.update(tx, experiment_id, progress=searcher.progress(shares))


def _apply_actions(
    tx: Transaction,
    row: experiment_rows.Experiment,
    config: Mapping[str, Any],
    searcher: Searcher,
    actions: list[Action],
) -> None:
    experiment_id = row.id
    warm_start = _warm_start_uuid(tx, config["searcher"])
    for action in actions:
        if isinstance(action, Create):
            trial_rows.insert(tx, row, action, now_us(), warm_start)
    experiment_rows.update(tx, experiment_id, searcher_snapshot=json.dumps(searcher.snapshot()))
    _store_progress(tx, experiment_id, searcher)
    tx.publish("scheduler", f"experiment:{experiment_id}")
    for action in actions:
        if isinstance(action, Shutdown):
            state = "ERROR" if action.failure else "CANCELED" if action.cancel else "COMPLETED"
            reason = "every trial failed" if action.failure else None
            finish_experiment(tx, experiment_id, state, reason)
        elif not isinstance(action, Create):
            trial = trial_rows.by_request(tx.connection, experiment_id, action.request_id)
            if trial is not None and trial.state not in TERMINAL:
                trial_rows.update(tx, trial.id, is_stopped_by_searcher=True)
                stop_trial(tx, trial.id, "STOPPING_COMPLETED", STOPPED_BY_SEARCHER)


def _warm_start_uuid(tx: Transaction, searcher: Mapping[str, Any]) -> str | None:
    """Return the uuid of the checkpoint that initialises new trials, or None."""
    if searcher.get("source_trial_id") is None:
        uuid: str | None = searcher.get("source_checkpoint_uuid")
        return uuid
    source = checkpoint_rows.latest_completed(tx.connection, int(searcher["source_trial_id"]))
    return None if source is None else source.uuid
