"""Read the lines that a supervisor has written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from dstrial.master.store.logs import LogLine

CHUNK_BYTES = 512 * 1024
"""Read at a time: an allocation that floods its log delays neither the others nor its own end."""

_HEAD = re.compile(r"(\d{1,18}) ([oe]) ")
_RANK = re.compile(r"\[rank=(\d{1,9})\] ?")
_LEVEL = re.compile(r"(TRACE|DEBUG|INFO|WARNING|ERROR|CRITICAL)(?::|\b(?=\s*[:|\]]))")
_STREAMS = {"o": "stdout", "e": "stderr"}


def read_lines(directory: Path, offset: int, max_bytes: int) -> tuple[list[LogLine], int]:
    """Return the complete lines from a byte offset on, and the offset behind them.

    Args:
        directory: of the allocation.
        offset: byte in its log file where to go on; the beginning of a line.
        max_bytes: about how much to read at most.
    """
    try:
        with (directory / "output.log").open("rb") as file:
            file.seek(offset)
            data = file.read(max_bytes)
            if len(data) == max_bytes and b"\n" not in data:
                data += file.readline()
    except FileNotFoundError:
        return [], offset
    complete, newline, _ = data.rpartition(b"\n")
    if not newline:
        return [], offset
    lines = [parse(raw) for raw in complete.decode("utf-8", errors="replace").split("\n")]
    return lines, offset + len(complete) + 1


def parse(raw: str) -> LogLine:
    """Parse a log line: time, stream, the rank of its tag, the level of its prefix.

    A line that no supervisor wrote, which a power failure may leave, is text without a time.
    """
    head = _HEAD.match(raw)
    time_us, stream, text = (int(head[1]), head[2], raw[head.end() :]) if head else (0, "e", raw)
    rank: int | None = None
    if text.startswith("[rank="):
        tag = _RANK.match(text)
        if tag is not None:
            rank = int(tag[1])
            text = text[tag.end() :]
    level = None
    if text[:1] in "TDIWEC" and text:
        prefix = _LEVEL.match(text)
        level = prefix[1] if prefix is not None else None
        if level is not None and text.startswith(f"{level}: "):
            text = text[len(level) + 2 :]
    return LogLine(time_us, _STREAMS[stream], level, rank, f"{text}\n")


def printed(directory: Path) -> Iterator[tuple[int | None, str]]:
    """Yield rank and text of all that an allocation printed (stderr and stdout)."""
    offset = 0
    while True:
        lines, offset = read_lines(directory, offset, CHUNK_BYTES)
        if not lines:
            return
        for line in lines:
            yield line.rank, line.text
