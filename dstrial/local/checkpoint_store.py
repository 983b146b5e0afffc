"""Determined's ``CheckpointContext`` on a run directory, with or without a master.

Determined's code transfers files and merges metadata. This module adds the completion marker, the keep policy and the
removal of a failed checkpoint. If one rank fails, every rank raises an error with the failing rank's number and cause.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import platformdirs
from determined import core
from determined.common import storage
from determined.common.api import bindings
from determined.common.api.errors import ForbiddenException, NotFoundException

from dstrial import object_storage
from dstrial.checkpoint.completion_marker import (
    MARKER_NAME,
    is_complete,
    is_uuid,
    read_marker,
    remove_marker,
    write_marker,
)
from dstrial.checkpoint.manifest import MANIFEST_NAME, METADATA_NAME, FileEntry, hash_file, hash_files
from dstrial.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError, RankError
from dstrial.local.checkpoint_directory import (
    KeepPolicy,
    StoredCheckpoint,
    begin_checkpoint,
    checkpoints_to_delete,
    end_saving,
    list_checkpoints,
    newest_checkpoint,
    remove_checkpoint,
    remove_incomplete_checkpoints,
)
from dstrial.local.json_files import write_json_atomically
from dstrial.local.node_checkpoints import (
    NodeCheckpointContext,
    ObjectStorageManager,
    completion_info,
    downloaded_record,
    require_storage,
    run_on_all_ranks,
    shared_scratch,
    write_record,
)
from dstrial.local.run_directory import RunDirectory, default_runs_dir
from dstrial.local.train_context import LocalTrainContext
from dstrial.object_storage import recorded_storage
from dstrial.storage_guard import StorageGoneError

logger = logging.getLogger("dstrial.local")

# Key of the completion marker: SHA-256 of the metadata file, which is not in the manifest.
_METADATA_DIGEST = "metadata_sha256"
# Directory in which Determined 0.38.1 keeps checkpoints without a master; user code may build paths below it.
_DETERMINED_PATH = platformdirs.user_data_path("determined")


class _CheckpointDirectory(storage.SharedFSStorageManager):  # type: ignore[misc]  # mypy does not follow determined
    """A storage manager of Determined that records which process writes a checkpoint.

    A save never creates the storage directory: after an unmount, the files would be written to the wrong disk.
    """

    def __init__(self, path: Path, *, is_chief: bool) -> None:
        super().__init__(str(path))
        self.path = path
        self._is_chief = is_chief
        self._inode = path.stat().st_ino

    def pre_store_path(self, dst: str) -> Path:
        self.require_present()
        if self._is_chief:  # the other ranks write after an exchange
            begin_checkpoint(self.path, dst)
        return self.path / dst

    def require_present(self) -> None:
        """Raise ``StorageGoneError`` if the storage directory is missing or replaced."""
        try:
            inode = self.path.stat().st_ino
        except FileNotFoundError as error:
            raise StorageGoneError(str(self.path), "no directory") from error
        # Compare inodes only: a remounted network file system has the same inodes, but another device number.
        if inode != self._inode:
            raise StorageGoneError(str(self.path), "a directory that was made since")


class LocalCheckpointContext(NodeCheckpointContext):
    """Stores checkpoints in a directory that all ranks can write to, without a master.

    With an external storage, ``checkpoints_path`` has only a record (manifest, metadata and completion marker) of each
    checkpoint.

    Args:
        checkpoints_path: directory of the checkpoints or of their records.
        manager: Determined's storage manager for the files.
        settings: the external storage; None if the files are in ``checkpoints_path``.
        keep: the policy for deleting checkpoints after each save; None keeps all.
        validations: returns ``steps_completed`` -> searcher metric, for ``keep``; called on the chief.
    """

    def __init__(
        self,
        dist: core.DistributedContext,
        checkpoints_path: Path,
        manager: _CheckpointDirectory | ObjectStorageManager,
        *,
        settings: Mapping[str, Any] | None = None,
        keep: KeepPolicy | None = None,
        validations: Callable[[], Mapping[int, float]] = dict,
        smaller_is_better: bool = True,
    ) -> None:
        self._dist = dist
        self._settings = settings
        self._checkpoints_path = checkpoints_path
        self._keep = keep
        self._validations = validations
        self._smaller_is_better = smaller_is_better
        self._storage_manager = manager
        self._open = contextlib.ExitStack()

    @contextlib.contextmanager
    def store_path(
        self, metadata: dict[str, Any] | None = None, *, shard: bool = False
    ) -> Iterator[tuple[Path, str]]:
        """Yield a new checkpoint's directory and uuid; the block writes the files.

        The checkpoint is complete after the block. ``metadata`` is read after the block and needs ``steps_completed`` on at
        least one rank.

        Raises:
            CheckpointError: a rank failed to write its files; the directory is removed. The failing rank raises an exception
                other than ``OSError`` unchanged.
            RankError: ``shard=False`` on another rank than 0.
            RuntimeError: ranks have different metadata of one key.

        Ranks: all, collectively, with ``shard=True``; rank 0 otherwise.
        """
        if not shard and self._dist.rank != 0:
            raise RankError(
                f"CheckpointContext.store_path(shard=False) is called on rank {self._dist.rank}; expected rank 0. Pass "
                "shard=True and call it on all ranks, or call it on the chief only."
            )
        ranks = self._dist if shard else core.DummyDistributedContext()
        stack = contextlib.ExitStack()
        storing = super().store_path(metadata, shard=shard)
        made: list[str] = []

        def begin() -> tuple[str, str]:
            path, storage_id = stack.enter_context(storing)
            made.append(storage_id)
            return str(path), storage_id

        error: Exception | None = None
        try:
            begun = run_on_all_ranks(ranks, begin, self._failed_to("begun"))
            path, storage_id = Path(begun[0][0]), begun[0][1]
            try:
                yield path, storage_id
            except Exception as caught:  # noqa: BLE001  # raised again below, after the other ranks know of it
                error = caught
            run_on_all_ranks(ranks, lambda: _raise(error), self._failed_to(f"saved in {path}"))
            run_on_all_ranks(ranks, stack.close, self._failed_to(f"completed in {path}"))
        except Exception as failure:
            # After a `RankError` the checkpoint may be complete. If it is not, the next start removes it.
            if self._dist.rank == 0 and made and not isinstance(failure, RankError):
                with contextlib.suppress(CheckpointError):  # the next start deletes the objects
                    self._remove(made[0])
            raise
        if self._dist.rank == 0:
            self._apply_keep_policy()

    def _failed_to(self, done: str) -> Callable[[Exception], str]:
        def describe(error: Exception) -> str:
            text = f"{type(error).__name__}: {error}".rstrip(".")  # a sentence continues after the text
            if isinstance(error, OSError):
                with contextlib.suppress(OSError):
                    free_bytes = shutil.disk_usage(self._checkpoints_path).free
                    text += f" ({free_bytes} bytes free in {self._checkpoints_path})"
            return (
                f"a checkpoint could not be {done}: rank {self._dist.rank}: {text}. Earlier checkpoints are untouched. Remove "
                "the cause and resume from the last one."
            )

        return describe

    def _write_metadata_file(self, ckpt_dir: str, metadata: dict[str, Any]) -> None:
        write_json_atomically(Path(ckpt_dir) / METADATA_NAME, metadata)

    def _report_checkpoint(
        self,
        storage_id: str,
        resources: dict[str, int] | None = None,  # noqa: ARG002  # of interest to a master
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """Write the completion marker; ``metadata`` needs ``steps_completed``. Ranks: 0."""
        manager = self._storage_manager
        if "steps_completed" not in (metadata or {}):
            raise ValueError(
                f"metadata of checkpoint {self._checkpoints_path / storage_id} is {metadata!r}; expected the key "
                "'steps_completed'. Add how many batches are trained."
            )
        assert metadata is not None
        record = self._checkpoints_path / storage_id
        info = completion_info(storage_id, metadata["steps_completed"])
        if isinstance(manager, ObjectStorageManager):
            manager.mark(storage_id, info | {_METADATA_DIGEST: _digest_of_metadata(record)})
        else:
            manager.require_present()
            path = manager.path / storage_id
            info |= {_METADATA_DIGEST: _digest_of_metadata(path)}
            write_marker(path, info)
            end_saving(manager.path, storage_id)
            if self._settings is not None and path != record:
                write_record(path, record, info, self._settings)
        logger.info("saved checkpoint %s at batch %s", storage_id, metadata["steps_completed"])

    def _apply_keep_policy(self) -> None:
        for storage_id in _superfluous(
            self._checkpoints_path, self._keep, self._validations, smaller_is_better=self._smaller_is_better
        ):
            try:
                self._remove(storage_id)
            except (CheckpointError, OSError) as error:
                logger.warning(
                    "checkpoint %s, which is not to be kept, cannot be deleted: %s", storage_id, error
                )
            else:
                logger.info("deleted checkpoint %s, which the keep policy does not keep", storage_id)

    def _remove(self, storage_id: str) -> None:
        path = self._checkpoints_path / storage_id
        settings = recorded_storage(path, self._settings) or self._settings
        remove_checkpoint(self._checkpoints_path, storage_id, _deletion(settings, self._storage_manager))

    def upload(
        self,
        ckpt_dir: str | os.PathLike[str] | None,
        metadata: dict[str, Any] | None = None,
        *,
        shard: bool = False,
        selector: Callable[[str], bool] | None = None,
    ) -> str:
        """Copy ``ckpt_dir`` into a new checkpoint; return the checkpoint's uuid.

        With ``shard=True`` the checkpoint has the files of all ranks; ``ckpt_dir`` is None on a rank without files. Unlike
        Determined's ``upload``, this method adds no file to ``ckpt_dir``.

        Raises:
            CheckpointError: ``ckpt_dir`` is None on all ranks, or ranks have different files of one name.

        Ranks: all, collectively, with ``shard=True``; rank 0 otherwise.
        """
        with self.store_path(metadata, shard=shard) as (path, storage_id):
            source = Path(ckpt_dir or os.devnull)
            ranks = self._dist if shard else core.DummyDistributedContext()
            listings = run_on_all_ranks(
                ranks,
                lambda: None if ckpt_dir is None else _selected_files(source, selector),
                self._failed_to("listed"),
            )
            if all(listing is None for listing in listings):
                raise CheckpointError(
                    "ckpt_dir is None on every rank that uploads; expected a directory on at least one. Name the directory to "
                    "upload."
                )
            files = [listing or {} for listing in listings]
            mine = files[ranks.rank]
            for name, entry in mine.items():
                owner = next(rank for rank, of_rank in enumerate(files) if name in of_rank)
                if files[owner][name] != entry:
                    raise CheckpointError(
                        f"file {name!r} differs between ranks {owner} and {self._dist.rank}; expected one content for each "
                        "name in a checkpoint. Write it under another name, or on one rank only."
                    )
                if owner == self._dist.rank:
                    (path / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(source / name, path / name)
        return storage_id

    def download(
        self,
        storage_id: str,
        ckpt_dir: str | os.PathLike[str],
        download_mode: core.DownloadMode = core.DownloadMode.LocalWorkersShareDownload,
        *,
        selector: Callable[[str], bool] | None = None,
    ) -> None:
        """Copy a checkpoint into a directory.

        Ranks: all, collectively, unless ``download_mode`` is ``NoSharedDownload``.
        """
        path = self._find(storage_id)
        settings = recorded_storage(path, self._settings)
        if settings is None or not object_storage.is_object_storage(settings):
            super().download(storage_id, ckpt_dir, download_mode, selector=selector)
            return
        manager = ObjectStorageManager(settings, path.parent, None, is_chief=False)
        self._fetch(self._sharing(download_mode), manager, path.name, Path(ckpt_dir), selector, path)

    def delete(self, storage_id: str) -> None:
        if not is_uuid(storage_id):
            raise CheckpointNotFoundError(f"checkpoint is {storage_id!r}; expected a UUID from list().")
        self._find(storage_id, is_read=False)
        self._remove(storage_id)

    def directory_of(self, storage_id: str) -> Path | None:
        """Return the directory with a complete checkpoint's files; None in object storage."""
        path = self._checkpoints_path / storage_id
        settings = recorded_storage(path, self._settings)
        if settings is None:
            return path
        return (
            None
            if object_storage.is_object_storage(settings)
            else Path(settings["container_path"], storage_id)
        )

    def close(self) -> None:
        """Delete the scratch directory of object storage; a no-op without one."""
        self._open.close()

    def _record_of(self, storage_id: str) -> Path:
        return self._find(storage_id)

    def list(self) -> list[StoredCheckpoint]:
        """Return complete checkpoints, sorted by ``steps_completed``, then by time."""
        return list_checkpoints(self._checkpoints_path)

    def newest(self) -> StoredCheckpoint | None:
        return newest_checkpoint(self._checkpoints_path)

    def _find(self, storage_id: str, *, is_read: bool = True) -> Path:
        path = Path(storage_id)
        if path.parent == _DETERMINED_PATH and not path.exists():
            path = Path(path.name)
        if len(path.parts) > 1:
            if (path / MANIFEST_NAME).is_file() and path.parent != self._checkpoints_path:
                # A checkpoint downloaded from a cluster has no completion marker. Loading verifies every file
                # by the manifest.
                return path
        else:
            name, path = path.name, self._checkpoints_path / path
            if is_read and not is_complete(path):
                path = self._elsewhere(name) or self._stored(name) or path
        if not is_complete(path):
            complete = ", ".join(checkpoint.uuid for checkpoint in self.list()) or "none"
            raise CheckpointNotFoundError(
                f"checkpoint is {storage_id!r}; expected one that is complete in {path.parent}. Choose one "
                f"of: {complete}."
            )
        expected = read_marker(path).get(_METADATA_DIGEST) if is_read else None
        if expected is not None and _digest_of_metadata(path) != expected:
            raise CheckpointDamagedError(
                f"{path / METADATA_NAME} is missing or changed; expected SHA-256 {expected[:12]}, as {MARKER_NAME} says. Resume "
                "from an earlier checkpoint, or restore the file from a copy."
            )
        return path

    def _elsewhere(self, storage_id: str) -> Path | None:
        """Return another run's complete checkpoint with this uuid; None if not found.

        Searches the runs directory that contains this run, then the default runs directory. (Determined 0.38.1 stores all local
        checkpoints in one directory, so scripts may use the uuid of another run's checkpoint.)
        """
        # <runs>/<experiment>/<run>/checkpoints/<uuid>
        for runs in (*self._checkpoints_path.parents[2:3], default_runs_dir()):
            for path in runs.glob(f"*/*/{self._checkpoints_path.name}/*/"):
                if path.name == storage_id and is_complete(path):
                    return path
        return None

    def _stored(self, name: str) -> Path | None:
        """Download an object-storage checkpoint's metadata; return their local directory.

        None if ``name`` is no uuid, the storage has no such complete checkpoint, or there is no object storage.
        """
        manager = self._storage_manager
        if not isinstance(manager, ObjectStorageManager) or not is_uuid(name):
            return None
        return downloaded_record(manager, name)


class MirroredCheckpointContext(NodeCheckpointContext):
    """Determined's checkpoint context under a master, storing into a run directory.

    ``dstrial run`` uses it for single trials.

    Args:
        cluster: Determined's own checkpoint context, whose connection to the master is used.
        settings: the external storage of the files; None if the run directory has them.
        keep: the policy for deleting checkpoints after each save; None keeps all.
        train: the train context, whose validations determine the best checkpoints.
    """

    def __init__(
        self,
        cluster: core.CheckpointContext,
        run_directory: RunDirectory,
        *,
        settings: Mapping[str, Any] | None,
        keep: KeepPolicy | None,
        train: LocalTrainContext,
    ) -> None:
        self.__dict__.update(cluster.__dict__)
        self._checkpoints_path = run_directory.checkpoints_path
        self._settings = settings
        if isinstance(self._storage_manager, ObjectStorageManager):
            self._storage_manager.records = self._checkpoints_path
        self._keep = keep
        self._train = train

    def _report_checkpoint(
        self,
        storage_id: str,
        resources: dict[str, int] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """Write the completion marker and report to the master. Ranks: 0.

        Then delete the trial's checkpoints that the keep policy does not keep.
        """
        super()._report_checkpoint(storage_id, resources, metadata)
        for superfluous in _superfluous(
            self._checkpoints_path,
            self._keep,
            self._train.validations,
            smaller_is_better=self._train.smaller_is_better,
        ):
            if self._is_own(superfluous):
                self._delete(superfluous)

    def _mark(self, storage_id: str, info: Mapping[str, Any]) -> None:
        super()._mark(storage_id, info)
        manager = self._storage_manager
        if self._settings is not None and not isinstance(manager, ObjectStorageManager):
            files = Path(manager._base_path, storage_id)
            write_record(files, self._checkpoints_path / storage_id, info, self._settings)

    def _delete(self, storage_id: str) -> None:
        if not isinstance(self._storage_manager, ObjectStorageManager):
            remove_marker(self._checkpoints_path / storage_id)
        try:
            self.delete(storage_id)
        except CheckpointError as error:
            logger.warning("checkpoint %s, which is not to be kept, cannot be deleted: %s", storage_id, error)
        else:
            remove_checkpoint(self._checkpoints_path, storage_id)

    def _is_own(self, storage_id: str) -> bool:
        """Return whether, according to the master, this trial has saved the checkpoint.

        The master lets a trial delete only the trial's own checkpoints, and only if their files still exist (Determined 0.38.1
        ``core/_checkpoint.py``, ``delete``).
        """
        try:
            found = bindings.get_GetCheckpoint(self._session, checkpointUuid=storage_id).checkpoint
        except (ForbiddenException, NotFoundException):
            return False  # another trial or another master has the checkpoint
        return bool(found.taskId == self._task_id)

    def _record_of(self, storage_id: str) -> Path | None:
        """Return ``storage_id`` as a path if it is an absolute path, else None."""
        return Path(storage_id) if Path(storage_id).is_absolute() else None


def _selected_files(source: Path, selector: Callable[[str], bool] | None) -> dict[str, FileEntry]:
    next(source.iterdir(), None)  # raises an OSError unless the directory can be read
    names = [found.relative_to(source).as_posix() for found in source.rglob("*") if found.is_file()]
    return hash_files(source, [name for name in names if selector is None or selector(name)])


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _digest_of_metadata(path: Path) -> str:
    """Return the SHA-256 of a checkpoint's metadata file; "" if it is missing."""
    file = path / METADATA_NAME
    return hash_file(file).sha256 if file.is_file() else ""


def _deletion(
    settings: Mapping[str, Any] | None, manager: storage.StorageManager
) -> Callable[[str], object] | None:
    """Return a function that deletes a checkpoint's files from the external storage.

    None if ``settings`` is None, because there is no external storage.
    """
    if settings is None:
        return None
    if not object_storage.is_object_storage(settings):
        return lambda storage_id: remove_checkpoint(Path(settings["container_path"]), storage_id)

    def delete(storage_id: str) -> None:
        if isinstance(manager, ObjectStorageManager):
            shutil.rmtree(manager.scratch / storage_id, ignore_errors=True)
        object_storage.delete(settings, storage_id)

    return delete


def _superfluous(
    checkpoints_path: Path,
    keep: KeepPolicy | None,
    validations: Callable[[], Mapping[int, float]],
    *,
    smaller_is_better: bool,
) -> list[str]:
    """Return uuids of complete checkpoints that ``keep`` deletes; [] if it is None."""
    if keep is None:
        return []
    stored = sorted(list_checkpoints(checkpoints_path), key=lambda checkpoint: checkpoint.time)
    return checkpoints_to_delete(
        [(checkpoint.uuid, checkpoint.steps_completed) for checkpoint in stored],
        validations(),
        keep,
        smaller_is_better=smaller_is_better,
    )


def open_checkpoint_store(
    dist: core.DistributedContext,
    checkpoints_path: Path,
    *,
    settings: Mapping[str, Any] | None = None,
    keep: KeepPolicy | None = None,
    validations: Callable[[], Mapping[int, float]] = dict,
    smaller_is_better: bool = True,
) -> LocalCheckpointContext:
    """Open or create a checkpoints directory; rank 0 removes incomplete checkpoints.

    ``settings`` is the external storage of the files; None if ``checkpoints_path`` has them.

    Raises:
        CheckpointError: the object storage cannot be written.

    Ranks: all, collectively, with object storage.
    """
    checkpoints_path.mkdir(parents=True, exist_ok=True)
    manager: _CheckpointDirectory | ObjectStorageManager
    with contextlib.ExitStack() as stack:
        if settings is not None and object_storage.is_object_storage(settings):
            require_storage(dist, settings)
            scratch = shared_scratch(dist, stack)
            manager = ObjectStorageManager(settings, scratch, checkpoints_path, is_chief=dist.rank == 0)
        else:
            files = checkpoints_path if settings is None else Path(settings["container_path"]).absolute()
            files.mkdir(parents=True, exist_ok=True)
            manager = _CheckpointDirectory(files, is_chief=dist.rank == 0)
        if dist.rank == 0:
            paths = {checkpoints_path: _deletion(settings, manager)}
            if isinstance(manager, _CheckpointDirectory):
                paths.setdefault(manager.path, None)
            for path, deletion in paths.items():
                remove_incomplete_checkpoints(path, deletion)
        store = LocalCheckpointContext(
            dist,
            checkpoints_path,
            manager,
            settings=settings,
            keep=keep,
            validations=validations,
            smaller_is_better=smaller_is_better,
        )
        store._open = stack.pop_all()
    return store
