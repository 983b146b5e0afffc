"""Where overlays lie, who may change one, who uses one, and which may be deleted.

``<root>/NAME``, a virtual environment, has these files beside it: ``NAME.lock`` (locked by whoever changes it, with its name),
``NAME.use`` (locked, shared, by every task while it lives; its mtime is the last start), ``NAME.json`` (what was installed),
``NAME.complete`` (hooks have run to their end in it), ``NAME.broken`` (an install that began and did not end well). NAME is a
digest and a count: one that is broken is left to those who use it, and the next task makes another.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from pathlib import Path

from dstrial.file_writes import remove_tree, replace_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    Tell = Callable[[str], None]

POLL_S = 0.1
TELL_AGAIN_S = 30.0

UNUSED_S = 14 * 24 * 3600.0
"""After how long an environment that no task has used is deleted, seconds; pip's cache makes it again."""


class WaitedTooLongError(Exception):
    """A lock was not free in time."""


class Overlay:
    """One environment by its place; a value, holding nothing open.

    Args:
        root: directory of all overlays.
        name: its name, unique there.
    """

    def __init__(self, root: Path, name: str) -> None:
        self.root = root
        self.name = name
        self.path = root / name
        self.python = self.path / "bin" / "python3"

    def beside(self, kind: str) -> Path:
        """Return ``NAME.kind``."""
        return self.root / f"{self.name}.{kind}"

    def read_record(self) -> dict[str, Any]:
        """Return what was installed: ``made_by``, ``installs`` by key, ``notes``."""
        try:
            value = json.loads(self.beside("json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            value = {}
        return {"made_by": "", "installs": {}, "notes": [], **(value if isinstance(value, dict) else {})}

    def write_record(self, record: dict[str, Any]) -> None:
        """Replace the record at once."""
        replace_file(self.beside("json"), json.dumps(record, indent=2), is_private=True)

    @contextlib.contextmanager
    def locked(self, who: str, print_line: Tell, timeout_s: float) -> Iterator[None]:
        """Be the only one that changes this overlay while the block lasts.

        Args:
            who: what others are told who wait meanwhile.
            print_line: told soon and then twice a minute whom this one waits for.
            timeout_s: how long it waits, seconds.

        Raises:
            WaitedTooLongError: somebody else had it for so long.
        """
        descriptor = self._lock(print_line, timeout_s)
        try:
            # In this order it is never empty for those who read it meanwhile.
            os.pwrite(descriptor, who.encode(), 0)
            os.ftruncate(descriptor, len(who.encode()))
            yield
        finally:
            os.close(descriptor)

    def _lock(self, print_line: Tell, timeout_s: float) -> int:
        began_s = time.monotonic()
        told_s = None
        while True:
            descriptor = try_lock(self.beside("lock"))
            if descriptor is not None:
                return descriptor
            waited_s = time.monotonic() - began_s
            if waited_s < POLL_S:
                time.sleep(POLL_S)
                continue
            holder = self.holder()
            if waited_s > timeout_s:
                raise WaitedTooLongError(
                    f"environment {self.name} has been changed by {holder} for {waited_s:.0f} s; expected at most "
                    f"{timeout_s:.0f} s. Look at the log of that one, and kill it if it hangs."
                )
            if told_s is None or waited_s - told_s > TELL_AGAIN_S:
                told_s = waited_s
                print_line(
                    f"waiting for environment {self.name}, which {holder} is making ({waited_s:.0f} s)"
                )
            time.sleep(POLL_S)

    def holder(self) -> str:
        """Return who changes it, as far as is known."""
        try:
            return self.beside("lock").read_text(encoding="utf-8", errors="replace").strip() or "another task"
        except OSError:
            return "another task"

    def use(self) -> int:
        """Mark as used; return the descriptor that the task's processes must keep open."""
        descriptor = os.open(self.beside("use"), os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        os.utime(descriptor)
        os.set_inheritable(descriptor, True)
        return descriptor


def acquire(
    root: Path,
    digest: str,
    make: Callable[[Overlay, Path], None],
    who: str,
    print_line: Tell,
    timeout_s: float,
) -> Overlay:
    """Return a digest's overlay, made if missing, and use it from now on.

    Args:
        root: directory of all overlays; made with mode 0700.
        digest: of all that decides what is in it.
        make: makes the virtual environment in a directory of another name, which then gets its own at once.
        who: this task.
        print_line: prints a line.
        timeout_s: how long another task may be changing it, seconds.

    Raises:
        WaitedTooLongError: another task has been for longer.
    """
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    count = 0
    while True:
        overlay = Overlay(root, f"{digest}-{count}")
        with overlay.locked(who, print_line, timeout_s):
            if not overlay.beside("broken").exists():
                if not overlay.path.is_dir():
                    staging = root / f".{overlay.name}.new"
                    shutil.rmtree(staging, ignore_errors=True)
                    make(overlay, staging)
                    overlay.write_record({"made_by": who, "installs": {}, "notes": []})
                    staging.rename(overlay.path)
                    print_line(f"environment {overlay.name}: made")
                overlay.use()
                return overlay
        count += 1


def try_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock of a file; None if somebody else does."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever deletes an overlay deletes this file, too: another file counts then.
            if path.exists() and path.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        os.close(descriptor)


def collect(root: Path, unused_s: float) -> list[str]:
    """Delete overlays that are broken or long unused, unless a process uses them.

    Args:
        root: directory of all overlays.
        unused_s: seconds since a task last started in it.

    Returns:
        The names of those that were deleted.
    """
    deleted = []
    for lock_path in sorted(root.glob("*.lock")) if root.is_dir() else ():
        overlay = Overlay(root, lock_path.stem)
        changing = try_lock(lock_path)
        if changing is None:
            continue
        try:
            if _is_collectable(overlay, unused_s):
                with contextlib.suppress(OSError):  # one that stays must not keep the others
                    _delete(overlay)
                    deleted.append(overlay.name)
        finally:
            os.close(changing)
    return deleted


def _is_collectable(overlay: Overlay, unused_s: float) -> bool:
    using = try_lock(overlay.beside("use"))
    if using is None:
        return False
    try:
        age_s = time.time() - os.fstat(using).st_mtime
        return overlay.beside("broken").exists() or not overlay.path.is_dir() or age_s > unused_s
    finally:
        os.close(using)


def _delete(overlay: Overlay) -> None:
    """Delete all of an overlay, last its lock file, on which others wait."""
    for path in (overlay.path, overlay.root / f".{overlay.name}.new"):
        if path.is_dir():
            gone = overlay.root / f".{overlay.name}.old"
            remove_tree(gone)
            path.rename(gone)
            remove_tree(gone)
    for kind in ("json", "complete", "use", "broken", "lock"):
        with contextlib.suppress(FileNotFoundError):
            overlay.beside(kind).unlink()
