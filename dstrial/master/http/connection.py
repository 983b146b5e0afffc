"""uvicorn's connection class with a deadline for unauthenticated clients.

uvicorn has no read timeout. Its connection class is undocumented: ``pyproject.toml`` pins the release, and
``tests/security/test_connections.py`` checks how the class behaves.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 1000  # at a time, unless the process may open fewer files
MAX_HEAD_BYTES = 64 * 1024  # limit of a request's head, and of the framing between two chunks of its body

_DEADLINE_S = 30.0  # from the start of the connection, or its last response, to the next authentication


class Connection(H11Protocol):
    """A client's connection, closed at a deadline unless the client authenticates.

    Authentication removes the deadline until the response is sent. If uvicorn's ``limit_concurrency`` is reached, a new
    connection replaces the unauthenticated one with the earliest deadline.
    """

    is_at_owner_socket = False

    def __init__(
        self,
        config: Any,
        server_state: Any,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, "connection": self}, _loop)
        self._deadline: asyncio.TimerHandle | None = None
        self._is_authenticated = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency - 1:
            self._evict_oldest()
        super().connection_made(transport)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._set_deadline()
        super().on_response_complete()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._cancel_deadline()  # the proxy authenticates immediately
        super().handle_websocket_upgrade(event)

    def authenticate(self) -> None:
        """Remove the deadline for the current request and its response."""
        self._cancel_deadline()
        self._is_authenticated = True

    def _set_deadline(self) -> None:
        self._cancel_deadline()
        # close() first flushes the transport's buffer, which a slow authenticated client may not have read yet.
        end = self._close if self._is_authenticated else self.transport.abort
        self._is_authenticated = False
        self._deadline = self.loop.call_later(_DEADLINE_S, end)

    def _close(self) -> None:
        if self.transport.is_closing():  # closing since the last deadline, and the client still does not read
            self.transport.abort()
        else:
            self.transport.close()

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _evict_oldest(self) -> None:
        waiting = [
            (one._deadline.when(), one)
            for one in self.connections
            if isinstance(one, Connection) and not one.is_at_owner_socket and one._deadline is not None
        ]
        if waiting:
            _, oldest = min(waiting, key=lambda pair: pair[0])
            oldest._cancel_deadline()
            oldest.transport.abort()
            self.connections.discard(oldest)  # now, because connection_lost() runs after the next request


class OwnerConnection(Connection):
    """A connection to the UNIX socket that only the state directory's owner can open."""

    is_at_owner_socket = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limit_concurrency = None


def connection_of(scope: Scope) -> Connection:
    connection: Connection = scope["state"]["connection"]
    return connection
