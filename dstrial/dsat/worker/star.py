"""Lines of JSON between the chief and the guardians: one connection each, which tells at once when a side has gone."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
import zlib
from collections.abc import Sequence
from typing import Any

from dstrial.errors import RankError
from dstrial.ranks.identity import RankIdentity, identify
from dstrial.ranks.stop import LAUNCHER_PID_VARIABLE

_MEET_S = 120.0
_FIRST_PORT = 15_000
_NUM_PORTS = 14_000


class Line:
    """One end of a connection; messages are JSON objects, one per line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._unread = b""

    def fileno(self) -> int:
        """Return the descriptor, for ``select``."""
        return self.connection.fileno()

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message; does nothing where the other side has gone, which ``heard`` tells."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def heard(self) -> list[dict[str, Any]] | None:
        """Return what has come, after ``select`` said that there is something; None if the other side has gone."""
        try:
            chunk = self.connection.recv(1 << 16)
        except OSError:
            return None
        if not chunk:
            return None
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End the connection."""
        self.connection.close()


def job_name() -> str:
    """Return what the guardians of one worker have in common, and no other process of the machine."""
    names = ["DET_ALLOCATION_ID", "MASTER_ADDR", "MASTER_PORT"]
    if identify(os.environ).num_nodes == 1:
        names.append(LAUNCHER_PID_VARIABLE)
    return "/".join(os.environ.get(name, "") for name in names)


def listen(identity: RankIdentity) -> socket.socket:
    """Return the socket on which the chief waits for its guardians.

    Raises:
        RankError: the port is taken.
    """
    family, address = _address(identity)
    server = socket.socket(family, socket.SOCK_STREAM)
    if family == socket.AF_INET:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(address if family == socket.AF_UNIX else ("", address[1]))
    except OSError as error:
        server.close()
        raise RankError(
            f"the guardians' address {address!r} cannot be served ({error}); expected it to be free. End what uses it."
        ) from error
    server.listen(identity.world_size)
    return server


def gather(server: socket.socket, identity: RankIdentity) -> dict[int, Line]:
    """Return the connections of all guardians, by rank.

    Raises:
        RankError: not all came in time.
    """
    lines: dict[int, Line] = {}
    give_up_at_s = time.monotonic() + _MEET_S
    with server:
        while len(lines) < identity.world_size:
            server.settimeout(max(give_up_at_s - time.monotonic(), 0.01))
            try:
                connection, _ = server.accept()
                connection.settimeout(10.0)
                greeting = json.loads(connection.makefile("r").readline() or "{}")
            except TimeoutError:
                missing = sorted(set(range(identity.world_size)) - set(lines))
                raise RankError(
                    f"the guardians of ranks {missing} have not come within {_MEET_S:.0f} s; expected one per slot. "
                    "Look at what their containers printed."
                ) from None
            except ValueError:
                connection.close()
                continue
            if greeting.get("job") != job_name():
                connection.close()
                continue
            connection.settimeout(None)
            lines[int(greeting["rank"])] = Line(connection)
    return lines


def join(identity: RankIdentity) -> Line:
    """Return a guardian's connection to its chief.

    Raises:
        RankError: there is none.
    """
    family, address = _address(identity)
    give_up_at_s = time.monotonic() + _MEET_S
    while True:
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.connect(address)
        except OSError as error:
            connection.close()
            if time.monotonic() > give_up_at_s:
                raise RankError(
                    f"the guardian of rank 0 does not answer at {address!r} ({error}); expected it to. Look at its output."
                ) from error
            time.sleep(0.1)
        else:
            line = Line(connection)
            line.tell({"job": job_name(), "rank": identity.rank})
            return line


def ready(lines: Sequence[Any], timeout_s: float) -> list[Any]:
    """Return those that have something to read, waiting for at most so long."""
    with selectors.DefaultSelector() as selector:
        for line in lines:
            selector.register(line, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(max(timeout_s, 0.0))]


def free_port(host: str) -> int:
    """Return a TCP port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1" if host in ("127.0.0.1", "localhost") else "", 0))
        return int(probe.getsockname()[1])


def _address(identity: RankIdentity) -> tuple[socket.AddressFamily, Any]:
    """Where the chief listens: on one machine a socket without a file, that no other machine can reach."""
    digest = zlib.crc32(job_name().encode())
    if identity.num_nodes == 1:
        return socket.AF_UNIX, f"\0dstrial-dsat-{os.getuid()}-{digest:08x}"
    return socket.AF_INET, (identity.master_addr, _FIRST_PORT + digest % _NUM_PORTS)
