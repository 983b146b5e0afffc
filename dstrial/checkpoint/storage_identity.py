"""Gives a checkpoint storage its identity, a file made in its root at first use.

Several masters may share a storage: whoever comes first makes the file, and the others take its id. ``dstrial.storage_guard``
compares it later; this module only makes it, and never a storage that has had one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import uuid
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dstrial.storage_guard import IDENTITY_NAME, place_of, read_identity

_READ_ONLY_ERRORS = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)
_NO_LINKS_ERRORS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def is_uuid(name: str) -> bool:
    """Say whether a name is a UUID in lower case with hyphens, as checkpoints have."""
    return _UUID.fullmatch(name) is not None


@dataclasses.dataclass(frozen=True, slots=True)
class StorageIdentity:
    """By what a storage is known again.

    Attributes:
        path: its root, absolute.
        id: what its identity file says; None where none can be written there.
        device: number of the file system that has the identity file, or the root where the id is None.
        inode: of the same, which stays the same when a network file system is mounted again.
    """

    path: str
    id: str | None
    device: int
    inode: int

    def fields(self) -> dict[str, Any]:
        """Return what a process of an allocation is told, as JSON values."""
        return dataclasses.asdict(self)


def claim_identity(root: Path, cluster_id: str, *, umask: int | None = None) -> StorageIdentity:
    """Return the identity of a storage, and give it one if it has none.

    Args:
        root: an existing directory.
        cluster_id: who uses it first; written down for people.
        umask: for the file's mode; None for that of this process. Others who share the storage are to read it.

    Raises:
        OSError: the storage cannot be read.
    """
    path = root / IDENTITY_NAME
    if not path.exists():
        content = {
            "id": str(uuid.uuid4()),
            "cluster_id": cluster_id,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        try:
            _create(path, json.dumps(content, indent=2) + "\n", umask)
        except OSError as error:
            if error.errno not in _READ_ONLY_ERRORS:
                raise
            status = root.stat()
            return StorageIdentity(str(root), None, status.st_dev, status.st_ino)
    status = path.stat()
    found = read_identity(str(root)).get("id")
    if not isinstance(found, str) or not found:
        raise OSError(errno.EINVAL, "its identity file is damaged", str(path))
    return StorageIdentity(str(root), found, status.st_dev, status.st_ino)


def seen_again(known: StorageIdentity) -> StorageIdentity:
    """Return the same storage with the device and inode that it has now.

    Raises:
        OSError: it is not there.
    """
    root = Path(known.path)
    status = (root if known.id is None else root / IDENTITY_NAME).stat()
    return dataclasses.replace(known, device=status.st_dev, inode=status.st_ino)


def accept_identity(known: StorageIdentity, *, umask: int | None = None) -> None:
    """Make the directory that is at a storage's path the storage, whatever it holds.

    For people who have moved or replaced it on purpose. Nobody takes a copy of the file that is written for the storage: it
    names the directory's device and inode.

    Raises:
        OSError: there is no directory, or it cannot be written to.
    """
    root = Path(known.path)
    content = {
        "id": known.id,
        "accepted": place_of(known.path),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    temporary = _write_beside(root / IDENTITY_NAME, json.dumps(content, indent=2) + "\n", umask)
    temporary.replace(root / IDENTITY_NAME)


def _create(path: Path, text: str, umask: int | None) -> None:
    """Make a file with all of its content, unless somebody else has made it."""
    temporary = _write_beside(path, text, umask)
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in _NO_LINKS_ERRORS:
            raise
        if not path.exists():
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_beside(path: Path, text: str, umask: int | None) -> Path:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            if umask is not None:
                with contextlib.suppress(OSError):  # file systems without modes
                    os.fchmod(file.fileno(), 0o666 & ~umask)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return temporary
