"""Compare a checkpoint's files with its manifest, byte by byte."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from dstrial.checkpoint.completion_marker import MARKER_NAME, is_complete, read_marker
from dstrial.checkpoint.file_roles import FileRole, layouts_of, rank_state_name, role_of
from dstrial.checkpoint.manifest import MANIFEST_NAME, Manifest, hash_file, read_manifest, share_of
from dstrial.errors import CheckpointDamagedError, CheckpointError


@dataclasses.dataclass(frozen=True, slots=True)
class Damage:
    """A file that differs from its entry in the manifest."""

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
    """Compare files with the manifest, size first; return the damaged ones.

    ``only`` lists the paths to compare (None: all). ``on_bytes`` is called with the bytes read since its last call.
    """
    wanted = None if only is None else set(only)
    damages = []
    for path, entry in manifest.files.items():
        if wanted is not None and path not in wanted:
            continue
        found = _check_file(
            pathlib.Path(root), pathlib.Path(root) / path, entry.num_bytes, entry.sha256, on_bytes
        )
        if found is not None:
            kind, got, expected = found
            damages.append(Damage(path, kind, got, expected, entry.reader_ranks))
    return damages


def read_verified(
    root: str | os.PathLike[str], allgather: Callable[[Any], list[Any]], *, part: int, parts: int
) -> Manifest:
    """Read the manifest and verify every file; each rank reads a share of the files.

    Raises:
        CheckpointNotFoundError: there is no manifest.
        CheckpointDamagedError: the manifest is unreadable, or files differ on any rank; names all of them.

    Ranks: all, collectively.
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
    """Return damage as a clause: file, found and expected values, affected ranks."""
    return f"{damage.path} is {damage.got}; expected {damage.expected}{_readers(damage.reader_ranks)}"


def damaged_error(root: str | os.PathLike[str], damages: Sequence[Damage]) -> CheckpointDamagedError:
    return CheckpointDamagedError(
        f"checkpoint {root} is damaged: {'. '.join(describe_damage(damage) for damage in damages)}. "
        "Resume from an earlier checkpoint, or restore the files from a copy."
    )


def _check_file(
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


_MAX_READERS = 4
_IGNORED = frozenset({MANIFEST_NAME, MARKER_NAME, "metadata.json"})

FaultKind = Literal["missing", "truncated", "longer", "changed", "unreadable", "unexpected", "incomplete"]


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One difference between a directory and its manifest.

    ``got`` and ``expected`` are display text; ``reader_ranks`` read the file when resuming in the same layout.
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
class IntegrityReport:
    """Number and size of the manifest's files, and all differences in file order."""

    num_files: int
    num_bytes: int
    faults: tuple[Fault, ...]

    @property
    def is_intact(self) -> bool:
        return not self.faults


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
    """Compare every file of a checkpoint with its manifest, several at a time.

    The report lists damaged, unexpected and missing files. ``needs_mark``: whether a missing completion mark is a
    difference. ``on_bytes`` is called, from several threads, with the bytes read since its last call.
    """
    path = pathlib.Path(root)
    manifest = read_manifest(path) if manifest is None else manifest
    layouts = layouts_of(manifest, path)
    faults = _faults_of_mark(path, needs_mark=needs_mark)
    # Only trials save rank states, and only trials use the default name for an engine's folder.
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
        if name not in manifest.files and name not in _IGNORED:
            size = f"{(path / name).lstat().st_size:,} bytes"
            faults.append(Fault(name, "unexpected", size, "no such file", role_of(name, layouts)))
    return IntegrityReport(len(manifest.files), bytes_to_read(manifest), tuple(faults))


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
        return [Fault(MARKER_NAME, "incomplete", "no file", text, role)] if needs_mark else []
    try:
        read_marker(root)
    except CheckpointError as error:
        return [Fault(MARKER_NAME, "changed", str(error), "the mark that dstrial wrote", role)]
    return []


def _fault_of_absence(name: str, role: FileRole) -> Fault:
    return Fault(name, "incomplete", "not in the manifest", "the state of every rank of the layout", role)


def _files_under(root: pathlib.Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir())
