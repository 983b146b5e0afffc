"""State transitions of a command: create, assign, start, pause, kill, end.

A pausable command can stop, for example if the master shuts down or a slot of the command is disabled. Later it restarts with
the same files in a new allocation. Any other command ends with its only allocation.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dstrial.errors import MasterError
from dstrial.master.backends.backend import AllocationExit, SupervisorHandle
from dstrial.master.clock import now_us
from dstrial.master.lifecycle import allocations, checkpoint_gc
from dstrial.master.store import allocations as allocation_rows
from dstrial.master.store import commands, experiments, tasks, trials, workspaces
from dstrial.master.store.commands import ENDED, NewCommand
from dstrial.master.store.database import Connection, Transaction
from dstrial.master.store.errors import Hint, InvalidError
from dstrial.master.store.reports.logs import add_master_line

STOP_TIMEOUT_S = 30  # grace period between SIGTERM and SIGKILL

_LOST_EARLY = "the master was killed before the process began"
_END_OF = {
    "STOPPING_CANCELED": "CANCELED",
    "STOPPING_PAUSED": "PAUSED",
}  # stopping state -> state after the exit


def create(tx: Transaction, new: NewCommand) -> str:
    if new.parent_id is not None:
        state = commands.require(tx.connection, new.parent_id, ("GENERIC",)).state
        if state == "CANCELED" or state.startswith("STOPPING"):
            raise InvalidError(
                f"task {new.parent_id}, which is to be the parent, is {state}; expected one that nobody is "
                "stopping or has stopped. Leave --parent out."
            )
    task_id = commands.insert(tx, new)
    if new.spec.config["bind_mounts"]:
        text = "bind_mounts has no effect: the process runs on this machine itself, and sees the host_path as it is"
        _log_line(tx, task_id, None, text, "WARNING")
    _publish(tx, task_id)
    return task_id


def _publish(tx: Transaction, task_id: str, *topics: str) -> None:
    tx.publish("scheduler", f"command:{task_id}", f"logs:{task_id}", *topics)


def assign(
    tx: Transaction, task_id: str, *, token_hashes: Mapping[str, str], **resources: Any
) -> allocation_rows.Allocation | None:
    """Create and return an allocation for a command.

    Returns None if the command is not waiting. ``token_hashes`` maps kind ("allocation", "user") -> SHA-256 of a token.
    ``resources`` are ``slots``, ``ports`` (environment variable -> port), ``resources_id``, and ``directory``, the parent of
    the allocation's directory.
    """
    row = commands.require(tx.connection, task_id)
    if row.state != "ACTIVE" or row.allocation_id is not None:
        return None
    run_id = row.run_id + 1
    commands.update(tx, task_id, run_id=run_id, exit_status=None, stop_reason=None)
    allocation = allocations.insert(
        tx,
        row.owner_id,
        token_hashes,
        task_id=task_id,
        run_id=run_id,
        workspace_name=workspaces.name_of(tx.connection, row.workspace_id),
        **resources,
    )
    _log_line(tx, task_id, allocation.id, f"Scheduling {row.description} (id: {allocation.id})")
    _publish(tx, task_id)
    return allocation


def _log_line(
    tx: Transaction, task_id: str, allocation_id: str | None, text: str, level: str = "INFO"
) -> None:
    add_master_line(tx, task_id, None, text, level=level, allocation_id=allocation_id)


def started(tx: Transaction, allocation_id: str, handle: SupervisorHandle | None) -> None:
    """Set a command's allocation to RUNNING, and to ready unless it is a TensorBoard.

    A TensorBoard becomes ready when it responds (``mark_ready``). ``handle`` is the supervisor, the process that starts and
    watches the command; None if the command runs on another machine.
    """
    row = allocation_rows.require(tx.connection, allocation_id)
    command = commands.require(tx.connection, row.task_id)
    if row.state != "TERMINATED":
        allocation_rows.update(
            tx,
            allocation_id,
            state="RUNNING",
            **allocations.supervisor_columns(handle),
            is_ready=row.is_ready or command.kind != "TENSORBOARD",
        )
    _log_line(tx, row.task_id, allocation_id, f"Resources for {command.description} have started")
    _publish(tx, row.task_id, f"allocation:{allocation_id}")


def mark_ready(tx: Transaction, allocation_id: str) -> None:
    row = allocation_rows.require(tx.connection, allocation_id)
    if not row.is_ready and row.state != "TERMINATED":
        allocation_rows.update(tx, allocation_id, is_ready=True)
        _log_line(tx, row.task_id, allocation_id, "Service of the task is available")
        _publish(tx, row.task_id, f"allocation:{allocation_id}")


def release(
    tx: Transaction, allocation: allocation_rows.Allocation, why: str, *, is_kill: bool = False
) -> None:
    """Request SIGTERM for a command's process, or SIGKILL if ``is_kill``.

    ``why`` is logged. SIGKILL follows SIGTERM after ``STOP_TIMEOUT_S``. No-op if the same or a kill was requested before.
    """
    now = now_us()
    if is_kill:
        if allocation.kill_us is not None:
            return
        allocation_rows.update(tx, allocation.id, kill_us=now, kill_reason=why)
        text = f"forcibly killing allocation: {why}"
    else:
        if allocation.preempt_us is not None or allocation.kill_us is not None:
            return
        allocation_rows.update(
            tx, allocation.id, preempt_us=now, preempt_deadline_us=now + STOP_TIMEOUT_S * 1_000_000
        )
        if commands.require(tx.connection, allocation.task_id).stop_reason is None:
            commands.update(tx, allocation.task_id, stop_reason=why)
        text = f"gracefully terminating allocation: {why}"
    _log_line(tx, allocation.task_id, allocation.id, text)
    _publish(tx, allocation.task_id, f"allocation:{allocation.id}")


def kill(tx: Transaction, task_id: str, why: str = "a user has killed it") -> None:
    """Kill a command and all its descendants that have not ended."""
    for one in commands.tree(tx.connection, task_id):
        row = commands.require(tx.connection, one)
        if row.state not in ENDED:
            _stop(tx, row, "STOPPING_CANCELED", why, is_kill=True)


def pause(tx: Transaction, task_id: str) -> None:
    """Pause a generic task (of `det task create`) and its pausable descendants."""
    row = commands.require(tx.connection, task_id, ("GENERIC",))
    _require_open(row, "pause")
    if not row.is_pausable:
        raise InvalidError(
            f"task {task_id} was made with --no_pause; expected one that may be paused. Kill it instead."
        )
    for one in commands.tree(tx.connection, task_id):
        below = commands.require(tx.connection, one)
        if below.state == "ACTIVE" and below.is_pausable:
            _stop(tx, below, "STOPPING_PAUSED", "the task was paused")


def unpause(tx: Transaction, task_id: str) -> None:
    """Resume a paused generic task and its paused descendants."""
    row = commands.require(tx.connection, task_id, ("GENERIC",))
    _require_open(row, "unpause")
    if row.state not in ("PAUSED", "STOPPING_PAUSED"):
        raise InvalidError(f"task {task_id} is {row.state}; expected PAUSED. Leave it as it is.")
    for one in commands.tree(tx.connection, task_id):
        # A task that is still stopping restarts after its process exits.
        if commands.require(tx.connection, one).state in ("PAUSED", "STOPPING_PAUSED"):
            commands.update(tx, one, state="ACTIVE", stop_reason=None)
        _publish(tx, one)


def _require_open(row: commands.CommandInfo, verb: str) -> None:
    if row.state in ENDED or row.state == "STOPPING_CANCELED":
        raise InvalidError(
            f"task {row.task_id} is {row.state}; expected one that has not ended to {verb} it.",
            Hint.FORK_TASK,
        )


def set_priority(tx: Transaction, task_id: str, priority: int) -> None:
    config = json.loads(commands.require(tx.connection, task_id).config)
    config["resources"]["priority"] = priority
    commands.update(tx, task_id, priority=priority, config=json.dumps(config))
    _publish(tx, task_id)


def _stop(
    tx: Transaction, row: commands.CommandInfo, stopping: str, why: str, *, is_kill: bool = False
) -> None:
    commands.update(tx, row.task_id, state=stopping, stop_reason=why)
    if row.allocation_id is None:
        _close(tx, row, _END_OF[stopping], why)
        return
    release(tx, allocation_rows.require(tx.connection, row.allocation_id), why, is_kill=is_kill)


def refuse(tx: Transaction, task_id: str, why: str) -> None:
    """Set a waiting command, which can never start for reason ``why``, to ERROR.

    No-op if the command has an allocation or has ended.
    """
    row = commands.require(tx.connection, task_id)
    if row.allocation_id is None and row.state not in commands.ENDED:
        _close(tx, row, "ERROR", why)


def _close(tx: Transaction, row: commands.CommandInfo, state: str, exit_status: str) -> None:
    """Set a command without an allocation to PAUSED or a terminal state."""
    now = now_us()
    is_end = state in ENDED
    commands.update(tx, row.task_id, state=state, exit_status=exit_status, end_us=now if is_end else None)
    if is_end:
        tasks.update(tx, row.task_id, end_us=now)
        if row.kind != "GENERIC":
            # The files of generic tasks stay as long as the logs, so that the tasks can be forked.
            commands.forget_context(tx, row.task_id)
    _publish(tx, row.task_id)


def exited(tx: Transaction, allocation_id: str, exit_: AllocationExit, _traceback: str | None = None) -> None:
    """End a command's allocation, then restart, pause or end the command.

    Call this after the allocation's complete log is stored. No-op if the allocation is TERMINATED.
    """
    row = allocation_rows.require(tx.connection, allocation_id)
    if row.state == "TERMINATED":
        return
    command = commands.require(tx.connection, row.task_id)
    was_asked = row.kill_us is not None or row.preempt_us is not None
    starts_again = exit_.was_lost and row.state == "ASSIGNED" and not was_asked
    reason = _LOST_EARLY if starts_again else _describe(row, exit_, command.stop_reason)
    allocations.end(tx, row, exit_, reason)
    is_failure = exit_.exit_code != 0 and not was_asked and not starts_again
    # These are messages of Determined 0.38.1, for which scripts search the logs.
    if exit_.exit_code == 0 and not was_asked:
        details = "resources exited successfully with a zero exit code"
    elif is_failure and not exit_.was_lost:
        code = exit_.exit_code
        details = f"resources failed with non-zero exit code: container failed with non-zero exit code: {code} (exit code {code})"
        details += f": {exit_.explanation}" if exit_.explanation else ""
    else:
        details = reason
    text = f"{command.description} {'has failed' if is_failure else 'was terminated'}: {details}"
    _log_line(tx, row.task_id, allocation_id, text, "ERROR" if is_failure else "INFO")
    state = command.state
    if state in _END_OF:
        _close(tx, command, _END_OF[state], reason)
    elif (was_asked and command.is_pausable) or starts_again:
        _publish(tx, row.task_id)
    elif was_asked:
        _close(tx, command, "CANCELED", reason)
    else:
        _close(tx, command, "ERROR" if is_failure else "COMPLETED", reason)


def _describe(row: allocation_rows.Allocation, exit_: AllocationExit, stop_reason: str | None) -> str:
    if row.kill_us is not None:
        return f"allocation killed: {row.kill_reason}"
    if exit_.was_lost:
        return "allocation lost: its supervisor was killed"
    if row.preempt_us is not None:
        return f"allocation terminated: {stop_reason}"
    if exit_.exit_code == 0:
        return "exited with code 0"
    text = f"exited with code {exit_.exit_code}"
    return f"{text}: {exit_.explanation}" if exit_.explanation else text


# Running trials upload event files every few seconds, so TensorBoard reads the storage directly and also shows trials that start
# later. Source: Determined 0.38.1 `det tensorboard start --help` (at most the 100 best trials of an experiment).
MAX_TRIALS = 100


def tensorboard_sources(
    connection: Connection,
    cluster_id: str,
    experiment_ids: Collection[int],
    trial_ids: Collection[int],
) -> dict[str, Path]:
    """Return TensorBoard run name -> directory of event files, which may not exist.

    Raises ``InvalidError`` without ids, for more than ``MAX_TRIALS`` trials, or for an object storage.
    """
    if not experiment_ids and not trial_ids:
        raise InvalidError(
            "experimentIds and trialIds are empty; expected what to show. Name an experiment, or trials with -t."
        )
    if len(trial_ids) > MAX_TRIALS:
        raise InvalidError(
            f"trialIds has {len(trial_ids)} items; expected at most {MAX_TRIALS}. Name fewer, or the experiment."
        )
    found: dict[str, Path] = {}
    for experiment_id in experiment_ids:
        directory = _tensorboard_directory(connection, cluster_id, experiment_id)
        chosen = _best_trials(connection, experiment_id)
        if chosen is None:
            found[f"experiment-{experiment_id}"] = directory
        for trial_id in chosen or ():
            found[f"experiment-{experiment_id}-trial-{trial_id}"] = directory / "trial" / str(trial_id)
    for trial_id in trial_ids:
        row = trials.require(connection, trial_id)
        directory = _tensorboard_directory(connection, cluster_id, row.experiment_id)
        found[f"trial-{trial_id}"] = directory / "trial" / str(trial_id)
    return found


def _tensorboard_directory(connection: Connection, cluster_id: str, experiment_id: int) -> Path:
    config = json.loads(experiments.require(connection, experiment_id).config)
    try:
        return checkpoint_gc.tensorboard_directory(config["checkpoint_storage"], cluster_id, experiment_id)
    except MasterError as error:
        kind = config["checkpoint_storage"].get("type")
        raise InvalidError(
            f"checkpoint_storage.type of experiment {experiment_id} is {kind!r}; expected shared_fs or directory, whose "
            "event files this machine has. Fetch them with the storage's own tools, and run `tensorboard --logdir`."
        ) from error


def _best_trials(connection: Connection, experiment_id: int) -> list[int] | None:
    """Return the ids of an experiment's ``MAX_TRIALS`` best trials.

    None if the experiment has ``MAX_TRIALS`` trials or fewer.
    """
    found = trials.best_ids(connection, experiments.require(connection, experiment_id), MAX_TRIALS + 1)
    return None if len(found) <= MAX_TRIALS else found[:MAX_TRIALS]
