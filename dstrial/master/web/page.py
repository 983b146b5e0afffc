"""HTML documents: the web page, the login form, and pages of pending tasks."""

from __future__ import annotations

import functools
import secrets
from typing import Any, Literal

import jinja2
from starlette.responses import Response

from dstrial.master.http.router import PUBLIC, USER, ApiRequest, route
from dstrial.master.services import Services
from dstrial.master.store import commands
from dstrial.master.store.database import Connection
from dstrial.master.web import assets

_WAITING_REFRESH_S = 1


@functools.cache
def _templates() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("dstrial.master.web"), autoescape=True, undefined=jinja2.StrictUndefined
    )


def render(name: str, status: int = 200, **values: Any) -> Response:
    """Render a template with autoescaping and a strict Content-Security-Policy."""
    nonce = secrets.token_urlsafe(16)
    text = _templates().get_template(name).render(nonce=nonce, **values)
    headers = {
        "Content-Security-Policy": (
            f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; "
            "img-src 'self' blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
    return Response(text, status_code=status, media_type="text/html", headers=headers)


async def show_page(_request: ApiRequest) -> Response:
    if not assets.are_there():
        return render("message.html", 503, text=assets.MISSING)
    return render(
        "page.html", modules=[name for name in assets.names() if name.endswith(".js")], start="app.js"
    )


def task_state(connection: Connection, task_id: str) -> Literal["waiting", "ready", "ended"]:
    row = commands.require(connection, task_id)
    if row.state in commands.ENDED:
        return "ended"
    return "ready" if row.is_ready else "waiting"


def waiting_page(task_id: str) -> Response:
    return render(
        "task.html", task_id=task_id, refresh_s=_WAITING_REFRESH_S, text="is starting, or waits for slots"
    )


def ended_page(task_id: str) -> Response:
    return render("task.html", 404, task_id=task_id, refresh_s=0, text="has ended; start another one")


def login_page(services: Services, status: int = 200) -> Response:
    has_file = (services.state_dir / "credentials.json").exists()
    return render("login.html", status, has_file=has_file)


async def show_login(request: ApiRequest) -> Response:
    return login_page(request.services, 401)


async def show_link(request: ApiRequest) -> Response:
    """Return the login form, whose script redeems a login link's code after ``#``."""
    return login_page(request.services)


# Same URL paths as Determined's web interface, because Determined's client prints links to them.
_DEPTH = 6
routes = [
    route("GET", "//login", show_link, access=PUBLIC),
    route("GET", "//", show_page, access=USER, unauthenticated=show_login),
    *(
        route(
            "GET",
            "//det" + "".join(f"/{{part_{idx}}}" for idx in range(depth)),
            show_page,
            access=USER,
            unauthenticated=show_login,
        )
        for depth in range(_DEPTH + 1)
    ),
]
