"""What this process may use: cores, memory, shared memory, files, processes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pwd
import resource
from collections.abc import Mapping
from pathlib import Path

from dstrial.doctor.finding import Finding, note, ok, problem, size
from dstrial.engine.async_copy.host_memory import available_bytes

_GIB = 1 << 30
_MIB = 1 << 20
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the directory itself is looked at
_SMALL_SHM = 512 * _MIB
"""Below this DeepSpeed itself warns (0.19.8 ``env_report.get_shm_size``); containers have 64 MiB unless told otherwise."""

_FEW_FILES = 1024
_ENOUGH_FILES = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What this process may use; a number is None if unlimited or unknown.

    Attributes:
        cores: of the machine.
        allowed_cores: that this process may run on.
        core_quota: how many cores' worth of time its control group has.
        memory_bytes: of the machine.
        available_bytes: what can still be taken, control groups included.
        shm_bytes: size of ``/dev/shm``; 0 if it is missing.
        shm_free_bytes: what is free of it.
        shm_is_writable: whether files can be made in it.
        open_files: soft and hard limit.
        num_processes: soft limit of this account.
        locked_bytes: soft limit of memory that may be locked.
        has_infiniband: whether there is InfiniBand, which needs locked memory.
        is_root: whether the account is root, for whom ``num_processes`` does not count.
    """

    cores: int
    allowed_cores: int
    core_quota: float | None
    memory_bytes: int
    available_bytes: int | None
    shm_bytes: int
    shm_free_bytes: int
    shm_is_writable: bool
    open_files: tuple[int | None, int | None]
    num_processes: int | None
    locked_bytes: int | None
    has_infiniband: bool
    is_root: bool


def measure() -> Limits:
    """Ask the kernel."""
    shm_bytes = shm_free = 0
    with contextlib.suppress(OSError):
        shm = os.statvfs(SHARED_MEMORY)
        shm_bytes, shm_free = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
    return Limits(
        cores=os.cpu_count() or 1,
        allowed_cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        core_quota=core_quota(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        available_bytes=available_bytes(),
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free,
        shm_is_writable=os.access(SHARED_MEMORY, os.W_OK | os.X_OK),
        open_files=(_limit(resource.RLIMIT_NOFILE), _limit(resource.RLIMIT_NOFILE, hard=True)),
        num_processes=_limit(resource.RLIMIT_NPROC),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        has_infiniband=Path("/sys/class/infiniband").is_dir(),
        is_root=os.getuid() == 0,
    )


def _limit(kind: int, *, hard: bool = False) -> int | None:
    value = resource.getrlimit(kind)[1 if hard else 0]
    return None if value == resource.RLIM_INFINITY else value


def core_quota(
    own_cgroups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> float | None:
    """Return how many cores' time the control groups give; None without a limit.

    Args:
        own_cgroups: the control groups of this process.
        root: where control groups are mounted.

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
            # In a container, the path is the host's, and the mount is the group itself.
            for group in {mount, own, *(parent for parent in own.parents if parent.is_relative_to(mount))}:
                quotas.append(_quota(group))
    known = [quota for quota in quotas if quota is not None]
    return min(known) if known else None


def _quota(group: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        microseconds = int((group / "cpu.cfs_quota_us").read_text())
        return None if microseconds < 0 else microseconds / int((group / "cpu.cfs_period_us").read_text())
    return None


def judge(limits: Limits, environ: Mapping[str, str], *, num_devices: int = 0) -> list[Finding]:
    """Judge what this process may use.

    ``environ`` chooses how many threads a rank has; the ranks of ``num_devices`` accelerators share memory.
    """
    return [
        _judge_cores(limits, environ),
        _judge_memory(limits),
        judge_shared_memory(limits, num_devices=num_devices),
        _judge_open_files(limits),
        *_judge_processes(limits),
        *_judge_locked(limits),
    ]


def _judge_cores(limits: Limits, environ: Mapping[str, str]) -> Finding:
    what = f"{limits.allowed_cores} of {limits.cores}"
    quota = limits.core_quota
    if quota is not None and quota < limits.allowed_cores and "OMP_NUM_THREADS" not in environ:
        whole = max(1, int(quota))
        return note(
            "cores",
            f"{what}, with time for {quota:.3g} (control group)",
            f"Start the master with `dstrial up --slots {whole}` where there is no accelerator, and set OMP_NUM_THREADS={whole}: "
            "torch starts a thread for each core that it sees.",
        )
    return ok("cores", what if quota is None else f"{what}, with time for {quota:.3g} (control group)")


def _judge_memory(limits: Limits) -> Finding:
    free = limits.available_bytes
    what = (
        size(limits.memory_bytes)
        if free is None
        else f"{size(free)} available of {size(limits.memory_bytes)}"
    )
    if free is not None and free < _GIB:
        return problem(
            "memory",
            what,
            "End what uses it, or raise the limit of the container: torch alone takes half a GiB a rank.",
        )
    if free is not None and free < 4 * _GIB:
        return note(
            "memory", what, "Each rank takes about 1 GiB before its model: start few, and few loader workers."
        )
    return ok("memory", what)


def judge_shared_memory(limits: Limits, *, num_devices: int) -> Finding:
    """Judge ``/dev/shm``, through which loader workers and local ranks exchange data."""
    name = "/dev/shm"  # noqa: S108 - its name
    bigger = (
        "In a container, start it with `--shm-size=1g` or more (Kubernetes: an emptyDir with medium Memory)"
    )
    if limits.shm_bytes == 0 or not limits.shm_is_writable:
        what = "missing" if limits.shm_bytes == 0 else "no files can be made in it"
        return problem(
            name,
            what,
            "Mount a tmpfs there that everybody can write to (`mount -t tmpfs -o mode=1777 tmpfs /dev/shm`).",
        )
    what = f"{size(limits.shm_free_bytes)} free of {size(limits.shm_bytes)}"
    if limits.shm_bytes < _SMALL_SHM:
        return problem(
            name,
            f"{what}: loader workers and NCCL end with SIGBUS (Bus error) where it is full",
            f"{bigger}, or remount it (`mount -o remount,size=1g /dev/shm`); with num_workers 0 loaders do without.",
        )
    needed = _SMALL_SHM + num_devices * 64 * _MIB
    if limits.shm_free_bytes < needed:
        return problem(
            name,
            f"{what}; expected {size(needed)} free: loader workers and NCCL end with SIGBUS (Bus error) where it is full",
            "Remove what programs that were killed have left (`ls -l /dev/shm`), or make it larger.",
        )
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


def _judge_processes(limits: Limits) -> list[Finding]:
    count = limits.num_processes
    if count is None or limits.is_root or count >= 4096:
        return [
            ok(
                "processes",
                "no limit" if count is None else f"{count}{' (not for root)' if limits.is_root else ''}",
            )
        ]
    what = f"{count} processes and threads of {_account()}: each rank has dozens of threads"
    todo = "Raise `nproc` in /etc/security/limits.conf, or `ulimit -u` where the hard limit allows it."
    return [(problem if count < 512 else note)("processes", what, todo)]


def _account() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"user id {os.getuid()}"


def _judge_locked(limits: Limits) -> list[Finding]:
    locked = limits.locked_bytes
    if locked is None:
        return [ok("locked memory", "no limit")]
    if limits.has_infiniband:
        return [
            problem(
                "locked memory",
                f"{size(locked)}: InfiniBand registers its buffers as locked memory, and fails beyond it",
                "Set `memlock unlimited` in /etc/security/limits.conf (container: `--ulimit memlock=-1`).",
            )
        ]
    return [ok("locked memory", f"{size(locked)}; only InfiniBand needs more")]
