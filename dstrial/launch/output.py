"""Read the output of running ranks line by line."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

Stream = Literal["stdout", "stderr"]
OnLine = Callable[[int, Stream, str], None]

_POLL_S = 0.05  # interval of reads
_CHUNK_BYTES = 1 << 16  # size of one read
_LONGEST_LINE_BYTES = 1 << 20  # longer lines are split


class LineReader:
    """Calls a function with each line of the ranks' files or pipes, from one thread.

    Lines of one stream arrive in order. A carriage return, as in progress bars, or the end of the output also ends a line.

    Args:
        descriptors: (rank, stream) -> non-blocking descriptor of a file or pipe; ``close`` closes them.
        on_line: called with rank, stream and the line without its newline. If it raises OSError, the line is lost.
    """

    def __init__(self, descriptors: dict[tuple[int, Stream], int], on_line: OnLine) -> None:
        self._on_line = on_line
        self._done = threading.Event()
        self._buffers: dict[tuple[int, Stream], bytes] = dict.fromkeys(descriptors, b"")
        self._files = descriptors
        self._thread = threading.Thread(target=self._run, name="dstrial-line-reader", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Deliver all output written so far, then stop reading."""
        self._done.set()
        self._thread.join()
        for descriptor in self._files.values():
            os.close(descriptor)

    def _run(self) -> None:
        while not self._done.wait(_POLL_S):
            self._drain()
        self._drain()
        for key, rest in self._buffers.items():
            if rest.rstrip(b"\r"):
                self._deliver(key, rest.rstrip(b"\r"))

    def _drain(self) -> None:
        for key in self._files:
            while chunk := self._read(key):
                text = self._buffers[key] + chunk
                # A carriage return at the end of a chunk may be the first half of a CRLF.
                held = b"\r" if text.endswith(b"\r") else b""
                text = text.removesuffix(held).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
                *lines, rest = text.split(b"\n")
                self._buffers[key] = rest + held
                for line in lines:
                    self._deliver(key, line)
                if len(self._buffers[key]) > _LONGEST_LINE_BYTES:
                    self._deliver(key, self._buffers[key])
                    self._buffers[key] = b""

    def _read(self, key: tuple[int, Stream]) -> bytes:
        try:
            return os.read(self._files[key], _CHUNK_BYTES)
        except BlockingIOError:
            return b""

    def _deliver(self, key: tuple[int, Stream], line: bytes) -> None:
        with contextlib.suppress(OSError):  # the terminal may be closed; the ranks go on
            self._on_line(key[0], key[1], line.decode(errors="replace"))


def tail(path: Path, num_lines: int = 20) -> str:
    """Return the last ``num_lines`` lines of a file; "" if the file is missing."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - (1 << 16)))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-num_lines:])
    except OSError:
        return ""
