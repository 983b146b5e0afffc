"""Write and read the completion mark: a checkpoint's file that is written last."""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from dstrial.checkpoint.checksum import CHECKSUM_KEY, is_intact, with_checksum
from dstrial.errors import CheckpointDamagedError, CheckpointNotFoundError
from dstrial.file_writes import sync_path

MARKER_NAME = "COMPLETE"
"""File name of the completion mark."""

_UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def is_uuid(name: str) -> bool:
    """Return whether a name has the form of a checkpoint's name.

    That form is a UUID in lower case, with hyphens.
    """
    return _UUID.fullmatch(name) is not None


def write_marker(path: str | os.PathLike[str], info: Mapping[str, Any] | None = None) -> None:
    """Flush checkpoint ``path`` to disk, then write the completion mark with ``info``.

    After a crash the mark is either missing or valid. Before the call, one rank on each other machine must flush that machine's
    files with ``fsync_tree``.

    Ranks: one, after all ranks have written their files.
    """
    root = pathlib.Path(path)
    fsync_tree(root)
    temporary = root / (MARKER_NAME + ".tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        json.dump(with_checksum({} if info is None else info), stream)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(root / MARKER_NAME)
    sync_path(root)
    sync_path(root.parent)


def read_marker(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the ``info`` that ``write_marker`` wrote.

    Raises:
        CheckpointNotFoundError: the checkpoint has no mark.
        CheckpointDamagedError: the mark is invalid.
    """
    mark = pathlib.Path(path) / MARKER_NAME
    try:
        info = json.loads(mark.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointNotFoundError(
            f"{path} has no file {MARKER_NAME}; expected a complete checkpoint. Resume from another one."
        ) from None
    except ValueError:
        info = None
    if not isinstance(info, dict) or not is_intact(info):
        raise CheckpointDamagedError(
            f"{mark} is no JSON object that matches its own checksum; expected the mark that dstrial wrote. Resume from an "
            "earlier checkpoint."
        )
    return {key: value for key, value in info.items() if key != CHECKSUM_KEY}


def is_complete(path: str | os.PathLike[str]) -> bool:
    return (pathlib.Path(path) / MARKER_NAME).is_file()


def remove_marker(path: str | os.PathLike[str]) -> None:
    """Remove the completion mark; no-op if the checkpoint has none.

    Call this before deleting the checkpoint's other files.
    """
    root = pathlib.Path(path)
    (root / MARKER_NAME).unlink(missing_ok=True)
    sync_path(root)


def incomplete(root: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Return the subdirectories of ``root`` without a completion mark, sorted.

    The list is empty if ``root`` is not a directory.
    """
    parent = pathlib.Path(root)
    if not parent.is_dir():
        return []
    return sorted(child for child in parent.iterdir() if child.is_dir() and not is_complete(child))


def fsync_tree(path: str | os.PathLike[str]) -> None:
    """Flush all files and directories in ``path`` to disk, then ``path`` itself."""
    for directory, _, names in os.walk(path, topdown=False):
        for name in names:
            entry = pathlib.Path(directory) / name
            if entry.is_file() and not entry.is_symlink():
                sync_path(entry)
        sync_path(pathlib.Path(directory))
