"""A command with the input and output of a program on a node of Ray's.

Run as a file, standard library only. The bridge does the work; this process is what
:class:`dstrial.hosts.connection.HostConnection` can start, and costs 10 MB.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading

EXIT_CODE_OF_CONNECTION = 255  # where the program's own is not known, as ssh has it
OUT, ERR, CODE = (
    b"o",
    b"e",
    b"x",
)  # kinds of frames that come back: a byte, four for the length, as many bytes
HEAD_BYTES = 5
_READ_BYTES = 1 << 16


def framed(kind: bytes, data: bytes) -> bytes:
    return kind + len(data).to_bytes(4, "big") + data


def main(arguments: list[str]) -> int:
    """Run a program on a node; return its exit code.

    ``arguments``: path of the bridge's socket, the job's id, the node's name, the program's words.
    """
    path, job, host, *words = arguments
    with socket.socket(socket.AF_UNIX) as bridge:
        try:
            bridge.connect(path)
            bridge.sendall(
                json.dumps({"do": "start", "job": job, "host": host, "words": words}).encode() + b"\n"
            )
        except OSError as error:
            _write(2, f"dstrial is not connected to Ray ({error.strerror})\n".encode())
            return EXIT_CODE_OF_CONNECTION
        threading.Thread(target=_send, args=(bridge,), daemon=True).start()
        return _receive(bridge)


def _send(bridge: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := os.read(0, _READ_BYTES):
            bridge.sendall(data)
        bridge.shutdown(socket.SHUT_WR)


def _receive(bridge: socket.socket) -> int:
    with contextlib.suppress(ConnectionError, BrokenPipeError), bridge.makefile("rb") as frames:
        while len(head := frames.read(HEAD_BYTES)) == HEAD_BYTES:
            kind, data = head[:1], frames.read(int.from_bytes(head[1:], "big"))
            if kind == CODE:
                return int(data)
            _write(1 if kind == OUT else 2, data)
    _write(2, b"dstrial's connection to Ray has ended\n")
    return EXIT_CODE_OF_CONNECTION


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # An orderly end would wait for the thread that reads.
    os._exit(code)
