"""Name a checkpoint's files; write and read the manifest: checksums and layouts."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dstrial import __version__
from dstrial.checkpoint import checksum
from dstrial.checkpoint.checksum import CHECKSUM_KEY, is_intact, with_checksum
from dstrial.checkpoint.layout import Layout
from dstrial.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError
from dstrial.resume.metadata import EngineRecord, SavedRun

MANIFEST_NAME = "manifest.json"
"""File name of the manifest in a checkpoint directory."""

METADATA_NAME = "metadata.json"
"""File name of a checkpoint's metadata, as in Determined."""

MANIFEST_DIGEST = "manifest_sha256"
"""Metadata key of the manifest's SHA-256, which the trial reports to the master when it saves the checkpoint."""

FORMAT = 1
"""Version of the manifest's format that this release writes; later versions are rejected."""

_CHUNK_BYTES = 1 << 20
_ENGINE_FILE = re.compile(r"(model(\d+)|pytorch_model(?:_(\d+))?|global_step\d+)/.+")


def rank_state_name(rank: int) -> str:
    """Return the name of the file with a rank's counters and random states."""
    return f"dstrial_rank{rank}.pt"


def engine_folder(paths: Iterable[str], engine_idx: int) -> str:
    """Return the folder (DeepSpeed tag) that has an engine's files in a checkpoint.

    ``DeepSpeedTrial.save`` writes engine *i* to ``model<i>``, Accelerate to ``pytorch_model`` or ``pytorch_model_<i>``, the
    Hugging Face Trainer to ``global_step<n>``. The default is ``model<i>``. ``paths`` are the checkpoint's files.

    Source: accelerate 1.15 ``Accelerator.save_state``; transformers 5.23 ``Trainer._save_checkpoint``.
    """
    for path in sorted(paths):
        found = _ENGINE_FILE.fullmatch(path)
        if found is not None and int(found[2] or found[3] or 0) == engine_idx:
            return found[1]
    return f"model{engine_idx}"


@dataclasses.dataclass(frozen=True, slots=True)
class FileEntry:
    """A file's size in bytes and its hexadecimal SHA-256."""

    num_bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """Description of a checkpoint: progress, layouts of engines, and files.

    Attributes:
        steps_completed: optimizer steps completed before the checkpoint.
        created: creation time, ISO 8601 in UTC.
        layouts: the ``Layout`` of each engine, as JSON values.
        files: path relative to the checkpoint -> entry, for all files except manifest, metadata and completion mark.
        format: version of the manifest's format.
    """

    steps_completed: int
    created: str
    layouts: tuple[Mapping[str, Any], ...]
    files: Mapping[str, FileEntry]
    format: int = FORMAT

    @classmethod
    def build(
        cls, *, steps_completed: int, layouts: Sequence[Mapping[str, Any]], files: Mapping[str, FileEntry]
    ) -> Manifest:
        """Build a manifest whose creation time is now."""
        created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        return cls(steps_completed, created, tuple(layouts), dict(sorted(files.items())))

    def to_json(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "created": self.created,
            "steps_completed": self.steps_completed,
            "layouts": [dict(layout) for layout in self.layouts],
            "files": {
                path: {"bytes": entry.num_bytes, "sha256": entry.sha256} for path, entry in self.files.items()
            },
        }


def write_manifest(root: str | os.PathLike[str], manifest: Manifest) -> None:
    """Write or replace the manifest of ``root``, signed with this account's secret."""
    # No fsync, because `write_marker` flushes all files of the checkpoint later.
    target = pathlib.Path(root) / MANIFEST_NAME
    temporary = target.with_name(target.name + ".tmp")
    temporary.write_text(
        json.dumps(with_checksum(checksum.signed(manifest.to_json())), indent=1) + "\n", encoding="utf-8"
    )
    temporary.replace(target)


def read_manifest(root: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of the checkpoint directory ``root``.

    Raises:
        CheckpointNotFoundError: ``root`` has no manifest.
        CheckpointDamagedError: the manifest is not JSON, a value is missing or has the wrong type, or the checksum differs.
        CheckpointError: a newer release of dstrial wrote the manifest.
    """
    path = pathlib.Path(root) / MANIFEST_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointNotFoundError(
            f"{root} has no {MANIFEST_NAME}; expected a checkpoint written by dstrial. Name a checkpoint directory."
        ) from None
    except UnicodeDecodeError as error:
        raise _damaged(path, f"not text ({error.reason})") from error
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise _damaged(path, f"no JSON from line {error.lineno} on ({error.msg})") from error
    if not isinstance(values, dict):
        raise _damaged(path, f"a JSON {type(values).__name__}")
    written = values.get("format")
    if isinstance(written, int) and written > FORMAT:
        raise CheckpointError(
            f"{path}: format is {written}; expected at most {FORMAT}. Resume with the release of dstrial that wrote it."
        )
    if not is_intact(values):
        raise _damaged(path, "not the content that its own checksum has")
    return _manifest_of(path, values)


def layouts_of(manifest: Manifest, root: str | os.PathLike[str]) -> tuple[Layout, ...]:
    """Return each engine's layout from a manifest.

    Raises:
        CheckpointError: another release wrote the layouts in a form that this release cannot read. The message names ``root``.
        CheckpointDamagedError: a layout names a folder outside of the checkpoint.
    """
    try:
        layouts = tuple(Layout.from_json(values) for values in manifest.layouts)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint {root} describes its layout in another form ({error}); expected that of dstrial "
            f"{__version__}. Use the release that wrote it."
        ) from error
    for layout in layouts:
        folder = pathlib.PurePosixPath(layout.folder)
        if folder.is_absolute() or ".." in folder.parts:
            raise CheckpointDamagedError(
                f"checkpoint {root} has an engine in {layout.folder!r}, outside of the checkpoint; expected a folder of it. Use "
                "another checkpoint."
            )
    return layouts


def read_saved_run(root: str | os.PathLike[str]) -> SavedRun:
    """Return the progress, trial id and engines recorded in a checkpoint.

    Raises:
        CheckpointNotFoundError: ``root`` has no manifest.
        CheckpointDamagedError: manifest or metadata are damaged.
    """
    path = pathlib.Path(root)
    manifest = read_manifest(path)
    metadata: Any = {}
    with contextlib.suppress(FileNotFoundError):
        try:
            metadata = json.loads((path / METADATA_NAME).read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise CheckpointDamagedError(
                f"{path / METADATA_NAME} is no JSON ({error}); expected the checkpoint's metadata. Resume from another "
                "checkpoint."
            ) from error
    metadata = metadata if isinstance(metadata, dict) else {}
    # Of the metadata, take only the fields that layouts do not have.
    extras = metadata.get("engines")
    padded = [*(extras if isinstance(extras, list) else []), *([{}] * len(manifest.layouts))]
    try:
        engines = tuple(
            EngineRecord.from_layout(
                layout, {key: extra[key] for key in ("given", "micro_batch_limit") if key in extra}
            )
            for layout, extra in zip(manifest.layouts, padded, strict=False)
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointDamagedError(
            f"{path} describes its layout in another form ({error}); expected that of this release. Resume with the release "
            "that wrote it."
        ) from error
    trial_id = metadata.get("trial_id")
    known_id = trial_id if isinstance(trial_id, int) else None
    return SavedRun(path.name, manifest.steps_completed, known_id, engines)


def is_own_manifest(root: str | os.PathLike[str]) -> bool:
    """Return whether the manifest is readable and signed by this account.

    The signature vouches for the checkpoint's other files only if they were verified against the manifest.
    """
    try:
        values = json.loads((pathlib.Path(root) / MANIFEST_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(values, dict):
        return False
    return checksum.is_own({key: value for key, value in values.items() if key != CHECKSUM_KEY})


def hash_files(root: str | os.PathLike[str], paths: Iterable[str]) -> dict[str, FileEntry]:
    """Return path -> size and SHA-256; ``paths`` are relative to ``root``."""
    return {path: hash_file(pathlib.Path(root) / path) for path in paths}


def hash_file(path: str | os.PathLike[str], on_bytes: Callable[[int], None] | None = None) -> FileEntry:
    """Return a file's size and SHA-256.

    ``on_bytes`` is called with the number of bytes read since its last call.
    """
    digest = hashlib.sha256()
    num_bytes = 0
    with pathlib.Path(path).open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
            if on_bytes is not None:
                on_bytes(len(chunk))
    return FileEntry(num_bytes=num_bytes, sha256=digest.hexdigest())


def share_of(files: Sequence[str], part: int, parts: int) -> list[str]:
    """Return the files that rank ``part`` handles if ``parts`` ranks divide the work."""
    return list(files[part::parts])


def _damaged(path: pathlib.Path, got: str) -> CheckpointDamagedError:
    return CheckpointDamagedError(
        f"{path} is {got}; expected the manifest that dstrial wrote. Resume from an earlier checkpoint."
    )


def _manifest_of(path: pathlib.Path, values: Mapping[str, Any]) -> Manifest:
    def take(holder: Mapping[str, Any], key: str, kind: type) -> Any:
        value = holder.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise _damaged(path, f"without a usable {key} ({value!r})")
        return value

    files: dict[str, FileEntry] = {}
    for name, entry in take(values, "files", dict).items():
        pure = pathlib.PurePosixPath(name)
        if not isinstance(entry, dict) or pure.is_absolute() or ".." in pure.parts or "\0" in name:
            raise _damaged(path, f"without a usable entry of files ({name!r})")
        files[name] = FileEntry(take(entry, "bytes", int), take(entry, "sha256", str))
    return Manifest(
        steps_completed=take(values, "steps_completed", int),
        created=take(values, "created", str),
        layouts=tuple(take(values, "layouts", list)),
        files=files,
        format=take(values, "format", int),
    )
