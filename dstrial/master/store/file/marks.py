"""High-water marks: how far the database has come, in a file beside it.

They tell an older, emptied or foreign database, and a log that is shorter than it was, from the one that the last
master left. ``master.db-marks`` is a line of JSON and its checksum, written in place after each group of commits.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FORMAT = 1
_BYTES = 4096
"""One page, which the kernel takes as a whole whenever the process is killed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Marks:
    """How far a database has come.

    Attributes:
        cluster_id: whose it is; empty before the first start has made it.
        highest: table -> highest id that it has given, of tables whose ids are never given again. Only what was on the
            disk when it was noted.
        is_open: whether a master has it, or had it when it ended.
        boot_id: of the machine's start in which it was opened last.
        salt: of the log, see :class:`dstrial.master.store.file.wal.Scan`; empty before the first commit.
        num_frames: frames of the log that hold commits, 0 when all are in the database.
        num_synced: those of them that a loss of power cannot take.
        num_folded: frames of this log that the database has taken in.
    """

    cluster_id: str = ""
    highest: Mapping[str, int] = dataclasses.field(default_factory=dict)
    is_open: bool = False
    boot_id: str = ""
    salt: str = ""
    num_frames: int = 0
    num_synced: int = 0
    num_folded: int = 0


def path_of(database: Path) -> Path:
    """Return where a database's marks lie."""
    return database.with_name(f"{database.name}-marks")


def boot_id() -> str:
    """Return what names this start of the machine; another after each loss of power."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def read(path: Path) -> Marks | None:
    """Return what is stored; None if there is none.

    Raises:
        ValueError: it is damaged.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    line, _, rest = content.partition(b"\n")
    if rest[:8] != b"%08x" % zlib.crc32(line):
        raise ValueError("its checksum is wrong")
    fields = json.loads(line)
    if fields.pop("format", None) != _FORMAT:
        raise ValueError("it is of another format")
    return Marks(**fields)


def _text(marks: Marks) -> bytes:
    fields: dict[str, Any] = {"format": _FORMAT, **dataclasses.asdict(marks)}
    line = json.dumps(fields).encode()
    return (line + b"\n%08x\n" % zlib.crc32(line)).ljust(_BYTES)


def write(path: Path, marks: Marks) -> None:
    """Store marks, on the disk when this returns."""
    file = MarksFile(path)
    try:
        file.write(marks, is_synced=True)
    finally:
        file.close()


class MarksFile:
    """The open file of one database's marks."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def write(self, marks: Marks, *, is_synced: bool = False) -> None:
        """Replace the marks; with ``is_synced`` they are on the disk when this returns."""
        os.pwrite(self._descriptor, _text(marks), 0)
        if is_synced:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
