"""Compare the files of a checkpoint with its manifest, and say what is damaged and whom it would hit."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from dstrial.checkpoint.manifest import Manifest, hash_file, read_manifest, share_of
from dstrial.errors import CheckpointDamagedError, CheckpointError


@dataclasses.dataclass(frozen=True, slots=True)
class Damage:
    """One file that is not what the manifest says.

    Attributes:
        path: the file, relative to the checkpoint.
        kind: what is wrong with it.
        got: what was found, for a person.
        expected: what the manifest says, for a person.
        reader_ranks: ranks that would have read it.
    """

    path: str
    kind: Literal["missing", "unreadable", "size", "checksum"]
    got: str
    expected: str
    reader_ranks: tuple[int, ...]


def verify_files(
    root: str | os.PathLike[str],
    manifest: Manifest,
    only: Iterable[str] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> list[Damage]:
    """Compare files under ``root`` with the manifest, size first.

    Args:
        root: directory of the checkpoint.
        manifest: its manifest.
        only: paths to look at, such as one rank's ``share_of``; None looks at all.
        on_bytes: told how many more bytes were read.

    Returns:
        One entry per damaged file, in the order of the manifest; empty when all is well.

    Ranks: any; no communication.
    """
    wanted = None if only is None else set(only)
    damages = []
    for path, entry in manifest.files.items():
        if wanted is not None and path not in wanted:
            continue
        found = _look_at(
            pathlib.Path(root), pathlib.Path(root) / path, entry.num_bytes, entry.sha256, on_bytes
        )
        if found is not None:
            kind, got, expected = found
            damages.append(Damage(path, kind, got, expected, entry.reader_ranks))
    return damages


def read_verified(
    root: str | os.PathLike[str], allgather: Callable[[Any], list[Any]], *, part: int, parts: int
) -> Manifest:
    """Read the manifest and compare every file with it, each rank its share.

    Args:
        root: directory of the checkpoint.
        allgather: hands a picklable object to all ranks; returns those of all ranks, in rank order.
        part: which share is this rank's, the rank on its machine.
        parts: ranks of its machine.

    Returns:
        The manifest.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointDamagedError: it cannot be read, or files are not as it says, on any rank; all of them are named.

    Ranks: all, collectively (one ``allgather``).
    """
    mine: list[Damage] | CheckpointError
    try:
        manifest = read_manifest(root)
    except CheckpointError as error:
        mine = error
    else:
        mine = verify_files(root, manifest, only=share_of(sorted(manifest.files), part, parts))
    gathered = allgather(mine)
    for found in gathered:
        if isinstance(found, CheckpointError):
            raise found
    damages = {damage.path: damage for found in gathered for damage in found}
    if damages:
        raise damaged_error(root, [damages[name] for name in sorted(damages)])
    return manifest


def describe_damage(damage: Damage) -> str:
    """Return one sentence part: the file, what it is, what was expected, and the ranks that it would have hit."""
    return f"{damage.path} is {damage.got}; expected {damage.expected}{_readers(damage.reader_ranks)}"


def damaged_error(root: str | os.PathLike[str], damages: Sequence[Damage]) -> CheckpointDamagedError:
    """Return the error that names every damaged file of the checkpoint ``root``."""
    return CheckpointDamagedError(
        f"checkpoint {root} is damaged: {'. '.join(describe_damage(damage) for damage in damages)}. "
        "Resume from an earlier checkpoint, or restore the files from a copy."
    )


def _look_at(
    root: pathlib.Path,
    path: pathlib.Path,
    num_bytes: int,
    sha256: str,
    on_bytes: Callable[[int], None] | None,
) -> tuple[Literal["missing", "unreadable", "size", "checksum"], str, str] | None:
    size = f"{num_bytes:,} bytes"
    try:
        if not path.resolve().is_relative_to(root.resolve()):
            return "unreadable", "a link that leads out of the checkpoint", f"a file of {size}"
        found_bytes = path.stat().st_size
        if not path.is_file():
            return "missing", "no file", size
        if found_bytes != num_bytes:
            return "size", f"{found_bytes:,} bytes", size
        entry = hash_file(path, on_bytes)
    except FileNotFoundError:
        return "missing", "missing", size
    except OSError as error:
        return "unreadable", f"unreadable ({error.strerror or error})", size
    if entry.sha256 != sha256:
        return "checksum", f"of checksum {entry.sha256[:12]}", f"{sha256[:12]} (SHA-256)"
    return None


def _readers(ranks: tuple[int, ...]) -> str:
    if not ranks:
        return ""
    if len(ranks) == 1:
        return f" (read by rank {ranks[0]})"
    named = ", ".join(str(rank) for rank in ranks[:8])
    return f" (read by ranks {named}{' and more' if len(ranks) > 8 else ''})"
