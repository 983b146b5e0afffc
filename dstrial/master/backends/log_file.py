"""Read the log of an allocation's output, which its supervisor writes."""

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

CHUNK_BYTES = 512 * 1024  # maximum of one read, so that a large log does not delay other allocations

_NAME = "output.log"
_PART = re.compile(r"output\.log\.(\d{1,18})\.(\d{1,18})")
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
    num_lost: int = 0  # number of unread lines before ``lines`` that the supervisor has deleted
    has_more: bool = False  # whether another read may return lines immediately


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """A file of a log; ``start`` bytes and ``num_lines`` lines are in earlier files."""

    path: Path
    start: int
    num_lines: int


def read_lines(directory: Path, offset: int, max_bytes: int, *, num_lines: int = 0) -> LogRead:
    """Return the complete lines of an allocation's log from a byte offset on.

    At most about ``max_bytes`` are read. The log consists of ``output.log`` and later files, the oldest of which the
    supervisor deletes. ``offset`` is the start of a line, in bytes of the whole log, after ``num_lines`` lines.
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
            break  # Deleted meanwhile: the next call lists the parts again.
    return LogRead([], offset, num_lost)


def _read(part: _Part, offset: int, max_bytes: int) -> bytes | None:
    """Return a log file's bytes from an offset in the whole log; None if missing."""
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
    """Return the files of an allocation's log, in order; the first may not exist."""
    return [directory / _NAME, *(part.path for part in _further_parts(directory))]


def _further_parts(directory: Path) -> list[_Part]:
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            part = _PART.fullmatch(entry.name)
            # A trial may have created a directory or pipe with such a name.
            if part is not None and entry.is_file(follow_symlinks=False):
                found.append(_Part(directory / entry.name, int(part[1]), int(part[2])))
    return sorted(found, key=lambda part: part.start)


def parse(raw: str) -> LogLine:
    """Parse a line of an allocation's log: time, stream, rank tag and level prefix.

    A line without a valid time becomes text without a time. A time in the future, which a trial could write, becomes now.
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

    If the log is larger than 16 MiB, only its beginning and its end are read.
    """
    offset = 0
    end = _size(directory)
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


def _size(directory: Path) -> int:
    last = [_Part(directory / _NAME, 0, 0), *_further_parts(directory)][-1]
    try:
        return last.start + last.path.stat().st_size
    except FileNotFoundError:
        return last.start
