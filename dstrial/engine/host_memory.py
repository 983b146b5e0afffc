"""Read how much host memory this process may still allocate."""

from __future__ import annotations

import pathlib

_MEMINFO = pathlib.Path("/proc/meminfo")
_OWN_CGROUPS = pathlib.Path("/proc/self/cgroup")
_CGROUP_ROOT = pathlib.Path("/sys/fs/cgroup")


def available_bytes(
    meminfo: pathlib.Path = _MEMINFO,
    own_cgroups: pathlib.Path = _OWN_CGROUPS,
    cgroup_root: pathlib.Path = _CGROUP_ROOT,
) -> int | None:
    """Return the bytes that this process can allocate without swap; None if unknown.

    This is the minimum of the kernel's estimate for the machine and of the unused part of each cgroup limit that applies to
    this process. A cgroup's inactive page cache counts as unused. The arguments are paths in ``/proc`` and ``/sys``.

    Source: ``man 5 proc`` (MemAvailable); the kernel's documentation of cgroup v2.
    """
    found = [_of_machine(meminfo), *(_left_in(group) for group in _groups(own_cgroups, cgroup_root))]
    known = [value for value in found if value is not None]
    return max(min(known), 0) if known else None


def _of_machine(meminfo: pathlib.Path) -> int | None:
    for line in _lines(meminfo):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _groups(own_cgroups: pathlib.Path, root: pathlib.Path) -> list[pathlib.Path]:
    paths = [line.split(":", 2)[2].strip() for line in _lines(own_cgroups) if line.startswith("0::")]
    owns = [root / path.lstrip("/") for path in paths]
    return [group for own in owns for group in (own, *own.parents) if group.is_relative_to(root)]


def _left_in(group: pathlib.Path) -> int | None:
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    if limit is None or used is None:
        return None
    counts = dict(line.split() for line in _lines(group / "memory.stat"))
    return limit - used + int(counts.get("inactive_file", 0))


def _number(path: pathlib.Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _lines(path: pathlib.Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
