"""Write files atomically and durably; delete deep directory trees."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def replace_file(path: Path, content: str | bytes, *, sync: bool = True, is_private: bool = False) -> None:
    """Replace a file atomically: readers see either the old or the new content.

    With ``sync``, the file is flushed to disk (fsync). With ``is_private``, its mode is 0600, regardless of the umask.
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
        FileExistsError: the file exists; it is not changed.
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
    """Delete a directory tree of any depth, if it exists; do not follow links.

    ``shutil.rmtree`` fails at about 1000 levels (RecursionError, CPython before 3.13). With ``is_forced``, the contents of
    read-only directories are deleted too. If an entry cannot be deleted, OSError is raised after all other entries are deleted.
    """
    problem: OSError | None = None
    try:
        here = os.open(directory.parent, _DIRECTORY | os.O_PATH)
    except FileNotFoundError:
        return
    # Two stacks from the top directory to the current one: `left` has the names that remain in each directory; `above` has the
    # name of each opened directory and the stat of its parent.
    left, above = [[directory.name]], list[tuple[str, os.stat_result]]()
    try:
        while left[-1] or above:
            is_empty = not left[-1]
            if is_empty:
                # Return to the parent by "..": an open descriptor per level could exceed the process's limit.
                below, here = here, os.open("..", _DIRECTORY | os.O_PATH, dir_fd=here)
                os.close(below)
                left.pop()
                name, parent = above.pop()
                if not os.path.samestat(os.fstat(here), parent):
                    raise OSError(errno.EBUSY, "the directory was moved during its deletion", str(directory))
            else:
                name = left[-1].pop()
            try:
                if is_empty:
                    os.rmdir(name, dir_fd=here)
                elif (opened := _delete_or_open(name, here, is_forced)) is not None:
                    above.append((name, os.fstat(here)))
                    left.append([])
                    os.close(here)
                    here = opened
                    with os.scandir(here) as entries:
                        left[-1] = [entry.name for entry in entries]
            except FileNotFoundError:
                pass
            except OSError as error:
                problem = problem or error
    finally:
        os.close(here)
    if problem is not None:
        raise problem


def _delete_or_open(name: str, here: int, is_forced: bool) -> int | None:
    """Open a directory and return its descriptor; delete any other entry, return None."""
    try:
        path = os.open(name, _DIRECTORY | os.O_PATH | os.O_NOFOLLOW, dir_fd=here)
    except NotADirectoryError:
        os.unlink(name, dir_fd=here)
        return None
    try:
        if is_forced:
            with contextlib.suppress(OSError):
                Path(f"/proc/self/fd/{path}").chmod(0o700)
        return os.open(".", _DIRECTORY, dir_fd=path)
    finally:
        os.close(path)


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
