"""Frames of WebSockets, for services that speak no HTTP: their bytes are the payload of binary frames.

Source: RFC 6455, sections 1.3 (handshake) and 5.2 (frames).
"""

from __future__ import annotations

import base64
import hashlib

BINARY, CLOSE, PING, PONG = 0x2, 0x8, 0x9, 0xA
NORMAL, PROTOCOL_ERROR, TOO_BIG = 1000, 1002, 1009

_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_MAX_FRAME_BYTES = 16 * 2**20


class FrameError(Exception):
    """A client has sent what is no frame of a WebSocket.

    Attributes:
        code: with which its WebSocket is closed.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def accept_key(key: bytes) -> bytes:
    """Return the ``Sec-WebSocket-Accept`` to a client's ``Sec-WebSocket-Key``."""
    return base64.b64encode(hashlib.sha1(key + _MAGIC, usedforsecurity=False).digest())


def frame(opcode: int, payload: bytes = b"") -> bytes:
    """Return one whole frame of a server, which masks nothing."""
    size = len(payload)
    if size < 126:
        length = bytes([size])
    elif size < 2**16:
        length = b"\x7e" + size.to_bytes(2, "big")
    else:
        length = b"\x7f" + size.to_bytes(8, "big")
    return bytes([0x80 | opcode]) + length + payload


class FrameReader:
    """Takes a client's bytes and gives its frames; the pieces of a message are frames of their own."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Return opcode and payload of every frame that is whole now; 0 goes on with the message before it.

        Raises:
            FrameError: a frame is not masked, has reserved bits, or is larger than 16 MiB.
        """
        self._data += data
        found = []
        while (one := self._next()) is not None:
            found.append(one)
        return found

    def _next(self) -> tuple[int, bytes] | None:
        data = self._data
        if len(data) < 2:
            return None
        if data[0] & 0x70 or not data[1] & 0x80:
            raise FrameError(PROTOCOL_ERROR)
        size, start = data[1] & 0x7F, 2
        if size >= 126:
            start = 4 if size == 126 else 10
            if len(data) < start:
                return None
            size = int.from_bytes(data[2:start], "big")
        if size > _MAX_FRAME_BYTES:
            raise FrameError(TOO_BIG)
        if len(data) < start + 4 + size:
            return None
        mask, opcode = data[start : start + 4], data[0] & 0x0F
        masked = bytes(data[start + 4 : start + 4 + size])
        del data[: start + 4 + size]
        return opcode, _unmasked(masked, bytes(mask))


def _unmasked(payload: bytes, mask: bytes) -> bytes:
    size = len(payload)
    if not size:
        return b""
    key = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(payload, "big") ^ int.from_bytes(key, "big")).to_bytes(size, "big")
