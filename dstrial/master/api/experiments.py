"""Experiments: submit, list, look at, change, and what is done with them."""

from __future__ import annotations

import base64
import json
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from determined.common.api import bindings

from dstrial.config import SavedRun
from dstrial.config.submission import Submission, check_submission, merge_override
from dstrial.errors import ConfigError, ConfigProblem, DstrialError, RequestError
from dstrial.master import checkpoint_gc, resumption
from dstrial.master.api.fields import Fields
from dstrial.master.api.frame import TRIAL, USER, ApiRequest, route
from dstrial.master.api.messages import message, page_of
from dstrial.master.api.shapes import checkpoint_json, experiment_json, sizes_as_texts
from dstrial.master.api.workspaces import PROJECT_ID, check_project
from dstrial.master.clock import format_us, now_us
from dstrial.master.experiment import experiments
from dstrial.master.interpreter import check_interpreter
from dstrial.master.model_definition import pack, unpack
from dstrial.master.services import Services
from dstrial.master.store import checkpoints as checkpoint_rows
from dstrial.master.store import experiments as experiment_rows
from dstrial.master.store import listings
from dstrial.master.store import trials as trial_rows
from dstrial.master.store.database import Transaction
from dstrial.master.store.metrics import as_number, metric_names
from dstrial.master.store.tokens import User

_MAX_SUBMISSION_BYTES = 130 * 2**20
_ANY_STATE = "STATE_"


def checked(services: Services, config: str, tgz: bytes, resumed: SavedRun | None = None) -> Submission:
    """Check a config with its model definition; takes long enough to be done in a thread.

    Args:
        services: of the running master.
        config: YAML.
        tgz: the model definition.
        resumed: the checkpoint that its trial goes on from, if it does.

    Raises:
        ConfigError: with every problem.
        RequestError: the model definition cannot be unpacked.
    """
    with tempfile.TemporaryDirectory(prefix="dstrial-check-") as name:
        context_dir = Path(name)
        unpack(tgz, context_dir)
        try:
            submission = check_submission(
                config,
                context_dir=context_dir,
                defaults=services.settings.defaults(services.state_dir),
                num_slots=len(services.slots),
                resumed=resumed,
            )
        except ConfigError as error:
            raise ConfigError([_in_users_words(problem, name) for problem in error.problems]) from error
    pool = submission.config["resources"]["resource_pool"]
    if pool and pool != services.settings.pool_name:
        raise RequestError(
            400,
            f"resources.resource_pool is {pool!r}; expected {services.settings.pool_name!r}, the only pool. Remove it.",
        )
    if submission.interpreter is not None:
        check_interpreter(submission.interpreter, submission.config["entrypoint"])
    return submission


def _in_users_words(problem: ConfigProblem, context_dir: str) -> ConfigProblem:
    """Return a problem without the temporary directory in which the model definition was looked at."""
    texts = (problem.where, problem.got, problem.expected, problem.fix)
    return ConfigProblem(
        *(text.replace(f"{context_dir}/", "").replace(context_dir, "the model definition") for text in texts)
    )


async def _shown(services: Services, experiment_id: int) -> dict[str, Any]:
    row = await services.read(listings.get_experiment, experiment_id)
    if row is None:
        await services.read(experiment_rows.require, experiment_id)
        raise RequestError(404, f"experiment {experiment_id} is not found.")
    return experiment_json(services, row)


async def create_experiment(request: ApiRequest) -> dict[str, Any]:
    """``POST experiments``: check a submission and, unless only that is asked for, store it with its first trials."""
    body, services = request.body(), request.services
    if body.text("template"):
        raise RequestError(
            501, "templates are not offered by the embedded master; merge the template into the config."
        )
    if body.flag("unmanaged"):
        raise RequestError(
            501,
            "unmanaged experiments are not offered by the embedded master; submit one with an entrypoint.",
        )
    check_project(body.integer("projectId"))
    parent_id = body.integer("parentId") or None
    tgz = await services.run(lambda: pack([dict(file) for file in _files(body)]))
    config = body.text("config") or ""
    if parent_id is not None:
        parent = await services.read(experiment_rows.require, parent_id)
        config = config or parent["original_config"]
        if not tgz:
            tgz = await services.read(_model_definition, parent_id)
    resumed = await services.read(resumption.of_submission, config)
    submission = await services.run(lambda: checked(services, config, tgz, resumed))
    warnings = ["LAUNCH_WARNING_CURRENT_SLOTS_EXCEEDED"] if submission.exceeds_slots else []
    if body.flag("validateOnly"):
        return message(
            bindings.v1CreateExperimentResponse,
            config=submission.config,
            experiment=_unsaved(request, submission),
            warnings=warnings,
        )
    experiment_id = await services.write(
        lambda tx: experiments.create(
            tx,
            submission=submission,
            tgz=tgz,
            owner_id=request.user.id,
            activate=body.flag("activate") is not False,
            parent_id=parent_id,
        )
    )
    return message(
        bindings.v1CreateExperimentResponse,
        config=submission.config,
        experiment=await _shown(services, experiment_id),
        warnings=warnings,
    )


def _files(body: Fields) -> list[Any]:
    files = body.items_of("modelDefinition") or []
    if not all(isinstance(file, dict) for file in files):
        raise body.wrong("modelDefinition", "a list of files")
    return files


def _unsaved(request: ApiRequest, submission: Submission) -> dict[str, Any]:
    config = submission.config
    return message(
        bindings.v1Experiment,
        archived=False,
        config=config,
        id=0,
        jobId="",
        name=config["name"],
        numTrials=0,
        originalConfig=submission.original,
        projectId=PROJECT_ID,
        projectOwnerId=request.user.id,
        searcherType=config["searcher"]["name"],
        startTime=format_us(now_us()),
        state="STATE_UNSPECIFIED",
        username=request.user.username,
    )


def _model_definition(connection: sqlite3.Connection, experiment_id: int) -> bytes:
    experiment_rows.require(connection, experiment_id)
    row = connection.execute(
        "SELECT tgz FROM model_definitions WHERE experiment_id = ?", (experiment_id,)
    ).fetchone()
    return b"" if row is None else bytes(row["tgz"])


def _states(request: ApiRequest, enum_class: Any) -> list[str]:
    """Return stored states; what clients see of an active one stands for it."""
    names = {name.removeprefix(_ANY_STATE) for name in request.query_choices("states", enum_class)}
    if names & {"QUEUED", "PULLING", "STARTING", "RUNNING"}:
        names.add("ACTIVE")
    return sorted(names)


def _ids(request: ApiRequest, name: str) -> list[int]:
    found = []
    for text in request.queries(name):
        try:
            found.append(int(text))
        except ValueError as error:
            raise request.wrong_query(name, "whole numbers") from error
    return found


async def list_experiments(request: ApiRequest) -> dict[str, Any]:
    """``GET experiments``: a page of experiments."""
    check_project(request.query_int("projectId"))
    above = request.query_int("experimentIdFilter.gt")
    at_least = request.query_int("experimentIdFilter.gte")
    below = request.query_int("experimentIdFilter.lt")
    at_most = request.query_int("experimentIdFilter.lte")
    wanted = listings.ExperimentFilter(
        archived=request.query_flag("archived"),
        name=request.query("name"),
        description=request.query("description"),
        users=request.queries("users"),
        user_ids=_ids(request, "userIds"),
        states=_states(request, bindings.experimentv1State),
        labels=request.queries("labels"),
        ids=_ids(request, "experimentIdFilter.incl"),
        not_ids=_ids(request, "experimentIdFilter.notIn"),
        above=above if at_least is None else at_least - 1,
        below=below if at_most is None else at_most + 1,
    )
    sort_by = request.query_choice("sortBy", bindings.v1GetExperimentsRequestSortBy)
    is_descending = request.query_choice("orderBy", bindings.v1OrderBy) == "ORDER_BY_DESC"
    offset, limit = request.query_int("offset"), request.query_int("limit")

    def read(connection: sqlite3.Connection) -> tuple[Any, list[sqlite3.Row]]:
        page = page_of(listings.count_experiments(connection, wanted), offset, limit)
        rows = listings.list_experiments(
            connection,
            wanted,
            sort_by=sort_by,
            is_descending=is_descending,
            offset=page.start,
            limit=page.end - page.start,
        )
        return page, rows

    page, rows = await request.services.read(read)
    return {
        "experiments": [experiment_json(request.services, row) for row in rows],
        "pagination": page.to_json(),
    }


async def show_experiment(request: ApiRequest) -> dict[str, Any]:
    """``GET experiments/{id}``."""
    shown = await _shown(request.services, request.path_params["experiment_id"])
    state = "STATE_SCHEDULED" if shown["state"] in ("STATE_RUNNING", "STATE_STARTING") else "STATE_QUEUED"
    job = message(bindings.v1JobSummary, jobsAhead=0, state=state)
    is_open = shown["endTime"] is None
    return message(
        bindings.v1GetExperimentResponse,
        experiment=shown,
        config=shown["config"],
        jobSummary=job if is_open else None,
    )


def _action(
    perform: Callable[[Transaction, int], Any], *, is_owners: bool = False
) -> Callable[[ApiRequest], Any]:
    async def handle(request: ApiRequest) -> dict[str, Any]:
        owner = request.user if is_owners else None
        await request.services.write(_of(perform, request.path_params["experiment_id"], owner))
        return {}

    handle.__doc__ = f"``experiments/{{id}}``: {perform.__name__}."
    return handle


def _of(
    perform: Callable[[Transaction, int], Any], experiment_id: int, owner: User | None
) -> Callable[[Transaction], Any]:
    """Return the write for one experiment, which is refused where ``owner`` is neither its owner nor an administrator."""

    def write(tx: Transaction) -> None:
        row = experiment_rows.require(tx.connection, experiment_id)
        if owner is not None and not owner.admin and owner.id != row["owner_id"]:
            raise RequestError(
                403,
                f"experiment {experiment_id} is another user's; expected your own, or an administrator. "
                "Ask with `det -u admin`.",
            )
        perform(tx, experiment_id)

    return write


def _bulk(
    perform: Callable[[Transaction, int], Any], *, is_owners: bool = False
) -> Callable[[ApiRequest], Any]:
    async def handle(request: ApiRequest) -> dict[str, Any]:
        check_project(request.path_params["project_id"])
        owner = request.user if is_owners else None
        ids = request.body().items_of("experimentIds") or []
        results = []
        for experiment_id in ids:
            if not isinstance(experiment_id, int):
                raise RequestError(400, "experimentIds has something else; expected whole numbers.")
            error = ""
            try:
                await request.services.write(_of(perform, experiment_id, owner))
            except DstrialError as problem:
                error = str(problem)
            results.append(message(bindings.v1ExperimentActionResult, error=error, id=experiment_id))
        return {"results": results}

    handle.__doc__ = f"``experiments``: {perform.__name__} several, each with its own result."
    return handle


def _resumed_by(connection: sqlite3.Connection, experiment_id: int) -> SavedRun | None:
    """Return the checkpoint from which the trial of a single searcher goes on; None if it would start anew."""
    trials = trial_rows.of_experiment(connection, experiment_id)
    return resumption.of_trial(connection, trials[0]) if len(trials) == 1 else None


async def continue_experiment(request: ApiRequest) -> dict[str, Any]:
    """``POST experiments/continue``: let one that has ended go on, perhaps with another config."""
    body, services = request.body(), request.services
    experiment_id = body.required_integer("id")
    override = body.text("overrideConfig") or ""
    submission = None
    if override.strip():
        row = await services.read(experiment_rows.require, experiment_id)
        tgz = await services.read(_model_definition, experiment_id)
        merged = merge_override(row["original_config"], override)
        resumed = await services.read(_resumed_by, experiment_id)
        submission = await services.run(lambda: checked(services, merged, tgz, resumed))
    await services.write(lambda tx: experiments.continue_(tx, experiment_id, submission))
    return message(
        bindings.v1ContinueExperimentResponse, experiment=await _shown(services, experiment_id), warnings=[]
    )


async def patch_experiment(request: ApiRequest) -> dict[str, Any]:
    """``PATCH experiments/{id}``: name, description, notes, labels, resources and the policy for checkpoints."""
    body = request.body()
    fields: dict[str, Any] = {}
    for name in ("name", "description", "notes"):
        value = body.text(name)
        if value is not None:
            fields[name] = value
    labels = body.texts("labels")
    if labels is not None:
        fields["labels"] = labels
    resources = body.fields("resources")
    if resources is not None:
        if "maxSlots" in resources:
            fields["max_slots"] = resources.integer("maxSlots", 0, 10**6)
        if resources.get("priority") is not None:
            fields["priority"] = resources.required_integer("priority")
        if resources.get("weight") is not None:
            fields["weight"] = resources.number("weight")
    storage = body.fields("checkpointStorage")
    if storage is not None:
        names = {
            "save_experiment_best": "saveExperimentBest",
            "save_trial_best": "saveTrialBest",
            "save_trial_latest": "saveTrialLatest",
        }
        fields["checkpoint_storage"] = {
            ours: storage.required_integer(theirs, 0, 10**9)
            for ours, theirs in names.items()
            if storage.get(theirs) is not None
        }
    experiment_id = request.path_params["experiment_id"]
    await request.services.write(lambda tx: experiments.patch(tx, experiment_id, **fields))
    return {"experiment": await _shown(request.services, experiment_id)}


def _relabel(change: Callable[[set[str], str], Any]) -> Callable[[ApiRequest], Any]:
    async def handle(request: ApiRequest) -> dict[str, Any]:
        experiment_id, label = request.path_params["experiment_id"], request.path_params["label"]

        def perform(tx: Transaction) -> list[str]:
            labels = set(json.loads(experiment_rows.require(tx.connection, experiment_id)["labels"]))
            change(labels, label)
            experiments.patch(tx, experiment_id, labels=sorted(labels))
            return sorted(labels)

        return {"labels": await request.services.write(perform)}

    handle.__doc__ = "``experiments/{id}/labels/{label}``."
    return handle


async def retain_logs(request: ApiRequest) -> dict[str, Any]:
    """``PUT experiments/{id}/retain_logs``: how long to keep logs, in days; -1 for ever."""
    days = request.body().required_integer("numDays", -1, 32767)
    experiment_id = request.path_params["experiment_id"]
    await request.services.write(lambda tx: experiments.patch(tx, experiment_id, log_retention_days=days))
    return {}


async def show_model_definition(request: ApiRequest) -> dict[str, Any]:
    """``GET experiments/{id}/model_def``: gzip tar in base64."""
    tgz = await request.services.read(_model_definition, request.path_params["experiment_id"])
    return message(bindings.v1GetModelDefResponse, b64Tgz=base64.b64encode(tgz).decode())


async def best_searcher_validation_metric(request: ApiRequest) -> dict[str, Any]:
    """``GET experiments/{id}/searcher/best_searcher_validation_metric``; 404 before the first validation."""
    row = await request.services.read(experiment_rows.require, request.path_params["experiment_id"])
    if row["best_metric"] is None:
        raise RequestError(404, f"experiment {row['id']} has no validation yet.")
    return {"metric": row["best_metric"]}


async def validation_history(request: ApiRequest) -> dict[str, Any]:
    """``GET experiments/{id}/validation-history``: each validation that was the best so far."""
    experiment_id = request.path_params["experiment_id"]

    def read(connection: sqlite3.Connection) -> list[dict[str, Any]]:
        experiment = experiment_rows.require(connection, experiment_id)
        rows = connection.execute(
            "SELECT m.trial_id, m.end_us, m.metrics FROM metrics m JOIN trials t ON t.id = m.trial_id "
            "WHERE t.experiment_id = ? AND m.group_name = 'validation' AND m.archived = 0 ORDER BY m.end_us",
            (experiment_id,),
        )
        best: float | None = None
        history = []
        for row in rows:
            value = as_number(json.loads(row["metrics"]).get(experiment["searcher_metric"]))
            if value is None or value != value:
                continue
            if best is None or (value < best if experiment["smaller_is_better"] else value > best):
                best = value
                history.append(
                    message(
                        bindings.v1ValidationHistoryEntry,
                        endTime=format_us(row["end_us"]),
                        searcherMetric=value,
                        trialId=row["trial_id"],
                    )
                )
        return history

    return {"validationHistory": await request.services.read(read)}


async def stream_metric_names(request: ApiRequest) -> dict[str, Any]:
    """``GET experiments/metrics-stream/metric-names``: the names that trials have reported."""
    ids = _ids(request, "ids")
    names = await request.services.read(metric_names, ids)
    searcher = [
        (await request.services.read(experiment_rows.require, experiment_id))["searcher_metric"]
        for experiment_id in ids
    ]
    return {
        "result": {
            "searcherMetrics": searcher,
            "trainingMetrics": [name for group, name in names if group == "training"],
            "validationMetrics": [name for group, name in names if group == "validation"],
            "metricNames": [{"group": group, "name": name} for group, name in names],
        }
    }


async def preview_gc(request: ApiRequest) -> dict[str, Any]:
    """``//experiments/{id}/preview_gc``: the checkpoints that another policy would delete."""
    experiment_id = request.path_params["experiment_id"]
    policy = checkpoint_gc.Policy(
        *(request.query_int(name) or 0 for name in ("saveExperimentBest", "saveTrialBest", "saveTrialLatest"))
    )

    def read(connection: sqlite3.Connection) -> dict[str, Any]:
        experiment = experiment_rows.require(connection, experiment_id)
        rows = checkpoint_rows.list_checkpoints(
            connection, experiment_id=experiment_id, states=("COMPLETED",)
        )
        in_use = checkpoint_rows.warm_starts(connection)
        rows = [row for row in rows if row["uuid"] not in in_use]
        metric = experiment["searcher_metric"]
        values = {row["uuid"]: json.loads(row["validation"]) if row["validation"] else {} for row in rows}
        candidates = [
            checkpoint_gc.Candidate(
                row["uuid"], row["trial_id"], row["steps"], as_number(values[row["uuid"]].get(metric))
            )
            for row in rows
        ]
        chosen = set(
            checkpoint_gc.plan(candidates, policy, smaller_is_better=bool(experiment["smaller_is_better"]))
        )
        return {
            "metric_name": metric,
            "checkpoints": [
                {
                    "TrialID": row["trial_id"],
                    "StepsCompleted": row["steps"],
                    "State": row["state"],
                    "UUID": row["uuid"],
                    "Resources": {path: int(size) for path, size in sizes_as_texts(row["resources"]).items()},
                    "ValidationMetrics": values[row["uuid"]],
                    "ReportTime": format_us(row["report_us"]),
                    "step": {
                        "trial_id": row["trial_id"],
                        "total_batches": row["steps"],
                        "validation": values[row["uuid"]] or None,
                    },
                }
                for row in rows
                if row["uuid"] in chosen
            ],
        }

    return await request.services.read(read)


async def list_checkpoints(request: ApiRequest) -> dict[str, Any]:
    """``GET experiments/{id}/checkpoints``."""
    return await checkpoints_page(request, experiment_id=request.path_params["experiment_id"])


async def checkpoints_page(
    request: ApiRequest, *, experiment_id: int | None = None, trial_id: int | None = None
) -> dict[str, Any]:
    """Return a page of checkpoints, ordered as asked: by an attribute, or by a validation metric.

    Without an order, the searcher metric is ordered best first. What has no value comes last.
    """
    sort_by = request.query_choice("sortByAttr", bindings.checkpointv1SortBy)
    metric = request.query("sortByMetric")
    order = request.query_choice("orderBy", bindings.v1OrderBy)
    states = tuple(
        name.removeprefix(_ANY_STATE) for name in request.query_choices("states", bindings.checkpointv1State)
    )
    offset, limit = request.query_int("offset"), request.query_int("limit")

    def read(connection: sqlite3.Connection) -> list[sqlite3.Row]:
        return checkpoint_rows.list_checkpoints(
            connection, trial_id=trial_id, experiment_id=experiment_id, states=states
        )

    rows = await request.services.read(read)
    is_descending = order == "ORDER_BY_DESC"
    is_best_first = sort_by == "SORT_BY_SEARCHER_METRIC" or metric is not None
    if is_best_first and order in (None, "ORDER_BY_UNSPECIFIED") and rows:
        is_descending = not rows[0]["smaller_is_better"]

    def key(row: sqlite3.Row) -> Any:
        if is_best_first:
            values = json.loads(row["validation"]) if row["validation"] else {}
            value = as_number(values.get(metric or row["searcher_metric"]))
            return None if value is None or value != value else value
        column = {
            "SORT_BY_UUID": "uuid",
            "SORT_BY_TRIAL_ID": "trial_id",
            "SORT_BY_BATCH_NUMBER": "steps",
            "SORT_BY_STATE": "state",
        }.get(sort_by or "", "report_us")
        return row[column]

    known = sorted((row for row in rows if key(row) is not None), key=key, reverse=is_descending)
    rows = known + [row for row in rows if key(row) is None]
    page = page_of(len(rows), offset, limit)
    return {
        "checkpoints": [checkpoint_json(row) for row in rows[page.start : page.end]],
        "pagination": page.to_json(),
    }


_ONE = "/experiments/{experiment_id:int}"
routes = [
    route("POST", "/experiments", create_experiment, access=USER, max_body_bytes=_MAX_SUBMISSION_BYTES),
    route("GET", "/experiments", list_experiments, access=USER),
    route("POST", "/experiments/continue", continue_experiment, access=USER),
    route("GET", _ONE, show_experiment, access=TRIAL),
    route("PATCH", _ONE, patch_experiment, access=USER),
    route("DELETE", _ONE, _action(experiments.delete, is_owners=True), access=USER),
    route("POST", f"{_ONE}/pause", _action(experiments.pause), access=USER),
    route("POST", f"{_ONE}/activate", _action(experiments.activate), access=USER),
    route("POST", f"{_ONE}/cancel", _action(experiments.cancel), access=USER),
    route("POST", f"{_ONE}/kill", _action(experiments.kill), access=USER),
    route("POST", f"{_ONE}/archive", _action(experiments.archive), access=USER),
    route("POST", f"{_ONE}/unarchive", _action(experiments.unarchive), access=USER),
    route("POST", "/projects/{project_id:int}/experiments/pause", _bulk(experiments.pause), access=USER),
    route(
        "POST", "/projects/{project_id:int}/experiments/activate", _bulk(experiments.activate), access=USER
    ),
    route("POST", "/projects/{project_id:int}/experiments/cancel", _bulk(experiments.cancel), access=USER),
    route("POST", "/projects/{project_id:int}/experiments/kill", _bulk(experiments.kill), access=USER),
    route("POST", "/projects/{project_id:int}/experiments/archive", _bulk(experiments.archive), access=USER),
    route(
        "POST", "/projects/{project_id:int}/experiments/unarchive", _bulk(experiments.unarchive), access=USER
    ),
    route(
        "DELETE",
        "/projects/{project_id:int}/experiments/delete",
        _bulk(experiments.delete, is_owners=True),
        access=USER,
    ),
    route("PUT", f"{_ONE}/labels/{{label}}", _relabel(set.add), access=USER),
    route("DELETE", f"{_ONE}/labels/{{label}}", _relabel(set.discard), access=USER),
    route("PUT", f"{_ONE}/retain_logs", retain_logs, access=USER),
    route("GET", f"{_ONE}/model_def", show_model_definition, access=TRIAL),
    route(
        "GET",
        f"{_ONE}/searcher/best_searcher_validation_metric",
        best_searcher_validation_metric,
        access=TRIAL,
    ),
    route("GET", f"{_ONE}/validation-history", validation_history, access=TRIAL),
    route("GET", "/experiments/metrics-stream/metric-names", stream_metric_names, access=USER),
    route("GET", f"{_ONE}/checkpoints", list_checkpoints, access=TRIAL),
    route("GET", f"/{_ONE}/preview_gc", preview_gc, access=USER),
]
