"""Check by a marker file that a checkpoint storage is present; never create it.

After an unmount, the mount point is empty or missing. A save would create the storage in its place, and the next mount would
hide the files. Therefore a storage has a marker file, which is checked before a trial's start, a save and a deletion. Processes
of an allocation load this file by path. Their Python may have no dstrial, so this file only uses the standard library.
"""

# Importing pathlib and contextlib would cost another 5 ms per start.
# ruff: noqa: PTH103, PTH108, PTH112, PTH116, PTH118

from __future__ import annotations

import errno
import os

STORAGE_MARKER = ".dstrial-storage"  # Name of the marker file in a storage's root

STORAGE_VARIABLE = "DSTRIAL_STORAGE"  # Variable of an allocation: path of a storage with a marker

SAVING_DIRECTORY = "saving"
"""Subdirectory of an allocation's directory: one empty file, named by uuid, per checkpoint not yet reported."""


class StorageGoneError(OSError):
    """A checkpoint storage is missing.

    Args:
        path: root of the storage.
        why: what the path is instead of the storage, for the message.
    """

    def __init__(self, path: str, why: str) -> None:
        super().__init__(errno.ENODEV, why, path)

    def __str__(self) -> str:
        return (
            f"checkpoint storage {self.filename} is gone: {self.strerror}; expected the storage that was there before. "
            f"Mount or restore it. If it was replaced or emptied on purpose, make {self.filename}/{STORAGE_MARKER}."
        )


def is_storage_gone(error: BaseException) -> bool:
    """Return whether an error is a :class:`StorageGoneError`, by its class name.

    This module may be loaded twice, by path and by import, so there may be two such classes.
    """
    return type(error).__name__ == StorageGoneError.__name__


def what_is_there_instead(path: str) -> str | None:
    """Return what is found in place of a storage, as text; None if it is present.

    Raises:
        OSError: this process has too many open files.
    """
    try:
        os.stat(os.path.join(path, STORAGE_MARKER))
    except (FileNotFoundError, NotADirectoryError):
        if os.path.isdir(path):
            return f"a directory without {STORAGE_MARKER}, such as a mount point where nothing is mounted"
        return "no directory"
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # This error does not concern the storage.
            raise
        return f"what cannot be read ({error.strerror or error})"
    return None


class StorageGuard:
    """Checks that an allocation's checkpoint storage is present; notes begun saves.

    Args:
        root: root directory of the storage.
        allocation: directory of the allocation; ``note`` creates a file for each begun save in its ``SAVING_DIRECTORY``.
    """

    def __init__(self, root: str, allocation: str) -> None:
        self.root = os.path.normpath(root)
        self._notes = os.path.join(allocation, SAVING_DIRECTORY)

    def check(self) -> None:
        """Raise :class:`StorageGoneError` unless the storage is present."""
        instead = what_is_there_instead(self.root)
        if instead is not None:
            raise StorageGoneError(self.root, instead)

    def covers(self, base_path: str) -> bool:
        """Return whether Determined's storage manager for ``base_path`` uses this storage."""
        return os.path.normpath(base_path) == self.root

    def note(self, storage_id: str) -> None:
        """Create the file that says that checkpoint ``storage_id`` is being saved.

        If the checkpoint is never reported to the master, the master deletes it as incomplete.
        """
        if not storage_id or os.sep in storage_id or storage_id in (".", ".."):
            return
        try:
            os.makedirs(self._notes, mode=0o700, exist_ok=True)
            os.close(os.open(os.path.join(self._notes, storage_id), os.O_WRONLY | os.O_CREAT, 0o600))
        except OSError:  # Without the record, for example on a full disk, an incomplete checkpoint stays.
            pass

    def forget(self, storage_id: str) -> None:
        """Delete the file of ``note``, after the master has stored the checkpoint.

        With the file, a master whose database is restored from an older backup would delete the checkpoint as incomplete.
        """
        if storage_id and os.sep not in storage_id:
            try:  # noqa: SIM105 - see the import of contextlib
                os.unlink(os.path.join(self._notes, storage_id))
            except OSError:  # Another process of this rank has deleted it, or it was never written.
                pass


def guard_of_environment(allocation: str) -> StorageGuard | None:
    """Return the guard of this process's checkpoint storage, or None.

    None if the storage has no marker file. ``allocation`` is the allocation's directory.
    """
    root = os.environ.get(STORAGE_VARIABLE, "")
    return StorageGuard(root, allocation) if root else None
