"""The page's handler: reads a snapshot and renders it with everything escaped."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jinja2
from starlette.responses import Response

from dstrial.config.secrets import SecretNames, masked_json
from dstrial.errors import RequestError
from dstrial.master.api.webhooks import masked_url, seen_workspaces
from dstrial.master.clock import format_us, now_us
from dstrial.master.http.router import PUBLIC, USER, ApiRequest, route
from dstrial.master.http.serializers import shown_state
from dstrial.master.services import Services
from dstrial.master.store import allocations, commands, listings
from dstrial.master.store import webhooks as webhook_rows
from dstrial.master.store.database import Connection
from dstrial.master.store.experiments import Experiment
from dstrial.master.store.observe import stall_in
from dstrial.master.store.reports import logs
from dstrial.master.store.reports import metrics as metric_rows
from dstrial.master.store.tokens import User

_MAX_EXPERIMENTS = 200
_MAX_TRIALS = 50
_LOG_LINES = 200
_REFRESH_S = 10
_WAITING_REFRESH_S = 1
# Of a plot, pixels.
_WIDTH, _HEIGHT = 420, 180
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 24
_MAX_POINTS = 400


@functools.cache
def _templates() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("dstrial.master.web"), autoescape=True, undefined=jinja2.StrictUndefined
    )


def render(name: str, status: int = 200, **values: Any) -> Response:
    """Render a template: everything is escaped, and nothing foreign may load."""
    nonce = secrets.token_urlsafe(16)
    text = _templates().get_template(name).render(nonce=nonce, **values)
    headers = {
        "Content-Security-Policy": (
            f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
    return Response(text, status_code=status, media_type="text/html", headers=headers)


def _experiment(row: listings.ListedExperiment) -> dict[str, Any]:
    return {
        "id": row.id,
        "name": row.name,
        "owner": row.username,
        "state": shown_state(row).removeprefix("STATE_"),
        "progress": round(100 * row.progress, 1),
        "trials": row.num_trials,
        "metric": row.searcher_metric,
        "best": row.best_metric,
        "start": format_us(row.start_us)[:19].replace("T", " "),
        "reason": row.end_reason or "",
    }


def _series(connection: Connection, trial_id: int, group: str, metric: str) -> Plot | None:
    return line_plot(metric_rows.series(connection, trial_id, group, metric))


def _trials(connection: Connection, experiment: Experiment, names: SecretNames) -> list[dict[str, Any]]:
    rows = listings.list_trials(connection, now_us=now_us(), experiment_id=experiment.id, limit=_MAX_TRIALS)
    shown = []
    for row in rows:
        plots = [
            (f"validation: {experiment.searcher_metric}",
             _series(connection, row.id, "validation", experiment.searcher_metric)),
            ("training: loss", _series(connection, row.id, "training", "loss")),
        ]  # fmt: skip
        shown.append(
            {
                "id": row.id,
                "state": shown_state(row).removeprefix("STATE_"),
                "batches": row.total_batches,
                "restarts": row.restarts,
                "stall": _stall(connection, row.id),
                "best": row.searcher_metric_value,
                "hparams": json.dumps(json.loads(masked_json(row.hparams, names)), indent=1),
                "plots": [(title, plot) for title, plot in plots if plot is not None],
            }
        )
    return shown


def _stall(connection: Connection, trial_id: int) -> str:
    """Return who holds up the ranks of a trial; empty if nobody does."""
    allocation = allocations.live(connection, trial_id)
    found = None if allocation is None else stall_in(Path(allocation.directory))
    return "" if found is None else found[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Plot:
    """A plot with its axes, in pixels.

    Attributes:
        points: ``x,y x,y …`` of the line.
        dots: the same points, each with a text to show.
        y_labels: (y, text) of the highest and the lowest value.
        x_labels: (x, text) of the first and the last batch.
        left: where the y axis is.
        bottom: where the x axis is.
    """

    width: int
    height: int
    points: str
    dots: tuple[tuple[float, float, str], ...]
    y_labels: tuple[tuple[float, str], ...]
    x_labels: tuple[tuple[float, str], ...]
    left: int = _LEFT
    bottom: int = _HEIGHT - _BOTTOM


def line_plot(series: Sequence[tuple[int, float]]) -> Plot | None:
    """Return the plot of a metric over batches; None without a finite value.

    Args:
        series: batches and value, in the order of batches. Of a long one every n-th is drawn, and the last.
    """
    finite = [(batch, value) for batch, value in series if math.isfinite(value)]
    if not finite:
        return None
    step = -(-len(finite) // _MAX_POINTS)
    drawn = finite[::step] if (len(finite) - 1) % step == 0 else [*finite[::step], finite[-1]]
    low, high = min(value for _, value in drawn), max(value for _, value in drawn)
    first, last = drawn[0][0], drawn[-1][0]
    bottom = _HEIGHT - _BOTTOM

    def x_of(batch: int) -> float:
        return round(_LEFT + (batch - first) / ((last - first) or 1) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y_of(value: float) -> float:
        return round(bottom - (value - low) / ((high - low) or 1) * (bottom - _TOP), 1)

    dots = tuple((x_of(batch), y_of(value), f"batch {batch}: {value:.5g}") for batch, value in drawn)
    y_labels = (
        ((y_of(high), f"{high:.4g}"),)
        if high == low
        else ((y_of(high), f"{high:.4g}"), (y_of(low), f"{low:.4g}"))
    )
    x_labels = (
        ((x_of(first), str(first)),)
        if first == last
        else ((x_of(first), str(first)), (x_of(last), str(last)))
    )
    points = " ".join(f"{x},{y}" for x, y, _ in dots)
    return Plot(_WIDTH, _HEIGHT, points, dots, y_labels, x_labels)


def _webhook(webhook: webhook_rows.Webhook) -> dict[str, Any]:
    """Return what is shown of a webhook; its URL may be secret, so only the host."""
    last_us = webhook.delivery["lastTime"]
    return {
        "id": webhook.id,
        "name": webhook.name,
        "triggers": [
            " ".join(filter(None, (one.type.replace("_", " ").lower(), one.condition)))
            for one in webhook.triggers
        ],
        "url": masked_url(webhook.url),
        **{key: webhook.delivery[key] for key in ("delivered", "failed", "dropped", "waiting")},
        "last": "" if last_us is None else format_us(last_us)[:19].replace("T", " "),
        "result": webhook.delivery["lastResult"] or "",
    }


def _read(
    connection: Connection,
    experiment_id: int | None,
    trial_id: int | None,
    names: SecretNames,
    user: User,
) -> dict[str, Any]:
    workspace_ids = seen_workspaces(connection, user)
    rows = listings.list_experiments(
        connection, listings.ExperimentFilter(), is_descending=True, limit=_MAX_EXPERIMENTS
    )
    chosen = None
    if experiment_id is not None:
        chosen = listings.get_experiment(connection, experiment_id)
        if chosen is None:
            raise RequestError(404, f"experiment {experiment_id} is not found; expected one of the list.")
    trials = [] if chosen is None else _trials(connection, chosen, names)
    if trial_id is None and trials:
        trial_id = trials[0]["id"]
    lines: list[str] = []
    if trial_id is not None:
        wanted = logs.LogFilter(trial_id=trial_id, limit=_LOG_LINES, is_descending=True)
        lines = [logs.format_message(row) for row in reversed(logs.query(connection, wanted))]
    return {
        "experiments": [_experiment(row) for row in rows],
        "chosen": None if chosen is None else _experiment(chosen),
        "trials": trials,
        "trial_id": trial_id,
        "log": "".join(lines),
        "is_live": any(row.state == "ACTIVE" for row in rows),
        "webhooks": [_webhook(one) for one in webhook_rows.list_webhooks(connection, workspace_ids)],
    }


async def show_page(request: ApiRequest) -> Response:
    """``GET /``: experiments, trials of ``?experiment=N``, the log of ``&trial=N``.

    ``GET /det/experiments/N`` shows that experiment; ``core_v2.url_reverse_webui_exp_view`` of detached runs leads there.
    """
    services = request.services
    experiment_id = request.path_params.get("experiment_id", request.query_int("experiment"))
    values = await services.read(
        _read, experiment_id, request.query_int("trial"), services.secret_names, request.user
    )
    return render(
        "page.html",
        user=request.user.username,
        pool=services.settings.pool_name,
        num_slots=len(services.slots),
        damage=services.database.describe_trouble(),
        refresh_s=_REFRESH_S if values["is_live"] else 0,
        **values,
    )


def task_state(connection: Connection, task_id: str) -> Literal["waiting", "ready", "ended"]:
    """Say how far a command has come with its service.

    Raises:
        NotFoundError: there is none.
    """
    row = commands.require(connection, task_id)
    if row.state in commands.ENDED:
        return "ended"
    return "ready" if row.is_ready else "waiting"


def waiting_page(task_id: str) -> Response:
    """Return a page that asks again every second."""
    return render(
        "task.html", task_id=task_id, refresh_s=_WAITING_REFRESH_S, text="is starting, or waits for slots"
    )


def ended_page(task_id: str) -> Response:
    """Return the page of a task that has ended."""
    return render("task.html", 404, task_id=task_id, refresh_s=0, text="has ended; start another one")


def login_page(services: Services, status: int = 200) -> Response:
    """Return the login form, which names an existing password file."""
    has_file = (services.state_dir / "credentials.json").exists()
    return render("login.html", status, has_file=has_file)


async def show_login(request: ApiRequest) -> Response:
    """``GET /`` without a valid token: the login form."""
    return login_page(request.services, 401)


async def show_link(request: ApiRequest) -> Response:
    """``GET /login``: the form; a login link's code after ``#`` opens a session."""
    return login_page(request.services)


routes = [
    route("GET", "//login", show_link, access=PUBLIC),
    route("GET", "//", show_page, access=USER, unauthenticated=show_login),
    route(
        "GET",
        "//det/experiments/{experiment_id:int}",
        show_page,
        access=USER,
        unauthenticated=show_login,
    ),
]
