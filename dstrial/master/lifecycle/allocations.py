"""State transitions of a trial's allocation, and of the trial when it exits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dstrial.master.backends.backend import AllocationExit, SupervisorHandle
from dstrial.master.backends.failures import fingerprint
from dstrial.master.lifecycle import endings
from dstrial.master.lifecycle.endings import END_OF, STOPPING, TERMINAL
from dstrial.master.store import allocations as allocation_rows
from dstrial.master.store import background_jobs, jobs, projects, tokens
from dstrial.master.store import checkpoints as checkpoint_rows
from dstrial.master.store import experiments as experiment_rows
from dstrial.master.store import trials as trial_rows
from dstrial.master.store.database import Transaction
from dstrial.master.store.reports import metrics as metric_rows
from dstrial.master.store.reports.logs import add_master_line
from dstrial.search import ExitReason

_MAX_LOSSES = 3  # consecutive losses (no exit status) without a report after which a loss counts as a failure

# After this error a trial does not restart: it would read the same samples and weights, and fail again.
_NOT_RETRIED_ERROR = "NonFiniteError"


def insert(
    tx: Transaction, owner_id: int, token_hashes: Mapping[str, str], **columns: Any
) -> allocation_rows.Allocation:
    """Insert an allocation and its API tokens; return the allocation's row.

    ``token_hashes`` maps kind ("allocation", "user") -> SHA-256. ``columns`` are those of ``store.allocations.insert``.
    """
    allocation_id = allocation_rows.insert(tx, **columns)
    tokens.keep_allocation_tokens(tx, allocation_id, owner_id, token_hashes)
    tx.publish(f"allocation:{allocation_id}")
    return allocation_rows.require(tx.connection, allocation_id)


def end(tx: Transaction, row: allocation_rows.Allocation, exit_: AllocationExit, reason: str) -> None:
    """Set an allocation to TERMINATED with its exit reason, and revoke its tokens."""
    allocation_rows.update(
        tx,
        row.id,
        state="TERMINATED",
        end_us=exit_.time_us,
        exit_code=exit_.exit_code,
        exit_reason=reason,
    )
    tokens.end_allocation_tokens(tx, row.id)
    tx.publish(f"allocation:{row.id}")


def assign(
    tx: Transaction, trial_id: int, *, token_hashes: Mapping[str, str], **resources: Any
) -> allocation_rows.Allocation | None:
    """Create and return an allocation for a trial's next run.

    Returns None if the trial or its experiment is not active, or the trial has an allocation. ``token_hashes`` maps kind
    ("allocation", "user") -> SHA-256 of a token. ``resources`` are ``slots``, ``ports`` (environment variable -> port),
    ``resources_id``, and ``directory``, the parent of the allocation's directory.
    """
    trial = trial_rows.require(tx.connection, trial_id)
    experiment = experiment_rows.require(tx.connection, trial.experiment_id)
    if trial.state != "ACTIVE" or experiment.state != "ACTIVE":
        return None
    if allocation_rows.live(tx.connection, trial_id) is not None:
        return None
    run_id = trial.run_id + 1
    uuid, steps = _start_point(tx, trial)
    trial_rows.update(tx, trial_id, run_id=run_id, runner_state="UNSPECIFIED")
    row = insert(
        tx,
        experiment.owner_id,
        token_hashes,
        task_id=trial.task_id,
        run_id=run_id,
        workspace_name=projects.require(tx.connection, experiment.project_id).workspace_name,
        trial_id=trial_id,
        experiment_id=trial.experiment_id,
        steps_at_start=steps,
        checkpoint_uuid=uuid,
        **resources,
    )
    name = _name(row)
    for text in (f"Scheduling {name} (id: {row.id})", f"{name} was assigned to an agent"):
        add_master_line(tx, trial.task_id, trial_id, text, allocation_id=row.id)
    _publish(tx, row)
    return row


def _name(row: allocation_rows.Allocation) -> str:
    return f"Trial {row.trial_id} (Experiment {row.experiment_id})"


def _publish(tx: Transaction, row: allocation_rows.Allocation) -> None:
    tx.publish(f"allocation:{row.id}", f"trial:{row.trial_id}", f"experiment:{row.experiment_id}")


def _start_point(tx: Transaction, trial: trial_rows.Trial) -> tuple[str | None, int]:
    """Return (checkpoint uuid or None, batches completed) for a trial's next run."""
    latest = checkpoint_rows.latest_completed(tx.connection, trial.id)
    if latest is not None:
        return str(latest.uuid), int(latest.steps)
    return trial.warm_start_uuid, 0


def started(tx: Transaction, allocation_id: str, handle: SupervisorHandle | None) -> None:
    """Set an allocation to RUNNING, unless it is TERMINATED.

    ``handle`` is the supervisor, the process that starts and watches the ranks, or None if the ranks are on other machines.
    """
    row = allocation_rows.require(tx.connection, allocation_id)
    if row.state != "TERMINATED":
        allocation_rows.update(tx, allocation_id, state="RUNNING", **supervisor_columns(handle))
    text = f"Resources for {_name(row)} have started"
    add_master_line(tx, row.task_id, row.trial_id, text, allocation_id=allocation_id)
    _publish(tx, row)


def supervisor_columns(handle: SupervisorHandle | None) -> dict[str, Any]:
    """Return the columns of an allocation's supervisor (pid, start); {} for None."""
    return {} if handle is None else {"supervisor_pid": handle.pid, "supervisor_start": handle.start_time}


def mark_ready(tx: Transaction, allocation_id: str) -> None:
    """Record that the trial's code has contacted the master, so it can be preempted."""
    row = allocation_rows.require(tx.connection, allocation_id)
    if not row.is_ready:
        allocation_rows.update(tx, allocation_id, is_ready=True)
        _publish(tx, row)


def acknowledge_preemption(tx: Transaction, allocation_id: str) -> None:
    allocation_rows.require(tx.connection, allocation_id)
    allocation_rows.update(tx, allocation_id, preempt_acked=True)


def allocation_exited(
    tx: Transaction,
    allocation_id: str,
    exit_: AllocationExit,
    traceback: str | None = None,
    *,
    storage_trouble: str | None = None,
    begun: Sequence[str] = (),
) -> None:
    """End a trial's allocation, then restart or end the trial.

    No-op if the allocation is TERMINATED. ``traceback`` is that of the rank that failed first. ``storage_trouble`` says why the
    checkpoint storage is unavailable, None if it is available; a failure without the storage is not counted as a restart.
    ``begun`` are uuids of checkpoints that the allocation began to write. A background job deletes those that it did not
    report.
    """
    row = allocation_rows.require(tx.connection, allocation_id)
    if row.state == "TERMINATED":
        return
    reason = _describe(row, exit_)
    end(tx, row, exit_, reason)
    trial = trial_rows.require(tx.connection, row.trial_id)
    tx.publish("scheduler")
    _publish(tx, row)
    name = _name(row)
    is_failure = exit_.exit_code != 0 and row.kill_us is None and not row.preempt_acked
    if exit_.exit_code == 0:
        text = f"{name} was terminated: resources exited successfully with a zero exit code"
    elif is_failure:
        text = f"{name} crashed: resources failed with non-zero exit code: {reason}"
    else:
        text = f"{name} was terminated: {reason}"
    level = "ERROR" if is_failure else "INFO"
    add_master_line(tx, row.task_id, trial.id, text, level=level, allocation_id=allocation_id)
    half_written = checkpoint_rows.unknown_of(tx.connection, list(begun))
    if half_written:
        payload = {"uuids": half_written, "allocation_id": allocation_id}
        background_jobs.request(tx, "sweep", row.experiment_id, payload)
    _decide_trial(tx, row, trial, exit_, reason, traceback if is_failure else None, storage_trouble)


def _describe(row: allocation_rows.Allocation, exit_: AllocationExit) -> str:
    if row.kill_us is not None:
        return f"allocation killed: {row.kill_reason}"
    if exit_.was_lost:
        return f"allocation lost: {exit_.explanation}"
    text = f"container failed with non-zero exit code: {exit_.exit_code} (exit code {exit_.exit_code})"
    if exit_.exit_code == 0:
        return "exited with code 0"
    return f"{text}: {exit_.explanation}" if exit_.explanation else text


def _decide_trial(
    tx: Transaction,
    row: allocation_rows.Allocation,
    trial: trial_rows.Trial,
    exit_: AllocationExit,
    reason: str,
    traceback: str | None,
    storage_trouble: str | None,
) -> None:
    state, trial_id = trial.state, trial.id
    if state in TERMINAL:
        return
    was_asked = row.kill_us is not None or row.preempt_acked
    is_stop = state == "STOPPING_COMPLETED" and trial.early_exit is None and row.kill_us is None
    is_stop = is_stop and exit_.exit_code != 0
    has_end = is_stop and _has_last_checkpoint(tx, trial_id)
    if is_stop and not has_end and _should_retry_stop(tx, row, exit_):
        experiment = experiment_rows.require(tx.connection, row.experiment_id)
        trial_rows.update(tx, trial_id, state=experiment.state)
        if not exit_.was_lost:
            _handle_failure(tx, row, trial, reason, traceback, storage_trouble)
    elif state in STOPPING:
        is_clean = exit_.exit_code == 0 or was_asked or exit_.was_lost or has_end
        endings.close_trial(
            tx, trial_id, END_OF[state] if is_clean else "ERROR", why=None if is_clean else reason
        )
    elif trial.early_exit is not None:
        endings.close_trial(tx, trial_id, "COMPLETED", ExitReason.INVALID_HP)
    elif was_asked or (exit_.was_lost and _count_losses(tx, trial_id, row.run_id) < _MAX_LOSSES):
        return
    elif exit_.exit_code == 0:
        endings.close_trial(tx, trial_id, "COMPLETED")
    else:
        _handle_failure(tx, row, trial, reason, traceback, storage_trouble)


def _has_last_checkpoint(tx: Transaction, trial_id: int) -> bool:
    checkpoint = checkpoint_rows.latest_completed(tx.connection, trial_id)
    return checkpoint is not None and checkpoint.steps >= metric_rows.last_validation(tx.connection, trial_id)


def _should_retry_stop(tx: Transaction, row: allocation_rows.Allocation, exit_: AllocationExit) -> bool:
    """Return whether to restart a trial that failed while the searcher stopped it."""
    experiment = experiment_rows.require(tx.connection, row.experiment_id)
    if experiment.state not in ("ACTIVE", "PAUSED"):
        return False
    if row.preempt_acked and checkpoint_rows.latest_completed(tx.connection, row.trial_id) is None:
        # The trial crashes on every stop request and never saves, so a retry cannot succeed.
        return False
    return not exit_.was_lost or _count_losses(tx, row.trial_id, row.run_id) < _MAX_LOSSES


def _count_losses(tx: Transaction, trial_id: int, run_id: int) -> int:
    """Count a trial's consecutive last runs that were lost before any metric report."""
    count = 0
    for row in allocation_rows.last_runs(tx.connection, trial_id, run_id, _MAX_LOSSES):
        if row.num_reports or not str(row.exit_reason).startswith("allocation lost"):
            break
        count += 1
    return count


def _kind_of_error(traceback: str) -> str:
    return traceback.rpartition("\n")[2].partition(":")[0].rpartition(".")[2]


def _handle_failure(
    tx: Transaction,
    row: allocation_rows.Allocation,
    trial: trial_rows.Trial,
    reason: str,
    traceback: str | None,
    storage_trouble: str | None,
) -> None:
    if storage_trouble is not None and not trial.retry_cancelled:
        text = (
            f"the trial failed without its checkpoint storage (not counted as a restart): {storage_trouble}"
        )
        add_master_line(tx, row.task_id, trial.id, text, level="WARNING", allocation_id=row.id)
        return
    experiment = experiment_rows.require(tx.connection, row.experiment_id)
    num_slots = len(row.slots)
    # The configured slot count is always retried; only other counts are marked as unusable.
    is_chosen = num_slots != experiment.slots_per_trial and not trial.retry_cancelled
    if is_chosen and num_slots in jobs.unusable_counts(tx.connection, trial.id):
        text = f"the trial cannot go on with {num_slots} slots (not counted as a restart, not tried again): {reason}"
        add_master_line(tx, row.task_id, trial.id, text, level="WARNING", allocation_id=row.id)
        return
    config: dict[str, Any] = json.loads(experiment.config)
    restarts, limit = trial.restarts + 1, int(config["max_restarts"])
    is_before_first_batch = row.num_reports == 0 and row.steps_at_start == 0
    failure_digest = fingerprint(traceback) if is_before_first_batch and traceback is not None else None
    verdict = None
    if trial.retry_cancelled:
        verdict = "trial failed and matched logs to a don't retry policy"
    elif restarts > limit:
        verdict = f"failed {restarts} times; max_restarts is {limit}" if limit else "max_restarts is 0"
    elif traceback is not None and _kind_of_error(traceback) == _NOT_RETRIED_ERROR:
        verdict = "its losses stay non-finite, and a restart would repeat that"
    elif failure_digest is not None and failure_digest == trial.last_failure:
        verdict = "failed twice in the same way before its first batch, and is not tried again"
    num_restarts = trial.restarts if verdict is not None else restarts
    trial_rows.update(tx, trial.id, restarts=num_restarts, last_failure=failure_digest)

    def say(text: str, level: str = "ERROR") -> None:
        add_master_line(tx, row.task_id, trial.id, text, level=level, allocation_id=row.id)

    if verdict is None:
        count = f"({restarts} of {limit} restarts)"
        if trial.is_node_excluded:
            trial_rows.update(tx, trial.id, is_node_excluded=2)
            say(f"trial failed and restarts on another node {count}", "WARNING")
        else:
            say(f"trial failed and restarts {count}", "WARNING")
        return
    say(f"trial {trial.id} has failed: {verdict}")
    last = traceback.rpartition("\n")[2] if traceback else reason
    endings.close_trial(tx, trial.id, "ERROR", why=f"{verdict}: {last}")
