"""Determined's CheckpointContext on a directory of whole checkpoints.

Every step ends in one gather of the ranks' successes. If a rank fails, the step fails on all ranks, with its number and cause.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import platformdirs
from determined import core
from determined.common import storage
from determined.core._checkpoint import merge_metadata

from dstrial.checkpoint.completion_marker import MARKER_NAME, is_complete, is_uuid, read_marker, write_marker
from dstrial.checkpoint.manifest import MANIFEST_NAME, hash_file
from dstrial.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError, RankError
from dstrial.local.checkpoint_directory import (
    KeepPolicy,
    StoredCheckpoint,
    begin_checkpoint,
    checkpoints_to_delete,
    end_part,
    end_saving,
    list_checkpoints,
    newest_checkpoint,
    ranks_saving,
    remove_checkpoint,
    remove_incomplete_checkpoints,
)
from dstrial.local.json_files import read_json, write_json_atomically
from dstrial.local.run_directory import default_runs_dir, utc_now
from dstrial.storage_guard import StorageGoneError

logger = logging.getLogger("dstrial.local")

METADATA_FILE = "metadata.json"

_METADATA_DIGEST = "metadata_sha256"

# How long a rank that could not save its part waits for the others before it fails alone.
FAILURE_WAIT_S = 60.0
_POLL_PERIOD_S = 0.05

T = TypeVar("T")

# Checkpoints that this process has completed, by uuid: their runs may lie anywhere.
_written_here: dict[str, Path] = {}
# Where Determined 0.38.1 keeps checkpoints off a cluster, and code written for it looks: a path there stands for its uuid.
_DETERMINED_PATH = platformdirs.user_data_path("determined")


class LocalCheckpointContext(core.CheckpointContext):  # type: ignore[misc]  # mypy does not follow determined
    """Stores checkpoints in a directory that all ranks can write to.

    Args:
        keep: applied after each new checkpoint; None keeps all.
        validations: returns ``steps_completed`` -> searcher metric, for ``keep``; called on the chief.
        failure_wait_s: how long a rank that failed waits for the others.
    """

    def __init__(
        self,
        dist: core.DistributedContext,
        checkpoints_path: Path,
        *,
        keep: KeepPolicy | None = None,
        validations: Callable[[], Mapping[int, float]] = dict,
        smaller_is_better: bool = True,
        failure_wait_s: float = FAILURE_WAIT_S,
    ) -> None:
        self._failure_wait_s = failure_wait_s
        self._dist = dist
        self._checkpoints_path = checkpoints_path
        self._keep = keep
        self._validations = validations
        self._smaller_is_better = smaller_is_better
        self._storage_manager = storage.SharedFSStorageManager(str(checkpoints_path))
        self._inode = checkpoints_path.stat().st_ino

    @contextlib.contextmanager
    def store_path(
        self, metadata: dict[str, Any] | None = None, *, shard: bool = False
    ) -> Iterator[tuple[Path, str]]:
        """Yield a new directory to save into, and the checkpoint's uuid.

        The checkpoint is complete after the block. ``metadata`` is read then, and has ``steps_completed`` on one rank at least.

        Raises:
            CheckpointError: a rank could not write its part; the directory is removed. An exception that is no ``OSError``
                is raised as it is on its rank.
            RankError: ``shard=False`` on another rank than 0, or raised by the block: without ranks to agree with, the
                directory is left to ``open_checkpoint_store``.

        Ranks: all, collectively, with ``shard=True``; rank 0 otherwise.
        """
        if not shard and self._dist.rank != 0:
            raise RankError(
                f"CheckpointContext.store_path(shard=False) is called on rank {self._dist.rank}; expected "
                "rank 0. Pass shard=True and call it on all ranks, or call it on the chief only."
            )
        begun = self._run_on_all_ranks(
            shard,
            "begun",
            lambda: self._begin(self._dist.size if shard else 1) if self._dist.rank == 0 else None,
        )
        path, storage_id = next(result for result in begun if result is not None)
        error: Exception | None = None
        try:
            yield path, storage_id
        except Exception as caught:  # noqa: BLE001 - raised again below, after the other ranks know of it
            error = caught
        end_part(self._checkpoints_path, storage_id, self._dist.rank)
        if isinstance(error, RankError):
            # There is nobody to agree with; the directory has no mark and is removed at the next start.
            raise error
        if error is not None and shard:
            self._await_other_ranks(storage_id, error)
        self._finish(path, storage_id, metadata, shard=shard, error=error)

    def _begin(self, num_ranks: int) -> tuple[Path, str]:
        self._require_storage()
        return begin_checkpoint(self._checkpoints_path, num_ranks)

    def _require_storage(self) -> None:
        """Raise ``StorageGoneError`` if another directory is in the storage's place.

        A save creates missing parents: into an unmounted storage it would write where nobody finds it later.
        """
        path = str(self._checkpoints_path)
        try:
            inode = self._checkpoints_path.stat().st_ino
        except FileNotFoundError as error:
            raise StorageGoneError(path, "no directory") from error
        # A network file system that was mounted again has another device, and the same inodes.
        if inode != self._inode:
            raise StorageGoneError(path, "a directory that was made since")

    def _finish(
        self,
        path: Path,
        storage_id: str,
        metadata: dict[str, Any] | None,
        *,
        shard: bool,
        error: Exception | None,
    ) -> None:
        """Complete a checkpoint that all ranks have saved; remove it on failure."""
        try:
            all_metadata = self._run_on_all_ranks(
                shard, f"saved in {path}", lambda: dict(metadata or {}), error
            )
            merged, conflicts = merge_metadata(all_metadata)
            if conflicts:
                raise CheckpointError(
                    f"metadata of checkpoint {path} has different values on ranks {conflicts}; expected the "
                    "same value of a key on all ranks. Give the key on one rank only."
                )
            if "steps_completed" not in merged:
                raise ValueError(
                    f"metadata of checkpoint {path} is {merged!r}; expected the key 'steps_completed'. Add "
                    "how many batches are trained."
                )
            self._run_on_all_ranks(
                shard,
                f"completed in {path}",
                (lambda: self._complete(path, storage_id, merged)) if self._dist.rank == 0 else lambda: None,
            )
        except Exception as failure:
            # A rank that dies once the mark is written takes nothing from the checkpoint.
            is_done = isinstance(failure, RankError) and is_complete(path)
            if self._dist.rank == 0 and not is_done:
                remove_checkpoint(self._checkpoints_path, storage_id)
            raise
        if self._dist.rank == 0:
            self._apply_keep_policy()

    def _await_other_ranks(self, storage_id: str, error: Exception) -> None:
        """Wait until the other ranks are done too, up to ``failure_wait_s``.

        They may wait for this rank in a barrier of DeepSpeed's. Only the end of this process releases them then, so this rank
        fails alone.
        """
        give_up_at_s = time.monotonic() + self._failure_wait_s
        while waiting := ranks_saving(self._checkpoints_path, storage_id):
            if time.monotonic() < give_up_at_s:
                time.sleep(_POLL_PERIOD_S)
                continue
            if not isinstance(error, OSError):
                raise error
            raise CheckpointError(
                f"a checkpoint could not be saved in {self._checkpoints_path / storage_id}: rank "
                f"{self._dist.rank}: {self._describe(error)}; ranks {waiting} have not ended their part after "
                f"{self._failure_wait_s:g} s. Earlier checkpoints are untouched. Remove the cause and resume "
                "from the last one."
            ) from error

    def _run_on_all_ranks(
        self, shard: bool, done: str, step: Callable[[], T], error: Exception | None = None
    ) -> list[T]:
        """Run a step on every rank, and return the results by rank; one failure fails all.

        ``shard`` says whether the other ranks take part; ``done`` is what the checkpoint is after the step, for the error;
        ``error`` is an earlier failure, which skips the step.
        """
        result: T | None = None
        if error is None:
            try:
                result = step()
            except Exception as caught:  # noqa: BLE001 - raised again below, after the other ranks know of it
                error = caught
        outcome = (self._dist.rank, None if error is None else self._describe(error), result)
        outcomes = self._dist.allgather(outcome) if shard else [outcome]
        failures = [f"rank {rank}: {cause}" for rank, cause, _ in outcomes if cause is not None]
        if error is not None and not isinstance(error, OSError):
            raise error
        if failures:
            raise CheckpointError(
                f"a checkpoint could not be {done}: {'; '.join(failures)}. Earlier checkpoints are "
                "untouched. Remove the cause and resume from the last one."
            ) from error
        return [cast(T, result) for _, _, result in outcomes]

    def _describe(self, error: Exception) -> str:
        text = f"{type(error).__name__}: {error}".rstrip(".")  # a sentence goes on
        if isinstance(error, OSError):
            with contextlib.suppress(OSError):
                free_bytes = shutil.disk_usage(self._checkpoints_path).free
                text += f" ({free_bytes} bytes free in {self._checkpoints_path})"
        return text

    def _complete(self, path: Path, storage_id: str, metadata: Mapping[str, Any]) -> None:
        self._require_storage()
        write_json_atomically(path / METADATA_FILE, metadata)
        info = {
            "uuid": storage_id,
            "steps_completed": metadata["steps_completed"],
            "time": utc_now(),
            _METADATA_DIGEST: hash_file(path / METADATA_FILE).sha256,
        }
        write_marker(path, info)
        _written_here[storage_id] = path
        end_saving(self._checkpoints_path, storage_id)
        logger.info("saved checkpoint %s at batch %s", storage_id, metadata["steps_completed"])

    def _apply_keep_policy(self) -> None:
        if self._keep is None:
            return
        checkpoints = sorted(self.list(), key=lambda checkpoint: checkpoint.time)
        superfluous = checkpoints_to_delete(
            [(checkpoint.uuid, checkpoint.steps_completed) for checkpoint in checkpoints],
            self._validations(),
            self._keep,
            smaller_is_better=self._smaller_is_better,
        )
        for storage_id in superfluous:
            try:
                remove_checkpoint(self._checkpoints_path, storage_id)
            except OSError as error:
                logger.warning(
                    "checkpoint %s, which is not to be kept, cannot be deleted: %s", storage_id, error
                )
            else:
                logger.info("deleted checkpoint %s, which the keep policy does not keep", storage_id)

    def upload(
        self,
        ckpt_dir: str | os.PathLike[str] | None,
        metadata: dict[str, Any] | None = None,
        *,
        shard: bool = False,
        selector: Callable[[str], bool] | None = None,
    ) -> str:
        """Copy a directory, or the union of the ranks', to a checkpoint; return its uuid.

        ``ckpt_dir`` is None on a rank that has nothing to add. Ranks that bring different files of one name, or no directory at
        all, raise ``CheckpointError``.

        Ranks: all, collectively, with ``shard=True``; rank 0 otherwise.
        """
        with self.store_path(metadata, shard=shard) as (path, storage_id):
            source = None if ckpt_dir is None else Path(ckpt_dir)
            listings = self._run_on_all_ranks(
                shard, "listed", lambda: None if source is None else _selected_digests(source, selector)
            )
            if all(listing is None for listing in listings):
                raise CheckpointError(
                    "ckpt_dir is None on every rank that uploads; expected a directory on at least one. Name "
                    "the directory to upload."
                )
            owners = _owners([listing or {} for listing in listings])
            if source is not None:
                for name, owner_rank in owners.items():
                    if owner_rank == self._dist.rank:
                        target = path / name
                        target.parent.mkdir(parents=True, exist_ok=True)
                        shutil.copy2(source / name, target)
        return storage_id

    def download(
        self,
        storage_id: str,
        ckpt_dir: str | os.PathLike[str],
        download_mode: core.DownloadMode = core.DownloadMode.LocalWorkersShareDownload,
        *,
        selector: Callable[[str], bool] | None = None,
    ) -> None:
        """Copy a checkpoint into a directory. Ranks: all, collectively, when they share."""
        self._find(storage_id)
        super().download(storage_id, ckpt_dir, download_mode, selector=selector)

    @contextlib.contextmanager
    def restore_path(
        self,
        storage_id: str,
        download_mode: core.DownloadMode = core.DownloadMode.LocalWorkersShareDownload,  # noqa: ARG002
        *,
        selector: Callable[[str], bool] | None = None,  # noqa: ARG002 - nothing is copied
    ) -> Iterator[Path]:
        """Yield the directory of a checkpoint, by uuid or by path; nothing is copied."""
        yield self._find(storage_id)

    def delete(self, storage_id: str) -> None:
        if not is_uuid(storage_id):
            raise CheckpointNotFoundError(f"checkpoint is {storage_id!r}; expected a UUID from list().")
        self._find(storage_id, is_read=False)
        remove_checkpoint(self._checkpoints_path, storage_id)

    def get_metadata(self, storage_id: str) -> dict[str, Any]:
        metadata: dict[str, Any] = read_json(self._find(storage_id) / METADATA_FILE) or {}
        return metadata

    def list(self) -> list[StoredCheckpoint]:
        """Return complete checkpoints by ``steps_completed``, then by time."""
        return list_checkpoints(self._checkpoints_path)

    def newest(self) -> StoredCheckpoint | None:
        return newest_checkpoint(self._checkpoints_path)

    def _find(self, storage_id: str, *, is_read: bool = True) -> Path:
        path = Path(storage_id)
        if path.parent == _DETERMINED_PATH and not path.exists():
            storage_id = path.name
            path = Path(storage_id)
        if len(path.parts) == 1:
            path = self._checkpoints_path / storage_id
        elif (path / MANIFEST_NAME).is_file() and path.parent != self._checkpoints_path:
            # Downloaded from a cluster, whose storage knows no completion mark; whoever loads it verifies
            # every file by the manifest.
            return path
        if is_read and len(Path(storage_id).parts) == 1 and not is_complete(path):
            path = _elsewhere(self._checkpoints_path, storage_id) or path
        if not is_complete(path):
            complete = ", ".join(checkpoint.uuid for checkpoint in self.list()) or "none"
            raise CheckpointNotFoundError(
                f"checkpoint is {storage_id!r}; expected one that is complete in {path.parent}. Choose one "
                f"of: {complete}."
            )
        expected = read_marker(path).get(_METADATA_DIGEST) if is_read else None
        if expected is not None:
            _require_metadata(path / METADATA_FILE, expected)
        return path


def _elsewhere(checkpoints_path: Path, storage_id: str) -> Path | None:
    """Find a checkpoint of another run: of this process, beside this run, or of any.

    Source: Determined 0.38.1 keeps the checkpoints of all local runs in one directory, where each is found by its uuid.
    """
    if not is_uuid(storage_id):
        return None
    written = _written_here.get(storage_id)
    found = [] if written is None else [written]
    # <runs>/<experiment>/<run>/checkpoints/<uuid>
    for runs in dict.fromkeys((*checkpoints_path.parents[2:3], default_runs_dir())):
        found += runs.glob(f"*/*/{checkpoints_path.name}/{storage_id}")
    return next((path for path in found if is_complete(path)), None)


def _require_metadata(path: Path, sha256: str) -> None:
    """Compare the metadata file with the completion mark, which was written after it."""
    try:
        found = hash_file(path).sha256
    except FileNotFoundError:
        found = "missing"
    if found != sha256:
        got = found if found == "missing" else f"of checksum {found[:12]}"
        raise CheckpointDamagedError(
            f"{path} is {got}; expected {sha256[:12]} (SHA-256), as {MARKER_NAME} says. Resume from an earlier checkpoint, or "
            "restore the file from a copy."
        )


def open_checkpoint_store(
    dist: core.DistributedContext,
    checkpoints_path: Path,
    *,
    keep: KeepPolicy | None = None,
    validations: Callable[[], Mapping[int, float]] = dict,
    smaller_is_better: bool = True,
) -> LocalCheckpointContext:
    """Open or create a directory of checkpoints, without what killed processes left."""
    checkpoints_path.mkdir(parents=True, exist_ok=True)
    if dist.rank == 0:
        for name, num_bytes in remove_incomplete_checkpoints(checkpoints_path).items():
            logger.warning(
                "removed checkpoint %s, which was never completed (%s bytes)", name, f"{num_bytes:,}"
            )
    return LocalCheckpointContext(
        dist, checkpoints_path, keep=keep, validations=validations, smaller_is_better=smaller_is_better
    )


def _selected_digests(source: Path, selector: Callable[[str], bool] | None) -> dict[str, str]:
    digests = {}
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if path.is_file() and (selector is None or selector(name)):
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
            digests[name] = digest.hexdigest()
    return digests


def _owners(digests: list[dict[str, str]]) -> dict[str, int]:
    """Return which rank copies each file: the lowest that has it."""
    owners: dict[str, int] = {}
    for rank, files in enumerate(digests):
        for name, digest in files.items():
            if digests[owners.setdefault(name, rank)][name] != digest:
                raise CheckpointError(
                    f"file {name!r} differs between ranks {owners[name]} and {rank}; expected one content "
                    "for each name in a checkpoint. Write it under another name, or on one rank only."
                )
    return owners
