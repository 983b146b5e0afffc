"""Say what waits for an extension's build, and remove locks of builds that died.

Source: torch 2.13 ``torch.utils.file_baton``, through which ``cpp_extension.load`` (and so every operator that DeepSpeed
compiles) goes each time: the lock is a file, made with ``O_EXCL`` and held open until it is removed. A process that is
killed meanwhile leaves the file, and every later one waits for it without end and without a word.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

_log = logging.getLogger(__name__)

_PROCESSES = Path("/proc")
_LOCK_NAME = "lock"
# For an instant a process that has just made the file does not show it among its open files.
_MIN_AGE_S = 1.0
# Nor does one that gives it back: it is closed first and removed then, and raises if it has gone meanwhile.
_SECOND_LOOK_S = 2.0
# Another machine may hold a lock that no process here has open; no operator compiles for as long as this.
_MIN_AGE_ON_NETWORK_S = 1800.0
_LOCAL_FILE_SYSTEMS = {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}


def remove_stale_locks(root: Path | None = None) -> list[Path]:
    """Remove, and log, each lock below compiled extensions that no process holds.

    A lock is abandoned when it lies on a file system of this machine and no process has it open, or, on a shared file system,
    when it is also older than half an hour; and when it still is so 2 seconds later. Linux only.
    """
    return [lock for lock in find_stale_locks(root) if _remove(lock)]


def find_stale_locks(root: Path | None = None) -> list[Path]:
    """Return the locks that ``remove_stale_locks`` would remove; changes nothing."""
    folder = root or extensions_root()
    suspects = _unheld(folder)
    if not suspects:
        return []
    time.sleep(_SECOND_LOOK_S)
    return [lock for lock, status in _unheld(folder).items() if suspects.get(lock) == status]


def _unheld(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """Return the locks nobody has open, and what tells each from a later one."""
    try:
        locks = _locks(folder)
    except OSError:
        return {}
    if not locks or not _PROCESSES.is_dir():
        return {}
    looked_at_s = time.time()
    held = _open_files()
    found = {}
    for lock in locks:
        with contextlib.suppress(OSError):  # released meanwhile
            status = lock.stat()
            min_age_s = _MIN_AGE_S if _is_local(lock) else _MIN_AGE_ON_NETWORK_S
            if (status.st_dev, status.st_ino) not in held and looked_at_s - status.st_mtime >= min_age_s:
                found[lock] = (status.st_dev, status.st_ino, status.st_mtime_ns)
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Build:
    """An extension that is being compiled.

    With ``is_kept`` it has a result, and is mostly only loaded, under the same lock.
    """

    operator: str
    folder: Path
    since_s: float
    holder: str
    is_kept: bool


def builds_under_way(root: Path | None = None) -> list[Build]:
    """Return what is being compiled now below ``root``, the oldest build first."""
    found = []
    with contextlib.suppress(OSError):
        for lock in _locks(root or extensions_root()):
            with contextlib.suppress(OSError):
                status = lock.stat()
                folder, holder = lock.parent, _holder(status.st_ino, lock)
                is_kept = any(folder.glob("*.so"))
                found.append(Build(folder.name, folder, status.st_mtime, holder, is_kept))
    return sorted(found, key=lambda build: build.since_s)


def _locks(folder: Path) -> list[Path]:
    # <folder>/<operator>/lock, or <folder>/<python and device>/<operator>/lock below the default one.
    return [*folder.glob(f"*/{_LOCK_NAME}"), *folder.glob(f"*/*/{_LOCK_NAME}")]


def _holder(inode: int, lock: Path) -> str:
    """Name the process that has the lock open; empty where that cannot be seen."""
    with contextlib.suppress(OSError):
        device = lock.stat().st_dev
        for process, (opened_on, opened) in _open_files_by_process():
            if (opened_on, opened) == (device, inode):
                return f" by process {process}"
    return ""


def extensions_root() -> Path:
    """Return the extensions' folder: ``TORCH_EXTENSIONS_DIR``, else torch's own."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "torch_extensions"


def _remove(lock: Path) -> bool:
    try:
        age_s = time.time() - lock.stat().st_mtime
        lock.unlink()
    except OSError:
        # Released or removed meanwhile, or not ours to remove.
        return False
    _log.warning(
        "Removed %s, left %.0f min ago by a build that was killed; every program that loads this operator "
        "would have waited for it.",
        lock,
        age_s / 60,
    )
    return True


def _open_files() -> set[tuple[int, int]]:
    """Device and inode of all files that processes have open, as far as we may see."""
    return {opened for _, opened in _open_files_by_process()}


def _open_files_by_process() -> Iterator[tuple[str, tuple[int, int]]]:
    for process in _PROCESSES.iterdir():
        if not process.name.isdigit():
            continue
        try:
            descriptors = list((process / "fd").iterdir())
        except OSError:
            continue
        for descriptor in descriptors:
            try:
                found = descriptor.stat()
            except OSError:
                continue
            yield process.name, (found.st_dev, found.st_ino)


def _is_local(path: Path) -> bool:
    """Say, by its type, whether ``path``'s file system is this machine's alone."""
    return file_system_of(path) in _LOCAL_FILE_SYSTEMS


def file_system_of(path: Path) -> str:
    """Return the type of a path's file system, ``ext4`` for example; empty if unknown."""
    best, kind = "", ""
    where = str(path.resolve()).rstrip("/") + "/"
    for line in (_PROCESSES / "self" / "mounts").read_text(errors="replace").splitlines():
        _, mounted_at, file_system, *_ = line.split()
        prefix = mounted_at.rstrip("/") + "/"
        if where.startswith(prefix) and len(prefix) >= len(best):
            best, kind = prefix, file_system
    return kind
