"""Compare the size and SHA-256 of a checkpoint's files with its manifest."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from dstrial.checkpoint.completion_marker import MARKER_NAME, is_complete, read_marker
from dstrial.checkpoint.manifest import (
    MANIFEST_NAME,
    METADATA_NAME,
    FileEntry,
    Manifest,
    hash_file,
    layouts_of,
    rank_state_name,
    read_manifest,
    share_of,
)
from dstrial.errors import CheckpointDamagedError, CheckpointError

_MAX_READERS = 4
_IGNORED = frozenset({MANIFEST_NAME, MARKER_NAME, METADATA_NAME})

FaultKind = Literal["missing", "truncated", "longer", "changed", "unreadable", "unexpected", "incomplete"]


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One difference between a checkpoint's files and its manifest.

    ``got`` and ``expected`` are display text.
    """

    path: str
    kind: FaultKind
    got: str
    expected: str

    def __str__(self) -> str:
        return f"{self.path} is {self.kind}: {self.got}; expected {self.expected}"


@dataclasses.dataclass(frozen=True, slots=True)
class IntegrityReport:
    """Result of comparing a checkpoint with its manifest.

    ``num_files`` and ``num_bytes`` are totals over the files in the manifest; ``faults`` has all differences.
    """

    num_files: int
    num_bytes: int
    faults: tuple[Fault, ...]

    @property
    def is_intact(self) -> bool:
        return not self.faults


def verify_files(
    root: str | os.PathLike[str],
    manifest: Manifest,
    only: Iterable[str] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> list[Fault]:
    """Compare files with the manifest; return one fault per damaged or missing file.

    ``only`` lists the paths to compare (None: all). ``on_bytes`` is called with the number of bytes read since its last call.
    """
    wanted = manifest.files.keys() if only is None else set(only)
    found = (
        _fault_of(pathlib.Path(root), path, entry, on_bytes)
        for path, entry in manifest.files.items()
        if path in wanted
    )
    return [fault for fault in found if fault is not None]


def read_verified(root: str | os.PathLike[str], distributed: Any) -> Manifest:
    """Return the manifest of ``root`` after verifying every file that it lists.

    Raises:
        CheckpointNotFoundError: there is no manifest.
        CheckpointDamagedError: the manifest is unreadable, or files on any machine differ from it. The message names every such
            file.

    Ranks: all, collectively; the ranks of each machine divide the files among themselves.
    """
    mine: list[Fault] | CheckpointError
    try:
        manifest = read_manifest(root)
    except CheckpointError as error:
        mine = error
    else:
        share = share_of(sorted(manifest.files), distributed.local_rank, distributed.local_size)
        mine = verify_files(root, manifest, share)
    gathered = distributed.allgather(mine)
    for found in gathered:
        if isinstance(found, CheckpointError):
            raise found
    faults = {fault.path: fault for found in gathered for fault in found}
    if faults:
        raise damaged_error(root, [faults[name] for name in sorted(faults)])
    return manifest


def damaged_error(root: str | os.PathLike[str], faults: Sequence[Fault]) -> CheckpointDamagedError:
    return CheckpointDamagedError(
        f"checkpoint {root} is damaged: {'. '.join(map(str, faults))}. "
        "Resume from an earlier checkpoint, or restore the files from a copy."
    )


def bytes_to_read(manifest: Manifest) -> int:
    """Return the number of bytes that ``check_integrity`` reads, for progress bars."""
    return sum(entry.num_bytes for entry in manifest.files.values())


def check_integrity(
    root: str | os.PathLike[str],
    manifest: Manifest | None = None,
    *,
    needs_mark: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> IntegrityReport:
    """Compare every file of a checkpoint with the manifest; report all differences.

    The report lists damaged, missing and unexpected files. With ``needs_mark``, a missing completion mark is also reported. If
    ``manifest`` is None, it is read from ``root``. ``on_bytes`` is called from several threads with the number of bytes read
    since its last call.
    """
    path = pathlib.Path(root)
    manifest = read_manifest(path) if manifest is None else manifest
    layouts = layouts_of(manifest, path)
    faults = _faults_of_mark(path, needs_mark=needs_mark)
    # Only DeepSpeedTrial.save writes a state file per rank. Its layouts have no folder, because it uses the default folder.
    num_ranks = layouts[0].world_size if layouts and not layouts[0].folder else 0
    faults += [
        Fault(name, "incomplete", "not in the manifest", "the state of every rank of the layout")
        for name in map(rank_state_name, range(num_ranks))
        if name not in manifest.files
    ]
    by_size = sorted(manifest.files, key=lambda name: -manifest.files[name].num_bytes)
    with concurrent.futures.ThreadPoolExecutor(min(_MAX_READERS, os.cpu_count() or 1)) as readers:
        found = readers.map(lambda name: verify_files(path, manifest, [name], on_bytes), by_size)
        damaged = {fault.path: fault for of_file in found for fault in of_file}
    faults += [damaged[name] for name in manifest.files if name in damaged]
    for name in sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if not file.is_dir()):
        if name not in manifest.files and name not in _IGNORED:
            size = f"{(path / name).lstat().st_size:,} bytes"
            faults.append(Fault(name, "unexpected", size, "no such file"))
    return IntegrityReport(len(manifest.files), bytes_to_read(manifest), tuple(faults))


def _fault_of(
    root: pathlib.Path, name: str, entry: FileEntry, on_bytes: Callable[[int], None] | None
) -> Fault | None:
    path = root / name

    def fault(kind: FaultKind, got: str, expected: str = f"{entry.num_bytes:,} bytes") -> Fault:
        return Fault(name, kind, got, expected)

    try:
        if not path.resolve().is_relative_to(root.resolve()):
            return fault("unreadable", "a link that leads out of the checkpoint")
        num_bytes = path.stat().st_size
        if not path.is_file():
            return fault("missing", "no file")
        if num_bytes != entry.num_bytes:
            return fault("truncated" if num_bytes < entry.num_bytes else "longer", f"{num_bytes:,} bytes")
        sha256 = hash_file(path, on_bytes).sha256
    except FileNotFoundError:
        return fault("missing", "no file")
    except OSError as error:
        return fault("unreadable", error.strerror or str(error))
    if sha256 != entry.sha256:
        return fault("changed", f"SHA-256 {sha256[:12]}", f"SHA-256 {entry.sha256[:12]}")
    return None


def _faults_of_mark(root: pathlib.Path, *, needs_mark: bool) -> list[Fault]:
    if not is_complete(root):
        text = "the mark that is written last; the checkpoint is being written, or its writer was killed"
        return [Fault(MARKER_NAME, "incomplete", "no file", text)] if needs_mark else []
    try:
        read_marker(root)
    except CheckpointError as error:
        return [Fault(MARKER_NAME, "changed", str(error), "the mark that dstrial wrote")]
    return []
