"""State transitions of experiments, and deletion of projects and workspaces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dstrial.config.experiment_config.submission import Submission
from dstrial.config.schema import SEARCHERS
from dstrial.master.lifecycle import endings
from dstrial.master.lifecycle.detached_runs import refuse_detached
from dstrial.master.lifecycle.endings import DELETING, TERMINAL
from dstrial.master.store import background_jobs, models, projects, workspaces
from dstrial.master.store import checkpoints as checkpoint_rows
from dstrial.master.store import experiments as experiment_rows
from dstrial.master.store import trials as trial_rows
from dstrial.master.store.database import Connection, Transaction
from dstrial.master.store.errors import Hint, InvalidError
from dstrial.master.webhooks import events
from dstrial.search import Create, Searcher


def create(
    tx: Transaction,
    *,
    submission: Submission,
    tgz: bytes,
    owner_id: int,
    activate: bool,
    parent_id: int | None = None,
    project_id: int = projects.DEFAULT_ID,
) -> int:
    """Create an experiment, PAUSED unless ``activate``, and its first trials.

    ``tgz`` is the model definition as tar.gz. Returns the experiment's id.
    """
    projects.refuse_shut(projects.require(tx.connection, project_id), "take another experiment")
    _check_warm_start(tx, submission.config)
    experiment_id = experiment_rows.insert(
        tx,
        submission=submission,
        owner_id=owner_id,
        state="ACTIVE" if activate else "PAUSED",
        parent_id=parent_id,
        project_id=project_id,
    )
    experiment_rows.add_model_definition(tx, experiment_id, tgz)
    endings.begin_search(tx, experiment_id, submission.config)
    return experiment_id


def _check_warm_start(tx: Transaction, config: dict[str, Any]) -> None:
    trial_id = config["searcher"].get("source_trial_id")
    uuid = config["searcher"].get("source_checkpoint_uuid")
    if trial_id is not None and checkpoint_rows.latest_completed(tx.connection, int(trial_id)) is None:
        raise InvalidError(
            f"searcher.source_trial_id is {trial_id}; expected a trial with a complete checkpoint. "
            "Name another trial, or remove it."
        )
    if uuid is None:
        return
    checkpoint = checkpoint_rows.get_checkpoint(tx.connection, str(uuid))
    if checkpoint is None or checkpoint.state not in ("COMPLETED", "PARTIALLY_DELETED"):
        raise InvalidError(
            f"searcher.source_checkpoint_uuid is {uuid}; "
            f"expected a checkpoint that exists and has not been deleted.",
            Hint.TAKE_CHECKPOINT,
        )
    if checkpoint.state == "COMPLETED":
        checkpoint_rows.refuse_deleting(tx.connection, checkpoint)


def pause(tx: Transaction, experiment_id: int) -> None:
    """Pause an experiment: its trials save checkpoints, then release their slots."""
    state = _require_changeable(tx, experiment_id, "pause")
    if state == "PAUSED":
        return
    experiment_rows.update(tx, experiment_id, state="PAUSED")
    events.notify_state(tx, experiment_id)
    tx.publish(f"experiment:{experiment_id}", "scheduler")
    for trial_id in trial_rows.open_ids(tx.connection, experiment_id):
        if trial_rows.require(tx.connection, trial_id).state == "ACTIVE":
            trial_rows.update(tx, trial_id, state="PAUSED")
            tx.publish(f"trial:{trial_id}")
            endings.release(tx, trial_id, "the experiment was paused")


def activate(tx: Transaction, experiment_id: int) -> None:
    state = _require_changeable(tx, experiment_id, "activate")
    if state == "ACTIVE":
        return
    experiment_rows.update(tx, experiment_id, state="ACTIVE")
    events.notify_state(tx, experiment_id)
    trial_rows.activate_paused(tx, experiment_id)
    for trial_id in trial_rows.open_ids(tx.connection, experiment_id):
        tx.publish(f"trial:{trial_id}")
    tx.publish(f"experiment:{experiment_id}", "scheduler")


def _require_changeable(tx: Transaction, experiment_id: int, verb: str) -> str:
    row = experiment_rows.require(tx.connection, experiment_id)
    refuse_detached(row, verb)
    state = str(row.state)
    if state not in ("ACTIVE", "PAUSED"):
        raise InvalidError(
            f"experiment {experiment_id} is {state}; expected ACTIVE or PAUSED to {verb} it.",
            Hint.CONTINUE_EXPERIMENT,
        )
    return state


def cancel(tx: Transaction, experiment_id: int) -> None:
    """Cancel an experiment; its trials save checkpoints. No-op if it has ended."""
    experiment_rows.require(tx.connection, experiment_id)
    endings.stop_experiment(tx, experiment_id, "STOPPING_CANCELED", "the experiment was canceled")


def kill(tx: Transaction, experiment_id: int) -> None:
    """Kill an experiment's trials; no-op if the experiment has ended."""
    experiment_rows.require(tx.connection, experiment_id)
    endings.stop_experiment(tx, experiment_id, "STOPPING_KILLED", "the experiment was killed")


def archive(tx: Transaction, experiment_id: int, *, is_archived: bool = True) -> None:
    row = experiment_rows.require(tx.connection, experiment_id)
    if row.state not in TERMINAL:
        raise InvalidError(
            f"experiment {experiment_id} is {row.state}; expected one that has ended. "
            "Cancel or kill it first."
        )
    experiment_rows.update(tx, experiment_id, archived=is_archived)
    tx.publish(f"experiment:{experiment_id}")


def unarchive(tx: Transaction, experiment_id: int) -> None:
    archive(tx, experiment_id, is_archived=False)


def delete(tx: Transaction, experiment_id: int) -> None:
    """Set an experiment to DELETING, and enqueue deletion of its files and rows."""
    row = experiment_rows.require(tx.connection, experiment_id)
    if row.state == "DELETING":
        return
    check_deletable(tx, row)
    experiment_rows.update(tx, experiment_id, state="DELETING")
    tx.publish(f"experiment:{experiment_id}")
    background_jobs.request(tx, "delete_experiment", experiment_id)


def check_deletable(tx: Transaction, row: experiment_rows.Experiment) -> None:
    """Raise ``InvalidError`` unless an experiment may be deleted.

    The experiment must have ended, and the model registry must have none of its checkpoints.
    """
    if row.state not in TERMINAL | DELETING:
        raise InvalidError(
            f"experiment {row.id} is {row.state}; expected one that has ended. Cancel or kill it first."
        )
    versions = models.registered_of(tx.connection, row.id)
    if versions:
        raise InvalidError(
            f"experiment {row.id} has checkpoints that are registered as {', '.join(versions[:5])}; expected none that is. "
            "Delete these versions first, or archive the experiment instead."
        )


def move(tx: Transaction, experiment_id: int, project_id: int) -> None:
    row = experiment_rows.require(tx.connection, experiment_id)
    target = projects.require(tx.connection, project_id)
    source = projects.require(tx.connection, row.project_id)
    if row.archived or row.state == "DELETING":
        state = "archived" if row.archived else "being deleted"
        raise InvalidError(
            f"experiment {experiment_id} is {state} and cannot be moved; expected one that is not.",
            Hint.UNARCHIVE_EXPERIMENT,
        )
    projects.refuse_shut(source, "be changed")
    projects.refuse_shut(target, "take another experiment")
    experiment_rows.update(tx, experiment_id, project_id=project_id)
    tx.publish(f"experiment:{experiment_id}")


def delete_tensorboard_files(tx: Transaction, experiment_id: int) -> None:
    row = experiment_rows.require(tx.connection, experiment_id)
    if row.state not in TERMINAL:
        raise InvalidError(
            f"experiment {experiment_id} is {row.state}; expected one that has ended, which writes no files any more. "
            "Cancel or kill it first."
        )
    background_jobs.request(tx, "delete_tensorboard", experiment_id)


def continue_(tx: Transaction, experiment_id: int, submission: Submission | None = None) -> int:
    """Resume an ended experiment from its checkpoints; return its id.

    Trials that did not complete run again, with restart counters of 0. With the single searcher, a completed trial also runs
    again. ``submission`` is a changed config, allowed for the single searcher only; None does not change the config.
    """
    row = experiment_rows.require(tx.connection, experiment_id)
    refuse_detached(row, "continue")
    _check_continuable(row, submission)
    trials = trial_rows.of_experiment(tx.connection, experiment_id)
    again = [trial for trial in trials if trial.state != "COMPLETED"]
    if row.searcher_type == "single":
        again = trials
    if not again:
        raise InvalidError(
            f"experiment {experiment_id} has completed all of its trials; expected one that is left to run. "
            "Create a new experiment."
        )
    if submission is not None:
        experiment_rows.replace_config(tx, experiment_id, submission.config, submission.interpreter)
        _resample(tx, again[0].id, submission)
    # The snapshot is not None: detached experiments, which have no searcher, were rejected above.
    snapshot = json.loads(experiment_rows.require(tx.connection, experiment_id).searcher_snapshot or "")
    reopened = {trial.request_id for trial in again}
    for name in ("closed", "failed", "cancelled", "stopped"):
        snapshot[name] = [request_id for request_id in snapshot[name] if request_id not in reopened]
    snapshot["is_shut_down"] = False
    experiment_rows.update(
        tx,
        experiment_id,
        state="ACTIVE",
        end_us=None,
        end_reason=None,
        progress=0,
        archived=False,
        searcher_snapshot=json.dumps(snapshot),
    )
    events.notify_state(tx, experiment_id)
    for trial in again:
        trial_rows.reopen(tx, trial)
    tx.publish(f"experiment:{experiment_id}", "scheduler")
    return experiment_id


def _check_continuable(row: experiment_rows.Experiment, submission: Submission | None) -> None:
    searcher = row.searcher_type
    *others, last = (name for name, keys in SEARCHERS.items() if keys.is_independent)
    problem = None
    if row.state not in TERMINAL:
        problem = f"experiment {row.id} is {row.state}; expected one that has ended. Activate it instead."
    elif searcher not in (*others, last):
        problem = (
            f"experiment {row.id} has the searcher {searcher}; expected {', '.join(others)} or {last}, whose "
            "trials do not depend on each other. Create a new experiment."
        )
    elif submission is not None and searcher != "single":
        problem = (
            f"experiment {row.id} has the searcher {searcher}; expected single to continue with another "
            "config. Continue without --config."
        )
    if problem is not None:
        raise InvalidError(problem)


def _resample(tx: Transaction, trial_id: int, submission: Submission) -> None:
    """Sample a trial's hyperparameters anew from a changed config, and store them.

    For experiments with the single searcher.
    """
    seed = int(submission.config["reproducibility"]["experiment_seed"])
    for action in Searcher.new(submission.config, seed).initial_trials():
        if isinstance(action, Create):
            trial_rows.update(tx, trial_id, hparams=json.dumps(action.hparams))


def patch(tx: Transaction, experiment_id: int, **fields: Any) -> None:
    """Update fields of an experiment in its row and its config; keep omitted fields.

    ``fields`` may be name, description, notes, labels, priority, weight, max_slots, log_retention_days and checkpoint_storage.
    checkpoint_storage has only ``save_…`` keys; a change of these enqueues checkpoint garbage collection.
    """
    row = experiment_rows.require(tx.connection, experiment_id)
    if row.state in DELETING:
        raise InvalidError(f"experiment {experiment_id} is being deleted; expected one that stays.")
    config = json.loads(row.config)
    policy = fields.pop("checkpoint_storage", None)
    if policy:
        config["checkpoint_storage"].update(policy)
        background_jobs.request(tx, "gc", experiment_id)
    if "labels" in fields:
        config["labels"] = sorted(set(fields["labels"]))
        fields["labels"] = json.dumps(config["labels"])
    for name in ("name", "description"):
        if name in fields:
            config[name] = fields[name]
    for name in ("max_slots", "priority", "weight"):
        if name in fields:
            config["resources"][name] = fields[name]
    experiment_rows.update(tx, experiment_id, **fields, config=json.dumps(config))
    tx.publish(f"experiment:{experiment_id}", "scheduler")


def project_of_config(
    connection: Connection, project_id: int | None, config: Mapping[str, Any]
) -> projects.ProjectInfo:
    """Return a new experiment's project: the request's, the config's, or the default.

    ``project_id`` is the request's; if it is None or 1 (the default project), the names in the config decide.
    ``config`` need not be validated. Source: Determined 0.38.1.
    """
    names = [config.get("workspace") or None, config.get("project") or None]
    if project_id is not None and project_id > projects.DEFAULT_ID:
        row = projects.require(connection, project_id)
    elif isinstance(names[0], str) and isinstance(names[1], str):
        row = projects.by_names(connection, names[0], names[1])
    else:
        row = projects.require(connection, projects.DEFAULT_ID)
    projects.refuse_shut(row, "take another experiment")
    return row


def delete_project(tx: Transaction, project_id: int) -> bool:
    """Delete an empty project and return True, else start its deletion.

    In the latter case, a background job deletes the experiments and then the project; return False.
    """
    row = projects.require(tx.connection, project_id)
    projects.refuse_immutable(row, "be deleted")
    held = experiment_rows.of_project(tx.connection, project_id)
    for experiment in held:
        check_deletable(tx, experiment)
    for experiment in held:
        delete(tx, experiment.id)
    if not held:
        projects.delete(tx, project_id)
        return True
    projects.change(tx, project_id, state="DELETING", error="")
    background_jobs.request(tx, "delete_project", 0, {"id": project_id})
    return False


def delete_workspace(tx: Transaction, workspace_id: int) -> bool:
    """Delete a workspace without experiments and return True, else start its deletion.

    In the latter case, a background job deletes the projects and then the workspace; return False.
    """
    row = workspaces.require(tx.connection, workspace_id)
    workspaces.refuse_immutable(row, "be deleted")
    model = models.any_name_in(tx.connection, workspace_id)
    if model is not None:
        raise InvalidError(
            f"workspace {row.name!r} has the model {model!r}; expected none.", Hint.MOVE_MODELS
        )
    gone = [delete_project(tx, one.id) for one in projects.list_projects(tx.connection, workspace_id)]
    if all(gone):
        workspaces.delete(tx, workspace_id)
        return True
    workspaces.change(tx, workspace_id, state="DELETING", error="")
    background_jobs.request(tx, "delete_workspace", 0, {"id": workspace_id})
    return False


def finish_project(tx: Transaction, project_id: int) -> None:
    """Delete a project without experiments; set any other project to DELETE_FAILED.

    Called after the deletion of the experiments, which may have failed.
    """
    left = experiment_rows.of_project(tx.connection, project_id)
    if not left:
        projects.delete(tx, project_id)
        return
    why = next((row.end_reason for row in left if row.end_reason), "it was created during the deletion")
    projects.change(
        tx, project_id, state="DELETE_FAILED", error=f"experiment {left[0].id} could not be deleted: {why}"
    )


def finish_workspace(tx: Transaction, workspace_id: int) -> None:
    """Delete a workspace without content; set any other workspace to DELETE_FAILED.

    Called after the deletion of the projects, which may have failed.
    """
    left = projects.list_projects(tx.connection, workspace_id)
    if left:
        why = f"project {left[0].name!r} could not be deleted: {left[0].error}"
    elif models.any_name_in(tx.connection, workspace_id) is not None:
        why = "a model was created while its projects were deleted"
    else:
        workspaces.delete(tx, workspace_id)
        return
    workspaces.change(tx, workspace_id, state="DELETE_FAILED", error=why)
