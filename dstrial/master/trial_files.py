"""Read files that trials can write, without trusting their type, size or owner."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, get_type_hints

T = TypeVar("T")

MAX_RECORD_BYTES = 1 << 20  # maximum size of a JSON file
# Errors of open() which mean that the path is no file that this account can read.
_NO_FILE = (errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EACCES)


def open_regular(path: Path, *, is_own: bool = True) -> BinaryIO:
    """Open a regular file for reading; never block on a pipe or follow a link.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the path is a link, a pipe, a directory or, if ``is_own``, another account's file.
        OSError: the file cannot be opened.
    """
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except IsADirectoryError as error:
        raise ValueError(f"{path} is a directory") from error
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        raise ValueError(f"{path} is no file that can be read ({error.strerror})") from error
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode) or (is_own and found.st_uid != os.geteuid()):
        file.close()
        raise ValueError(f"{path} is no regular file" + " of this account" * is_own)
    return file


def read_json(path: Path) -> Any:
    """Parse a JSON file of at most ``MAX_RECORD_BYTES``.

    Raises ``ValueError`` if the file is longer or not JSON, and the errors of ``open_regular``.
    """
    with open_regular(path) as file:
        content = file.read(MAX_RECORD_BYTES + 1)
    if len(content) > MAX_RECORD_BYTES:
        raise ValueError(f"{path} has more than {MAX_RECORD_BYTES} bytes")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error})") from error


def read_record(path: Path, kind: type[T]) -> T:
    """Parse a JSON file into dataclass ``kind``; raises the errors of ``read_json``."""
    found = read_json(path)
    fields = {}
    for name, wanted in get_type_hints(kind).items():
        value = fields[name] = found.get(name) if isinstance(found, dict) else None
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise ValueError(f"{path}: {name} is {str(value)[:40]!r}; expected {wanted}")
    try:
        return kind(**fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
