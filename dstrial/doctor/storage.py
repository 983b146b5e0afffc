"""The directories that training writes to: permissions, free space, speed.

Looking never makes a directory: where one does not exist yet, its nearest parent that does is looked at. What the speed
probe writes has no name, so that nothing is left even of a killed command.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from dstrial.doctor.background import NoAnswerError, within
from dstrial.doctor.finding import Finding, note, ok, problem, size

_MIB = 1 << 20
_GIB = 1 << 30
_CHUNK = 4 * _MIB
TOTAL_BYTES = 48 * _MIB
"""What all speed probes of one command write together at most; the small writes come on top, some KiB."""

_PROBE_S = 0.6
_NUM_SYNCS = 8
_DIRECTORY_TIMEOUT_S = 8.0
_NETWORK_FILE_SYSTEMS = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "glusterfs",
    "9p",
    "fuse.sshfs",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Directory:
    """A directory that training writes to.

    Attributes:
        name: what it is for.
        path: where it is, or will be made.
        looked_at: the nearest directory that exists.
        file_system: its type, ``ext4`` for example; empty if not known.
        free_bytes: what an ordinary account may still take.
        free_files: how many files may still be made; None where that has no limit.
        error: why nothing can be written; empty if it can.
        bytes_per_s: speed of writing with each piece brought to the disk; None if it was not measured.
        sync_s: how long a small write takes to be on the disk, median; None if it was not measured.
    """

    name: str
    path: str
    looked_at: str
    file_system: str
    free_bytes: int
    free_files: int | None
    error: str = ""
    bytes_per_s: float | None = None
    sync_s: float | None = None


def measure(places: Sequence[tuple[str, Path]]) -> list[Directory | Finding]:
    """Look at directories by name and path, each file system measured once.

    Returns:
        One value per place, in order; a finding for one that does not answer.
    """
    found: list[Directory | Finding] = []
    elsewhere = "Choose another directory, or change the rights on this one."
    measured: dict[int, Directory] = {}
    share = TOTAL_BYTES // max(1, len(places))
    for name, path in places:
        try:
            found.append(within(_DIRECTORY_TIMEOUT_S, lambda n=name, p=path: _look(n, p, share, measured)))  # type: ignore[misc]
        except OSError as error:
            found.append(problem(name, f"{path} cannot be looked at: {error.strerror or error}", elsewhere))
        except NoAnswerError:
            found.append(
                problem(
                    name,
                    f"{path} does not answer within {_DIRECTORY_TIMEOUT_S:.0f} s",
                    "Look at the server of that file system, or choose another directory.",
                )
            )
    return found


def _look(name: str, path: Path, share: int, measured: dict[int, Directory]) -> Directory:
    at = path
    while not at.exists() and at != at.parent:
        at = at.parent
    facts = os.statvfs(at)
    directory = Directory(
        name=name,
        path=str(path),
        looked_at=str(at),
        file_system=_file_system(at),
        free_bytes=facts.f_bavail * facts.f_frsize,
        free_files=facts.f_favail if facts.f_files else None,
    )
    device = at.stat().st_dev
    try:
        if not at.is_dir():
            raise NotADirectoryError(0, "it is no directory")
        if device in measured:
            with tempfile.TemporaryFile(dir=at):
                other = measured[device]
                return dataclasses.replace(
                    directory,
                    bytes_per_s=other.bytes_per_s,
                    sync_s=other.sync_s,
                )
        speed, sync_s = _probe(at, min(share, directory.free_bytes // 2))
    except OSError as error:
        return dataclasses.replace(directory, error=error.strerror or str(error))
    measured[device] = dataclasses.replace(directory, bytes_per_s=speed, sync_s=sync_s)
    return measured[device]


def _probe(at: Path, max_bytes: int) -> tuple[float | None, float]:
    """Write; return bytes/s and seconds of a small write."""
    with tempfile.TemporaryFile(dir=at) as file:
        descriptor = file.fileno()
        syncs = []
        for idx in range(_NUM_SYNCS):
            began_at_s = time.perf_counter()
            os.pwrite(descriptor, b"x" * 4096, idx * 4096)
            os.fdatasync(descriptor)
            syncs.append(time.perf_counter() - began_at_s)
            if sum(syncs) > _PROBE_S:
                break
        # No file system makes random bytes smaller.
        chunk = os.urandom(_CHUNK)
        began_at_s, written = time.perf_counter(), 0
        while written + _CHUNK <= max_bytes and time.perf_counter() - began_at_s < _PROBE_S:
            written += os.write(descriptor, chunk)
            os.fdatasync(descriptor)
        seconds = time.perf_counter() - began_at_s
    return (written / seconds if written else None), statistics.median(syncs)


def _file_system(path: Path) -> str:
    best, kind = "", ""
    where = str(path.resolve()).rstrip("/") + "/"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines():
            _, mounted_at, file_system, *_ = line.split()
            prefix = mounted_at.rstrip("/") + "/"
            if where.startswith(prefix) and len(prefix) >= len(best):
                best, kind = prefix, file_system
    return kind


def judge(directories: Sequence[Directory | Finding]) -> list[Finding]:
    """Judge directories; findings among them stay as they are."""
    found = []
    for directory in directories:
        found += [directory] if isinstance(directory, Finding) else judge_directory(directory)
    return found


def judge_directory(directory: Directory) -> list[Finding]:
    """Judge a directory: whether it is writable, then its free space, then its speed."""
    name = directory.name
    free = size(directory.free_bytes)
    if directory.error:
        return [
            problem(
                name,
                f"{directory.path} cannot be written to: {directory.error}",
                "Choose another directory, or change the rights on this one.",
            )
        ]
    facts = [directory.path, directory.file_system, f"{free} free"]
    if directory.bytes_per_s is not None:
        facts.append(f"writes {directory.bytes_per_s / _MIB:,.0f} MiB/s")
    if directory.sync_s is not None:
        facts.append(f"a small write is on the disk after {1000 * directory.sync_s:.2g} ms")
    found = [ok(name, ", ".join(fact for fact in facts if fact))]
    if directory.free_bytes < 10 * _GIB:
        found.append(
            (problem if directory.free_bytes < _GIB else note)(
                f"{name} space",
                f"{free} free: a checkpoint of a model with N billion parameters and Adam takes 14 N GiB or more",
                "Free some, or choose a directory on another disk.",
            )
        )
    if directory.free_files is not None and directory.free_files < 10_000:
        found.append(
            problem(
                f"{name} files",
                f"{directory.free_files} more files can be made",
                "Remove files that are not needed.",
            )
        )
    return found + _judge_speed(directory)


def _judge_speed(directory: Directory) -> list[Finding]:
    name, found = directory.name, []
    if directory.bytes_per_s is not None and directory.bytes_per_s < 50 * _MIB:
        found.append(
            note(
                f"{name} speed",
                f"{directory.bytes_per_s / _MIB:.3g} MiB/s: a checkpoint of 10 GiB takes "
                f"{10 * _GIB / directory.bytes_per_s / 60:.0f} min",
                "Choose a faster disk, save less often, or save behind the loop.",
            )
        )
    if directory.sync_s is not None and directory.sync_s > 0.05:
        found.append(
            note(
                f"{name} speed",
                f"a small write takes {1000 * directory.sync_s:.0f} ms to be on the disk; the master waits for one a commit",
                "Put the state directory on a local disk (`dstrial up --state-dir`).",
            )
        )
    if directory.file_system in _NETWORK_FILE_SYSTEMS and name == "state":
        found.append(
            note(
                f"{name} place",
                f"on a network file system ({directory.file_system}), where SQLite's locks may not hold",
                "Put the state directory on a local disk (`dstrial up --state-dir`); checkpoints may stay.",
            )
        )
    return found
