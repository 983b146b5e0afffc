"""How many connections there are, which has to go, and which is out of time."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dstrial.master.http.connection import Connection
    from dstrial.master.http.peers import Accounts

DEFAULT_NUM_CONNECTIONS = 1000
logger = logging.getLogger("dstrial.master.http")

_SWEEP_PERIOD_S = 1.0
_LOG_PERIOD_S = 60.0
_MAX_REFUSED = 32


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
