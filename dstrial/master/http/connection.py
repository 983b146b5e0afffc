"""Clients' connections: uvicorn's, bounded in what each sends and in their number.

uvicorn and llhttp bound neither a request's head nor what lies between the pieces of its body, give no deadline but that of
an idle connection, and queue as many requests as a client sends without reading (uvicorn 0.54
``protocols/http/httptools_impl.py``).
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import math
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, cast

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from dstrial.master.http.errors import problem
from dstrial.master.http.peers import SCOPE_EXTENSION, UNKNOWN, Peer

if TYPE_CHECKING:
    from dstrial.master.http.peers import Accounts

DEFAULT_NUM_CONNECTIONS = 1000
logger = logging.getLogger("dstrial.master.http")

_SWEEP_PERIOD_S = 1.0
_LOG_PERIOD_S = 60.0
_MAX_REFUSED = 32


class _RefusedError(Exception):
    """Stops the parser from within a callback; the refusal stands in the connection."""


class Connection(HttpToolsProtocol):
    """A connection that is refused when it takes too much.

    Args:
        limiter: where it is one of many.
        is_at_owner_socket: whether it came by the UNIX socket of the state directory.
        config: uvicorn's.
        server_state: uvicorn's.
        app_state: uvicorn's.
        _loop: uvicorn's.

    Attributes:
        peer: who is at the other end.
        deadline_s: when what is expected of the client has to be there, in the loop's time; infinite while it waits for
            an answer.
    """

    def __init__(
        self,
        limiter: ConnectionLimiter,
        *,
        is_at_owner_socket: bool = False,
        config: Any,
        server_state: Any,
        app_state: Any,
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.peer: Peer = UNKNOWN
        self.deadline_s = math.inf
        self._limiter = limiter
        self._limits = limiter.limits
        self._is_at_owner_socket = is_at_owner_socket
        self._extension: dict[object, object] = {}
        self._refusal: tuple[int, str] | None = None
        self._is_refused = False
        self._is_deaf = False
        self._is_in_head = True
        self._has_body_deadline = True
        self._body_began_s = 0.0
        self._num_body_bytes = 0
        self._num_unframed_bytes = 0
        self._has_progressed = False

    # How it begins and ends

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        """Ask who it is, and let it in or not."""
        super().connection_made(transport)
        self.peer = self._limiter.accounts.peer(transport, is_at_owner_socket=self._is_at_owner_socket)
        self._extension = {"peer": self.peer, "connection": self}
        reason = self._limiter.accounts.refusal(self.peer)
        if reason is not None:
            self._limiter.log_refused(self.peer.account)
            self._refuse(403, reason)
            return
        self.deadline_s = self.loop.time() + self._limits.head_s
        if self._is_at_owner_socket:
            # The owner's way in is not the one that has to go for others.
            return
        if not self._limiter.add(self, len(self.connections)):
            self._refuse(
                503, "all connections of the master are in use; expected a free one. Try again soon."
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._limiter.remove(self)
        self.pipeline.clear()
        # Else the connection and its last request would keep each other until the garbage collector comes.
        self._extension.pop("connection", None)
        super().connection_lost(exc)

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for an answer: no request is whole, or they do not read."""
        is_answering = (
            self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        )
        return not is_answering or self.flow.write_paused

    def drop(self) -> None:
        """Close it at once."""
        self.transport.abort()

    def expire(self, now_s: float) -> None:
        """Close it since its deadline has passed, with a word where a request has begun."""
        if self._is_refused or self.transport.is_closing():
            self.drop()
        elif not self._is_in_head and self.flow.read_paused and not self._is_answered:
            # It is us who do not take the body.
            self._body_began_s = now_s
            self._num_body_bytes = 0
            self.deadline_s = now_s + self._limits.body_s
        elif self._is_in_head and self._num_unframed_bytes == 0:
            self.transport.close()
        else:
            part = "head" if self._is_in_head else "body"
            seconds = self._limits.head_s if self._is_in_head else self._limits.body_s
            self._refuse(
                408,
                f"the {part} of the request is incomplete after {seconds:g} s; expected all of it. Send it faster.",
            )

    def lift_body_deadline(self) -> None:
        """Let the body take as long as it likes: that is a matter of the task's service."""
        self._has_body_deadline = False
        if not self._is_in_head:
            self.deadline_s = math.inf

    # What comes

    def data_received(self, data: bytes) -> None:
        """Parse what has come, as far as it is within bounds."""
        if self._is_refused:
            # Read and forgotten, so that the refusal arrives; not for ever.
            self._num_unframed_bytes += len(data)
            if self._num_unframed_bytes > self._limits.linger_bytes:
                self.drop()
            return
        if self._is_deaf:
            return
        self._unset_keepalive_if_required()
        self._limiter.touch(self)
        is_next_head = self._is_in_head and self._num_unframed_bytes == 0 and self.cycle is not None
        rest = memoryview(data)
        while rest and not self.transport.is_closing():
            piece = rest[: self._limits.head_bytes - self._num_unframed_bytes]
            rest = rest[len(piece) :]
            self._has_progressed = False
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as upgrade:
                self._upgrade(bytes(piece[upgrade.args[0] :]) + bytes(rest))
                return
            except httptools.HttpParserError:
                self._refuse(
                    *(self._refusal or (400, "the request is not HTTP; expected HTTP/1.1. Send that."))
                )
                return
            self._num_unframed_bytes = 0 if self._has_progressed else self._num_unframed_bytes + len(piece)
            if self._num_unframed_bytes >= self._limits.head_bytes:
                self._refuse(*self._too_large())
                return
        if is_next_head and self._is_in_head and self._num_unframed_bytes and self._is_answered:
            self.deadline_s = self.loop.time() + self._limits.head_s

    @property
    def _is_answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _upgrade(self, rest: bytes) -> None:
        if not self._should_upgrade():
            # Answered as if it had not asked for that; llhttp reads no further, and so do we.
            self._is_deaf = True
            self.cycle.keep_alive = False
            if self.cycle.response_complete:
                self.transport.close()
            return
        self._limiter.remove(self)
        self.handle_websocket_upgrade()
        if rest:
            protocol = self.transport.get_protocol()
            assert isinstance(protocol, asyncio.Protocol)
            protocol.data_received(rest)

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._has_body_deadline = True
        self.scope["extensions"] = {SCOPE_EXTENSION: self._extension}

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, but leave out trailers."""
        if not self._is_in_head:
            return
        if len(self.headers) >= self._limits.num_headers:
            self._refusal = self._too_large()
            raise _RefusedError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer, or queue the request while another is being answered."""
        if len(self.pipeline) >= self._limits.num_waiting:
            self._refusal = (
                429,
                "too many requests wait on this connection; expected to read their answers first.",
            )
            raise _RefusedError
        super().on_headers_complete()
        self._has_progressed = True
        self._is_in_head = False
        self._body_began_s = self.loop.time()
        self._num_body_bytes = 0
        self.deadline_s = self._body_began_s + self._limits.body_s

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body, which gives the rest more time."""
        super().on_body(body)
        self._has_progressed = True
        self._num_body_bytes += len(body)
        if self._is_answered:
            return  # nobody will read it, and the deadline stays
        earned_s = self._num_body_bytes / self._limits.body_bytes_per_s
        if self._has_body_deadline:
            self.deadline_s = self._body_began_s + self._limits.body_s + earned_s

    def on_message_complete(self) -> None:
        """Wait for the answer, or for the next request where it has been given already."""
        super().on_message_complete()
        self._has_progressed = True
        self._is_in_head = True
        self.deadline_s = self.loop.time() + self._limits.keep_alive_s if self._is_answered else math.inf

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of a body that nobody wanted to read."""
        super().on_response_complete()
        self._limiter.touch(self)
        if self._is_answered and not self.transport.is_closing():
            is_rest_to_come = not self._is_in_head or self._num_unframed_bytes
            self.deadline_s = self.loop.time() + (
                self._limits.head_s if is_rest_to_come else self._limits.keep_alive_s
            )

    # What is said

    def _too_large(self) -> tuple[int, str]:
        what = "headers" if self._is_in_head else "trailers and chunk extensions"
        return 431, (
            f"the {what} of the request are larger than {self._limits.head_bytes} bytes or more than "
            f"{self._limits.num_headers}; expected at most that. Send fewer."
        )

    def _refuse(self, status: int, text: str) -> None:
        """Say why, unless an answer is on its way, and take nothing more."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self._num_unframed_bytes = 0
        is_speaking = bool(self.pipeline) or (
            self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        )
        # An answer to what has been answered already would be taken for that of the next request.
        is_answered = not self._is_in_head and self._is_answered
        self._leave_requests()
        if is_speaking or is_answered:
            self.transport.abort()
            return
        self.transport.write(raw_answer(status, text))
        self.transport.write_eof()
        # Closing with unread bytes would reset the connection, and the reason with it.
        self.deadline_s = self.loop.time() + self._limits.linger_s
        self._limiter.add_refused(self)
        self.flow.resume_reading()

    def _leave_requests(self) -> None:
        """Tell whoever answers that nobody listens."""
        for cycle in [*([] if self.cycle is None else [self.cycle]), *(cycle for cycle, _ in self.pipeline)]:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()


def connection_protocol(limiter: ConnectionLimiter) -> type[asyncio.Protocol]:
    """Return what uvicorn makes of every connection to the port."""
    return cast("type[asyncio.Protocol]", functools.partial(Connection, limiter))


def raw_answer(status: int, text: str) -> bytes:
    """Return an error's bytes where no request can be answered; JSON as other errors."""
    refusal = problem(status, text)
    body = orjson.dumps({"error": {"code": refusal.code, "reason": refusal.reason, "error": refusal.text}})
    return b"%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (
        STATUS_LINE[status],
        len(body),
        body,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What one connection may take, and how many there may be.

    Attributes:
        num_connections: open at once.
        head_bytes: of a request's first line and headers; of what lies between two pieces of its body, too.
        num_headers: of a request.
        num_waiting: requests that may be sent before the answer of the first one.
        head_s: how long a request's head may take, from its first byte or from when the connection was opened.
        keep_alive_s: how long a connection may say nothing after an answer.
        body_s: how long a body may take, and
        body_bytes_per_s: how many bytes give it another second.
        linger_s: how long a refusal may take to reach its reader, and
        linger_bytes: how much the reader may send meanwhile.
    """

    num_connections: int = DEFAULT_NUM_CONNECTIONS
    head_bytes: int = 64 * 1024
    num_headers: int = 200
    num_waiting: int = 16
    head_s: float = 15.0
    keep_alive_s: float = 30.0
    body_s: float = 30.0
    body_bytes_per_s: int = 500
    linger_s: float = 2.0
    linger_bytes: int = 2**20


class ConnectionLimiter:
    """The open connections of a master; for the event loop's thread.

    Args:
        limits: what they may take.
        accounts: who may connect.
    """

    def __init__(self, limits: Limits, accounts: Accounts) -> None:
        self.limits = limits
        self.accounts = accounts
        self._connections: OrderedDict[Connection, None] = OrderedDict()
        self._refused: OrderedDict[Connection, None] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None
        self._num_dropped = 0
        self._next_line_s: dict[str, float] = {}

    def open(self) -> None:
        """Begin to look for connections that have used their time up; in the event loop."""
        self._timer = asyncio.get_running_loop().call_later(_SWEEP_PERIOD_S, self._sweep)

    def close(self) -> None:
        """Stop looking."""
        if self._timer is not None:
            self._timer.cancel()

    def add(self, connection: Connection, num_open: int) -> bool:
        """Add a new connection; where there are too many, drop the one longest idle.

        ``num_open`` is how many there are with it, WebSockets among them.

        Returns:
            Whether it may stay; not if all the others are in use.
        """
        has_room = num_open <= self.limits.num_connections
        if not has_room:
            oldest = next((one for one in self._connections if one.is_idle), None)
            has_room = oldest is not None
            self._num_dropped += 1
            self._log(
                "all %d connections are open; the one that was idle longest is closed for every new one (%d so far)",
                self.limits.num_connections,
                self._num_dropped,
            )
            if oldest is not None:
                self.remove(oldest)
                oldest.drop()
        if has_room:
            self._connections[connection] = None
        return has_room

    def touch(self, connection: Connection) -> None:
        """Note that a connection has been used just now."""
        if connection in self._connections:
            self._connections.move_to_end(connection)

    def add_refused(self, connection: Connection) -> None:
        """Note a connection that stays only to be told why it is refused; only a few may."""
        self._connections.pop(connection, None)
        self._refused[connection] = None
        if len(self._refused) > _MAX_REFUSED:
            oldest, _ = self._refused.popitem(last=False)
            oldest.drop()

    def remove(self, connection: Connection) -> None:
        """Forget a connection."""
        self._connections.pop(connection, None)
        self._refused.pop(connection, None)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_SWEEP_PERIOD_S, self._sweep)
        now_s = loop.time()
        for connection in [*self._connections, *self._refused]:
            if now_s > connection.deadline_s:
                connection.expire(now_s)

    def log_refused(self, account: int | None) -> None:
        """Note in the log that another account has come."""
        whose = "an account that the kernel does not tell" if account is None else f"user id {account}"
        self._log(
            "a connection of %s is refused; `allow_other_users: true` in master.yaml would let it log in",
            whose,
        )

    def _log(self, text: str, *values: object) -> None:
        """Write a line of each kind at most once a minute, so that nobody fills the disk."""
        now_s = time.monotonic()
        if now_s >= self._next_line_s.get(text, 0.0):
            logger.warning(text, *values)
            self._next_line_s[text] = now_s + _LOG_PERIOD_S
