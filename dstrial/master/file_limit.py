"""The open-file limit: the master's own, and the user's for what it starts."""

from __future__ import annotations

import resource

from dstrial.errors import MasterError

_WANTED_FILES = 4096
_RESERVED_FILES = 128
"""For the database, logs, supervisors and what else the master opens beside connections."""
_FILES_PER_CONNECTION = 2
"""One that is passed on to a task's service has a second one behind it."""
_MIN_CONNECTIONS = 16
_MIN_FILES = _RESERVED_FILES + _MIN_CONNECTIONS * _FILES_PER_CONNECTION

_soft_before: int | None = None


def raise_limit() -> int:
    """Raise this process's limit; return how many connections that is enough for.

    Raises:
        MasterError: it may not be raised as far as a master needs.
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
    """Give a new process the earlier limit, as ``select`` fails beyond 1024 files."""
    if _soft_before is not None:
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (_soft_before, hard))
