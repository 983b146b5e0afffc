"""Which service a path of the proxy means, and which headers reach it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

from dstrial.errors import RequestError
from dstrial.master.http.access import ALLOCATION_HEADER, COOKIE
from dstrial.master.store import tasks
from dstrial.master.store.database import Connection

PREFIX = "/proxy/"

_SERVICE = re.compile(r"(?P<task>[^:]+)(?::(?P<port>[0-9]{1,5}))?")
_SECRET = frozenset({b"authorization", b"x-user-token", ALLOCATION_HEADER.encode()})
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"expect",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class Service:
    """A port of this machine on which a living task answers.

    Attributes:
        port: on 127.0.0.1.
        is_tcp: whether it speaks no HTTP, so that a WebSocket carries its bytes.
        is_ready: whether it has answered already.
    """

    task_id: str
    port: int
    is_tcp: bool
    is_ready: bool


def service_of(path: str) -> str:
    """Return the service in a raw path below :data:`PREFIX`: task id, maybe ``:port``."""
    return unquote(path[len(PREFIX) :].partition("/")[0])


def find(connection: Connection, name: str) -> Service:
    """Return the service of a name.

    A TensorBoard has one; other tasks have those of ``environment.proxy_ports`` of their config, by port.

    Raises:
        RequestError: 404, there is no such task, it does not run, or does not offer that port.
    """
    asked = _SERVICE.fullmatch(name)
    task_id = "" if asked is None else asked["task"]
    row = tasks.living_of(connection, task_id)
    if asked is None or row is None:
        raise RequestError(
            404,
            f"task {name[:80]!r} does not run; expected one that does. See `det task list`, and its log for why.",
        )
    port = json.loads(row.ports).get("TENSORBOARD_PORT")
    if port is not None and asked["port"] is None:
        return Service(task_id, port, False, row.is_ready)
    offered: list[dict[str, Any]] = (json.loads(row.config).get("environment") or {}).get("proxy_ports") or []
    for one in offered:
        is_default = asked["port"] is None and (len(offered) == 1 or one.get("default_service_id"))
        if is_default or str(one["proxy_port"]) == asked["port"]:
            return Service(task_id, int(one["proxy_port"]), bool(one.get("proxy_tcp")), True)
    shown = ", ".join(str(one["proxy_port"]) for one in offered) or "none"
    raise RequestError(
        404,
        f"the port of {name[:80]!r} is none of environment.proxy_ports of its config ({shown}); expected one of them. "
        "Add {proxy_port: N} there, or open /proxy/TASK:N/ for one of these.",
    )


def forwarded(
    headers: Iterable[tuple[bytes, bytes]], *, is_upgrade: bool = False
) -> list[tuple[bytes, bytes]]:
    """Return a request's headers for its service: no connection headers, no token.

    Names are in lower case; with ``is_upgrade`` the headers that ask for a WebSocket stay.
    """
    kept = []
    for name, value in headers:
        if name in _SECRET or (
            name in _HOP_BY_HOP and not (is_upgrade and name in (b"connection", b"upgrade"))
        ):
            continue
        if name == b"cookie":
            value = b"; ".join(
                part.strip()
                for part in value.split(b";")
                if part.strip().partition(b"=")[0] != COOKIE.encode()
            )
            if not value:
                continue
        kept.append((name, value))
    return kept


def answered(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers of a service's answer that its client sees."""
    return [(name.lower(), value) for name, value in headers if name.lower() not in _HOP_BY_HOP]
