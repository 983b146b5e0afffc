"""A client's connection: uvicorn's, with bounds on what it sends and how long.

uvicorn and llhttp bound neither a request's head nor what lies between the pieces of its body, give no deadline but that of
an idle connection, and queue as many requests as a client sends without reading (uvicorn 0.54
``protocols/http/httptools_impl.py``).
"""

from __future__ import annotations

import asyncio
import functools
import math
from typing import TYPE_CHECKING, Any, cast

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from dstrial.master.http.errors import problem
from dstrial.master.http.peers import SCOPE_EXTENSION, UNKNOWN, Peer

if TYPE_CHECKING:
    from dstrial.master.http.connection_limits import ConnectionLimiter


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
