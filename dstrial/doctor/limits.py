"""Check this process's limits: cores, memory, shared memory, files, processes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
from collections.abc import Mapping
from pathlib import Path

from dstrial.doctor.devices import account_name
from dstrial.doctor.finding import Finding, note, ok, problem
from dstrial.engine.host_memory import available_bytes
from dstrial.visible_text import size_text

_GIB = 1 << 30
_MIB = 1 << 20
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the directory itself is checked
# DeepSpeed itself warns below this (0.19.8 ``env_report.get_shm_size``); containers have 64 MiB by default.
_SMALL_SHM = 512 * _MIB
_FEW_FILES = 1024
_ENOUGH_FILES = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of this process; None means unlimited or unknown."""

    cores: int
    core_quota: float | None  # CPU quota of the control group, in cores
    memory_bytes: int
    available_bytes: int | None  # free memory, also within the limits of control groups
    shm_bytes: int  # size of ``/dev/shm``; 0 if it is missing
    shm_free_bytes: int
    shm_is_writable: bool
    open_files: tuple[int | None, int | None]  # soft and hard limit
    num_processes: int | None  # also None for root
    locked_bytes: int | None
    has_infiniband: bool


def measure() -> Limits:
    shm_bytes = shm_free = 0
    with contextlib.suppress(OSError):
        shm = os.statvfs(_SHARED_MEMORY)
        shm_bytes, shm_free = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
    return Limits(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        core_quota=core_quota(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        available_bytes=available_bytes(),
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free,
        shm_is_writable=os.access(_SHARED_MEMORY, os.W_OK | os.X_OK),
        open_files=(_limit(resource.RLIMIT_NOFILE), _limit(resource.RLIMIT_NOFILE, hard=True)),
        num_processes=None if os.getuid() == 0 else _limit(resource.RLIMIT_NPROC),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        has_infiniband=Path("/sys/class/infiniband").is_dir(),
    )


def _limit(kind: int, *, hard: bool = False) -> int | None:
    value = resource.getrlimit(kind)[1 if hard else 0]
    return None if value == resource.RLIM_INFINITY else value


def core_quota(
    own_cgroups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> float | None:
    """Return the CPU quota of the control groups in cores.

    Source: the kernel's documentation of cgroup v2 (``cpu.max``) and of the CPU controller of v1 (``cpu.cfs_quota_us``).
    """
    quotas = []
    with contextlib.suppress(OSError, ValueError):
        for line in own_cgroups.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            mount = root / "cpu" if controllers else root
            own = mount / path.lstrip("/")
            # In a container the path is the host's, but the group itself is mounted.
            for group in {mount, own, *(parent for parent in own.parents if parent.is_relative_to(mount))}:
                quotas.append(_quota(group))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(group: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        microseconds = int((group / "cpu.cfs_quota_us").read_text())
        return None if microseconds < 0 else microseconds / int((group / "cpu.cfs_period_us").read_text())
    return None


def judge(limits: Limits, environ: Mapping[str, str], *, num_devices: int = 0) -> list[Finding]:
    return [
        _judge_cores(limits, environ),
        _judge_memory(limits),
        _judge_shared_memory(limits, num_devices),
        _judge_open_files(limits),
        _judge_processes(limits),
        *_judge_locked(limits),
    ]


def _judge_cores(limits: Limits, environ: Mapping[str, str]) -> Finding:
    quota = limits.core_quota
    if quota is None or quota >= limits.cores:
        return ok("cores", f"{limits.cores}")
    what = f"{limits.cores}, with time for {quota:.3g} (control group)"
    if "OMP_NUM_THREADS" in environ:
        return ok("cores", what)
    whole = max(1, int(quota))
    return note(
        "cores",
        what,
        f"Start the master with `dstrial up --slots {whole}` where there is no accelerator, and set OMP_NUM_THREADS={whole}: "
        "torch starts a thread for each core that it sees.",
    )


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


def _judge_processes(limits: Limits) -> Finding:
    count = limits.num_processes
    if count is None or count >= 4096:
        return ok("processes", "no limit" if count is None else f"{count}")
    what = f"{count} processes and threads of {account_name(os.getuid())}: each rank has dozens of threads"
    todo = "Raise `nproc` in /etc/security/limits.conf, or `ulimit -u` where the hard limit allows it."
    return (problem if count < 512 else note)("processes", what, todo)


def _judge_locked(limits: Limits) -> list[Finding]:
    if limits.locked_bytes is None or not limits.has_infiniband:
        return []
    what = f"{size_text(limits.locked_bytes)}: InfiniBand registers its buffers as locked memory, and fails beyond it"
    todo = "Set `memlock unlimited` in /etc/security/limits.conf (container: `--ulimit memlock=-1`)."
    return [problem("locked memory", what, todo)]
