"""Open-file limit (RLIMIT_NOFILE): raised for the master, restored for children."""

from __future__ import annotations

import errno
import resource

from dstrial.errors import MasterError

_WANTED_FILES = 4096  # the soft limit is raised to this value, or to the hard limit if that is lower
_RESERVED_FILES = 128  # for files other than connections: database, logs, supervisors
_FILES_PER_CONNECTION = 2  # a proxied connection has a second connection, to the task's service
_MIN_CONNECTIONS = 16
_MIN_FILES = _RESERVED_FILES + _MIN_CONNECTIONS * _FILES_PER_CONNECTION

_soft_before: int | None = None


def raise_limit() -> int:
    """Raise this process's open-file limit; return the maximum number of connections.

    Raises:
        MasterError: the hard limit is too low for a master.
    """
    global _soft_before
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _MIN_FILES:
        raise MasterError(
            f"this process may open {hard} files (ulimit -Hn); expected at least {_MIN_FILES} for a master. Raise this limit, "
            "and start the master from a new login or service."
        )
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(_WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        _soft_before = soft
        soft = wanted
    if soft == resource.RLIM_INFINITY:
        soft = _WANTED_FILES
    return (soft - _RESERVED_FILES) // _FILES_PER_CONNECTION


def restore_limit(pid: int) -> None:
    """Set a child's open-file limit back to the limit before ``raise_limit``.

    ``select`` in user code supports only descriptors below 1024.
    """
    if _soft_before is not None:
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (_soft_before, hard))


def is_shortage(error: BaseException) -> bool:
    """Return whether an error or any ``__cause__`` of it is a lack of descriptors."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return True
    return error.__cause__ is not None and is_shortage(error.__cause__)
