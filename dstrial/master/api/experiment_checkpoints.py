"""Checkpoints of experiments and trials; what another policy would delete of them."""

from __future__ import annotations

import json
from typing import Any

from determined.common.api import bindings

from dstrial.master.clock import format_us
from dstrial.master.http.messages import page_of
from dstrial.master.http.router import TRIAL, USER, ApiRequest, route
from dstrial.master.http.serializers import checkpoint_json, sizes_as_texts
from dstrial.master.lifecycle import checkpoint_gc
from dstrial.master.store import checkpoints as checkpoint_rows
from dstrial.master.store import experiments as experiment_rows
from dstrial.master.store.database import Connection
from dstrial.master.store.reports.metric_values import as_number

_ANY_STATE = "STATE_"


async def preview_gc(request: ApiRequest) -> dict[str, Any]:
    """Answer with the checkpoints that another policy would delete."""
    experiment_id = request.path_params["experiment_id"]
    policy = checkpoint_gc.Policy(
        *(request.query_int(name) or 0 for name in ("saveExperimentBest", "saveTrialBest", "saveTrialLatest"))
    )

    def read(connection: Connection) -> dict[str, Any]:
        experiment = experiment_rows.require(connection, experiment_id)
        rows = checkpoint_rows.list_checkpoints(
            connection, experiment_id=experiment_id, states=("COMPLETED",)
        )
        in_use = checkpoint_rows.in_use(connection)
        rows = [row for row in rows if row.uuid not in in_use]
        metric = experiment.searcher_metric
        values = {row.uuid: json.loads(row.validation) if row.validation else {} for row in rows}
        candidates = [
            checkpoint_gc.Candidate(
                row.uuid, row.trial_id, row.steps, as_number(values[row.uuid].get(metric))
            )
            for row in rows
        ]
        chosen = set(
            checkpoint_gc.plan(candidates, policy, smaller_is_better=bool(experiment.smaller_is_better))
        )
        return {
            "metric_name": metric,
            "checkpoints": [
                {
                    "TrialID": row.trial_id,
                    "StepsCompleted": row.steps,
                    "State": row.state,
                    "UUID": row.uuid,
                    "Resources": {path: int(size) for path, size in sizes_as_texts(row.resources).items()},
                    "ValidationMetrics": values[row.uuid],
                    "ReportTime": format_us(row.report_us),
                    "step": {
                        "trial_id": row.trial_id,
                        "total_batches": row.steps,
                        "validation": values[row.uuid] or None,
                    },
                }
                for row in rows
                if row.uuid in chosen
            ],
        }

    return await request.services.read(read)


async def list_checkpoints(request: ApiRequest) -> dict[str, Any]:
    return await _page(request, experiment_id=request.path_params["experiment_id"])


async def list_trial_checkpoints(request: ApiRequest) -> dict[str, Any]:
    return await _page(request, trial_id=request.path_params["trial_id"])


async def _page(
    request: ApiRequest, *, experiment_id: int | None = None, trial_id: int | None = None
) -> dict[str, Any]:
    """Return a page of checkpoints, by an attribute or by a validation metric.

    Without an order, the searcher metric is ordered best first. What has no value comes last.
    """
    sort_by = request.query_choice("sortByAttr", bindings.checkpointv1SortBy)
    metric = request.query("sortByMetric")
    order = request.query_choice("orderBy", bindings.v1OrderBy)
    states = tuple(
        name.removeprefix(_ANY_STATE) for name in request.query_choices("states", bindings.checkpointv1State)
    )
    offset, limit = request.query_int("offset"), request.query_int("limit")

    def read(connection: Connection) -> list[checkpoint_rows.CheckpointInfo]:
        return checkpoint_rows.list_checkpoints(
            connection, trial_id=trial_id, experiment_id=experiment_id, states=states
        )

    rows = await request.services.read(read)
    is_descending = order == "ORDER_BY_DESC"
    is_best_first = sort_by == "SORT_BY_SEARCHER_METRIC" or metric is not None
    if is_best_first and order in (None, "ORDER_BY_UNSPECIFIED") and rows:
        is_descending = not rows[0].smaller_is_better

    def key(row: checkpoint_rows.CheckpointInfo) -> Any:
        if is_best_first:
            values = json.loads(row.validation) if row.validation else {}
            value = as_number(values.get(metric or row.searcher_metric))
            return None if value is None or value != value else value
        column = {
            "SORT_BY_UUID": "uuid",
            "SORT_BY_TRIAL_ID": "trial_id",
            "SORT_BY_BATCH_NUMBER": "steps",
            "SORT_BY_STATE": "state",
        }.get(sort_by or "", "report_us")
        return getattr(row, column)

    known = sorted((row for row in rows if key(row) is not None), key=key, reverse=is_descending)
    rows = known + [row for row in rows if key(row) is None]
    page = page_of(len(rows), offset, limit)
    names = request.services.secret_names
    return {
        "checkpoints": [checkpoint_json(row, names) for row in rows[page.start : page.end]],
        "pagination": page.to_json(),
    }


_ONE = "/experiments/{experiment_id:int}"
routes = [
    route("GET", f"{_ONE}/checkpoints", list_checkpoints, access=TRIAL),
    route("GET", f"/{_ONE}/preview_gc", preview_gc, access=USER),
    route("GET", "/trials/{trial_id:int}/checkpoints", list_trial_checkpoints, access=TRIAL),
]
