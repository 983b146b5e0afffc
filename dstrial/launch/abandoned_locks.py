"""Say what waits for the build of an extension, and remove the lock files of builds that died.

Source: torch 2.13 ``torch.utils.file_baton``, through which ``cpp_extension.load`` (and so every operator that DeepSpeed
compiles) goes each time: the lock is a file, made with ``O_EXCL`` and held open until it is removed. A process that is
killed meanwhile leaves the file, and every later one waits for it without end and without a word.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
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
        locks = _locks(folder)
    except OSError:
        return []
    if not locks or not _PROCESSES.is_dir():
        return []
    held = _open_files()
    return [lock for lock in locks if _is_abandoned(lock, held)]


@contextlib.contextmanager
def watched_builds(
    *, every_s: float = 5.0, quiet_s: float = 20.0, root: Path | None = None
) -> Iterator[None]:
    """Look after builds of extensions while ranks run.

    FusedAdam, CPUAdam and others compile when they are first used, which takes minutes, and all ranks and all trials of a user
    wait for the same lock without a word (torch 2.13 ``cpp_extension._jit_compile``, ``FileBaton.wait``). A build that takes
    longer than ``quiet_s`` is logged once with the process that holds it; the lock of one that has died is removed.

    Args:
        every_s: how often to look, seconds.
        quiet_s: what is not worth a line, seconds.
        root: as for :func:`remove_abandoned_locks`.

    Ranks: none; for the launcher, around its ranks.
    """
    is_over = threading.Event()
    told: set[tuple[Path, int]] = set()

    def look() -> None:
        while not is_over.wait(every_s):
            remove_abandoned_locks(root)
            for lock, inode, age_s in _locks_with_age(root or _default_root()):
                if age_s >= quiet_s and (lock, inode) not in told:
                    told.add((lock, inode))
                    _log.warning(
                        "%s is being compiled since %.0f s%s; ranks that use it wait. It happens once: the result is kept in %s. "
                        "`DS_BUILD_OPS=1 pip install deepspeed` compiles before, and TORCH_EXTENSIONS_DIR keeps it elsewhere.",
                        lock.parent.name,
                        age_s,
                        _holder(inode, lock),
                        lock.parent,
                    )

    thread = threading.Thread(target=look, name="dstrial-builds", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _locks(folder: Path) -> list[Path]:
    # <folder>/<operator>/lock, or <folder>/<python and device>/<operator>/lock below the default one.
    return [*folder.glob(f"*/{_LOCK_NAME}"), *folder.glob(f"*/*/{_LOCK_NAME}")]


def _locks_with_age(folder: Path) -> list[tuple[Path, int, float]]:
    found = []
    with contextlib.suppress(OSError):
        for lock in _locks(folder):
            with contextlib.suppress(OSError):
                status = lock.stat()
                found.append((lock, status.st_ino, time.time() - status.st_mtime))
    return found


def _holder(inode: int, lock: Path) -> str:
    """Name the process that has the lock open; empty where that cannot be seen."""
    with contextlib.suppress(OSError):
        device = lock.stat().st_dev
        for process, (opened_on, opened) in _open_files_by_process():
            if (opened_on, opened) == (device, inode):
                command = (
                    (_PROCESSES / process / "cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                )
                return f" by process {process} ({command.strip()[:120]})"
    return ""


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
    """Whether the file system that ``path`` lies on belongs to this machine alone, by its type."""
    best, kind = "", ""
    where = str(path.resolve())
    for line in (_PROCESSES / "self" / "mounts").read_text(errors="replace").splitlines():
        _, mounted_at, file_system, *_ = line.split()
        prefix = mounted_at.rstrip("/") + "/"
        if where.startswith(prefix) and len(prefix) >= len(best):
            best, kind = prefix, file_system
    return kind in _LOCAL_FILE_SYSTEMS
