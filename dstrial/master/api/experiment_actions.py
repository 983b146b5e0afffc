"""Routes that act on an experiment: pause, kill, move, delete etc."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from determined.common.api import bindings

from dstrial.config.experiment_config.submission import search_section
from dstrial.config.secrets import masked
from dstrial.master.http.access import require_owner
from dstrial.master.http.responses import message
from dstrial.master.http.router import USER, ApiRequest, Handler, route, writes
from dstrial.master.lifecycle import experiments
from dstrial.master.store import experiments as experiment_rows
from dstrial.master.store.database import Transaction
from dstrial.search import PreviewedTrials, preview

Perform: TypeAlias = "Callable[[Transaction, int], Any]"

_MAX_DAYS = 32767  # longest log retention, a smallint in Determined's database


@writes
def move(tx: Transaction, request: ApiRequest) -> None:
    target = request.body().required_integer("destinationProjectId")
    experiments.move(tx, request.path_params["experiment_id"], target)


@writes
def retain_logs(tx: Transaction, request: ApiRequest) -> None:
    days = request.body().required_integer("numDays", -1, _MAX_DAYS)
    experiments.patch(tx, request.path_params["experiment_id"], log_retention_days=days)


def _one(perform: Perform, *, is_owners: bool = False) -> Handler:
    @writes
    def handle(tx: Transaction, request: ApiRequest) -> None:
        experiment_id = request.path_params["experiment_id"]
        row = experiment_rows.require(tx.connection, experiment_id)
        if is_owners:
            require_owner(request.user, row.owner_id, f"experiment {experiment_id}")
        perform(tx, experiment_id)

    return handle


_PLAIN: dict[str, Perform] = {
    "pause": experiments.pause,
    "activate": experiments.activate,
    "cancel": experiments.cancel,
    "kill": experiments.kill,
    "archive": experiments.archive,
    "unarchive": experiments.unarchive,
}
_ONE = "/experiments/{experiment_id:int}"


async def preview_search(request: ApiRequest) -> dict[str, Any]:
    body = request.body()
    config = body.mapping("config")
    if config is None:
        raise body.wrong("config", "an experiment config")
    summary = await request.services.check(lambda: preview(search_section(config)))
    return message(
        bindings.v1PreviewHPSearchResponse,
        summary=message(
            bindings.v1SearchSummary,
            config=masked(summary.config, request.services.secret_names),
            trials=[_trials(trials) for trials in summary.trials],
        ),
    )


def _trials(trials: PreviewedTrials) -> dict[str, Any]:
    unit = message(
        bindings.v1SearchUnit, maxLength=trials.value is None, name=trials.unit, value=trials.value
    )
    return message(bindings.v1TrialSummary, count=trials.count, unit=unit)


routes = [
    route("POST", "/preview-hp-search", preview_search, access=USER),
    *(route("POST", f"{_ONE}/{verb}", _one(perform), access=USER) for verb, perform in _PLAIN.items()),
    route("POST", f"{_ONE}/move", move, access=USER),
    route("PUT", f"{_ONE}/retain_logs", retain_logs, access=USER),
    route("DELETE", _ONE, _one(experiments.delete, is_owners=True), access=USER),
    route(
        "DELETE",
        f"{_ONE}/tensorboard-files",
        _one(experiments.delete_tensorboard_files, is_owners=True),
        access=USER,
    ),
]
