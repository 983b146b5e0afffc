"""Find running builds of extensions, and remove stale locks of dead builds.

Source: torch 2.13 ``torch.utils.file_baton``, which ``cpp_extension.load`` (and so every operator that DeepSpeed compiles)
uses: the lock is a file created with ``O_EXCL`` and held open until it is removed. If the process is killed, the file
stays, and later processes wait for it forever without a message.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

_log = logging.getLogger(__name__)

_PROCESSES = Path("/proc")
_LOCK_NAME = "lock"
# Minimum age of a stale lock: a process that has just created the file may not list it among its open files yet.
_MIN_AGE_S = 1.0
# Time between two checks: a process that releases the lock closes the file, then removes it, and fails if it is missing.
_RECHECK_DELAY_S = 2.0
# Minimum age on a network file system, where another machine may hold the lock; no build takes this long.
_MIN_AGE_ON_NETWORK_S = 1800.0
_LOCAL_FILE_SYSTEMS = {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}


def remove_stale_locks(root: Path) -> list[Path]:
    """Remove and log stale locks of extension builds; return their paths.

    A lock is stale if no process has the file open in two checks, 2 seconds apart. On a network file system, a stale lock is
    also older than 30 minutes. ``root`` is the directory of torch's compiled extensions. Linux only.
    """
    suspects = _unheld_locks(root)
    if not suspects:
        return []
    time.sleep(_RECHECK_DELAY_S)
    stale = [lock for lock, status in _unheld_locks(root).items() if suspects.get(lock) == status]
    return [lock for lock in stale if _remove(lock)]


def _unheld_locks(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """Return lock -> (device, inode, mtime in ns) for locks that no process has open.

    Locks younger than 1 second, on a network file system 30 minutes, are left out.
    """
    try:
        locks = _locks(folder)
    except OSError:
        return {}
    if not locks or not _PROCESSES.is_dir():
        return {}
    now_s = time.time()
    held = set(_open_files())
    found = {}
    for lock in locks:
        with contextlib.suppress(OSError):  # released in the meantime
            status = lock.stat()
            min_age_s = _MIN_AGE_S if file_system_of(lock) in _LOCAL_FILE_SYSTEMS else _MIN_AGE_ON_NETWORK_S
            if (status.st_dev, status.st_ino) not in held and now_s - status.st_mtime >= min_age_s:
                found[lock] = (status.st_dev, status.st_ino, status.st_mtime_ns)
    return found


def running_builds(root: Path) -> list[tuple[Path, float]]:
    """Return (extension's folder, epoch seconds) of running builds, oldest first.

    ``root`` is the directory of torch's compiled extensions.
    """
    found = []
    with contextlib.suppress(OSError):
        for lock in _locks(root):
            with contextlib.suppress(OSError):
                found.append((lock.parent, lock.stat().st_mtime))
    return sorted(found, key=lambda build: build[1])


def _locks(folder: Path) -> list[Path]:
    # <folder>/<operator>/lock, or <folder>/<python and device>/<operator>/lock in the default folder.
    return [*folder.glob(f"*/{_LOCK_NAME}"), *folder.glob(f"*/*/{_LOCK_NAME}")]


def extensions_root() -> Path:
    """Return torch's directory of compiled extensions (``TORCH_EXTENSIONS_DIR``)."""
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
        # Released or removed in the meantime, or no permission.
        return False
    _log.warning(
        "Removed %s, left %.0f min ago by a build that was killed; every program that loads this operator "
        "would have waited for it.",
        lock,
        age_s / 60,
    )
    return True


def _open_files() -> Iterator[tuple[int, int]]:
    """Yield (device, inode) of open files of processes that this account may inspect."""
    for descriptors in _PROCESSES.glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            for descriptor in descriptors.iterdir():
                with contextlib.suppress(OSError):
                    found = descriptor.stat()
                    yield found.st_dev, found.st_ino


def file_system_of(path: Path) -> str:
    """Return the type of a path's file system, such as ``ext4``; empty if unknown."""
    best, kind = "", ""
    where = str(path.resolve()).rstrip("/") + "/"
    for line in (_PROCESSES / "self" / "mounts").read_text(errors="replace").splitlines():
        _, mounted_at, file_system, *_ = line.split()
        prefix = mounted_at.rstrip("/") + "/"
        if where.startswith(prefix) and len(prefix) >= len(best):
            best, kind = prefix, file_system
    return kind
