"""WebSockets to services: forwards a connection's bytes after its handshake.

A service that speaks HTTP makes the handshake itself. For one that does not (``proxy_tcp``), as ``det experiment create
--publish`` asks for, the handshake is made here, and what it says travels in binary frames, which ``wsproto`` reads and writes.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from starlette.datastructures import Headers
from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Ping, Pong, TextMessage
from wsproto.extensions import Extension
from wsproto.frame_protocol import CloseReason, FrameDecoder, FrameProtocol, Opcode, RsvBits
from wsproto.utilities import generate_accept_token

from dstrial.errors import RequestError
from dstrial.master.http import access
from dstrial.master.http.errors import Problem, status_and_text
from dstrial.master.proxy import targets as named

if TYPE_CHECKING:
    from dstrial.master.services import Services

logger = logging.getLogger("dstrial.master.proxy")

_MAX_EARLY_BYTES = 1 << 20
_MAX_FRAME_BYTES = 16 * 2**20


def websocket_protocol(services: Services) -> type[asyncio.Protocol]:
    """Return what uvicorn makes of a connection that asks to become a WebSocket."""
    return cast("type[asyncio.Protocol]", functools.partial(WebSocketProxy, services))


class FrameLimit(Extension):
    """Refuses client frames over 16 MiB at their header, which wsproto does not.

    It is never offered in a handshake; wsproto has extensions see each header (``frame_protocol.py: extension_processing``).
    """

    name = "dstrial-frame-limit"

    def enabled(self) -> bool:
        """Whether frames are shown to it."""
        return True

    def offer(self) -> bool:
        """Whether a client would ask for it."""
        return False

    def frame_inbound_header(
        self, proto: FrameDecoder | FrameProtocol, opcode: Opcode, rsv: RsvBits, payload_length: int
    ) -> CloseReason | RsvBits:
        """Judge a header; no reserved bit is this extension's."""
        del proto, opcode, rsv
        if payload_length > _MAX_FRAME_BYTES:
            return CloseReason.MESSAGE_TOO_BIG
        return RsvBits(False, False, False)


def server_frames() -> Connection:
    """Return what reads a client's frames and writes ours, behind the handshake."""
    return Connection(ConnectionType.SERVER, [FrameLimit()])


class _ServiceEnd(asyncio.Protocol):
    """The connection to the service."""

    def __init__(self, tunnel: WebSocketProxy, begin: Callable[[asyncio.Transport], None]) -> None:
        self._proxy = tunnel
        self._begin = begin

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Here, since the service may speak before whoever has asked for the connection goes on.
        self._begin(cast("asyncio.Transport", transport))

    def data_received(self, data: bytes) -> None:
        self._proxy.from_service(data)

    def pause_writing(self) -> None:
        self._proxy.hold_client(True)

    def resume_writing(self) -> None:
        self._proxy.hold_client(False)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._proxy.service_lost()


class WebSocketProxy(asyncio.Protocol):
    """The connection of a client, and how it is tied to that of a service.

    ``config``, ``server_state`` (which counts this connection) and ``app_state`` are uvicorn's.
    """

    def __init__(self, services: Services, *, config: Any, server_state: Any, app_state: Any) -> None:
        del config, app_state
        self._services = services
        self._connections: set[Any] = server_state.connections
        self._transport: asyncio.Transport | None = None
        self._upstream: asyncio.Transport | None = None
        self._frames: Connection | None = None
        self._is_client_behind = False
        self._due_pong: bytes | None = None
        self._task: asyncio.Task[None] | None = None
        self._task_id = ""
        self._early = bytearray()

    # The client's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the client's connection over."""
        self._transport = cast("asyncio.Transport", transport)
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        """Begin with the request, which comes whole, and pass on what follows."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._open(data))
        elif self._upstream is None:
            self._early += data
            if len(self._early) > _MAX_EARLY_BYTES:
                self._close()
        else:
            self._to_service(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Let the service go as well."""
        del exc
        self._connections.discard(self)
        if self._task is not None:
            self._task.cancel()
        if self._upstream is not None:
            self._upstream.close()
        self._transport = None

    def pause_writing(self) -> None:
        """Let the service wait for the client."""
        self._is_client_behind = True
        if self._upstream is not None and not self._upstream.is_closing():
            self._upstream.pause_reading()

    def resume_writing(self) -> None:
        """Let the service go on."""
        self._is_client_behind = False
        pong, self._due_pong = self._due_pong, None
        if pong is not None and self._frames is not None:
            self._write(self._frames.send(Pong(pong)))
        if self._upstream is not None and not self._upstream.is_closing():
            self._upstream.resume_reading()

    def shutdown(self) -> None:
        """End the connection; uvicorn calls this when the server ends."""
        self._close()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # The handshake

    async def _open(self, request: bytes) -> None:
        # The boundary of a connection, as that of a request.
        try:
            await self._connect(request)
        except Exception as error:
            problem = status_and_text(error)
            if problem.status >= 500 and problem.status != 503:
                logger.exception("a WebSocket is answered %d", problem.status)
            self._refuse(problem)

    async def _connect(self, request: bytes) -> None:
        lines = request.split(b"\r\n")
        target = lines[0].split(b" ")[1]
        raw = [(name, value) for name, _, value in (line.partition(b": ") for line in lines[1:-2])]
        headers = Headers(raw=raw)
        access.check_host_and_origin(headers)
        path = target.split(b"?", 1)[0].decode("latin-1")
        # As a request that changes something: a page of another program on this machine must not use the cookie.
        identity = await access.identify(self._services, headers, "POST")
        if identity.allocation is not None:
            raise RequestError(403, "an allocation's token does not open the proxy; expected a user's.")
        if not path.startswith(named.PREFIX):
            raise RequestError(
                404,
                f"{path[:120]} is no WebSocket; expected {named.PREFIX}TASK/. Ask for it without an upgrade.",
            )
        service = await self._services.read(named.find, named.service_of(path))
        self._task_id = service.task_id
        self._services.activity.touch(service.task_id)
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: _ServiceEnd(self, functools.partial(self._begin, service, lines[0], raw)),
                "127.0.0.1",
                service.port,
            )
        except OSError as error:
            raise RequestError(
                503,
                f"port {service.port} of task {service.task_id} does not answer; expected its service. Try again.",
            ) from error

    def _begin(
        self,
        service: named.Service,
        line: bytes,
        raw: list[tuple[bytes, bytes]],
        upstream: asyncio.Transport,
    ) -> None:
        """Tie the two connections, before the service says anything."""
        if self._transport is None:
            upstream.close()
            return
        if service.is_tcp:
            key = Headers(raw=raw).get("sec-websocket-key", "").encode()
            self._frames = server_frames()
            self._transport.write(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                b"Sec-WebSocket-Accept: %b\r\n\r\n" % generate_accept_token(key)
            )
        else:
            kept = named.forwarded(((name.lower(), value) for name, value in raw), is_upgrade=True)
            upstream.write(b"\r\n".join([line, *(b"%b: %b" % header for header in kept), b"", b""]))
        self._upstream = upstream
        if self._early:
            self._to_service(bytes(self._early))
            self._early.clear()

    def _refuse(self, problem: Problem) -> None:
        if self._transport is None:
            return
        body = json.dumps(
            {"error": {"code": problem.code, "reason": problem.reason, "error": problem.text}}
        ).encode()
        self._transport.write(
            b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b"
            % (problem.status, problem.reason.encode(), len(body), body)
        )
        self._transport.close()

    # What goes to and fro

    def _to_service(self, data: bytes) -> None:
        self._services.activity.touch(self._task_id)
        if self._upstream is None or self._upstream.is_closing():
            return
        if self._frames is None:
            self._upstream.write(data)
            return
        self._frames.receive_data(data)
        for event in self._frames.events():
            if isinstance(event, BytesMessage):
                self._upstream.write(event.data)
            elif isinstance(event, TextMessage):
                self._upstream.write(event.data.encode())
            elif isinstance(event, Ping):
                self._answer_ping(bytes(event.payload))
            elif isinstance(event, CloseConnection):
                is_clients = self._frames.state is ConnectionState.REMOTE_CLOSING
                self._end_frames(CloseReason.NORMAL_CLOSURE if is_clients else event.code)
                return

    def _answer_ping(self, payload: bytes) -> None:
        """Answer a ping; a client that does not read gets only the last (RFC 6455, 5.5.3)."""
        assert self._frames is not None
        if self._is_client_behind:
            self._due_pong = payload
        else:
            self._write(self._frames.send(Pong(payload)))

    def _end_frames(self, code: int) -> None:
        assert self._frames is not None
        self._write(self._frames.send(CloseConnection(code)))
        self._frames = None
        if self._upstream is not None:
            self._upstream.close()
        self._close()

    def from_service(self, data: bytes) -> None:
        """Pass on what the service says."""
        self._services.activity.touch(self._task_id)
        self._write(data if self._frames is None else self._frames.send(BytesMessage(data)))

    def service_lost(self) -> None:
        """End the client's connection, behind what is still on its way to it."""
        if self._frames is not None:
            self._end_frames(CloseReason.NORMAL_CLOSURE)
        self._close()

    def hold_client(self, is_held: bool) -> None:
        """Let the client wait for the service, or go on."""
        if self._transport is None or self._transport.is_closing():
            return
        if is_held:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)
