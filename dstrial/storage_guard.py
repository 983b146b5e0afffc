"""Says whether a checkpoint storage is there; never makes it anew.

A file system that is unmounted leaves an empty directory, or none. A save would make the storage again there, and the files would
be hidden when the file system is back. So a storage has a marker file, looked at before a trial starts, a save and a deletion.
Processes of an allocation load this file by its path; their Python may have no dstrial: it needs the standard library only.
"""

# pathlib and contextlib would take another 5 ms of each start.
# ruff: noqa: PTH103, PTH108, PTH112, PTH116, PTH118

from __future__ import annotations

import errno
import os

STORAGE_MARKER = ".dstrial-storage"  # Name of the file in a storage's root by which it is known to be there

STORAGE_VARIABLE = "DSTRIAL_STORAGE"  # Variable of an allocation: path of its storage, which has a marker

SAVING_DIRECTORY = "saving"
"""Directory of an allocation with one empty file for each checkpoint that it has begun and not reported, by uuid."""


class StorageGoneError(OSError):
    """A checkpoint storage is not there.

    Args:
        path: root of the storage.
        why: what is there instead.
    """

    def __init__(self, path: str, why: str) -> None:
        super().__init__(errno.ENODEV, why, path)

    def __str__(self) -> str:
        return (
            f"checkpoint storage {self.filename} is gone: {self.strerror}; expected the storage that was there before. "
            f"Mount it again, or bring it back. If it was replaced or emptied on purpose, make {self.filename}/{STORAGE_MARKER}."
        )


def is_storage_gone(error: BaseException) -> bool:
    """Say whether an error is a :class:`StorageGoneError`, of any load of this file."""
    return type(error).__name__ == StorageGoneError.__name__


def what_is_there_instead(path: str) -> str | None:
    """Return what is found where a storage was; None if it is the storage.

    Raises:
        OSError: this process can open no more files.
    """
    try:
        os.stat(os.path.join(path, STORAGE_MARKER))
    except (FileNotFoundError, NotADirectoryError):
        if os.path.isdir(path):
            return f"a directory without {STORAGE_MARKER}, such as a mount point where nothing is mounted"
        return "no directory"
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # It says nothing of the storage.
            raise
        return f"what cannot be read ({error.strerror or error})"
    return None


class StorageGuard:
    """Keeps an allocation from saving where its storage no longer is.

    Args:
        root: of the storage.
        allocation: directory of the allocation, for notes of what has been begun.
    """

    def __init__(self, root: str, allocation: str) -> None:
        self.root = os.path.normpath(root)
        self._notes = os.path.join(allocation, SAVING_DIRECTORY)

    def check(self) -> None:
        """Raise :class:`StorageGoneError` unless the storage is there."""
        instead = what_is_there_instead(self.root)
        if instead is not None:
            raise StorageGoneError(self.root, instead)

    def covers(self, base_path: str) -> bool:
        """Say whether a manager of Determined's writes into this storage."""
        return os.path.normpath(base_path) == self.root

    def note(self, storage_id: str) -> None:
        """Note that a checkpoint is begun: if never reported, it will be deleted."""
        if not storage_id or os.sep in storage_id or storage_id in (".", ".."):
            return
        try:
            os.makedirs(self._notes, mode=0o700, exist_ok=True)
            os.close(os.open(os.path.join(self._notes, storage_id), os.O_WRONLY | os.O_CREAT, 0o600))
        except OSError:  # A full disk: nothing is deleted then.
            pass

    def forget(self, storage_id: str) -> None:
        """Take the note back: the master knows the checkpoint now.

        Else a copy of the master's database that does not know the checkpoint, put back, would have it deleted as half written.
        """
        if storage_id and os.sep not in storage_id:
            try:  # noqa: SIM105 - see the import of contextlib
                os.unlink(os.path.join(self._notes, storage_id))
            except OSError:  # Another process of this rank's has done it, or nothing was noted.
                pass


def guard_of_environment(allocation: str) -> StorageGuard | None:
    """Return the guard of this allocation; None where its storage has no marker."""
    root = os.environ.get(STORAGE_VARIABLE, "")
    return StorageGuard(root, allocation) if root else None
