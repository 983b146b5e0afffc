"""Convert database rows of experiments, trials and checkpoints to API messages."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import orjson
from determined.common.api import bindings

from dstrial.config.secrets import MASK, SecretNames, masked_json, masked_yaml
from dstrial.master.clock import format_us, now_us
from dstrial.master.http.responses import message
from dstrial.master.services import Services
from dstrial.master.store.checkpoints import CheckpointInfo
from dstrial.master.store.views.listings import ListedExperiment, ListedTrial

_STATES_OF_ACTIVE = {
    None: "QUEUED",
    1: "STARTING",
    2: "RUNNING",
}  # by column ``advance`` of a trial or experiment; None if it has no allocation


def stored(text: str | None) -> Any:
    """Wrap JSON text from the database for a response, unparsed; None stays None."""
    return None if text is None else orjson.Fragment(text)


def as_data(value: Any) -> Any:
    """Wrap user data for a response, so that its control characters are not escaped."""
    return orjson.Fragment(orjson.dumps(value))


def shown_config(text: str | None, names: SecretNames) -> Any:
    """Return a stored config, or a part of one, as JSON with masked secrets."""
    return None if text is None else orjson.Fragment(masked_json(text, names))


def proxy_ports(config: str) -> list[dict[str, Any]]:
    """Return ``environment.proxy_ports`` of a stored config: ports that a task serves."""
    return (json.loads(config).get("environment") or {}).get("proxy_ports") or []


def time_or_none(us: int | None) -> str | None:
    return None if us is None else format_us(us)


def elapsed_s(start_us: int, end_us: int | None) -> int:
    return max((now_us() if end_us is None else end_us) - start_us, 0) // 1_000_000


def shown_state(row: ListedExperiment | ListedTrial) -> str:
    return f"STATE_{_STATES_OF_ACTIVE[row.advance] if row.state == 'ACTIVE' else row.state}"


def stored_states(names: Iterable[str]) -> list[str]:
    """Return the states in the database to search for states of the API.

    ``STATE_RUNNING`` and other states of an active experiment add ACTIVE.
    """
    states = {name.removeprefix("STATE_") for name in names}
    if states & {"QUEUED", "PULLING", "STARTING", "RUNNING"}:
        states.add("ACTIVE")
    return sorted(states)


def experiment_json(services: Services, row: ListedExperiment) -> dict[str, Any]:
    names = services.secret_names
    return message(
        bindings.v1Experiment,
        archived=bool(row.archived),
        config=shown_config(row.config, names),
        id=row.id,
        jobId=row.job_id,
        name=row.name,
        numTrials=row.num_trials,
        originalConfig=as_data(masked_yaml(row.original_config, names)),
        projectId=row.project_id,
        projectOwnerId=row.project_owner_id,
        searcherType=row.searcher_type,
        startTime=format_us(row.start_us),
        state=shown_state(row),
        username=row.username,
        bestTrialId=row.best_trial_id,
        bestTrialSearcherMetric=row.best_metric,
        checkpointCount=row.checkpoint_count,
        checkpointSize=str(row.checkpoint_size),
        description=row.description,
        displayName=row.display_name or row.username,
        duration=elapsed_s(row.start_us, row.end_us),
        endTime=time_or_none(row.end_us),
        externalExperimentId=row.external_id,
        forkedFrom=row.parent_id,
        labels=orjson.loads(row.labels),
        notes=row.notes,
        parentArchived=bool(row.is_parent_archived),
        progress=row.progress,
        projectName=row.project_name,
        resourcePool=services.settings.pool_name,
        searcherMetric=row.searcher_metric,
        unmanaged=bool(row.unmanaged),
        userId=row.owner_id,
        workspaceId=row.workspace_id,
        workspaceName=row.workspace_name,
    )


def trial_json(services: Services, row: ListedTrial) -> dict[str, Any]:
    names = services.secret_names
    log_days = (row.own_log_days, services.settings.log_retention_days, -1)
    return message(
        bindings.trialv1Trial,
        experimentId=row.experiment_id,
        hparams=shown_config(row.hparams, names),
        id=row.id,
        restarts=row.restarts,
        startTime=format_us(row.start_us),
        state=shown_state(row),
        totalBatchesProcessed=row.total_batches,
        bestCheckpoint=_best_checkpoint(row, names),
        bestValidation=_validation(row.best_metrics, row.best_steps, row.best_us),
        checkpointCount=row.checkpoint_count,
        endTime=time_or_none(row.end_us),
        latestValidation=_validation(row.latest_metrics, row.latest_steps, row.latest_us),
        logPolicyMatched=row.log_policy_matched,
        logRetentionDays=next(days for days in log_days if days is not None),
        metadata=stored(row.metadata),
        runnerState=row.runner_state,
        searcherMetricValue=row.searcher_metric_value,
        summaryMetrics=stored(row.summary_metrics),
        taskId=row.task_id,
        taskIds=stored(row.task_ids),
        totalCheckpointSize=str(row.checkpoint_size),
        wallClockTime=row.run_us / 1e6,
        warmStartCheckpointUuid=row.warm_start_uuid,
    )


def _validation(metrics: str | None, steps: int | None, end_us: int | None) -> dict[str, Any] | None:
    if metrics is None or steps is None or end_us is None:
        return None
    return metrics_workload(metrics, steps, end_us)


def metrics_workload(metrics: str, steps: int, end_us: int, per_batch: str | None = None) -> dict[str, Any]:
    values = message(bindings.v1Metrics, avgMetrics=stored(metrics), batchMetrics=stored(per_batch or "[]"))
    return message(
        bindings.v1MetricsWorkload, metrics=values, numInputs=0, totalBatches=steps, endTime=format_us(end_us)
    )


def checkpoint_workload(
    *, uuid: str, state: str, steps: int, report_us: int, resources: str, metadata: str, names: SecretNames
) -> dict[str, Any]:
    return message(
        bindings.v1CheckpointWorkload,
        state=f"STATE_{state}",
        totalBatches=steps,
        endTime=format_us(report_us),
        metadata=shown_config(metadata, names),
        resources=sizes_as_texts(resources),
        uuid=uuid,
    )


def _best_checkpoint(row: ListedTrial, names: SecretNames) -> dict[str, Any] | None:
    if row.checkpoint_steps is None:
        return None
    # These columns come from one row of checkpoints, where they are NOT NULL.
    assert row.best_checkpoint_uuid is not None
    assert row.checkpoint_state is not None
    assert row.checkpoint_us is not None
    assert row.checkpoint_resources is not None
    assert row.checkpoint_metadata is not None
    return checkpoint_workload(
        uuid=row.best_checkpoint_uuid,
        state=row.checkpoint_state,
        steps=row.checkpoint_steps,
        report_us=row.checkpoint_us,
        resources=row.checkpoint_resources,
        metadata=row.checkpoint_metadata,
        names=names,
    )


def sizes_as_texts(resources: str) -> dict[str, str]:
    """Return the sizes of a checkpoint's files by path, as strings for the API."""
    return {path: str(size) for path, size in json.loads(resources).items()}


def _config_for_download(text: str, names: SecretNames) -> Any:
    """Return a config with masked secrets; secrets in checkpoint_storage become null."""
    shown = masked_json(text, names)
    if MASK not in shown:
        return orjson.Fragment(shown)
    config = orjson.loads(shown)
    # ``det checkpoint download`` would use a mask as credentials; for None, it uses the user's own or the master's API.
    storage = config.get("checkpoint_storage") or {}
    config["checkpoint_storage"] = {key: None if value == MASK else value for key, value in storage.items()}
    return config


def checkpoint_json(row: CheckpointInfo, names: SecretNames) -> dict[str, Any]:
    validation: dict[str, Any] = json.loads(row.validation) if row.validation else {}
    training = message(
        bindings.v1CheckpointTrainingMetadata,
        experimentConfig=_config_for_download(row.experiment_config, names),
        experimentId=row.experiment_id,
        hparams=shown_config(row.trial_hparams, names),
        searcherMetric=validation.get(row.searcher_metric),
        trainingMetrics=message(bindings.v1Metrics, avgMetrics={}, batchMetrics=[]),
        trialId=row.trial_id,
        validationMetrics=message(bindings.v1Metrics, avgMetrics=validation, batchMetrics=[]),
    )
    return message(
        bindings.v1Checkpoint,
        metadata=shown_config(row.metadata, names),
        resources=sizes_as_texts(row.resources),
        state=f"STATE_{row.state}",
        training=training,
        uuid=row.uuid,
        allocationId=row.allocation_id,
        reportTime=format_us(row.report_us),
        storageId=None,
        taskId=row.task_id,
    )
