"""A message between a fork server and who asks it: JSON, and open files."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

_HEAD = struct.Struct("!I")
MAX_FILES = 8
"""That go with one message."""


def send(connection: socket.socket, message: dict[str, Any], files: Sequence[int] = ()) -> None:
    text = json.dumps(message).encode()
    # The files go with the first bytes.
    socket.send_fds(connection, [_HEAD.pack(len(text))], list(files))
    connection.sendall(text)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next message and its files, which the caller closes; None at the end."""
    head, files, _, _ = socket.recv_fds(connection, _HEAD.size, MAX_FILES, socket.MSG_CMSG_CLOEXEC)
    if len(head) < _HEAD.size:
        return None
    (left,) = _HEAD.unpack(head)
    text = bytearray()
    while len(text) < left:
        chunk = connection.recv(left - len(text))
        if not chunk:
            return None
        text += chunk
    message: dict[str, Any] = json.loads(text)
    return message, files
