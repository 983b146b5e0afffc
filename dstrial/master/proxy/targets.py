"""Find, check and connect to services of tasks; filter forwarded headers.

In a browser, a task's services have the URL ``http://TASK.localhost:PORT/proxy/TASK…``. As this origin differs from the
master's, pages of services cannot send requests to the master as the user, nor set the master's cookies.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from starlette.datastructures import Headers

from dstrial.errors import RequestError
from dstrial.master.http import access
from dstrial.master.http.fields import shown
from dstrial.master.http.serializers import proxy_ports
from dstrial.master.store import tasks
from dstrial.master.store.database import Connection

if TYPE_CHECKING:
    from dstrial.master.services import Services

PREFIX = "/proxy/"  # of the URL path of every service

_SERVICE = re.compile(r"(?P<task>[^:]+)(?::(?P<port>[0-9]{1,5}))?")
_OWN_HOST = re.compile(r"(?P<task>[a-z0-9.-]+)\.localhost(:[0-9]{1,5})?")
# Headers and cookies that hold the master's tokens, which no service may see.
_SECRET = frozenset({b"authorization", b"x-user-token", access.ALLOCATION_HEADER.encode()})
_COOKIES = frozenset({access.COOKIE.encode(), access.GRANT_COOKIE.encode()})
_HOP_BY_HOP = frozenset(
    b"connection expect keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade".split()
)
_SOCKET = r": (\w+):{port} (\w+:\w+) (\w+) \S+ \S+ \S+ +(\d+) +\d+ (\d+) "
"""Pattern of a line of ``/proc/net/tcp``, tcp(5): local and remote address, state, user id, inode."""
_LISTEN = "0A"  # state of a listening socket
_LOOPBACK = "0100007F"  # 127.0.0.1


@dataclasses.dataclass(frozen=True, slots=True)
class Service:
    """A port of 127.0.0.1 on which an active task offers a service."""

    task_id: str
    port: int
    is_tcp: bool  # whether the service speaks TCP, not HTTP
    is_ready: bool


def task_of_host(headers: Headers) -> str | None:
    """Return the task id in a request's host name; None for the master's host name.

    Raises HTTP 403 for another host name, or if the request's Origin is another page.
    """
    host = headers.get("host", "").lower()
    found = _OWN_HOST.fullmatch(host)
    if found is None or len(headers.getlist("host")) != 1:
        access.check_host_and_origin(headers)
        return None
    origin = headers.get("origin")
    if origin is not None and origin.lower() != f"http://{host}":
        raise RequestError(
            403,
            f"the Origin of the request is {shown(origin)}; expected http://{host}. Ask from the service's own page.",
        )
    return found["task"]


async def find(services: Services, headers: Headers, method: str, path: str) -> Service:
    """Return the service that a request's path, still percent-encoded, names.

    Raises HTTP 401 or 403 if the request's token does not permit access to the service. Raises HTTP 404 if the task does not
    run or has no such service.
    """
    task_id = task_of_host(headers)
    identity = await access.identify(services, headers, method, task_id)
    if identity.allocation is not None:
        raise RequestError(
            403,
            "an allocation's token does not open the proxy; expected a user's. Use DET_USER_TOKEN in a task.",
        )
    service = await services.read(_find, unquote(path[len(PREFIX) :].partition("/")[0]))
    if task_id not in (None, service.task_id):
        raise RequestError(
            404, f"{headers['host']} is the address of task {task_id}; expected {PREFIX}{task_id}. Open that."
        )
    services.activity.touch(service.task_id)
    return service


def _find(connection: Connection, name: str) -> Service:
    """Return the service named ``TASK:PORT``, or the default service, named ``TASK``.

    Raises HTTP 404 if the task does not run or has no such service.
    """
    asked = _SERVICE.fullmatch(name)
    task_id = "" if asked is None else asked["task"]
    row = tasks.active_of(connection, task_id)
    if asked is None or row is None:
        raise RequestError(
            404,
            f"task {name[:80]!r} does not run; expected one that does. See `det task list`, and its log for why.",
        )
    port = row.ports.get("TENSORBOARD_PORT")
    if port is not None and asked["port"] is None:
        return Service(task_id, port, False, row.is_ready)
    offered = proxy_ports(row.config)
    for one in offered:
        is_default = asked["port"] is None and (len(offered) == 1 or one.get("default_service_id"))
        if is_default or str(one["proxy_port"]) == asked["port"]:
            return Service(task_id, int(one["proxy_port"]), bool(one.get("proxy_tcp")), True)
    names = ", ".join(str(one["proxy_port"]) for one in offered) or "none"
    raise RequestError(
        404,
        f"the port of {name[:80]!r} is none of environment.proxy_ports of its config ({names}); expected one of them. "
        "Add {proxy_port: N} there, or open /proxy/TASK:N/ for one of these.",
    )


async def connect(service: Service) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a service of a task.

    Raises:
        RequestError: 503 if no process listens on the port, 502 if the listening process belongs to another account.
    """
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    except OSError as error:
        raise RequestError(
            503,
            f"port {service.port} of task {service.task_id} does not answer; expected its service. Try again soon.",
        ) from error
    own_port = writer.get_extra_info("sockname")[1]
    account = await asyncio.to_thread(_socket_owner, service.port, own_port)
    if account not in (os.geteuid(), 0):
        writer.close()
        whose = "an unknown account" if account is None else f"user id {account}"
        raise RequestError(
            502,
            f"port {service.port} of task {service.task_id} is held by {whose}; expected user id {os.geteuid()}, which "
            "runs the master. Have the task offer another port in environment.proxy_ports.",
        )
    return reader, writer


def _socket_owner(port: int, own_port: int) -> int | None:
    """Return the id of the user whose process serves a connection to ``port``.

    ``own_port`` is the port of the master's end of the connection. If the service has not accepted the connection yet, return
    the user id of the socket that listens on ``port``; None if no socket does.
    """
    pattern = re.compile(_SOCKET.format(port=f"{port:04X}"))
    listener: int | None = None
    for name in ("tcp", "tcp6"):
        text = ""
        with contextlib.suppress(OSError):  # no IPv6
            text = Path(f"/proc/net/{name}").read_text()
        for address, peer, state, account, inode in pattern.findall(text):
            # A connection has no inode before accept(). IPv4-mapped IPv6 addresses end with the IPv4 address.
            if peer.endswith(f"{_LOOPBACK}:{own_port:04X}") and inode != "0":
                return int(account)
            if state == _LISTEN and (address.endswith(_LOOPBACK) or not address.strip("0")):
                listener = int(account) if listener is None else listener
    return listener


def _hop_by_hop(headers: Collection[tuple[bytes, bytes]]) -> frozenset[bytes]:
    # RFC 9110, section 7.6.1; Content-Length and Host are required and never dropped.
    values = [value.lower() for name, value in headers if name == b"connection"]
    named = {word.strip() for value in values for word in value.split(b",")}
    return (_HOP_BY_HOP | named) - {b"content-length", b"host"}


def forwarded(
    headers: Collection[tuple[bytes, bytes]], *, is_upgrade: bool = False
) -> list[tuple[bytes, bytes]]:
    """Return a request's headers without the master's tokens and hop-by-hop headers.

    With ``is_upgrade``, the headers that upgrade the connection to a WebSocket are not removed.
    """
    kept, dropped = [], _hop_by_hop(headers)
    for name, value in headers:
        if name in _SECRET or (name in dropped and not (is_upgrade and name in (b"connection", b"upgrade"))):
            continue
        if name == b"cookie":
            parts = [part.strip() for part in value.split(b";")]
            value = b"; ".join(part for part in parts if part.partition(b"=")[0] not in _COOKIES)
            if not value:
                continue
        kept.append((name, value))
    return kept


def answered(headers: Collection[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    dropped = _hop_by_hop(headers)
    return [(name, value) for name, value in headers if name not in dropped]
