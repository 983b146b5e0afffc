"""Notes how far the log goes after commits, and moves it into the database.

SQLite would move it whenever a thousand pages are full, and the checksums of pages would not hold. So it is told not to,
and :meth:`LogKeeper.fold` does it: in an order in which neither a kill nor a loss of power leaves what looks damaged.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import logging
import os
import sqlite3
import time
from pathlib import Path

from dstrial.master.store.file import integrity, marks, page_checksums, wal

logger = logging.getLogger(__name__)

_FOLD_FRAMES = 1000
_FOLD_PERIOD_S = 1.0
_IDLE_S = 5.0
_MAX_AGE_S = 60.0
_BUSY_MS = 100
_NO_SUMS = page_checksums.PageChecksums(0, array.array("I"))


class LogKeeper:
    """Keeps the log of one open database; used by the writer's thread only.

    Args:
        path: the database.
        connection: the writer's.
        last: the marks that the last master left, or an earlier step of opening.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, last: marks.Marks) -> None:
        self._path = path
        self._connection = connection
        self._marks = last
        self._file = marks.MarksFile(marks.path_of(path))
        self._log = wal.Follower(str(path))
        # Open as long as SQLite has it, as a process that closes any descriptor of a file gives up all of its locks on it.
        self._database = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._sums = page_checksums.read(page_checksums.path_of(path)) or _NO_SUMS
        self._folded_s = self._written_s = time.monotonic()

    def committed(self, *, is_durable: bool) -> None:
        """Note a commit; with ``is_durable`` it is on the disk when this returns.

        Raises:
            OSError: the disk does not take it.
        """
        self._written_s = time.monotonic()
        self._log.advance()
        changes: dict[str, object] = {
            "salt": self._log.salt,
            "num_frames": self._log.num_committed,
            "num_folded": 0,
        }
        if self._log.salt != self._marks.salt:
            changes["num_synced"] = 0
        if is_durable:
            self._log.sync()
            changes |= {
                "num_synced": self._log.num_committed,
                "cluster_id": integrity.cluster_id_of(self._connection),
                "highest": integrity.highest_ids(self._connection),
            }
        self._note(changes)

    def seconds_until_fold(self) -> float | None:
        """Return in how many seconds :meth:`fold` is due, None with nothing to fold."""
        if not self._marks.num_frames:
            return None
        if self._log.num_committed >= _FOLD_FRAMES and time.monotonic() > self._folded_s + _FOLD_PERIOD_S:
            return 0.0
        due_s = min(max(self._written_s, self._folded_s) + _IDLE_S, self._folded_s + _MAX_AGE_S)
        return max(0.0, due_s - time.monotonic())

    def fold(self, *, is_thorough: bool = True) -> None:
        """Move the log into the database; what readers still use stays in the log, too.

        Args:
            is_thorough: whether to wait a moment for readers, so that the log is empty afterwards.

        Raises:
            OSError: the disk does not take it.
            sqlite3.Error: so does SQLite say.
        """
        self._folded_s = time.monotonic()
        self._log.advance()
        num_frames = self._log.num_committed
        if num_frames:
            # 1. The log is on the disk, so that what step 2 says of its pages holds after a loss of power.
            self._log.sync()
            pages = {page: self._log.page(frame) for page, frame in self._log.pages.items()}
            base = dataclasses.replace(self._sums, page_size=self._log.page_size)
            self._sums = base.updated(self._log.num_pages, pages)
            # 2. The checksums: the pages themselves are still in the log, which excepts them from a comparison.
            page_checksums.write(page_checksums.path_of(self._path), self._sums)
            # 3. The log may be short from here on.
            self._note({"num_frames": 0, "num_synced": 0, "num_folded": num_frames}, is_synced=True)
        # 4. The pages.
        if not self._checkpoint("TRUNCATE" if is_thorough else "PASSIVE") and num_frames:
            self._note({"num_frames": num_frames, "num_synced": num_frames, "num_folded": 0})

    def wrong_pages(self, start: int, count: int) -> tuple[list[int], bool]:
        """Compare pages of the file with their checksums.

        Args:
            start: the first page, from 1.
            count: how many.

        Returns:
            Those that are neither what was written nor in the log, and whether these were the last pages.
        """
        self._log.advance()
        size = self._sums.page_size
        content = os.pread(self._database, count * size, (start - 1) * size)
        wanted = self._sums.sums[start - 1 : start - 1 + count]
        wrong = [
            start + place
            for place, expected in enumerate(wanted)
            if start + place not in self._log.pages
            and expected
            not in (
                page_checksums.UNKNOWN,
                page_checksums.checksum(content[place * size : (place + 1) * size]),
            )
        ]
        return wrong, len(wanted) < count

    def end(self) -> None:
        """Fold for the last time, and close the writer's connection.

        What could not be folded stays in the log.
        """
        try:
            self.fold()
        except (OSError, sqlite3.Error):
            logger.exception("the log of %s could not be moved into it; it stays beside it", self._path)
        with contextlib.ExitStack() as stack:
            if self._marks.num_frames:
                # The last connection that could write would move it when it is closed, and nobody would note that.
                last = stack.enter_context(integrity.reading(self._path))
                last.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
            self._connection.close()

    def close(self) -> None:
        """Note that the database is closed, after the last connection has been."""
        with contextlib.suppress(OSError):
            self._note({"is_open": False}, is_synced=True)
        self._log.close()
        self._file.close()
        os.close(self._database)

    def _checkpoint(self, mode: str) -> bool:
        """Have SQLite move the log; return whether all of it is in the database."""
        before = self._connection.execute("PRAGMA busy_timeout").fetchone()[0]
        self._connection.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
        try:
            is_busy, num_frames, num_moved = self._connection.execute(
                f"PRAGMA wal_checkpoint({mode})"
            ).fetchone()
        finally:
            self._connection.execute(f"PRAGMA busy_timeout = {before}")
        return num_frames == num_moved or (not is_busy and num_frames <= 0)

    def _note(self, changes: dict[str, object], *, is_synced: bool = False) -> None:
        self._marks = dataclasses.replace(self._marks, **changes)  # type: ignore[arg-type]  # names of its fields
        self._file.write(self._marks, is_synced=is_synced)
