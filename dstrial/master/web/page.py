"""Routes of the web page, its files, events and login form.

The module also renders the pages that are shown for tasks that are starting or have ended.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import jinja2
from starlette.responses import Response

from dstrial.errors import RequestError
from dstrial.master.http.responses import Stream, event_stream
from dstrial.master.http.router import PUBLIC, USER, ApiRequest, route
from dstrial.master.services import Services
from dstrial.master.store import commands
from dstrial.master.store.database import Connection

STATIC = Path(__file__).with_name("static")
VENDOR = Path(__file__).with_name("vendor")
LIBRARIES = ("preact.js", "uplot.js", "uplot.css")  # installed into ``vendor/`` by `tools/page_libraries.sh`
MISSING = (
    "This installation of dstrial was made without the libraries of its page. In a checkout, `make venv` fetches them "
    "(tools/page_libraries.sh); a wheel that was built afterwards has them. The `det` command works without."
)
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_WAITING_REFRESH_S = 1  # period in which the page of a starting task reloads itself
_GAP_S = 0.5  # minimum time between two events of a stream; changes in between are batched
_PING_S = 15.0  # time without changes after which a heartbeat is sent
_MAX_TOPICS = 500  # per event
# Topics of the master's pubsub that the page uses.
_TOPIC_PREFIXES = ("experiment:", "trial:", "metrics:", "logs:", "command:", "job:")
_TOPICS = ("scheduler", "models")


@functools.cache
def _templates() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("dstrial.master.web"), autoescape=True, undefined=jinja2.StrictUndefined
    )


def render(name: str, status: int = 200, **values: Any) -> Response:
    """Return the HTML template ``name`` filled with ``values``, under a strict CSP."""
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


def has_libraries() -> bool:
    return all((VENDOR / name).is_file() for name in LIBRARIES)


def asset_names() -> list[str]:
    """Return the names of the page's static files, for example ``vendor/preact.js``."""
    own = (path.relative_to(STATIC) for path in STATIC.rglob("*") if path.suffix in _TYPES)
    return sorted(str(path) for path in own) + [f"vendor/{name}" for name in LIBRARIES]


def _read_asset(name: str) -> tuple[bytes, str] | None:
    """Return the content and media type of a file of the page; None if there is none."""
    directory = VENDOR if name.startswith("vendor/") else STATIC
    try:
        path = (directory / name.removeprefix("vendor/")).resolve()
        if path.is_relative_to(directory.resolve()) and path.suffix in _TYPES:
            return path.read_bytes(), _TYPES[path.suffix]
    except (OSError, ValueError):
        pass
    return None


async def get_asset(request: ApiRequest) -> Response:
    """Serve a file of the page with an ETag, by which browsers check if it changed."""
    name = "/".join(str(part) for part in request.path_params.values())
    found = await request.services.run(functools.partial(_read_asset, name))
    if found is None:
        raise RequestError(404, f"{name!r} is no file of the page; expected one that it names.")
    content, media_type = found
    headers = {
        "ETag": f'"{hashlib.sha256(content).hexdigest()[:16]}"',
        "Cache-Control": "no-cache",
        "X-Content-Type-Options": "nosniff",
        "Cross-Origin-Resource-Policy": "same-origin",
    }
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=media_type, headers=headers)


async def show_page(_request: ApiRequest) -> Response:
    if not has_libraries():
        return render("message.html", 503, text=MISSING)
    return render("page.html", modules=[name for name in asset_names() if name.endswith(".js")])


def service_state(connection: Connection, task_id: str) -> Literal["waiting", "ready", "ended"]:
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
    """Return the login page; its script logs in with the code of a login link."""
    return login_page(request.services)


def is_shown(topic: str) -> bool:
    return topic.startswith(_TOPIC_PREFIXES) or topic in _TOPICS


async def _events(services: Services) -> AsyncIterator[dict[str, Any] | None]:
    with services.pubsub.follow(is_shown) as follower:
        yield {"master": services.master_id}
        while True:
            topics = await follower.next(_PING_S)
            if not topics:
                yield None
                continue
            yield {"topics": sorted(topics)} if len(topics) <= _MAX_TOPICS else {"all": True}
            await asyncio.sleep(_GAP_S)


async def get_events(request: ApiRequest) -> Stream:
    """Stream server-sent events that name what has changed, such as "trial:7".

    The first event is ``{"master": id}``; the id changes when the master restarts. Later events are ``{"topics": […]}``, or
    ``{"all": true}`` if there are too many.
    """
    return event_stream(_events(request.services))


def _below(path: str, depths: range) -> list[str]:
    """Return one route path for each of ``depths``: ``path`` and so many parameters.

    For example, depth 2 appends ``/{part_0}/{part_1}``.
    """
    return [path + "".join(f"/{{part_{idx}}}" for idx in range(depth)) for depth in depths]


# Same URL paths as Determined's web interface, because Determined's client prints links to them.
_PAGES = ["//", *_below("//det", range(7))]
routes = [
    route("GET", "//login", show_link, access=PUBLIC),
    route("GET", "//page/events", get_events, access=USER),
    *(route("GET", path, show_page, access=USER, unauthenticated=show_login) for path in _PAGES),
    *(route("GET", path, get_asset, access=PUBLIC) for path in _below("//page/assets", range(1, 4))),
]
