"""Files that are written whole or not at all, and are then on the disk.

Needs only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def replace_file(path: Path, content: str | bytes, *, sync: bool = True, is_private: bool = False) -> None:
    """Replace a file; a reader or a kill sees the old content or the new.

    Args:
        path: the file; its directory must exist.
        content: the whole new content; text is written as UTF-8.
        sync: also wait until it is on the disk; False for files that only show progress.
        is_private: whether other accounts must not read it, whatever the umask.

    Raises:
        OSError: the disk is full or the directory is not writable; the old content is still there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _write(temporary, content, os.O_TRUNC, sync=sync, is_private=is_private)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_path(path.parent)


def make_file(path: Path, content: str | bytes) -> None:
    """Make a file that only its owner may read, whole and on the disk.

    Of several who do so at once one succeeds.

    Raises:
        FileExistsError: there is one, which stays as it is.
        OSError: it cannot be written, or the file system has no links.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        _write(temporary, content, os.O_EXCL, sync=True, is_private=True)
        os.link(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def sync_path(path: Path) -> None:
    """Wait until a file's content, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, content: str | bytes, flag: int, *, sync: bool, is_private: bool) -> None:
    # Not to wait where somebody has made a pipe of that name.
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | flag
    with os.fdopen(os.open(path, flags, 0o600 if is_private else 0o666), "wb") as file:
        if is_private:
            os.fchmod(file.fileno(), 0o600)
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        if sync:
            os.fsync(file.fileno())
