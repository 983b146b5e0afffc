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
_MIB = 1 << 20
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the directory itself is checked
# DeepSpeed itself warns below this (0.19.8 ``env_report.get_shm_size``); containers have 64 MiB by default.
_SMALL_SHM = 512 * _MIB
_FEW_FILES = 1024
_ENOUGH_FILES = 4096
_DIRECTORY_TIMEOUT_S = 8.0
_NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p"}
_ELSEWHERE = "Choose another directory, or change the rights on this one."


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of this process; None means unlimited or unknown."""

    memory_bytes: int
    available_bytes: int | None  # free memory, also within the limits of control groups
    shm_bytes: int  # size of ``/dev/shm``; 0 if it is missing
    shm_free_bytes: int
    shm_is_writable: bool
    open_files: tuple[int | None, int | None]  # soft and hard limit


def measure_limits() -> Limits:
    shm_bytes = shm_free = 0
    with contextlib.suppress(OSError):
        shm = os.statvfs(_SHARED_MEMORY)
        shm_bytes, shm_free = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return Limits(
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        available_bytes=available_bytes(),
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free,
        shm_is_writable=os.access(_SHARED_MEMORY, os.W_OK | os.X_OK),
        open_files=(soft, hard),
    )


def judge_limits(limits: Limits, *, num_devices: int = 0) -> list[Finding]:
    return [_judge_memory(limits), _judge_shared_memory(limits, num_devices), _judge_open_files(limits)]


def _judge_memory(limits: Limits) -> Finding:
    free = limits.available_bytes
    if free is None:
        return ok("memory", size_text(limits.memory_bytes))
    what = f"{size_text(free)} available of {size_text(limits.memory_bytes)}"
    if free < _GIB:
        todo = "End what uses it, or raise the limit of the container: torch alone takes half a GiB a rank."
        return problem("memory", what, todo)
    if free < 4 * _GIB:
        todo = "Each rank takes about 1 GiB before its model: start few, and few loader workers."
        return note("memory", what, todo)
    return ok("memory", what)


def _judge_shared_memory(limits: Limits, num_devices: int) -> Finding:
    """Check ``/dev/shm``, through which loader workers and local ranks exchange data."""
    name = str(_SHARED_MEMORY)
    if limits.shm_bytes == 0 or not limits.shm_is_writable:
        what = "missing" if limits.shm_bytes == 0 else "no files can be made in it"
        todo = (
            "Mount a tmpfs there that everybody can write to (`mount -t tmpfs -o mode=1777 tmpfs /dev/shm`)."
        )
        return problem(name, what, todo)
    what = f"{size_text(limits.shm_free_bytes)} free of {size_text(limits.shm_bytes)}"
    sigbus = "loader workers and NCCL end with SIGBUS (Bus error) where it is full"
    if limits.shm_bytes < _SMALL_SHM:
        return problem(
            name,
            f"{what}: {sigbus}",
            "In a container, start it with `--shm-size=1g` or more (Kubernetes: an emptyDir with medium Memory), or remount it "
            "(`mount -o remount,size=1g /dev/shm`); with num_workers 0 loaders do without.",
        )
    needed = _SMALL_SHM + num_devices * 64 * _MIB
    if limits.shm_free_bytes < needed:
        todo = "Remove what programs that were killed have left (`ls -l /dev/shm`), or make it larger."
        return problem(name, f"{what}; expected {size_text(needed)} free: {sigbus}", todo)
    return ok(name, what)


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
    """Return findings on directories, given as (name, path), and their file systems."""
    found = []
    for name, path in places:
        try:
            found += within(_DIRECTORY_TIMEOUT_S, lambda n=name, p=path: _check_directory(n, p))  # type: ignore[misc]
        except OSError as error:
            found.append(problem(name, f"{path} cannot be used: {error.strerror or error}", _ELSEWHERE))
        except NoAnswerError as error:
            todo = "Look at the server of that file system, or choose another directory."
            found.append(problem(name, f"{path}: {error}", todo))
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
    """Return findings on a writable directory; ``file_system`` is empty if unknown."""
    free = size_text(free_bytes)
    found = [ok(name, ", ".join(fact for fact in (str(path), file_system, f"{free} free") if fact))]
    if free_bytes < 10 * _GIB:
        what = (
            f"{free} free: a checkpoint of a model with N billion parameters and Adam takes 14 N GiB or more"
        )
        todo = "Free some, or choose a directory on another disk."
        found.append((problem if free_bytes < _GIB else note)(f"{name} space", what, todo))
    if file_system in _NETWORK_FILE_SYSTEMS and name == "state":
        what = f"on a network file system ({file_system}), where SQLite's locks may not hold"
        todo = "Put the state directory on a local disk (`dstrial up --state-dir`); checkpoints may stay."
        found.append(note(f"{name} place", what, todo))
    return found
