"""Check by a marker file that a checkpoint storage is present; never create it.

If the storage is not mounted, a save would write into the mount point, and the next mount would hide the files. Processes that a
master starts load this file by path, because their Python environment may lack dstrial.
"""

# Importing pathlib and contextlib would cost another 5 ms per start.
# ruff: noqa: PTH103, PTH108, PTH112, PTH116, PTH118

from __future__ import annotations

import errno
import os

STORAGE_MARKER = ".dstrial-storage"
"""Name of the marker file in a storage's root directory."""

STORAGE_VARIABLE = "DSTRIAL_STORAGE"
"""Environment variable: root of the storage; not set if the root has no marker file."""

SAVING_DIRECTORY = "saving"
"""Subdirectory of an allocation's directory: has one empty file, named by uuid, per checkpoint that is being saved."""


class StorageGoneError(OSError):
    """A checkpoint storage is missing.

    Args:
        path: root of the storage.
        why: what the path is instead, for example "no directory".
    """

    def __init__(self, path: str, why: str) -> None:
        super().__init__(errno.ENODEV, why, path)

    def __str__(self) -> str:
        return (
            f"checkpoint storage {self.filename} is gone: {self.strerror}; expected the storage that was there before. "
            f"Mount or restore it. If it was replaced or emptied on purpose, make {self.filename}/{STORAGE_MARKER}."
        )


def is_storage_gone(error: BaseException) -> bool:
    """Return whether the class of ``error`` is named ``StorageGoneError``.

    ``isinstance`` would fail, because this module may be loaded twice: by path and by import.
    """
    return type(error).__name__ == StorageGoneError.__name__


def what_is_there_instead(path: str) -> str | None:
    """Return None if ``path`` is a storage, else a description of what is there.

    A storage is a directory with the file ``STORAGE_MARKER``.

    Raises:
        OSError: this process has too many open files, so that the storage cannot be checked.
    """
    try:
        os.stat(os.path.join(path, STORAGE_MARKER))
    except (FileNotFoundError, NotADirectoryError):
        if os.path.isdir(path):
            return f"a directory without {STORAGE_MARKER}, such as a mount point where nothing is mounted"
        return "no directory"
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # too many open files: says nothing about the storage
            raise
        return f"what cannot be read ({error.strerror or error})"
    return None


class StorageGuard:
    """Checks that a checkpoint storage is present; records checkpoints being saved.

    Args:
        root: root directory of the storage.
        allocation: private directory of the trial's allocation (the trial's processes on some slots). Records of checkpoints
            being saved are files in its subdirectory ``SAVING_DIRECTORY``.
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
        """Return whether ``base_path`` of a Determined storage manager is this storage."""
        return os.path.normpath(base_path) == self.root

    def note(self, storage_id: str) -> None:
        """Record that checkpoint ``storage_id`` is being saved. Best effort: never raises.

        If the process ends without a call of ``forget``, the master deletes the checkpoint as incomplete.
        """
        if not storage_id or os.sep in storage_id or storage_id in (".", ".."):
            return
        try:
            os.makedirs(self._notes, mode=0o700, exist_ok=True)
            os.close(os.open(os.path.join(self._notes, storage_id), os.O_WRONLY | os.O_CREAT, 0o600))
        except (
            OSError
        ):  # for example a full disk: the master then cannot find and delete an incomplete checkpoint
            pass

    def forget(self, storage_id: str) -> None:
        """Delete the record of ``note`` after the checkpoint was reported to the master."""
        if storage_id and os.sep not in storage_id:
            try:  # noqa: SIM105 - see the import of contextlib
                os.unlink(os.path.join(self._notes, storage_id))
            except OSError:  # another process of this rank has deleted the file, or `note` failed
                pass


def guard_of_environment(allocation: str) -> StorageGuard | None:
    """Return a guard of the storage that the variable ``STORAGE_VARIABLE`` names.

    Return None if the variable is not set. ``allocation`` is as for ``StorageGuard``.
    """
    root = os.environ.get(STORAGE_VARIABLE, "")
    return StorageGuard(root, allocation) if root else None
