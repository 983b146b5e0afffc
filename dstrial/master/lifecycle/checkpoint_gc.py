"""Checkpoint garbage collection: the retention policy, and deletion of files."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrial import object_storage
from dstrial.checkpoint.completion_marker import MARKER_NAME, is_uuid
from dstrial.checkpoint.manifest import MANIFEST_NAME, METADATA_NAME
from dstrial.errors import MasterError
from dstrial.file_writes import remove_tree
from dstrial.master.backends.environment import user_variables
from dstrial.master.store import checkpoints
from dstrial.master.store.checkpoints import CheckpointInfo
from dstrial.master.store.database import Connection
from dstrial.master.store.reports.metric_summaries import as_number

_RUN_DIR_VARIABLE = "DSTRIAL_RUN_DIR"  # as in dstrial.local.run_directory, which the master never imports
_ALL = ("**/*", "**", "*")  # patterns that match every file of a checkpoint
_OBJECTS_TIMEOUT_S = 600.0  # timeout of deletions in object storage, for one checkpoint


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint that garbage collection may delete."""

    uuid: str
    trial_id: int
    steps: int  # batches completed
    metric: float | None  # searcher metric of the validation at the same batch; None without one

    @classmethod
    def of_row(cls, row: CheckpointInfo) -> Candidate:
        validation = json.loads(row.validation) if row.validation else {}
        return cls(row.uuid, row.trial_id, row.steps, as_number(validation.get(row.searcher_metric)))


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """How many checkpoints garbage collection keeps: the config's ``save_…`` keys."""

    save_experiment_best: int
    save_trial_best: int
    save_trial_latest: int

    @classmethod
    def from_storage(cls, storage: Mapping[str, Any]) -> Policy:
        return cls(
            int(storage["save_experiment_best"]),
            int(storage["save_trial_best"]),
            int(storage["save_trial_latest"]),
        )


def unused(connection: Connection, experiment_id: int) -> list[CheckpointInfo]:
    """Return an experiment's COMPLETED checkpoints that no trial or model uses."""
    rows = checkpoints.list_checkpoints(connection, experiment_id=experiment_id, states=("COMPLETED",))
    in_use = checkpoints.in_use(connection)
    return [row for row in rows if row.uuid not in in_use]


def plan(candidates: Sequence[Candidate], policy: Policy, *, smaller_is_better: bool) -> list[str]:
    """Return the uuids of the candidates that the policy deletes.

    The policy keeps the best checkpoints of the experiment and of each trial, and the newest of each trial. Only checkpoints
    with a validation at the same batch are ranked; the earlier batch wins a tie. Source: Determined 0.38.1.
    """
    sign = 1.0 if smaller_is_better else -1.0
    validated = [item for item in candidates if item.metric is not None and not math.isnan(item.metric)]
    ranked = sorted(validated, key=lambda item: (sign * (item.metric or 0.0), item.steps))
    kept = {item.uuid for item in ranked[: policy.save_experiment_best]}
    for trial_id in {item.trial_id for item in candidates}:
        best = [item for item in ranked if item.trial_id == trial_id]
        newest = sorted(
            (item for item in candidates if item.trial_id == trial_id), key=lambda item: -item.steps
        )
        kept.update(item.uuid for item in best[: policy.save_trial_best])
        kept.update(item.uuid for item in newest[: policy.save_trial_latest])
    return [item.uuid for item in candidates if item.uuid not in kept]


def storage_root(storage: Mapping[str, Any]) -> Path:
    """Return the directory of a checkpoint storage.

    ``storage`` is a config's ``checkpoint_storage``. Raises ``MasterError`` for an object storage, which has no directory.
    """
    kind = storage.get("type")
    if kind == "shared_fs":
        base = Path(str(storage["host_path"]))
        return base / str(storage["storage_path"]) if storage.get("storage_path") else base
    if kind == "directory":
        return Path(str(storage["container_path"]))
    raise MasterError(
        f"checkpoint_storage.type is {kind!r}; expected shared_fs or directory, whose files this machine has."
    )


def checkpoint_directory(storage: Mapping[str, Any], uuid: str) -> Path:
    root = storage_root(storage)
    if not is_uuid(uuid):
        raise MasterError(f"the name of a checkpoint is {uuid[:80]!r}; expected a UUID in lower case.")
    return root / uuid


def tensorboard_directory(storage: Mapping[str, Any], cluster_id: str, experiment_id: int) -> Path:
    """Return the local directory of an experiment's TensorBoard files.

    Source: Determined 0.38.1 determined/tensorboard/build.py.
    """
    return storage_root(storage) / cluster_id / "tensorboard" / "experiment" / str(experiment_id)


def delete_tensorboard_files(config: Mapping[str, Any], cluster_id: str, experiment_id: int) -> None:
    storage = config["checkpoint_storage"]
    if object_storage.is_object_storage(storage):
        # The slash keeps experiment 12 when experiment 1 is deleted: names of objects are compared as text.
        prefix = f"{cluster_id}/tensorboard/experiment/{experiment_id}/"
        _delete_objects(config, prefix, (object_storage.ALL_FILES,))
        return
    directory = tensorboard_directory(storage, cluster_id, experiment_id)
    with _deleting(directory):
        if directory.is_dir() and not directory.is_symlink():
            remove_tree(directory)


@contextlib.contextmanager
def _deleting(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MasterError(
            f"{directory} cannot be deleted ({error.strerror}); expected files of your own. Delete them by hand."
        ) from error


def _delete_objects(config: Mapping[str, Any], name: str, globs: Sequence[str]) -> dict[str, int]:
    """Delete objects whose names start with ``name`` from an object storage.

    Returns the remaining objects: name -> size in bytes. ``globs`` are patterns of the objects to delete, relative to ``name``.
    ``config`` is the experiment's.
    """
    storage = object_storage.external_storage(config)
    assert storage is not None
    if any(pattern in _ALL for pattern in globs):
        globs = (object_storage.ALL_FILES,)
    return object_storage.delete(storage, name, globs, user_variables(config), _OBJECTS_TIMEOUT_S)


def delete_files(config: Mapping[str, Any], uuid: str, globs: Sequence[str] = ("**/*",)) -> dict[str, int]:
    """Delete the files of a checkpoint that match ``globs``.

    Returns the remaining files: path -> size in bytes. ``config`` is the experiment's. Symbolic links are deleted, not
    followed.

    Raises:
        CheckpointError: the object storage is unreachable or could not delete the files.
        MasterError: files cannot be deleted.
    """
    storage = config["checkpoint_storage"]
    if object_storage.is_object_storage(storage):
        return _delete_objects(config, uuid, globs)
    directory = checkpoint_directory(storage, uuid)
    if directory.is_symlink():
        raise MasterError(
            f"{directory} is a link; expected a checkpoint's directory. Nothing in it is deleted."
        )
    if not directory.is_dir():
        return {}
    with _deleting(directory):
        if not globs:
            return remaining(directory)
        if any(pattern in _ALL for pattern in globs):
            remove_tree(directory)
            return {}
        for path in sorted(directory.rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                with contextlib.suppress(OSError):
                    path.rmdir()
            elif any(_matches(str(path.relative_to(directory)), pattern) for pattern in globs):
                path.unlink()
        return remaining(directory)


def forget_record(config: Mapping[str, Any], uuid: str) -> None:
    """Delete a deleted checkpoint's metadata files from its run directory.

    For trials of ``dstrial run``, environment variable ``DSTRIAL_RUN_DIR`` in the config is the path of the run directory. It
    has copies of these files. No-op for other trials.
    """
    run_directory = user_variables(config).get(_RUN_DIR_VARIABLE)
    if run_directory is None or not is_uuid(uuid):
        return
    record = Path(run_directory, "checkpoints", uuid)
    with contextlib.suppress(OSError):
        for name in (MARKER_NAME, MANIFEST_NAME, METADATA_NAME):
            (record / name).unlink(missing_ok=True)
        record.rmdir()


def remaining(directory: Path) -> dict[str, int]:
    """Return path -> size in bytes of a directory's files, and ``subdirectory/`` -> 0."""
    found: dict[str, int] = {}
    for path in sorted(directory.rglob("*")):
        # JSON cannot contain names that are not UTF-8 (RFC 8259).
        name = os.fsencode(path.relative_to(directory)).decode(errors="backslashreplace")
        if path.is_dir() and not path.is_symlink():
            found[f"{name}/"] = 0
        else:
            found[name] = path.lstat().st_size
    return found


def _matches(name: str, pattern: str) -> bool:
    if pattern.startswith("**/") and fnmatch.fnmatchcase(name, pattern[3:]):
        return True
    if "/" not in pattern and "/" in name:
        return False
    return fnmatch.fnmatchcase(name, pattern)
