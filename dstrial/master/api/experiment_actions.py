"""Actions on experiments, one or many, for example pause, kill, move, delete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from determined.common.api import bindings

from dstrial.config.experiment_config.submission import search_section
from dstrial.config.secrets import masked
from dstrial.errors import DstrialError
from dstrial.master.advice import text_of
from dstrial.master.http.access import require_owner
from dstrial.master.http.fields import Fields
from dstrial.master.http.messages import message
from dstrial.master.http.router import USER, ApiRequest, route
from dstrial.master.http.serializers import stored_states
from dstrial.master.lifecycle import experiments
from dstrial.master.store import experiments as experiment_rows
from dstrial.master.store import projects
from dstrial.master.store.database import Connection, Transaction
from dstrial.master.store.tokens import User
from dstrial.master.store.views import listings
from dstrial.search import PreviewedTrials, preview

Perform: TypeAlias = "Callable[[Transaction, int], Any]"
Prepare: TypeAlias = "Callable[[ApiRequest], Perform]"
"""Reads what an action needs from the body of a request, and returns the action."""

_MAX_DAYS = 32767
_ALL_PROJECTS = -1
"""In place of a project's id: experiments of any. Source: Determined 0.38.1, e2e_tests/tests/experiment, bulk actions."""


def plain(perform: Perform) -> Prepare:
    """Return an action that needs nothing but the experiment."""

    def prepare(_request: ApiRequest) -> Perform:
        return perform

    return prepare


def move(request: ApiRequest) -> Perform:
    """Put experiments into another project."""
    target = request.body().required_integer("destinationProjectId")
    return lambda tx, experiment_id: experiments.move(tx, experiment_id, target)


def retain_logs(request: ApiRequest) -> Perform:
    """Keep logs for a number of days; -1 for ever."""
    days = request.body().required_integer("numDays", -1, _MAX_DAYS)
    return lambda tx, experiment_id: experiments.patch(tx, experiment_id, log_retention_days=days)


def of_owner(perform: Perform, experiment_id: int, user: User | None) -> Callable[[Transaction], None]:
    """Return the write for one experiment; 403 if ``user`` may not change it."""

    def write(tx: Transaction) -> None:
        row = experiment_rows.require(tx.connection, experiment_id)
        if user is not None:
            require_owner(user, row.owner_id, f"experiment {experiment_id}")
        perform(tx, experiment_id)

    return write


def _one(prepare: Prepare, *, is_owners: bool = False) -> Callable[[ApiRequest], Any]:
    async def handle(request: ApiRequest) -> dict[str, Any]:
        user = request.user if is_owners else None
        await request.services.write(of_owner(prepare(request), request.path_params["experiment_id"], user))
        return {}

    return handle


def _many(prepare: Prepare, *, is_owners: bool = False) -> Callable[[ApiRequest], Any]:
    async def handle(request: ApiRequest) -> dict[str, Any]:
        body, project_id = request.body(), request.path_params["project_id"]
        perform, user = prepare(request), request.user if is_owners else None
        ids = await request.services.read(_chosen, project_id, body)
        results = []
        for experiment_id in ids:
            error = ""
            try:
                await request.services.write(
                    of_owner(_within(project_id, perform), experiment_id, user),
                )
            except DstrialError as problem:
                error = text_of(problem)
            results.append(message(bindings.v1ExperimentActionResult, error=error, id=experiment_id))
        return {"results": results}

    return handle


def _within(project_id: int, perform: Perform) -> Perform:
    """Return an action that refuses (404) experiments of other projects than this one."""

    def act(tx: Transaction, experiment_id: int) -> None:
        if project_id != _ALL_PROJECTS:
            experiment_rows.require_of_project(tx.connection, experiment_id, project_id)
        perform(tx, experiment_id)

    return act


def _chosen(connection: Connection, project_id: int, body: Fields) -> list[int]:
    """Return the experiments that a body names, by its filters or else by numbers.

    Source: Determined 0.38.1, where filters replace the numbers.
    """
    if project_id != _ALL_PROJECTS:
        projects.require(connection, project_id)
    filters = body.fields("filters")
    if filters is None:
        return list(dict.fromkeys(body.ids("experimentIds")))
    wanted = listings.ExperimentFilter(
        archived=filters.flag("archived"),
        name=filters.text("name"),
        description=filters.text("description"),
        user_ids=filters.ids("userIds"),
        states=stored_states(filters.texts("states") or []),
        labels=filters.texts("labels") or [],
        not_ids=filters.ids("excludedExperimentIds"),
        project_id=None if project_id == _ALL_PROJECTS else project_id,
    )
    return [row.id for row in listings.list_experiments(connection, wanted)]


_EACH: tuple[tuple[str, str, Prepare, bool], ...] = (
    ("POST", "pause", plain(experiments.pause), False),
    ("POST", "activate", plain(experiments.activate), False),
    ("POST", "cancel", plain(experiments.cancel), False),
    ("POST", "kill", plain(experiments.kill), False),
    ("POST", "archive", plain(experiments.archive), False),
    ("POST", "unarchive", plain(experiments.unarchive), False),
    ("POST", "move", move, False),
    ("PUT", "retain_logs", retain_logs, False),
)
_ONE = "/experiments/{experiment_id:int}"
_MANY = "/projects/{project_id:int}/experiments"
_DELETE = plain(experiments.delete)


async def preview_search(request: ApiRequest) -> dict[str, Any]:
    """``POST preview-hp-search``: how many trials train how long, by the config alone."""
    body = request.body()
    config = body.mapping("config")
    if config is None:
        raise body.wrong("config", "an experiment config")
    limits = request.services.settings.limits
    summary = await request.services.check(lambda: preview(search_section(config, limits)))
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
    *(
        route(method, f"{_ONE}/{verb}", _one(prepare, is_owners=is_owners), access=USER)
        for method, verb, prepare, is_owners in _EACH
    ),
    *(
        route(method, f"{_MANY}/{verb}", _many(prepare, is_owners=is_owners), access=USER)
        for method, verb, prepare, is_owners in _EACH
    ),
    route("DELETE", _ONE, _one(_DELETE, is_owners=True), access=USER),
    route("DELETE", f"{_MANY}/delete", _many(_DELETE, is_owners=True), access=USER),
    route(
        "DELETE",
        f"{_ONE}/tensorboard-files",
        _one(plain(experiments.delete_tensorboard_files), is_owners=True),
        access=USER,
    ),
]
