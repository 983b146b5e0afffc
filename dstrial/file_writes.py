"""Write files atomically and durably; delete deep directory trees."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import subprocess
from pathlib import Path
from typing import cast


def replace_file(path: Path, content: str | bytes, *, sync: bool = True, is_private: bool = False) -> None:
    """Write a file atomically: readers see either the old or the new content.

    An existing file is replaced. If ``sync``, the file and its directory are flushed to disk (fsync). If ``is_private``, the
    file's mode is 0600, otherwise 0666 without the bits of the umask.
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
    """Create a file atomically, readable by its owner only, and flush it to disk.

    Raises:
        FileExistsError: the file exists; the existing file is not changed.
        OSError: the file cannot be written, or the file system has no hard links.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        _write(temporary, content, os.O_EXCL, sync=True, is_private=True)
        os.link(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(directory: Path, *, is_forced: bool = False) -> None:
    """Delete a directory tree of any depth; do not follow symbolic links.

    A no-op if ``directory`` does not exist. If ``is_forced``, the contents of read-only directories are deleted too. If an
    entry cannot be deleted, all others are deleted, and then OSError is raised.
    """
    if directory.is_symlink():
        directory.unlink()
        return
    problems: list[OSError] = []
    try:
        shutil.rmtree(
            directory, onerror=lambda _function, _path, info: problems.append(cast(OSError, info[1]))
        )
    except RecursionError:  # about 1000 levels, before Python 3.13
        problems.append(OSError(errno.ENAMETOOLONG, "directories are nested too deep", str(directory)))
    problems = [one for one in problems if not isinstance(one, FileNotFoundError)]
    if problems and (is_forced or problems[-1].errno == errno.ENAMETOOLONG):
        commands = [["chmod", "-R", "u+rwx"]] if is_forced else []
        for command in (*commands, ["rm", "-rf"]):
            subprocess.run([*command, "--", str(directory)], capture_output=True, check=False)
    if problems and directory.exists():
        raise problems[0]


def _write(path: Path, content: str | bytes, flag: int, *, sync: bool, is_private: bool) -> None:
    # O_NONBLOCK: do not block if `path` is a named pipe.
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | flag
    with os.fdopen(os.open(path, flags, 0o600 if is_private else 0o666), "wb") as file:
        if is_private:
            os.fchmod(file.fileno(), 0o600)
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        if sync:
            os.fsync(file.fileno())
