"""Says whether a checkpoint storage is the one it was; never makes it anew.

A file system that is unmounted leaves an empty directory, or none, and whoever saves makes it again: what is written there is
gone when the storage is back. So a storage has a file with an id, which is compared, together with device and inode, before
anything is made in it. Processes of an allocation load this file by its path, as they do with ``harness_paths``, and their
Python may have no dstrial: it needs nothing but the standard library, and little of that. It never makes a storage itself.
"""

# pathlib and contextlib would take another 5 ms of each start.
# ruff: noqa: PTH103, PTH108, PTH109, PTH112, PTH116, PTH118, PTH123

from __future__ import annotations

import errno
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

IDENTITY_NAME = ".dstrial-storage.json"
"""Name of the file in a storage's root that holds its id."""

STORAGE_VARIABLE = "DSTRIAL_STORAGE"
"""Variable of an allocation: its storage as JSON with ``path``, ``id``, ``device`` and ``inode``."""

SAVING_DIRECTORY = "saving"
"""Directory of an allocation with one empty file for each checkpoint that it has begun and not reported, by uuid."""

A_COPY = "a copy of it, on another device"
"""What is there instead, where only device and inode differ; its checkpoints tell whether it is as good."""


class StorageGoneError(OSError):
    """A checkpoint storage is not there, or something else is where it was.

    Args:
        path: root of the storage.
        why: what is there instead, from :func:`what_is_there_instead`.
    """

    def __init__(self, path: str, why: str) -> None:
        super().__init__(errno.ENODEV, why, path)

    def __str__(self) -> str:
        return (
            f"checkpoint storage {self.filename} is gone: {self.strerror}; expected the storage that was there before. "
            "Mount it again, or bring it back."
        )


def is_storage_gone(error: BaseException) -> bool:
    """Say whether an error is a :class:`StorageGoneError`, of any load of this file."""
    return type(error).__name__ == StorageGoneError.__name__


def what_is_there_instead(path: str, known: Mapping[str, Any]) -> str | None:
    """Return what is found where a storage was; None if it is the storage.

    Args:
        path: root of the storage.
        known: its ``id``, and ``device`` and ``inode`` of the file that holds it. Where the id is None, as nobody may write
            there, they are those of the root.

    A device alone changes with every mount of a network file system, an inode does not; a copy has neither.
    """
    expected = known["id"]
    try:
        status = os.stat(os.path.join(path, IDENTITY_NAME) if expected else path)
        found = read_identity(path) if expected else {}
    except (FileNotFoundError, NotADirectoryError):
        if os.path.isdir(path):
            return f"a directory without {IDENTITY_NAME}, such as a mount point where nothing is mounted"
        return "no directory"
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # It says nothing of the storage.
            raise
        return f"what cannot be read ({error.strerror or error})"
    if found.get("id") != expected and expected:
        return f"another storage, of id {str(found.get('id'))[:40]}"
    is_same = status.st_ino == known["inode"] or (expected and status.st_dev == known["device"])
    if is_same or found.get("accepted") == place_of(path):
        return None
    return A_COPY


def place_of(path: str) -> str:
    """Return device and inode of a directory, by which ``accepted`` names it.

    Raises:
        OSError: it cannot be looked at.
    """
    status = os.stat(path)
    return f"{status.st_dev}:{status.st_ino}"


def read_identity(path: str) -> dict[str, Any]:
    """Return what a storage's identity file holds; nothing for one that is damaged.

    Raises:
        OSError: it is missing or cannot be read.
    """
    import json

    with open(os.path.join(path, IDENTITY_NAME), "rb") as file:
        content = file.read(65536)
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class StorageGuard:
    """Keeps an allocation from saving where its storage no longer is.

    Args:
        known: the storage, as ``STORAGE_VARIABLE`` has it.
        allocation: directory of the allocation, for notes of what has been begun.
    """

    def __init__(self, known: Mapping[str, Any], allocation: str) -> None:
        self.root = os.path.normpath(str(known["path"]))
        self._known = known
        # Whoever resolves links names the same directory otherwise.
        self._insides = tuple({self.root + os.sep, os.path.realpath(self.root) + os.sep})
        self._notes = os.path.join(allocation, SAVING_DIRECTORY)
        self._mkdir = os.mkdir

    def check(self) -> None:
        """Do nothing if the storage is there.

        Raises:
            StorageGoneError: it is not.
        """
        instead = what_is_there_instead(self.root, self._known)
        if instead is not None:
            raise StorageGoneError(self.root, instead)

    def covers(self, base_path: str) -> bool:
        """Say whether a manager of Determined's writes into this storage."""
        return os.path.normpath(base_path) == self.root

    def note(self, storage_id: str) -> None:
        """Remember that a checkpoint is begun.

        What is never reported of it can be deleted.
        """
        if not storage_id or os.sep in storage_id or storage_id in (".", ".."):
            return
        try:
            os.makedirs(self._notes, mode=0o700, exist_ok=True)
            os.close(os.open(os.path.join(self._notes, storage_id), os.O_WRONLY | os.O_CREAT, 0o600))
        except OSError:  # A full disk: nothing is deleted then.
            pass

    def forget(self, storage_id: str) -> None:
        """Take the note back: the master knows the checkpoint now.

        It would go as half written otherwise when a copy of the master's database is put back, which does not know it.
        """
        if storage_id and os.sep not in storage_id:
            try:  # noqa: SIM105 - see the import of contextlib
                os.unlink(os.path.join(self._notes, storage_id))
            except OSError:  # Another process of this rank's has done it, or nothing was noted.
                pass

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        """Make a directory as ``os.mkdir``, but nothing of a storage that is gone.

        Every way to make one comes here: ``os.makedirs``, pathlib, DeepSpeed, TensorBoard's files.

        Raises:
            StorageGoneError: it would be the root, a parent of it or something inside, and the storage is gone.
        """
        if dir_fd is None:
            if self._concerns(path):
                self.check()
            self._mkdir(path, mode)
        else:
            self._mkdir(path, mode, dir_fd=dir_fd)

    def _concerns(self, path: Any) -> bool:
        text = os.fsdecode(path)
        name = os.path.normpath(text if text.startswith(os.sep) else os.path.join(os.getcwd(), text))
        if name.startswith(self._insides):
            return True
        is_above = any(inside.startswith(name + os.sep) for inside in self._insides)
        # What exists already is answered as ever.
        return is_above and not os.path.lexists(name)

    def install(self) -> None:
        """Have all of this process make directories through :meth:`mkdir`."""
        os.mkdir = self.mkdir
        # Python 3.10's pathlib keeps the function it found when it was imported.
        accessor = getattr(sys.modules.get("pathlib"), "_NormalAccessor", None)
        if accessor is not None:
            accessor.mkdir = staticmethod(self.mkdir)


def guard_of_environment(allocation: str) -> StorageGuard | None:
    """Return the guard of this allocation; None where its storage has no identity."""
    text = os.environ.get(STORAGE_VARIABLE, "")
    if not text:
        return None
    import json

    try:
        return StorageGuard(json.loads(text), allocation)
    except (ValueError, KeyError, TypeError):
        return None
