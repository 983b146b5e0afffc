"""Create, list and delete a run's checkpoint directories; decide which to keep.

``<checkpoints>/<uuid>/`` is a checkpoint as soon as its completion marker exists. During a save, ``<uuid>.saving/`` in the same
directory names the process of rank 0, which writes the checkpoint. If this process dies, the run's next start removes both
directories.

``KeepPolicy`` implements Determined's ``checkpoint_storage`` rules. A run without a master counts as an experiment of one trial.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrial.checkpoint.completion_marker import is_complete, is_uuid, read_marker, remove_marker
from dstrial.errors import CheckpointDamagedError, CheckpointError, DstrialError
from dstrial.local.json_files import read_json, write_json_atomically
from dstrial.process_state import start_ticks

logger = logging.getLogger("dstrial.local")

SAVING_SUFFIX = ".saving"
_WRITER_FILE = "writer.json"  # in the `.saving` directory: host, pid and start time of the writing process


@dataclasses.dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """Directory, batch count and completion time of a complete checkpoint."""

    uuid: str
    path: Path
    steps_completed: int
    time: str  # time of completion, ISO 8601 in UTC


def _may_be_alive(writer: Mapping[str, Any]) -> bool:
    if writer.get("host") != socket.gethostname():
        return True
    try:
        os.kill(int(writer["pid"]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return str(start_ticks(int(writer["pid"]))) == writer.get("started")  # else the pid was reused


def _saving_path(checkpoints_path: Path, storage_id: str) -> Path:
    return checkpoints_path / f"{storage_id}{SAVING_SUFFIX}"


def begin_checkpoint(checkpoints_path: Path, storage_id: str) -> None:
    """Create a checkpoint's directory and, next to it, the ``.saving`` directory.

    The ``.saving`` directory names this process as the writer. On an error, both directories are removed. Ranks: 0.
    """
    saving_path = _saving_path(checkpoints_path, storage_id)
    try:
        saving_path.mkdir()
        writer = {"host": socket.gethostname(), "pid": os.getpid(), "started": str(start_ticks(os.getpid()))}
        write_json_atomically(saving_path / _WRITER_FILE, writer, sync=False)
        (checkpoints_path / storage_id).mkdir()
    except OSError:
        remove_checkpoint(checkpoints_path, storage_id)
        raise


def end_saving(checkpoints_path: Path, storage_id: str) -> None:
    """Remove a checkpoint's ``.saving`` directory, which names the writing process."""
    shutil.rmtree(_saving_path(checkpoints_path, storage_id), ignore_errors=True)


def remove_checkpoint(
    checkpoints_path: Path, storage_id: str, delete_files: Callable[[str], object] | None = None
) -> None:
    """Remove a complete or incomplete checkpoint, its completion marker first.

    ``delete_files(storage_id)`` deletes the checkpoint's files in an external storage; None if there is no external storage. If
    this function raises, or the process is killed, a later ``remove_incomplete_checkpoints`` removes the rest.
    """
    path = checkpoints_path / storage_id
    if path.is_dir():
        with contextlib.suppress(OSError):  # for example a full disk
            _saving_path(checkpoints_path, storage_id).mkdir(exist_ok=True)
        remove_marker(path)
        if delete_files is not None:
            delete_files(storage_id)
        shutil.rmtree(path, ignore_errors=True)
    end_saving(checkpoints_path, storage_id)


def list_checkpoints(checkpoints_path: Path) -> list[StoredCheckpoint]:
    """Return complete checkpoints, sorted by ``steps_completed``, then by time.

    Raises:
        CheckpointDamagedError: a completion marker lacks its fields, so dstrial did not write it.
    """
    found = [_read_stored(path) for path in checkpoints_path.glob("*/") if is_complete(path)]
    return sorted(found, key=lambda checkpoint: (checkpoint.steps_completed, checkpoint.time))


def _read_stored(path: Path) -> StoredCheckpoint:
    mark = read_marker(path)
    try:
        return StoredCheckpoint(path.name, path, int(mark["steps_completed"]), str(mark["time"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointDamagedError(
            f"the completion marker in {path} is {mark!r}; expected one with steps_completed and time. Move the "
            "directory away, or delete it."
        ) from error


def newest_checkpoint(checkpoints_path: Path) -> StoredCheckpoint | None:
    """Return the checkpoint that was completed last; None without checkpoints.

    After a resume from an earlier checkpoint, the newest checkpoint may have fewer batches than others.
    """
    return max(list_checkpoints(checkpoints_path), key=lambda checkpoint: checkpoint.time, default=None)


def remove_incomplete_checkpoints(
    checkpoints_path: Path, delete_files: Callable[[str], object] | None = None
) -> None:
    """Remove checkpoints that were never completed because the writing process died.

    A checkpoint is not removed if its writer is alive or on another machine. ``delete_files(storage_id)`` deletes a
    checkpoint's files in an external storage, None if there is none. If this function raises ``CheckpointError``, the next call
    tries again. Directories without a ``.saving`` directory, such as those of Determined's TensorBoard files, are not removed.
    """
    names = {path.stem for path in checkpoints_path.glob(f"*{SAVING_SUFFIX}")}
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
        try:
            remove_checkpoint(checkpoints_path, name, delete_files)
        except CheckpointError as error:
            logger.warning("incomplete checkpoint %s is not deleted: %s", name, error)
        else:
            logger.warning("removed checkpoint %s, which was never completed", name)


KEEP_DEFAULTS = {"save_trial_latest": 1, "save_trial_best": 1, "save_experiment_best": 0}
"""Fields of ``checkpoint_storage`` that say which checkpoints to keep -> Determined's default."""


@dataclasses.dataclass(frozen=True, slots=True)
class KeepPolicy:
    """How many checkpoints of a run to keep; all others are deleted after each save."""

    num_latest: int = 1  # number of checkpoints to keep that were completed last; 0 has the effect of 1
    num_best: int = 1  # number of checkpoints to keep that are best by the searcher metric

    @classmethod
    def from_config(cls, checkpoint_storage: Mapping[str, object] | None) -> KeepPolicy | None:
        """Return the policy in ``checkpoint_storage``; None (keep all) if there is none.

        A policy is one or more of the fields ``save_trial_latest``, ``save_trial_best`` and ``save_experiment_best``.
        If a field is given, missing ones get Determined's defaults: latest 1, trial best 1, experiment best 0.
        """
        fields = checkpoint_storage or {}
        given = {key: fields[key] for key in KEEP_DEFAULTS if fields.get(key) is not None}
        if not given:
            return None
        numbers = {**KEEP_DEFAULTS, **given}
        latest, trial_best, experiment_best = (
            value if isinstance(value, int) else KEEP_DEFAULTS[key] for key, value in numbers.items()
        )
        return cls(num_latest=latest, num_best=max(trial_best, experiment_best))


def checkpoints_to_delete(
    checkpoints: Sequence[tuple[str, int]],
    validations: Mapping[int, float],
    policy: KeepPolicy,
    *,
    smaller_is_better: bool,
) -> list[str]:
    """Return the uuids of checkpoints that the policy deletes, oldest first.

    ``checkpoints`` are (uuid, ``steps_completed``), oldest first; the newest is always kept. ``validations`` is
    ``steps_completed`` -> searcher metric. A checkpoint without a metric, or with NaN, is never among the best. Of two
    checkpoints with equal metrics, the checkpoint with fewer steps is better.
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
