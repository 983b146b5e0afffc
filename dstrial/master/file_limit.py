"""Open-file limit (RLIMIT_NOFILE): raised for the master, restored for children."""

from __future__ import annotations

import errno
import resource

_WANTED_FILES = 4096

_soft_before: int | None = None


def raise_limit() -> None:
    """Raise this process's open-file limit to ``_WANTED_FILES``, or as far as allowed."""
    global _soft_before
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(_WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        _soft_before = soft


def restore_limit(pid: int) -> None:
    """Restore a child's original open-file limit: ``select`` needs descriptors < 1024."""
    if _soft_before is not None:
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (_soft_before, hard))


def is_shortage(error: BaseException) -> bool:
    """Return whether an error or its cause is a lack of file descriptors."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return True
    return error.__cause__ is not None and is_shortage(error.__cause__)
