"""Compares what the rows say of checkpoints with what their storages hold.

Looks only: names, sizes, marks and manifests, and reads no weights (``dstrial checkpoint verify`` does). A storage that is gone
is one finding, and nothing is said of its checkpoints.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

from dstrial.checkpoint.completion_marker import MARKER_NAME, read_marker
from dstrial.checkpoint.manifest import MANIFEST_NAME, hash_file
from dstrial.checkpoint.storage_identity import StorageIdentity, is_uuid
from dstrial.errors import CheckpointError
from dstrial.master.lifecycle.checkpoint_gc import remaining
from dstrial.master.lifecycle.storages import LOOK_TIMEOUT_S, StorageLook, root_of
from dstrial.master.store.storages import StoredFiles
from dstrial.storage_guard import what_is_there_instead

FindingKind = Literal[
    "storage gone",
    "missing",
    "incomplete",
    "other size",
    "damaged mark",
    "other manifest",
    "not deleted",
    "unknown",
]

REPAIRABLE: tuple[FindingKind, ...] = ("missing", "incomplete")
"""What the row can say as it is: no file is touched, and the storage was seen to be there."""

_MAX_NAMES = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing in which rows and a storage differ.

    Attributes:
        kind: what it is.
        storage: root of the storage.
        uuid: the checkpoint, or the directory's name; None for a finding of the whole storage.
        experiment_id: whose checkpoint it is; None for nobody's.
        trial_id: whose checkpoint it is; None for nobody's.
        text: what was found and what was expected, for a person.
        num_bytes: of the files that are concerned, as far as they are known.
    """

    kind: FindingKind
    storage: str
    uuid: str | None
    experiment_id: int | None
    trial_id: int | None
    text: str
    num_bytes: int

    @property
    def is_repairable(self) -> bool:
        """Whether the row can be made to say what is there."""
        return self.kind in REPAIRABLE

    def __str__(self) -> str:
        if self.uuid is None:
            return f"storage {self.storage} is gone: {self.text}"
        if self.trial_id is None:
            return f"{self.storage}/{self.uuid} is {self.kind}: {self.text}"
        return f"checkpoint {self.uuid} of trial {self.trial_id} is {_CLAUSES[self.kind]}: {self.text}"


_CLAUSES: Mapping[FindingKind, str] = {
    "missing": "missing",
    "incomplete": "incomplete",
    "other size": "of another size",
    "damaged mark": "of a damaged completion mark",
    "other manifest": "of another manifest",
    "not deleted": "not deleted",
}


@dataclasses.dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit has found.

    Attributes:
        num_checkpoints: rows that say that there are files.
        num_bytes: of these files, as the rows say.
        storages: roots that were looked at.
        num_elsewhere: rows whose storage is no directory of this machine.
        findings: everything that differs, by storage.
    """

    num_checkpoints: int
    num_bytes: int
    storages: tuple[str, ...]
    num_elsewhere: int
    findings: tuple[Finding, ...]


def compare(row: StoredFiles, found: Mapping[str, int] | None, storage: str) -> list[Finding]:
    """Compare a row with the files of its directory.

    Args:
        row: what is registered.
        found: bytes by relative path; None where there is no directory.
        storage: root of its storage, for the findings.
    """
    expected = {name: int(size) for name, size in json.loads(row.resources).items() if not name.endswith("/")}

    def finding(kind: FindingKind, text: str, num_bytes: int) -> list[Finding]:
        return [Finding(kind, storage, row.uuid, row.experiment_id, row.trial_id, text, num_bytes)]

    if row.state not in ("COMPLETED", "PARTIALLY_DELETED"):
        num_bytes = sum((found or {}).values())
        is_left = row.state == "DELETED" and found
        return (
            finding("not deleted", f"{len(found)} files; expected none", num_bytes)
            if is_left and found
            else []
        )
    total = sum(expected.values())
    if found is None:
        return finding("missing", f"no directory; expected {len(expected)} files, {total:,} bytes", total)
    absent = [name for name in expected if name not in found]
    if absent:
        text = f"without {_named(absent)}; expected {len(expected)} files, {total:,} bytes"
        return finding("incomplete", text, sum(expected[name] for name in absent))
    differing = [name for name in expected if found[name] != expected[name]]
    if not differing:
        return []
    first = differing[0]
    text = f"{_named(differing)} (the first {found[first]:,} bytes; expected {expected[first]:,})"
    return finding("other size", text, sum(expected[name] for name in differing))


def audit(
    rows: Sequence[StoredFiles],
    known: Sequence[StorageIdentity],
    saving: Collection[str],
    *,
    timeout_s: float = LOOK_TIMEOUT_S,
) -> AuditReport:
    """Look at the storage of every row.

    Args:
        rows: what is registered.
        known: the storages that have an identity.
        saving: uuids that runs which have not ended have begun.
        timeout_s: how long each storage has for its first answer, seconds.
    """
    by_root: dict[Path, list[StoredFiles]] = {Path(one.path): [] for one in known}
    num_elsewhere = 0
    for row in rows:
        root = root_of(json.loads(row.config)["checkpoint_storage"])
        if root is None:
            num_elsewhere += 1
        else:
            by_root.setdefault(root, []).append(row)
    identities = {Path(one.path): one for one in known}
    findings: list[Finding] = []
    for root, of_root in by_root.items():
        findings += _audit_storage(root, of_root, identities.get(root), saving, timeout_s)
    kept = [row for row in rows if row.state in ("COMPLETED", "PARTIALLY_DELETED")]
    num_bytes = sum(
        int(size)
        for row in kept
        for name, size in json.loads(row.resources).items()
        if not name.endswith("/")
    )
    return AuditReport(len(kept), num_bytes, tuple(map(str, by_root)), num_elsewhere, tuple(findings))


def audit_one(row: StoredFiles, root: Path, *, timeout_s: float = LOOK_TIMEOUT_S) -> Finding | None:
    """Look at the files of one checkpoint whose storage is there.

    Returns None if they are as registered.

    Args:
        row: what is registered.
        root: of its storage.
        timeout_s: how long that has, seconds.
    """
    look = StorageLook(lambda: _audit_checkpoint(root, row))
    if not look.wait(timeout_s):
        text = f"no answer within {timeout_s:g} s; expected the storage. Mount it again, or bring it back."
        return Finding("storage gone", str(root), None, None, None, text, 0)
    if look.error is not None:
        raise look.error
    return look.result[0] if look.result else None


def _audit_storage(
    root: Path,
    rows: Sequence[StoredFiles],
    known: StorageIdentity | None,
    saving: Collection[str],
    timeout_s: float,
) -> list[Finding]:
    kept = [row for row in rows if row.state in ("COMPLETED", "PARTIALLY_DELETED")]

    def look() -> str | None:
        if known is not None:
            return what_is_there_instead(str(root), known.fields())
        # Never used by a release that knows storages: it is there if any of its checkpoints is.
        is_there = not kept or any((root / row.uuid).is_dir() for row in kept)
        return None if is_there else "no directory of any of its checkpoints"

    first = StorageLook(look)
    is_answered = first.wait(timeout_s)
    if first.error is not None:
        raise first.error
    instead = first.result if is_answered else f"no answer within {timeout_s:g} s"
    if instead is not None:
        text = (
            f"{instead}; expected the storage with {len(kept)} checkpoints. Mount it again, or bring it back."
        )
        return [Finding("storage gone", str(root), None, None, None, text, 0)]
    findings: list[Finding] = []
    for row in rows:
        findings += _audit_checkpoint(root, row)
    return findings + _unknown(root, {row.uuid for row in rows} | set(saving))


def _audit_checkpoint(root: Path, row: StoredFiles) -> list[Finding]:
    directory = root / row.uuid
    found = _files_in(directory) if directory.is_dir() else None
    findings = compare(row, found, str(root))
    if found is None or findings or row.state != "COMPLETED":
        return findings

    def finding(kind: FindingKind, text: str) -> list[Finding]:
        return [
            Finding(kind, str(root), row.uuid, row.experiment_id, row.trial_id, text, sum(found.values()))
        ]

    if MARKER_NAME in found:
        try:
            read_marker(directory)
        except CheckpointError as error:
            return finding("damaged mark", str(error))
    if row.manifest_sha256 is not None and MANIFEST_NAME in found:
        sha256 = hash_file(directory / MANIFEST_NAME).sha256
        if sha256 != row.manifest_sha256:
            return finding(
                "other manifest", f"SHA-256 {sha256[:12]}; expected {row.manifest_sha256[:12]}, as registered"
            )
    return []


def _unknown(root: Path, known: Collection[str]) -> list[Finding]:
    """Return directories named as checkpoints that are none of this master's."""
    findings = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if path.name in known or not is_uuid(path.name) or path.is_symlink() or not path.is_dir():
            continue
        if (path / "tensorboard").is_dir():  # of a cluster, whose id it is
            continue
        num_bytes = sum(_files_in(path).values())
        text = (
            f"{num_bytes:,} bytes; expected a checkpoint of this master. It is another master's, or what a killed run of an "
            "earlier release has left: look, and delete it by hand"
        )
        findings.append(Finding("unknown", str(root), path.name, None, None, text, num_bytes))
    return findings


def _files_in(directory: Path) -> dict[str, int]:
    return {name: size for name, size in remaining(directory).items() if not name.endswith("/")}


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
