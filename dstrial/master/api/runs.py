"""Runs, which are trials across experiments: search them, and act on several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import orjson
from determined.common.api import bindings

from dstrial.errors import DstrialError, RequestError
from dstrial.master.advice import text_of
from dstrial.master.api.run_filters import in_order, wanted_by
from dstrial.master.api.table_columns import Table, run_table
from dstrial.master.clock import format_us
from dstrial.master.http.access import require_owner
from dstrial.master.http.fields import Fields
from dstrial.master.http.messages import message, page_of
from dstrial.master.http.router import USER, ApiRequest, route
from dstrial.master.http.serializers import elapsed_s, shown_config, stored, time_or_none
from dstrial.master.lifecycle import experiments, trials
from dstrial.master.services import Services
from dstrial.master.store import projects
from dstrial.master.store.database import Connection, Transaction
from dstrial.master.store.views import listings

Perform: TypeAlias = "Callable[[Transaction, listings.Run], Any]"


def run_json(services: Services, row: listings.Run) -> dict[str, Any]:
    """Return a row of ``listings.list_runs`` as a ``v1FlatRun``."""
    experiment = message(
        bindings.v1FlatRunExperiment,
        id=row.experiment_id,
        name=row.experiment_name,
        description=row.experiment_description,
        externalExperimentId=row.external_experiment_id,
        forkedFrom=row.parent_id,
        isMultitrial=row.num_trials > 1,
        progress=row.experiment_progress,
        resourcePool=services.settings.pool_name,
        searcherMetric=row.searcher_metric,
        searcherType=row.searcher_type,
        unmanaged=bool(row.unmanaged),
    )
    return message(
        bindings.v1FlatRun,
        id=row.id,
        archived=bool(row.experiment_archived),
        checkpointCount=row.checkpoint_count,
        checkpointSize=str(row.checkpoint_size),
        duration=elapsed_s(row.start_us, row.end_us),
        endTime=time_or_none(row.end_us),
        experiment=experiment,
        externalRunId=row.external_id,
        hyperparameters=shown_config(row.hparams, services.secret_names),
        labels=orjson.loads(row.labels),
        localId=f"{row.project_key}-{row.id}",
        logPolicyMatched=row.log_policy_matched,
        metadata=stored(row.metadata),
        parentArchived=bool(row.is_parent_archived),
        projectId=row.project_id,
        projectName=row.project_name,
        searcherMetricValue=row.searcher_metric_value,
        startTime=format_us(row.start_us),
        # As stored: Determined 0.38.1 tells ACTIVE here, whether it runs or waits.
        state=f"STATE_{row.state}",
        summaryMetrics=stored(row.summary_metrics),
        userId=row.owner_id,
        workspaceId=row.workspace_id,
        workspaceName=row.workspace_name,
    )


async def search_runs(request: ApiRequest) -> dict[str, Any]:
    """``POST runs``: a page of the runs that a filter wants."""
    body, services = request.body(), request.services
    table = run_table(services.settings.pool_name, services.secret_names)
    project_id, is_wanted, sort = (
        body.integer("projectId") or None,
        wanted_by(body.text("filter"), table),
        body.text("sort"),
    )

    def read(connection: Connection) -> list[listings.Run]:
        if project_id is not None:
            projects.require(connection, project_id)
        rows = [row for row in listings.list_runs(connection, project_id) if is_wanted(row)]
        return in_order(rows, sort, table)

    rows = await services.read(read)
    page = page_of(len(rows), body.integer("offset", -(2**31), 2**31), body.integer("limit", -(2**31), 2**31))
    return message(
        bindings.v1SearchRunsResponse,
        runs=[run_json(services, row) for row in rows[page.start : page.end]],
        pagination=page.to_json(),
    )


def _of_experiment(perform: Callable[[Transaction, int], Any], verb: str) -> Perform:
    """Return an action on a run's experiment, refused (400) where that has other runs."""

    def act(tx: Transaction, row: listings.Run) -> None:
        if row.num_trials > 1:
            raise RequestError(
                400,
                f"run {row.id} is one of {row.num_trials} of experiment {row.experiment_id} and cannot be {verb} "
                "alone; expected one with an experiment of its own. Ask for the experiment instead.",
            )
        perform(tx, row.experiment_id)

    return act


def _move(request: ApiRequest) -> Perform:
    body = request.body()
    target, skips = body.required_integer("destinationProjectId"), body.flag("skipMultitrial")

    def act(tx: Transaction, row: listings.Run) -> None:
        if row.num_trials > 1 and skips:
            return
        if listings.require_run(tx.connection, row.id).project_id != target:
            experiments.move(tx, row.experiment_id, target)

    return act


def _chosen(
    connection: Connection, body: Fields, project_id: int | None, table: Table[listings.Run]
) -> dict[int, int | None]:
    """Return the project of each run that a body names, by filter or else by number."""
    text = body.text("filter")
    if text:
        is_wanted = wanted_by(text, table)
        return {
            row.id: row.project_id for row in listings.list_runs(connection, project_id) if is_wanted(row)
        }
    held_by = {row.id: row.project_id for row in listings.list_runs(connection)}
    return {run_id: held_by.get(run_id) for run_id in body.ids("runIds")}


def _each(prepare: Callable[[ApiRequest], Perform], text: str, *, is_owners: bool = False) -> Any:
    async def handle(request: ApiRequest) -> dict[str, Any]:
        body, user, services = request.body(), request.user, request.services
        perform = prepare(request)
        project_id = body.integer("projectId") or body.integer("sourceProjectId") or None
        table = run_table(services.settings.pool_name, services.secret_names)
        results = []
        for run_id, held_by in (await services.read(_chosen, body, project_id, table)).items():

            def write(tx: Transaction, run_id: int = run_id, held_by: int | None = held_by) -> None:
                row = listings.require_run(tx.connection, run_id)
                if project_id not in (None, held_by):
                    raise RequestError(
                        404,
                        f"run {run_id} is in project {held_by}; expected one of project {project_id}. "
                        "Ask in its own project.",
                    )
                if is_owners:
                    require_owner(user, row.owner_id, f"run {run_id}")
                perform(tx, row)

            error = ""
            try:
                await services.write(write)
            except DstrialError as problem:
                error = text_of(problem)
            results.append(message(bindings.v1RunActionResult, id=run_id, error=error))
        return {"results": results}

    handle.__doc__ = f"``POST runs/…``: {text} several, each with its own result."
    return handle


def _plain(perform: Perform) -> Callable[[ApiRequest], Perform]:
    return lambda _request: perform


def _kill(tx: Transaction, row: listings.Run) -> None:
    trials.kill_trial(tx, row.id)


_ACTIONS = {
    "pause": _plain(_of_experiment(experiments.pause, "paused")),
    "resume": _plain(_of_experiment(experiments.activate, "resumed")),
    "archive": _plain(_of_experiment(experiments.archive, "archived")),
    "unarchive": _plain(_of_experiment(experiments.unarchive, "unarchived")),
    "kill": _plain(_kill),
    "move": _move,
}
_DELETE = _plain(_of_experiment(experiments.delete, "deleted"))
routes = [
    route("POST", "/runs", search_runs, access=USER),
    *(
        route("POST", f"/runs/{verb}", _each(prepare, verb), access=USER)
        for verb, prepare in _ACTIONS.items()
    ),
    route("POST", "/runs/delete", _each(_DELETE, "delete", is_owners=True), access=USER),
]
