"""Check memory, shared memory, open files, and the directories of training output."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dstrial.doctor.finding import Finding, NoAnswerError, note, ok, problem, within
from dstrial.engine.host_memory import available_bytes
from dstrial.launch.stale_locks import file_system_of
from dstrial.visible_text import size_text

_GIB = 1 << 30
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the directory itself is checked
# DeepSpeed itself warns below this (0.19.8 ``env_report.get_shm_size``); containers have 64 MiB by default.
_SMALL_SHM = 512 << 20
_FEW_FILES, _ENOUGH_FILES = 1024, 4096  # open files: fewer are a problem; more need no remark
_DIRECTORY_TIMEOUT_S = 8.0  # of the check of one directory, whose file system may hang
_NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p"}


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of this process; None means unlimited or unknown."""

    available_bytes: int | None  # free memory, or what control groups leave of their limit, if that is less
    shm_free_bytes: int  # of ``/dev/shm``; 0 if it is missing or not writable
    open_files: tuple[int | None, int | None]  # soft and hard limit


def measure_limits() -> Limits:
    shm_free = 0
    with contextlib.suppress(OSError):
        shm = os.statvfs(_SHARED_MEMORY)
        shm_free = shm.f_bavail * shm.f_frsize if os.access(_SHARED_MEMORY, os.W_OK | os.X_OK) else 0
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return Limits(available_bytes(), shm_free, (soft, hard))


def judge_limits(limits: Limits) -> list[Finding]:
    return [_judge_memory(limits.available_bytes), _judge_shared_memory(limits), _judge_open_files(limits)]


def _judge_memory(free: int | None) -> Finding:
    what = "unknown" if free is None else f"{size_text(free)} available"
    if free is None or free >= 4 * _GIB:
        return ok("memory", what)
    if free < _GIB:
        todo = "End what uses it, or raise the limit of the container: torch alone takes half a GiB a rank."
        return problem("memory", what, todo)
    todo = "Each rank takes about 1 GiB before its model: start few, and few loader workers."
    return note("memory", what, todo)


def _judge_shared_memory(limits: Limits) -> Finding:
    """Check ``/dev/shm``, through which loader workers and local ranks exchange data."""
    what = f"{size_text(limits.shm_free_bytes)} free"
    if limits.shm_free_bytes >= _SMALL_SHM:
        return ok(str(_SHARED_MEMORY), what)
    return problem(
        str(_SHARED_MEMORY),
        f"{what}: loader workers and NCCL end with SIGBUS (Bus error) where it is full",
        "Start a container with `--shm-size=1g` or more (Kubernetes: an emptyDir with medium Memory); elsewhere remove what "
        "killed programs have left in it, or mount a larger one (`mount -t tmpfs -o mode=1777,size=1g tmpfs /dev/shm`).",
    )


def _judge_open_files(limits: Limits) -> Finding:
    soft, hard = limits.open_files
    if soft is None or soft >= _ENOUGH_FILES:
        return ok("open files", "no limit" if soft is None else f"{soft} a process")
    most = "65536" if hard is None else str(min(hard, 65536))
    todo = (
        f"`ulimit -n {most}` before `dstrial up` or `dstrial run`."
        if hard is None or hard > soft
        else "Raise `nofile` in /etc/security/limits.conf (container: `--ulimit nofile=65536`)."
    )
    what = f"{soft} a process (at most {hard or 'any'}): loader workers and ranks open hundreds"
    return (problem if soft < _FEW_FILES else note)("open files", what, todo)


def check_directories(places: Sequence[tuple[str, Path]]) -> list[Finding]:
    """Return findings on directories: writable, free space, type of file system.

    ``places`` are (name for the finding, path of the directory, which may be missing).
    """
    found = []
    for name, path in places:
        try:
            found += within(_DIRECTORY_TIMEOUT_S, lambda n=name, p=path: _check_directory(n, p))  # type: ignore[misc]
        except (OSError, NoAnswerError) as error:
            what = f"{path} cannot be used: {getattr(error, 'strerror', None) or error}"
            found.append(problem(name, what, "Choose another directory, or change the rights on this one."))
    return found


def _check_directory(name: str, path: Path) -> list[Finding]:
    at = path
    while not at.exists() and at != at.parent:
        at = at.parent
    facts = os.statvfs(at)
    with tempfile.TemporaryFile(dir=at) as file:  # unnamed, so that a killed command leaves no file
        file.write(b"x" * 4096)
        file.flush()
        os.fdatasync(file.fileno())
    return judge_directory(name, path, file_system_of(at), facts.f_bavail * facts.f_frsize)


def judge_directory(name: str, path: Path, file_system: str, free_bytes: int) -> list[Finding]:
    """Return findings on the free space and the file system of a writable directory.

    ``file_system`` is the type of the file system, such as ``nfs``; empty if unknown.
    """
    what = f"{path}, {file_system or 'unknown file system'}, {size_text(free_bytes)} free"
    found = [ok(name, what)]
    if free_bytes < 10 * _GIB:
        what += ": a checkpoint of a model with N billion parameters and Adam takes 14 N GiB or more"
        todo = "Free some, or choose a directory on another disk."
        found = [(problem if free_bytes < _GIB else note)(name, what, todo)]
    if file_system in _NETWORK_FILE_SYSTEMS and name == "state":
        what = f"on a network file system ({file_system}), where SQLite's locks may not hold"
        todo = "Put the state directory on a local disk (`dstrial up --state-dir`); checkpoints may stay."
        found.append(note(f"{name} place", what, todo))
    return found
