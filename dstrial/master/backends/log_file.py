"""Read the lines that a supervisor has written."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path

from dstrial.master.clock import now_us
from dstrial.master.store.reports.logs import LogLine
from dstrial.master.trial_files import open_regular

CHUNK_BYTES = 512 * 1024  # a read: a flooded log delays neither other allocations nor its own end

_NAME = "output.log"
_PART = re.compile(r"output\.log\.(\d{1,18})\.(\d{1,18})")
# What is looked through for why a trial failed: a log of gigabytes would hold up all other trials.
_BEGINNING_BYTES = 4 * 2**20
_END_BYTES = 12 * 2**20
_HEAD = re.compile(r"(\d{1,18}) ([oe]) ")
_RANK = re.compile(r"\[rank=(\d{1,9})\] ?")
_LEVEL = re.compile(r"(TRACE|DEBUG|INFO|WARNING|ERROR|CRITICAL)(?::|\b(?=\s*[:|\]]))")
_STREAMS = {"o": "stdout", "e": "stderr"}


@dataclasses.dataclass(frozen=True, slots=True)
class LogRead:
    """Lines read from a log."""

    lines: list[LogLine]
    end: int  # byte offset behind the lines, for the next read
    num_lost: int = 0  # lines before them that the supervisor has deleted to make room
    has_more: bool = False  # whether there may be more to read at once


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """A file of the log; ``start`` bytes and ``num_lines`` lines come before it."""

    path: Path
    start: int
    num_lines: int


def read_lines(directory: Path, offset: int, max_bytes: int, *, num_lines: int = 0) -> LogRead:
    """Return the complete lines from a byte offset, the start of a line.

    The log is ``output.log`` and further parts, the oldest of which the supervisor deletes; offsets count bytes of the whole
    log, and ``num_lines`` the lines before ``offset``.
    """
    first = _Part(directory / _NAME, 0, 0)
    data = _read(first, offset, max_bytes)
    if data is None:
        return LogRead([], offset)
    further = _further_parts(directory)
    if data or not further:
        return _complete(data, offset, max_bytes, is_last=not further)
    num_lost = 0
    parts = [first, *further]
    for index, part in enumerate(parts):
        is_last = index + 1 == len(parts)
        if not is_last and parts[index + 1].start <= offset:
            continue
        if part.start > offset:
            offset, num_lost = part.start, max(part.num_lines - num_lines, 0)
        data = _read(part, offset, max_bytes)
        if data:
            return dataclasses.replace(_complete(data, offset, max_bytes, is_last=is_last), num_lost=num_lost)
        if data is None:
            break  # Deleted just now: those that are left are looked at anew.
    return LogRead([], offset, num_lost)


def _read(part: _Part, offset: int, max_bytes: int) -> bytes | None:
    """Return a part's bytes from an offset on; None if there is no such file."""
    try:
        with open_regular(part.path) as file:
            file.seek(offset - part.start)
            data = file.read(max_bytes)
            if len(data) == max_bytes and b"\n" not in data:
                data += file.readline(CHUNK_BYTES)
    except (FileNotFoundError, ValueError):
        return None
    return data


def _complete(data: bytes, offset: int, max_bytes: int, *, is_last: bool) -> LogRead:
    complete, newline, _ = data.rpartition(b"\n")
    if not newline:
        return LogRead([], offset)
    lines = [parse(raw) for raw in complete.decode("utf-8", errors="replace").split("\n")]
    has_more = not is_last or len(data) > max_bytes // 2
    return LogRead(lines, offset + len(complete) + 1, has_more=has_more)


def log_paths(directory: Path) -> list[Path]:
    """Return the files of the log, in order; the first may be missing."""
    return [directory / _NAME, *(part.path for part in _further_parts(directory))]


def _further_parts(directory: Path) -> list[_Part]:
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            part = _PART.fullmatch(entry.name)
            # A trial may have put something else there.
            if part is not None and entry.is_file(follow_symlinks=False):
                found.append(_Part(directory / entry.name, int(part[1]), int(part[2])))
    return sorted(found, key=lambda part: part.start)


def parse(raw: str) -> LogLine:
    """Parse a log line: time, stream, the rank of its tag, the level of its prefix.

    A line that no supervisor wrote, which a power failure may leave, is text without a time; a time in the future, which a
    trial may write, becomes now.
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
    """Yield rank and text of all output; of a large log its first 4 and last 12 MiB."""
    offset = 0
    end = _size(directory)
    is_end = end <= _BEGINNING_BYTES + _END_BYTES
    while True:
        if not is_end and offset >= _BEGINNING_BYTES:
            # In the middle of a line, whose rest is parsed as a line without a time.
            is_end, offset = True, max(offset, end - _END_BYTES)
        read = read_lines(directory, offset, CHUNK_BYTES)
        if not read.lines:
            return
        for line in read.lines:
            yield line.rank, line.text
        offset = read.end


def _size(directory: Path) -> int:
    last = [_Part(directory / _NAME, 0, 0), *_further_parts(directory)][-1]
    try:
        return last.start + last.path.stat().st_size
    except FileNotFoundError:
        return last.start
