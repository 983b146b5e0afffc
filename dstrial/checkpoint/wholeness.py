"""Whether a checkpoint directory is what was written, down to the byte: which file of which rank is not."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Literal

from dstrial.checkpoint.file_roles import FileRole, layouts_of, rank_state_name, role_of
from dstrial.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from dstrial.checkpoint.mark import MARK_NAME, is_complete, read_mark
from dstrial.checkpoint.verify import Damage, verify_files
from dstrial.errors import CheckpointError

_MAX_READERS = 4
_BESIDE = frozenset({MANIFEST_NAME, MARK_NAME, "metadata.json"})

FaultKind = Literal["missing", "truncated", "longer", "changed", "unreadable", "unexpected", "incomplete"]


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One thing in which a directory differs from the checkpoint that was written.

    Attributes:
        path: the file, relative to the checkpoint.
        kind: how it differs.
        got: what was found, for a person.
        expected: what was written, for a person.
        role: what the file holds.
        reader_ranks: ranks that read it when the run goes on in the same layout.
    """

    path: str
    kind: FaultKind
    got: str
    expected: str
    role: FileRole
    reader_ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        holds: list[str] = [] if self.role.kind == "other" else [self.role.kind]
        if self.role.writer_rank is not None:
            holds.append(f"of rank {self.role.writer_rank}")
        if self.role.engine_idx is not None and holds:
            holds.append(f"of engine {self.role.engine_idx}")
        what = f" ({' '.join(holds)})" if holds else ""
        readers = ""
        if self.reader_ranks:
            shown = ", ".join(map(str, self.reader_ranks[:8])) + (", …" if len(self.reader_ranks) > 8 else "")
            readers = f"; read by rank{'s' if len(self.reader_ranks) > 1 else ''} {shown}"
        return f"{self.path}{what} is {self.kind}: {self.got}; expected {self.expected}{readers}"


@dataclasses.dataclass(frozen=True, slots=True)
class Wholeness:
    """What was found.

    Attributes:
        num_files: files that the manifest names.
        num_bytes: their size as it was written.
        faults: everything that differs, in the order of the manifest; empty if the checkpoint is whole.
    """

    num_files: int
    num_bytes: int
    faults: tuple[Fault, ...]

    @property
    def is_whole(self) -> bool:
        """Whether it is what was written."""
        return not self.faults


def bytes_to_read(manifest: Manifest) -> int:
    """Return how many bytes ``examine`` reads of a checkpoint that is whole."""
    return sum(entry.num_bytes for entry in manifest.files.values())


def examine(
    root: str | os.PathLike[str],
    manifest: Manifest | None = None,
    *,
    needs_mark: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> Wholeness:
    """Compare every file of a checkpoint with its manifest, several at a time.

    Args:
        root: its directory.
        manifest: its manifest, if it has been read already.
        needs_mark: whether it lies where only a completion mark makes it a checkpoint.
        on_bytes: told how many more bytes were read; called from several threads.

    Returns:
        What differs: damaged files, files that nobody wrote, and what the directory lacks to be complete.

    Raises:
        CheckpointNotFoundError: there is no manifest.
        CheckpointDamagedError: the manifest cannot be read.

    Ranks: any; no communication.
    """
    path = pathlib.Path(root)
    manifest = read_manifest(path) if manifest is None else manifest
    layouts = layouts_of(manifest, path)
    faults = _faults_of_mark(path, needs_mark=needs_mark)
    # An engine in a folder of another name is not of a trial's, whose ranks keep a state of their own.
    num_ranks = layouts[0].world_size if layouts and not layouts[0].folder else 0
    own_states = [rank_state_name(rank) for rank in range(num_ranks)]
    faults += [
        _fault_of_absence(name, role_of(name, layouts)) for name in own_states if name not in manifest.files
    ]
    for damage in _damages(path, manifest, on_bytes):
        faults.append(
            Fault(
                damage.path,
                _kind_of(path / damage.path, damage, manifest.files[damage.path].num_bytes),
                damage.got,
                damage.expected,
                role_of(damage.path, layouts),
                damage.reader_ranks,
            )
        )
    for name in _files_under(path):
        if name not in manifest.files and name not in _BESIDE:
            size = f"{(path / name).lstat().st_size:,} bytes"
            faults.append(Fault(name, "unexpected", size, "no such file", role_of(name, layouts)))
    return Wholeness(len(manifest.files), bytes_to_read(manifest), tuple(faults))


def _damages(
    root: pathlib.Path, manifest: Manifest, on_bytes: Callable[[int], None] | None
) -> Sequence[Damage]:
    by_size = sorted(manifest.files, key=lambda name: -manifest.files[name].num_bytes)
    with concurrent.futures.ThreadPoolExecutor(min(_MAX_READERS, os.cpu_count() or 1)) as readers:
        found = readers.map(lambda name: verify_files(root, manifest, [name], on_bytes), by_size)
        damages = {damage.path: damage for part in found for damage in part}
    return [damages[name] for name in manifest.files if name in damages]


def _kind_of(path: pathlib.Path, damage: Damage, num_bytes: int) -> FaultKind:
    if damage.kind == "checksum":
        return "changed"
    if damage.kind != "size":
        return damage.kind
    return "truncated" if path.stat().st_size < num_bytes else "longer"


def _faults_of_mark(root: pathlib.Path, *, needs_mark: bool) -> list[Fault]:
    role = FileRole("other")
    if not is_complete(root):
        text = "the mark that is written last; the checkpoint is being written, or its writer was killed"
        return [Fault(MARK_NAME, "incomplete", "no file", text, role)] if needs_mark else []
    try:
        read_mark(root)
    except CheckpointError as error:
        return [Fault(MARK_NAME, "changed", str(error), "the mark that dstrial wrote", role)]
    return []


def _fault_of_absence(name: str, role: FileRole) -> Fault:
    return Fault(name, "incomplete", "not in the manifest", "the state of every rank of the layout", role)


def _files_under(root: pathlib.Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir())
