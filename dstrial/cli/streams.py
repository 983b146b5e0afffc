"""Write to a stream that may lose its reader: showing a training must never end it."""

from __future__ import annotations

import os
from typing import TextIO


class LastingStream:
    """A text stream that goes silent when it cannot be written any more.

    That is so when the reader of a pipe has ended (``| head``, or ``| tee`` at a Ctrl-C), when the terminal
    is gone, and when the disk that the output goes to is full.

    Args:
        stream: where to write. Once it is lost it writes to the null device, for whoever else uses it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_lost = False

    @property
    def is_lost(self) -> bool:
        """Whether something could not be written."""
        return self._is_lost

    @property
    def encoding(self) -> str:
        """That of the stream."""
        return self._stream.encoding

    def write(self, text: str) -> int:
        """Write and flush; returns the number of characters, also if nobody reads them."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            self._is_lost = True
            to_null_device(self._stream)
        return len(text)

    def flush(self) -> None:
        """Do nothing: everything is flushed as it is written."""

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """The stream's descriptor."""
        return self._stream.fileno()


def to_null_device(stream: TextIO) -> None:
    """Let a stream end in the null device, so that what it still holds is no error when Python exits."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(descriptor, stream.fileno())
    finally:
        os.close(descriptor)
