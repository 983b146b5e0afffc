"""Proxy WebSockets: forward the bytes of a connection after the handshake.

An HTTP service performs the handshake itself. For a raw TCP service (``proxy_tcp``, ``det experiment create --publish``) the
proxy performs the handshake and wraps the bytes in binary frames with ``wsproto``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

from starlette.datastructures import Headers
from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Ping, TextMessage
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import LocalProtocolError, generate_accept_token

from dstrial.errors import RequestError
from dstrial.master.http import access
from dstrial.master.http.responses import Problem, error_response, problem_of
from dstrial.master.proxy import targets

if TYPE_CHECKING:
    from dstrial.master.services import Services

logger = logging.getLogger("dstrial.master.proxy")

_CHUNK_BYTES = 64 * 1024  # per read
# Bytes per read: at most some thousand empty frames, which block the event loop for 10 ms.
_FRAMES_CHUNK_BYTES = 4 * 1024
_MAX_HEAD_BYTES = 128 * 1024  # above the size limit of HTTP heads, which was checked before


def websocket_protocol(services: Services) -> type[asyncio.Protocol]:
    return cast("type[asyncio.Protocol]", functools.partial(WebSocketProxy, services))


class WebSocketProxy(asyncio.StreamReaderProtocol):
    """Protocol class for uvicorn's WebSockets: connects a client to a task's service."""

    def __init__(self, services: Services, *, config: Any, server_state: Any, app_state: Any) -> None:
        del config, app_state
        super().__init__(asyncio.StreamReader(_MAX_HEAD_BYTES), self._begin)
        self._services = services
        self._connections: set[Any] = server_state.connections
        self._client: asyncio.BaseTransport | None = None
        self._serving: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._client = transport
        self._connections.add(self)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        if self._serving is not None:
            self._serving.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if self._client is not None:
            self._client.close()

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving = asyncio.ensure_future(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Connection boundary, as in http_proxy: log every exception.
        with contextlib.closing(writer):
            try:
                request = await reader.readuntil(b"\r\n\r\n")
                service, headers = await self._find(request)
                up_reader, up_writer = await targets.connect(service)
            except Exception as error:
                problem = problem_of(error)
                if problem.status >= 500 and not isinstance(error, RequestError):
                    logger.exception("a WebSocket is answered %d", problem.status)
                writer.write(_refusal(problem))
                return
            with contextlib.closing(up_writer):
                if service.is_tcp:
                    key = headers.get("sec-websocket-key", "").encode()
                    writer.write(
                        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                        b"Sec-WebSocket-Accept: %b\r\n\r\n" % generate_accept_token(key)
                    )
                    frames = Connection(ConnectionType.SERVER)
                    code = await _wait_for_either(
                        self._unpack(service, frames, reader, writer, up_writer),
                        self._copy(
                            service,
                            up_reader,
                            writer,
                            lambda data: frames.send(BytesMessage(bytearray(data))),
                        ),
                    )
                    writer.write(frames.send(CloseConnection(code)))
                else:
                    kept = targets.forwarded(headers.raw, is_upgrade=True)
                    line, _, _ = request.partition(b"\r\n")
                    up_writer.write(b"\r\n".join([line, *(b"%b: %b" % header for header in kept), b"", b""]))
                    await _wait_for_either(
                        self._copy(service, reader, up_writer), self._copy(service, up_reader, writer)
                    )

    async def _find(self, request: bytes) -> tuple[targets.Service, Headers]:
        line, *lines = request.removesuffix(b"\r\n\r\n").split(b"\r\n")
        raw = [(name.lower(), value) for name, _, value in (each.partition(b": ") for each in lines)]
        headers = Headers(raw=raw)
        path = line.split(b" ")[1].split(b"?", 1)[0].decode("latin-1")
        if not path.startswith(targets.PREFIX):
            raise RequestError(
                404,
                f"{path[:120]} is no WebSocket; expected {targets.PREFIX}TASK/. Ask for it without an upgrade.",
            )
        # "POST" enables the CSRF check: pages of other local programs must not use the cookie.
        service = await targets.find(self._services, headers, "POST", path)
        if targets.task_of_host(headers) is None and access.token_of(headers)[1]:
            raise RequestError(
                403,
                f"the Host of the request is {headers['host']}; expected {service.task_id}.localhost, where a browser shows "
                "this task. Ask from the service's own page, or send the token as `Authorization: Bearer`.",
            )
        return service, headers

    async def _copy(
        self,
        service: targets.Service,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pack: Callable[[bytes], bytes] = bytes,
    ) -> int:
        with contextlib.suppress(OSError, LocalProtocolError):  # the peer has disconnected
            while data := await reader.read(_CHUNK_BYTES):
                self._services.activity.touch(service.task_id)
                writer.write(pack(data))
                await writer.drain()
        return CloseReason.NORMAL_CLOSURE

    async def _unpack(
        self,
        service: targets.Service,
        frames: Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        up_writer: asyncio.StreamWriter,
    ) -> int:
        """Send the contents of a client's frames to a service until the WebSocket closes.

        Returns the WebSocket's close code.
        """
        with contextlib.suppress(OSError):
            while data := await reader.read(_FRAMES_CHUNK_BYTES):
                self._services.activity.touch(service.task_id)
                await asyncio.sleep(0)  # yield: reading buffered bytes does not
                frames.receive_data(data)
                for event in frames.events():
                    if isinstance(event, BytesMessage):
                        up_writer.write(event.data)
                    elif isinstance(event, TextMessage):
                        up_writer.write(event.data.encode())
                    elif isinstance(event, Ping):
                        writer.write(frames.send(event.response()))
                    elif isinstance(event, CloseConnection):
                        is_clients = frames.state is ConnectionState.REMOTE_CLOSING
                        return CloseReason.NORMAL_CLOSURE if is_clients else event.code
                # Backpressure: stop reading from a peer that does not read, so that buffers stay small.
                await writer.drain()
                await up_writer.drain()
        return CloseReason.NORMAL_CLOSURE


def _refusal(problem: Problem) -> bytes:
    response = error_response(problem)
    headers = b"".join(b"%b: %b\r\n" % header for header in response.raw_headers)
    head = f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}\r\n".encode()
    return head + headers + b"connection: close\r\n\r\n" + bytes(response.body)


async def _wait_for_either(*directions: Coroutine[Any, Any, int]) -> int:
    """Run coroutines until one ends, then cancel the others; return its result.

    The results are close codes of a WebSocket. If several coroutines end at the same time, return the largest code.
    """
    both = [asyncio.ensure_future(direction) for direction in directions]
    try:
        ended, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        return max(one.result() for one in ended)
    finally:
        for one in both:
            one.cancel()
        await asyncio.gather(*both, return_exceptions=True)
