"""Lines of JSON between the chief and each supervisor, until a side has gone.

On one machine both ends ask the kernel whose process the other one is. Every line carries a tag of the job's secret, for its
place in its direction of its connection, so that no other machine can say or repeat anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import struct
import time
import zlib
from collections.abc import Sequence
from typing import Any

from dstrial.errors import RankError
from dstrial.ranks.identity import RankIdentity, identify
from dstrial.ranks.job_secret import SECRET_VARIABLE, is_same_tag, key_from_environ, tag
from dstrial.ranks.sockets import listening_socket
from dstrial.ranks.stop_signals import LAUNCHER_PID_VARIABLE

_MEET_S = 120.0
_GREETING_S = 5.0
_GREETING_BYTES = 4096
_FIRST_PORT = 15_000
_NUM_PORTS = 14_000


class Connection:
    """An end of a connection; messages are JSON, one per line, after their tag."""

    def __init__(self, connection: socket.socket, key: bytes, *, is_chief: bool) -> None:
        self.socket = connection
        self._key = key
        self._directions = (b"to supervisor", b"to chief") if is_chief else (b"to chief", b"to supervisor")
        self._num_sent = self._num_received = 0
        self._unread = b""

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; no-op if the other side has gone, which ``receive`` reports."""
        text = json.dumps(message).encode()
        told = tag(self._key, self._directions[0], b"%d" % self._num_sent, text).hex().encode()
        self._num_sent += 1
        with contextlib.suppress(OSError):
            self.socket.sendall(told + b" " + text + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the messages that have come; None if the other side has gone."""
        try:
            chunk = self.socket.recv(1 << 16)
        except OSError:
            return None
        if not chunk:
            return None
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        return [self._opened(line) for line in lines]

    def _opened(self, line: bytes) -> dict[str, Any]:
        given, _, text = line.partition(b" ")
        expected = tag(self._key, self._directions[1], b"%d" % self._num_received, text).hex().encode()
        self._num_received += 1
        if not is_same_tag(given, expected):
            raise RankError(
                "a line between the chief and a supervisor does not carry this job's tag; expected one that the other end has "
                f"written, so nothing of it was read. Give all slots the same {SECRET_VARIABLE}."
            )
        message: dict[str, Any] = json.loads(text)
        return message

    def close(self) -> None:
        self.socket.close()


def job_name() -> str:
    """Return what only the supervisors of one worker on a machine have in common."""
    names = ["DET_ALLOCATION_ID", "MASTER_ADDR", "MASTER_PORT"]
    if identify(os.environ).num_nodes == 1:
        names.append(LAUNCHER_PID_VARIABLE)
    return "/".join(os.environ.get(name, "") for name in names)


def listen(identity: RankIdentity) -> socket.socket:
    """Return the socket on which the chief waits for its supervisors."""
    family, address = _address(identity)
    try:
        if family == socket.AF_INET:
            return listening_socket(*address)
        server = socket.socket(family, socket.SOCK_STREAM)
        try:
            server.bind(address)
        except OSError:
            server.close()
            raise
    except OSError as error:
        raise RankError(
            f"the supervisors' address {address!r} cannot be served ({error}); expected it to be free. End what uses it."
        ) from error
    server.listen(identity.world_size)
    return server


def accept_supervisors(server: socket.socket, identity: RankIdentity) -> dict[int, Connection]:
    """Return the connections of all supervisors, by rank; others are closed."""
    lines: dict[int, Connection] = {}
    give_up_at_s = time.monotonic() + _MEET_S
    with server:
        while len(lines) < identity.world_size:
            server.settimeout(max(give_up_at_s - time.monotonic(), 0.01))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = sorted(set(range(identity.world_size)) - set(lines))
                raise RankError(
                    f"the supervisors of ranks {missing} have not come within {_MEET_S:.0f} s; expected one per slot. "
                    "Look at what their containers printed."
                ) from None
            greeted = _greeted_supervisor(connection)
            if greeted is None:
                connection.close()
            else:
                lines[greeted[0]] = greeted[1]
    return lines


def connect(identity: RankIdentity) -> Connection:
    """Return a supervisor's connection to its chief."""
    family, address = _address(identity)
    give_up_at_s = time.monotonic() + _MEET_S
    while True:
        connection = socket.socket(family, socket.SOCK_STREAM)
        problem = "it belongs to another account or says nothing"
        try:
            connection.connect(address)
            line = _greeted_chief(connection, identity.rank)
            if line is not None:
                return line
        except OSError as error:
            problem = str(error)
        connection.close()
        if time.monotonic() > give_up_at_s:
            raise RankError(
                f"the supervisor of rank 0 does not answer at {address!r} ({problem}); expected it to. Look at its output."
            )
        time.sleep(0.1)


def _greeted_supervisor(connection: socket.socket) -> tuple[int, Connection] | None:
    """Return a supervisor's rank and connection; None if it is of another worker."""
    if not _is_own_account(connection):
        return None
    nonce = secrets.token_hex(16)
    try:
        connection.settimeout(_GREETING_S)
        connection.sendall(nonce.encode() + b"\n")
        greeting = json.loads(_first_line(connection))
        rank, answer, given = int(greeting["rank"]), str(greeting["nonce"]), str(greeting["tag"])
        connection.settimeout(None)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not is_same_tag(given.encode(), _greeting_tag(nonce, answer, rank).encode()):
        return None
    return rank, Connection(connection, _connection_key(nonce, answer, rank), is_chief=True)


def _greeted_chief(connection: socket.socket, rank: int) -> Connection | None:
    """Answer a connected chief, unless its socket is of another account."""
    if not _is_own_account(connection):
        return None
    # The chief may be busy greeting others first.
    connection.settimeout(_MEET_S)
    nonce = _first_line(connection).decode(errors="replace")
    if not nonce:
        return None
    answer = secrets.token_hex(16)
    greeting = {"rank": rank, "nonce": answer, "tag": _greeting_tag(nonce, answer, rank)}
    connection.sendall(json.dumps(greeting).encode() + b"\n")
    connection.settimeout(None)
    return Connection(connection, _connection_key(nonce, answer, rank), is_chief=False)


def _first_line(connection: socket.socket) -> bytes:
    """Read a line by bytes, as the rest is a ``Connection``'s; empty without an end."""
    line = b""
    while len(line) < _GREETING_BYTES:
        byte = connection.recv(1)
        if byte == b"\n":
            return line
        if not byte:
            break
        line += byte
    return b""


def _greeting_tag(nonce: str, answer: str, rank: int) -> str:
    return tag(_key(), b"greeting", nonce.encode(), answer.encode(), b"%d" % rank).hex()


def _connection_key(nonce: str, answer: str, rank: int) -> bytes:
    return tag(_key(), b"lines", nonce.encode(), answer.encode(), b"%d" % rank)


def _key() -> bytes:
    """Return this worker's key, of the secrets of its job, if any, and its slots."""
    return tag(key_from_environ(os.environ) or b"", b"dsat", job_name().encode())


def _is_own_account(connection: socket.socket) -> bool:
    """Return whether the other end is of this account, as the kernel knows."""
    if connection.family != socket.AF_UNIX:
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _pid, uid, _gid = struct.unpack("3i", credentials)
    return bool(uid == os.geteuid())


def ready(lines: Sequence[Any], timeout_s: float) -> list[Any]:
    """Return those that have something to read, waiting for at most so long."""
    with selectors.DefaultSelector() as selector:
        for line in lines:
            selector.register(line, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(max(timeout_s, 0.0))]


def _address(identity: RankIdentity) -> tuple[socket.AddressFamily, Any]:
    """Return the chief's address: on one machine a socket without a file, local to it.

    Raises:
        RankError: the worker has several machines, and no secret.
    """
    digest = zlib.crc32(job_name().encode())
    if identity.num_nodes == 1:
        # Nobody else knows the name, or can bind it before the chief does.
        return socket.AF_UNIX, f"\0dstrial-dsat-{os.getuid()}-{_key().hex()[:16]}"
    if key_from_environ(os.environ) is None:
        # Everything else that the slots share can be known or guessed by whoever can reach them.
        raise RankError(
            f"{SECRET_VARIABLE} is not set; expected a secret that all machines of a worker know, without which whoever can "
            "reach them could pass for a supervisor. Set it to the same long random text on all of them."
        )
    return socket.AF_INET, (identity.master_addr, _FIRST_PORT + digest % _NUM_PORTS)
