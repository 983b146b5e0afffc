"""Checkpoint directories: complete, being written, left behind, or kept no longer.

``<checkpoints>/<uuid>/`` counts as a checkpoint once its completion mark is there. While it is being written, ``<uuid>.saving/``
beside it says by which process, which tells work in progress from what a dead process left, and holds one empty file per rank
that has not ended its part. A rank ends its part by removing its file, which works on a full disk too.

``KeepPolicy`` has Determined's ``checkpoint_storage`` rules. A run off any cluster is one trial, so "best of the trial" and
"best of the experiment" rank the same checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import socket
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrial.checkpoint.completion_marker import is_complete, is_uuid, read_marker, remove_marker
from dstrial.errors import CheckpointDamagedError, DstrialError
from dstrial.local.json_files import read_json, write_json_atomically
from dstrial.process_state import start_ticks

SAVING_SUFFIX = ".saving"
_WRITER_FILE = "writer.json"


@dataclasses.dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """One complete checkpoint.

    Attributes:
        uuid: its name, and its ``storage_id`` in Determined's interface.
        path: its directory.
        steps_completed: batches trained when it was saved.
        time: when it was completed, ISO 8601 in UTC.
    """

    uuid: str
    path: Path
    steps_completed: int
    time: str


@dataclasses.dataclass(frozen=True, slots=True)
class Writer:
    """The process that writes a checkpoint; ``started`` (ticks) tells a reused pid."""

    host: str
    pid: int
    started: str | None


def this_writer() -> Writer:
    """Describe this process."""
    return Writer(host=socket.gethostname(), pid=os.getpid(), started=_process_start(os.getpid()))


def _process_start(pid: int) -> str | None:
    ticks = start_ticks(pid)
    return None if ticks is None else str(ticks)


def _may_be_alive(writer: Mapping[str, Any]) -> bool:
    if writer.get("host") != socket.gethostname():
        return True
    try:
        os.kill(int(writer["pid"]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _process_start(int(writer["pid"])) == writer.get("started")


def _saving_path(checkpoints_path: Path, storage_id: str) -> Path:
    return checkpoints_path / f"{storage_id}{SAVING_SUFFIX}"


def begin_checkpoint(checkpoints_path: Path, num_ranks: int) -> tuple[Path, str]:
    """Make the directory of a new checkpoint, which does not count as one yet.

    Args:
        checkpoints_path: directory of all checkpoints.
        num_ranks: how many ranks save a part, each of which calls ``end_part``.

    Returns:
        The directory and the checkpoint's uuid.

    Raises:
        OSError: the directory cannot be made; nothing is left behind.
    """
    storage_id = str(uuid.uuid4())
    path = checkpoints_path / storage_id
    saving_path = _saving_path(checkpoints_path, storage_id)
    try:
        saving_path.mkdir()
        write_json_atomically(saving_path / _WRITER_FILE, dataclasses.asdict(this_writer()), sync=False)
        for rank in range(num_ranks):
            (saving_path / f"rank{rank}").touch()
        path.mkdir()
    except OSError:
        remove_checkpoint(checkpoints_path, storage_id)
        raise
    return path, storage_id


def end_part(checkpoints_path: Path, storage_id: str, rank: int) -> None:
    """Say that a rank has ended its part, well or not."""
    (_saving_path(checkpoints_path, storage_id) / f"rank{rank}").unlink(missing_ok=True)


def ranks_saving(checkpoints_path: Path, storage_id: str) -> list[int]:
    """The ranks that have not ended their part, in order."""
    names = [path.name for path in _saving_path(checkpoints_path, storage_id).glob("rank*")]
    return sorted(int(name.removeprefix("rank")) for name in names)


def end_saving(checkpoints_path: Path, storage_id: str) -> None:
    """Forget who wrote a checkpoint, once it is complete."""
    shutil.rmtree(_saving_path(checkpoints_path, storage_id), ignore_errors=True)


def remove_checkpoint(checkpoints_path: Path, storage_id: str) -> None:
    """Remove a checkpoint, complete or not; its completion mark goes first.

    What a process killed meanwhile leaves of it, the next ``remove_incomplete_checkpoints`` removes.
    """
    path = checkpoints_path / storage_id
    if path.is_dir():
        with contextlib.suppress(OSError):  # a full disk
            _saving_path(checkpoints_path, storage_id).mkdir(exist_ok=True)
        remove_marker(path)
        shutil.rmtree(path, ignore_errors=True)
    end_saving(checkpoints_path, storage_id)


def list_checkpoints(checkpoints_path: Path) -> list[StoredCheckpoint]:
    """Find every complete checkpoint of a directory.

    Returns:
        Ordered by ``steps_completed`` and then by time; empty if there is no such directory.

    Raises:
        CheckpointDamagedError: a completion mark is not one that this package wrote.
    """
    found = [_read_stored(path) for path in checkpoints_path.glob("*/") if is_complete(path)]
    return sorted(found, key=lambda checkpoint: (checkpoint.steps_completed, checkpoint.time))


def _read_stored(path: Path) -> StoredCheckpoint:
    mark = read_marker(path)
    try:
        return StoredCheckpoint(path.name, path, int(mark["steps_completed"]), str(mark["time"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointDamagedError(
            f"the completion mark in {path} is {mark!r}; expected one with steps_completed and time. Move the "
            "directory away, or delete it."
        ) from error


def newest_checkpoint(checkpoints_path: Path) -> StoredCheckpoint | None:
    """Find the checkpoint that was completed last; None if there is none.

    It is not always the one with the most batches: a run can be resumed from an earlier checkpoint.
    """
    return max(list_checkpoints(checkpoints_path), key=lambda checkpoint: checkpoint.time, default=None)


def remove_incomplete_checkpoints(checkpoints_path: Path) -> dict[str, int]:
    """Remove what killed processes left of checkpoints they were writing.

    Left alone: complete checkpoints, what a process writes that lives, or that ran on another machine and may live, and every
    directory without a note of who writes it, such as the TensorBoard files that Determined keeps under the cluster's id.

    Returns:
        The names that were removed, with the bytes of their files.
    """
    names = {path.stem for path in checkpoints_path.glob(f"*{SAVING_SUFFIX}")}
    removed: dict[str, int] = {}
    for name in sorted(names):
        if not is_uuid(name):
            continue
        if is_complete(checkpoints_path / name):
            end_saving(checkpoints_path, name)
            continue
        try:
            writer = read_json(_saving_path(checkpoints_path, name) / _WRITER_FILE)
        except DstrialError:
            writer = None
        if writer is not None and _may_be_alive(writer):
            continue
        removed[name] = _num_bytes(checkpoints_path / name)
        remove_checkpoint(checkpoints_path, name)
    return removed


def _num_bytes(path: Path) -> int:
    total = 0
    for found in path.rglob("*"):
        with contextlib.suppress(OSError):
            total += found.lstat().st_size if not found.is_dir() else 0
    return total


_KEEP_DEFAULTS = {"save_trial_latest": 1, "save_trial_best": 1, "save_experiment_best": 0}


@dataclasses.dataclass(frozen=True, slots=True)
class KeepPolicy:
    """How many checkpoints of a run to keep.

    Attributes:
        num_latest: how many of those with the most batches; the newest is kept even at 0.
        num_best: how many of those with the best searcher metric, counted by their own.
    """

    num_latest: int = 1
    num_best: int = 1

    @classmethod
    def from_config(cls, checkpoint_storage: Mapping[str, object] | None) -> KeepPolicy | None:
        """Read the experiment config's ``checkpoint_storage``; None keeps everything.

        None comes of a section without any ``save_…`` field: nobody has asked to delete anything. Where one of the three is
        given, the others have Determined's defaults (latest 1, trial best 1, experiment best 0) if missing or None. Those that
        are given have been validated as integers of at least 0.
        """
        fields = checkpoint_storage or {}
        given = {key: fields[key] for key in _KEEP_DEFAULTS if fields.get(key) is not None}
        if not given:
            return None
        numbers = {**_KEEP_DEFAULTS, **given}
        latest, trial_best, experiment_best = (
            value if isinstance(value, int) else _KEEP_DEFAULTS[key] for key, value in numbers.items()
        )
        return cls(num_latest=latest, num_best=max(trial_best, experiment_best))


def checkpoints_to_delete(
    checkpoints: Sequence[tuple[str, int]],
    validations: Mapping[int, float],
    policy: KeepPolicy,
    *,
    smaller_is_better: bool,
) -> list[str]:
    """Decide which checkpoints the policy does not keep.

    Args:
        checkpoints: uuid and ``steps_completed`` of each complete checkpoint, oldest first.
        validations: ``steps_completed`` -> searcher metric reported there. A checkpoint without one,
            or with NaN, is never among the best.
        policy: how many to keep.
        smaller_is_better: which way the searcher metric is compared; of equals the earlier is better.

    Returns:
        uuids to delete, oldest first; never the newest checkpoint.
    """
    if not checkpoints:
        return []
    kept = {name for name, _ in checkpoints[-max(1, policy.num_latest) :]}
    measured = [
        (validations[steps], steps, name)
        for name, steps in checkpoints
        if not math.isnan(validations.get(steps, math.nan))
    ]
    measured.sort(key=lambda entry: (entry[0] if smaller_is_better else -entry[0], entry[1]))
    kept |= {name for _, _, name in measured[: policy.num_best]}
    return [name for name, _ in checkpoints if name not in kept]
