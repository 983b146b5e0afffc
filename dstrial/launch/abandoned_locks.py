"""Remove the lock files of extension builds that died.

Source: torch 2.13 ``torch.utils.file_baton``, through which ``cpp_extension.load`` (and so every operator that DeepSpeed
compiles) goes each time: the lock is a file, made with ``O_EXCL`` and held open until it is removed. A process that is
killed meanwhile leaves the file, and every later one waits for it without end and without a word.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

_log = logging.getLogger(__name__)

_PROCESSES = Path("/proc")
_LOCK_NAME = "lock"
# A process that has made the file and not yet opened its descriptor's link cannot be seen for an instant.
_MIN_AGE_S = 1.0
# Where another machine may hold the lock, no process here does; no operator compiles for as long as this.
_MIN_AGE_ON_NETWORK_S = 1800.0
_LOCAL_FILE_SYSTEMS = {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}


def remove_abandoned_locks(root: Path | None = None) -> list[Path]:
    """Remove each lock below the folder of compiled extensions that no process holds; log its path.

    A lock is abandoned when it lies on a file system of this machine and none of its processes has it open, or,
    on a shared file system, when it is also older than half an hour. Only Linux tells; elsewhere nothing is done.

    Args:
        root: the folder; that of torch if None (``TORCH_EXTENSIONS_DIR``, else ``~/.cache/torch_extensions``).

    Returns:
        The paths removed.

    Ranks: none; for the launcher, before it starts ranks.
    """
    return [lock for lock in abandoned_locks(root) if _remove(lock)]


def abandoned_locks(root: Path | None = None) -> list[Path]:
    """Return the locks that ``remove_abandoned_locks`` would remove; changes nothing.

    Args:
        root: the folder; that of torch if None.
    """
    folder = root or _default_root()
    try:
        # <folder>/<operator>/lock, or <folder>/<python and device>/<operator>/lock below the default one.
        locks = [*folder.glob(f"*/{_LOCK_NAME}"), *folder.glob(f"*/*/{_LOCK_NAME}")]
    except OSError:
        return []
    if not locks or not _PROCESSES.is_dir():
        return []
    held = _open_files()
    return [lock for lock in locks if _is_abandoned(lock, held)]


def _default_root() -> Path:
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "torch_extensions"


def _is_abandoned(lock: Path, held: set[tuple[int, int]]) -> bool:
    try:
        found = lock.stat()
        min_age_s = _MIN_AGE_S if _is_local(lock) else _MIN_AGE_ON_NETWORK_S
    except OSError:
        return False  # released meanwhile
    return (found.st_dev, found.st_ino) not in held and time.time() - found.st_mtime >= min_age_s


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
    """Device and inode of what the processes of this machine have open, as far as this user may see."""
    opened = set()
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
            opened.add((found.st_dev, found.st_ino))
    return opened


def _is_local(path: Path) -> bool:
    """Whether the file system that ``path`` lies on belongs to this machine alone, by its type."""
    best, kind = "", ""
    where = str(path.resolve())
    for line in (_PROCESSES / "self" / "mounts").read_text(errors="replace").splitlines():
        _, mounted_at, file_system, *_ = line.split()
        prefix = mounted_at.rstrip("/") + "/"
        if where.startswith(prefix) and len(prefix) >= len(best):
            best, kind = prefix, file_system
    return kind in _LOCAL_FILE_SYSTEMS
