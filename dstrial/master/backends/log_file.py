"""Read the log of an allocation's output, which its supervisor writes."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from dstrial.master.clock import now_us
from dstrial.master.store.reports.logs import LogLine
from dstrial.master.trial_files import open_regular

CHUNK_BYTES = 512 * 1024  # maximum of one read, so that a large log does not delay other allocations

LOG_NAME = "output.log"  # file in an allocation's directory
# Parts of a log that are searched for why a trial failed; reading gigabytes would delay all other trials.
_BEGINNING_BYTES = 4 * 2**20
_END_BYTES = 12 * 2**20
_HEAD = re.compile(r"(\d{1,18}) ([oe]) ")
_RANK = re.compile(r"\[rank=(\d{1,9})\] ?")
_LEVEL = re.compile(r"(TRACE|DEBUG|INFO|WARNING|ERROR|CRITICAL)(?::|\b(?=\s*[:|\]]))")
_STREAMS = {"o": "stdout", "e": "stderr"}


@dataclasses.dataclass(frozen=True, slots=True)
class LogRead:
    """Lines of one read of an allocation's log, and where the next read starts."""

    lines: list[LogLine]
    end: int  # byte offset after the lines, for the next read
    has_more: bool = False  # whether another read may return lines immediately


def read_lines(directory: Path, offset: int, max_bytes: int) -> LogRead:
    """Return the complete lines of an allocation's log that follow a byte offset.

    ``offset`` must be the start of a line. About ``max_bytes`` are read at most. If the log is missing or has no further
    complete line, the result has no lines.
    """
    try:
        with open_regular(directory / LOG_NAME) as file:
            file.seek(offset)
            data = file.read(max_bytes)
            if len(data) == max_bytes and b"\n" not in data:
                data += file.readline(CHUNK_BYTES)
    except (FileNotFoundError, ValueError):
        return LogRead([], offset)
    complete, newline, _ = data.rpartition(b"\n")
    if not newline:
        return LogRead([], offset)
    lines = [parse(raw) for raw in complete.decode("utf-8", errors="replace").split("\n")]
    return LogRead(lines, offset + len(complete) + 1, has_more=len(data) > max_bytes // 2)


def parse(raw: str) -> LogLine:
    """Split a line of the log into time, stream, level, rank and text.

    A line without a valid time gets the time 0 and the stream stderr. A time in the future, which a trial could write, is
    replaced by the current time.
    """
    head = _HEAD.match(raw)
    time_us, stream, text = (
        (min(int(head[1]), now_us()), head[2], raw[head.end() :]) if head else (0, "e", raw)
    )
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
    """Yield (rank or None, text) of each line that an allocation printed.

    If the log is larger than 16 MiB, only its first 4 MiB and its last 12 MiB are read.
    """
    offset = end = 0
    with contextlib.suppress(FileNotFoundError):
        end = (directory / LOG_NAME).stat().st_size
    is_end = end <= _BEGINNING_BYTES + _END_BYTES
    while True:
        if not is_end and offset >= _BEGINNING_BYTES:
            # The new offset may be within a line, whose rest is parsed as a line without a time.
            is_end, offset = True, max(offset, end - _END_BYTES)
        read = read_lines(directory, offset, CHUNK_BYTES)
        if not read.lines:
            return
        for line in read.lines:
            yield line.rank, line.text
        offset = read.end
