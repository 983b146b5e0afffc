"""A checksum of every page of the database as the last fold of its log left it.

SQLite has none: a flipped bit inside a value passes its own checks. The table lies beside the database
(``master.db-pages``): a line of JSON, and four bytes a page. It is replaced at once, before the pages are written.
"""

from __future__ import annotations

import array
import dataclasses
import json
import sys
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path

from dstrial.file_writes import replace_file

_FORMAT = 1
UNKNOWN = 0
"""Stands for a page that was never written, such as a free one; a checksum of 0 is kept as 1."""

_READ_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class PageChecksums:
    """The checksums (CRC-32) of a database's pages.

    Attributes:
        page_size: bytes.
        sums: one for each page, by its number less 1.
    """

    page_size: int
    sums: array.array[int]

    def updated(self, num_pages: int, pages: Mapping[int, bytes]) -> PageChecksums:
        """Return the checksums of a file of ``num_pages`` with other content in some.

        ``pages`` has their content by number, from 1.
        """
        sums = self.sums[:num_pages]
        sums.extend([UNKNOWN] * (num_pages - len(sums)))
        for page, content in pages.items():
            if page <= num_pages:
                sums[page - 1] = checksum(content)
        return PageChecksums(self.page_size, sums)


def path_of(database: Path) -> Path:
    """Return where a database's table lies."""
    return database.with_name(f"{database.name}-pages")


def checksum(page: bytes) -> int:
    """Return the checksum of a page, never that of an unknown one."""
    return zlib.crc32(page) or 1


def of_file(database: Path) -> PageChecksums | None:
    """Read a whole file and return its checksums; None if it is no database.

    Never while this process has the database open: closing a file gives up all of a process's locks on it.
    """
    with database.open("rb") as file:
        header = file.read(100)
        if len(header) < 100:
            return None
        page_size = int.from_bytes(header[16:18], "big")
        page_size = 65536 if page_size == 1 else page_size
        if page_size < 512 or page_size & (page_size - 1):
            return None
        file.seek(0)
        sums = array.array("I")
        while chunk := file.read(_READ_BYTES):
            for start in range(0, len(chunk), page_size):
                sums.append(checksum(chunk[start : start + page_size]))
    return PageChecksums(page_size, sums)


def differing(expected: PageChecksums, found: PageChecksums | None, except_for: Collection[int]) -> list[int]:
    """Return the pages (from 1) that are not what was written, or are missing.

    Args:
        expected: as the last fold left it.
        found: as the file has it now.
        except_for: pages whose content is in the log.
    """
    sums = array.array("I") if found is None else found.sums
    num = max(len(sums), len(expected.sums))
    wrong = []
    for page in range(1, num + 1):
        wanted = expected.sums[page - 1] if page <= len(expected.sums) else None
        got = sums[page - 1] if page <= len(sums) else None
        if wanted not in (got, UNKNOWN) and page not in except_for:
            wrong.append(page)
    return wrong


def read(path: Path) -> PageChecksums | None:
    """Return what is stored; None if there is none.

    Raises:
        ValueError: the table itself is damaged.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    head, _, body = content.partition(b"\n")
    try:
        fields = json.loads(head)
        is_whole = fields["format"] == _FORMAT and fields["crc32"] == zlib.crc32(
            body, int(fields["page_size"])
        )
        page_size = int(fields["page_size"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(str(error)) from error
    if not is_whole or len(body) % 4:
        raise ValueError("its checksum is wrong")
    sums = array.array("I", body)
    if sys.byteorder == "big":
        sums.byteswap()
    return PageChecksums(page_size, sums)


def write(path: Path, table: PageChecksums) -> None:
    """Replace what is stored, on the disk when this returns."""
    sums = table.sums[:]
    if sys.byteorder == "big":
        sums.byteswap()
    body = sums.tobytes()
    head = {"format": _FORMAT, "page_size": table.page_size, "crc32": zlib.crc32(body, table.page_size)}
    replace_file(path, json.dumps(head).encode() + b"\n" + body, is_private=True)
