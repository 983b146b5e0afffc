"""The relay: a local command that forwards stdio of a program on a Ray node.

:class:`dstrial.hosts.connection.HostConnection` starts a relay as it starts ssh. The relay connects to the bridge, which
requests the program from Ray. Python runs this file as a script. The script uses only the standard library, so that a relay
needs just 10 MB of memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading

EXIT_CODE_OF_CONNECTION = 255  # the relay's exit code if the connection fails, as with ssh
# Kinds of frames from the bridge: stdout, stderr, exit code. A frame is a byte for the kind, four for the length, and the data.
OUT, ERR, CODE = b"o", b"e", b"x"
HEAD_BYTES = 5  # kind and length
_READ_BYTES = 1 << 16  # size of one read of stdin


def framed(kind: bytes, data: bytes) -> bytes:
    return kind + len(data).to_bytes(4, "big") + data


def main(arguments: list[str]) -> int:
    """Run a program on a Ray node through the bridge; return the program's exit code.

    ``arguments`` are the path of the bridge's socket, the job's id, the node's name, and the program's command line. Return
    ``EXIT_CODE_OF_CONNECTION`` if the connection fails.
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
    # A normal exit would wait for the thread that reads stdin.
    os._exit(code)
