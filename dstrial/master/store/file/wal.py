"""What is in SQLite's write-ahead log, read from its bytes.

Nothing here changes it.

SQLite takes a log up to the first frame whose checksum is wrong and drops the rest without a word, so a flipped bit
loses transactions that were confirmed. Whoever knows how many frames there were can tell, by :func:`scan`.

Source: the file format, https://www.sqlite.org/fileformat2.html#the_write_ahead_log.
"""

from __future__ import annotations

import dataclasses
import os
import struct

_HEADER = struct.Struct(">8I")
_FRAME = struct.Struct(">6I")
_INDEX = struct.Struct("=HII")
_INDEX_BYTES = 48
_MAGIC = 0x377F0682
_MASK = 0xFFFFFFFF

HEADER_BYTES = _HEADER.size


@dataclasses.dataclass(frozen=True, slots=True)
class Scan:
    """A log as far as SQLite would take it.

    Attributes:
        salt: 16 hexadecimal digits that change whenever the log begins anew.
        page_size: bytes.
        num_valid: frames before the first that is wrong or missing.
        num_committed: those of them up to the end of the last transaction.
        num_present: frames for which the file has room.
        num_pages: pages of the database after the last transaction; 0 where there is none.
        pages: page number (from 1) -> frame (from 0) that holds its last committed content.
    """

    salt: str
    page_size: int
    num_valid: int
    num_committed: int
    num_present: int
    num_pages: int
    pages: dict[int, int]


def frame_offset(frame_idx: int, page_size: int) -> int:
    """Return where in the file a frame's page begins, bytes."""
    return HEADER_BYTES + frame_idx * (_FRAME.size + page_size) + _FRAME.size


def scan(content: bytes) -> Scan | None:
    """Read a log and check every frame; None where SQLite would take nothing of it."""
    if len(content) < HEADER_BYTES:
        return None
    magic, _version, page_size, _sequence, salt_1, salt_2, sum_1, sum_2 = _HEADER.unpack_from(content)
    if magic & ~1 != _MAGIC or page_size < 512 or page_size & (page_size - 1):
        return None
    order = ">" if magic & 1 else "<"
    sums = _checksum(content[:24], (0, 0), order)
    if sums != (sum_1, sum_2):
        return None
    num_present = (len(content) - HEADER_BYTES) // (_FRAME.size + page_size)
    num_valid = num_committed = num_pages = 0
    pages: dict[int, int] = {}
    pending: dict[int, int] = {}
    for frame_idx in range(num_present):
        start = frame_offset(frame_idx, page_size) - _FRAME.size
        page, size, *salts, frame_1, frame_2 = _FRAME.unpack_from(content, start)
        if salts != [salt_1, salt_2] or not page:
            break
        sums = _checksum(content[start : start + 8], sums, order)
        sums = _checksum(content[start + _FRAME.size : start + _FRAME.size + page_size], sums, order)
        if sums != (frame_1, frame_2):
            break
        num_valid += 1
        pending[page] = frame_idx
        if size:
            num_committed, num_pages = num_valid, size
            pages.update(pending)
            pending.clear()
    salt = f"{salt_1:08x}{salt_2:08x}"
    return Scan(salt, page_size, num_valid, num_committed, num_present, num_pages, pages)


def _checksum(content: bytes, sums: tuple[int, int], order: str) -> tuple[int, int]:
    first, second = sums
    words = iter(struct.unpack(f"{order}{len(content) // 4}I", content))
    for left, right in zip(words, words, strict=True):
        first = (first + left + second) & _MASK
        second = (second + right + first) & _MASK
    return first, second


class Follower:
    """Follows the log that this process writes, by SQLite's own index of it.

    Not by the log alone: what a commit has left there that failed on a full disk looks like a commit. The index is shared
    memory in a file (``-shm``). It stays open here for as long as SQLite has it, since a process that closes any
    descriptor of a file gives up all of its locks on it.

    Args:
        database: path of the database, which a connection of this process has read.

    Source: https://www.sqlite.org/walformat.html#the_wal_index_header.
    """

    def __init__(self, database: str) -> None:
        self._index = os.open(f"{database}-shm", os.O_RDONLY | os.O_CLOEXEC)
        self._log = os.open(f"{database}-wal", os.O_RDONLY | os.O_CLOEXEC)
        self.salt = ""
        self.page_size = 0
        self.num_pages = 0
        self.num_committed = 0
        self.pages: dict[int, int] = {}

    def advance(self) -> None:
        """Take in what has been committed since.

        Raises:
            OSError: the log cannot be read.
        """
        header = os.pread(self._index, _INDEX_BYTES, 0)
        page_size, num_frames, self.num_pages = _INDEX.unpack_from(header, 14)
        salt = header[32:40].hex()
        if salt != self.salt or num_frames < self.num_committed:
            self.salt, self.num_committed, self.pages = salt, 0, {}
        self.page_size = 65536 if page_size == 1 else page_size
        for frame_idx in range(self.num_committed, num_frames):
            raw = os.pread(self._log, 4, frame_offset(frame_idx, self.page_size) - _FRAME.size)
            self.pages[int.from_bytes(raw, "big")] = frame_idx
        self.num_committed = num_frames

    def page(self, frame_idx: int) -> bytes:
        """Return the page that a frame holds."""
        return os.pread(self._log, self.page_size, frame_offset(frame_idx, self.page_size))

    def sync(self) -> None:
        """Wait until the log is on the disk.

        SQLite's ``synchronous`` cannot be changed inside a transaction ("Safety level may not be changed inside a
        transaction"), and a group learns while it runs that it must last. This is what FULL does after a commit.
        """
        os.fsync(self._log)

    def close(self) -> None:
        """Close the files; only when SQLite has closed them."""
        os.close(self._index)
        os.close(self._log)
