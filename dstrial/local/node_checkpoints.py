"""A checkpoint context for object storage: each node transfers its files once.

Ranks write a checkpoint into a scratch directory of their node. Then the first rank of each node uploads the node's files, and
rank 0 uploads the completion marker last. To load a checkpoint, the first rank of each node downloads the files for all ranks
of the node. The run directory has a record of each checkpoint in object storage: ``checkpoints/<uuid>/`` with the manifest, the
metadata and a completion marker that names the storage. Code that lists or chooses checkpoints reads these records.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, TypeVar

from determined import core
from determined.common import storage

from dstrial import object_storage
from dstrial.checkpoint.completion_marker import MARKER_NAME, is_complete, write_marker
from dstrial.checkpoint.manifest import MANIFEST_DIGEST, MANIFEST_NAME, METADATA_NAME, hash_file
from dstrial.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError, RankError
from dstrial.local.checkpoint_directory import begin_checkpoint, end_saving
from dstrial.local.json_files import read_json
from dstrial.local.run_directory import utc_now
from dstrial.object_storage import STORAGE_KEY, recorded_storage
from dstrial.scratch import scratch_directory

logger = logging.getLogger("dstrial.local")

_RECORDED = (MANIFEST_NAME, METADATA_NAME)  # files of a checkpoint that are copied into the local record

T = TypeVar("T")


def run_on_all_ranks(
    distributed: core.DistributedContext, step: Callable[[], T], describe: Callable[[Exception], str]
) -> list[T]:
    """Run a function on every rank; return all results by rank, or raise on all ranks.

    Args:
        distributed: the ranks, and the channel for the exchange of results.
        step: the function; its result is small and can be pickled.
        describe: returns the error message for a failure on this rank; the other ranks raise it too.

    Raises:
        CheckpointError: ``step`` raised an ``OSError`` on this rank, or any exception on another rank. Any other exception of
            this rank is raised unchanged; a ``RankError`` at once, without communication.

    Ranks: all, collectively.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = step()
    except Exception as caught:  # noqa: BLE001  # raised again below, after the other ranks know of it
        error = caught
    if isinstance(error, RankError):
        raise error  # the other ranks no longer answer
    message = None if error is None else describe(error)
    if error is not None and distributed.size > 1 and not isinstance(error, CheckpointError):
        # The other ranks may wait in a collective of the step, such as a barrier of DeepSpeed's, instead of the gather below.
        logger.error("%s", message)
    outcomes: list[tuple[str | None, T]] = distributed.allgather((message, result))
    if isinstance(error, OSError):
        raise CheckpointError(message) from error
    if error is not None:
        raise error
    for failure, _ in outcomes:
        if failure is not None:
            raise CheckpointError(failure)
    return [outcome for _, outcome in outcomes]


def require_storage(distributed: core.DistributedContext, settings: Mapping[str, Any] | None) -> None:
    """Raise CheckpointError on all ranks if rank 0 cannot write to the object storage.

    ``settings`` is a config's external storage. A no-op if this storage is None or a directory.

    Ranks: all, collectively.
    """
    if settings is not None and object_storage.is_object_storage(settings):
        run_on_all_ranks(
            distributed, lambda: object_storage.check(settings) if distributed.rank == 0 else None, str
        )


def completion_info(storage_id: str, steps_completed: Any) -> dict[str, Any]:
    return {"uuid": storage_id, "steps_completed": steps_completed, "time": utc_now()}


def write_record(files: Path, record: Path, info: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Write the local record of a checkpoint in object storage.

    Copies the manifest and the metadata from the directory ``files`` into the directory ``record``, unless both are the same
    directory. Writes a completion marker that names the storage (``settings``) and has the fields ``info``.
    """
    record.mkdir(exist_ok=True)
    for name in _RECORDED:
        if files != record and (files / name).is_file():
            shutil.copy2(files / name, record / name)
    write_marker(record, {**info, STORAGE_KEY: object_storage.location_of(settings)})


class ObjectStorageManager(storage.StorageManager):  # type: ignore[misc]  # mypy does not follow determined
    """A storage manager of Determined whose transfers run in child processes.

    Args:
        settings: ``checkpoint_storage`` of the config.
        scratch: directory of this node for checkpoints that are being saved.
        records: directory of the records; None without a run directory.
    """

    def __init__(
        self, settings: Mapping[str, Any], scratch: Path, records: Path | None, *, is_chief: bool
    ) -> None:
        super().__init__(str(scratch))
        self.settings = settings
        self.scratch = scratch
        self.records = records
        self._is_chief = is_chief

    def pre_store_path(self, dst: str) -> Path:
        if self.records is not None and self._is_chief:
            begin_checkpoint(self.records, dst)
        path: Path = super().pre_store_path(dst)
        return path

    def post_store_path(self, src: str | os.PathLike[str], dst: str, paths: Set[str] | None = None) -> None:
        try:
            self.upload(src, dst, paths)
        finally:
            shutil.rmtree(src, ignore_errors=True)

    def store_path_is_direct_access(self) -> bool:
        return False

    @contextlib.contextmanager
    def restore_path(self, src: str, selector: Callable[[str], bool] | None = None) -> Iterator[Path]:
        with scratch_directory("dstrial-checkpoint-") as path:
            self.download(src, path, selector)
            yield path

    def upload(self, src: str | os.PathLike[str], dst: str, paths: Set[str] | None = None) -> None:
        names = self._list_directory(src) if paths is None else paths
        object_storage.upload(self.settings, dst, Path(src), list(names))
        if self.records is not None:
            (self.records / dst).mkdir(exist_ok=True)
            for name in _RECORDED:
                if name in names:
                    shutil.copy2(Path(src, name), self.records / dst / name)

    def download(
        self, src: str, dst: str | os.PathLike[str], selector: Callable[[str], bool] | None = None
    ) -> None:
        names = None if selector is None else [name for name in self.names_of(src) if selector(name)]
        Path(dst).mkdir(parents=True, exist_ok=True)
        object_storage.download(self.settings, src, Path(dst), names)

    def delete(self, tgt: str, globs: list[str]) -> dict[str, int]:
        return object_storage.delete(self.settings, tgt, globs)

    def names_of(self, storage_id: str) -> list[str]:
        return sorted(object_storage.delete(self.settings, storage_id, ()))

    def mark(self, storage_id: str, info: Mapping[str, Any]) -> None:
        """Upload a checkpoint's completion marker, then write it into the local record."""
        marker = {**info, STORAGE_KEY: object_storage.location_of(self.settings)}
        self.scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.scratch) as directory:
            write_marker(directory, marker)
            object_storage.upload(self.settings, storage_id, Path(directory), [MARKER_NAME])
        if self.records is not None:
            record = self.records / storage_id
            write_record(record, record, info, self.settings)
            end_saving(self.records, storage_id)


class NodeCheckpointContext(core.CheckpointContext):  # type: ignore[misc]  # mypy does not follow determined
    """Determined's checkpoint context, with completion markers.

    With object storage, each node transfers its files once. (Determined 0.38.1 treats directories with equal device and inode
    as one shared directory, but these numbers may be equal on two machines.)
    """

    _settings: Mapping[str, Any] | None = None  # the external storage of the files; None if there is none

    @classmethod
    def of_cluster(
        cls, cluster: core.CheckpointContext, manager: ObjectStorageManager | None
    ) -> NodeCheckpointContext:
        """Convert Determined's checkpoint context.

        ``manager`` replaces the storage manager of ``cluster``; None for no replacement.
        """
        made = cls.__new__(cls)
        made.__dict__.update(cluster.__dict__)
        if manager is not None:
            made._storage_manager = manager
        return made

    def _store_path_sharded(self, metadata: dict[str, Any] | None = None) -> Iterator[tuple[Path, str]]:
        manager, dist = self._storage_manager, self._dist
        if not isinstance(manager, ObjectStorageManager):
            yield from super()._store_path_sharded(metadata)
            return
        storage_id: str = dist.broadcast(str(uuid.uuid4()))
        path = manager.pre_store_path(storage_id)
        yield path, storage_id
        merged = self._merge_metadata(metadata)

        def upload() -> dict[str, int]:
            if dist.rank == 0:
                self._write_metadata_file(str(path), merged)
            if dist.local_rank != 0:
                return {}
            sizes: dict[str, int] = manager._list_directory(path)
            manager.post_store_path(path, storage_id, set(sizes))
            return sizes

        parts = run_on_all_ranks(dist, upload, lambda error: f"rank {dist.rank}: {error}")
        if dist.rank == 0:
            sizes = {name: size for part in parts for name, size in part.items()}
            self._report_checkpoint(storage_id, sizes, merged)
        dist.allgather(None)

    def _report_checkpoint(
        self,
        storage_id: str,
        resources: dict[str, int] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """Write the completion marker, then report to the master. Ranks: 0.

        Without ``steps_completed`` in ``metadata``, no marker is written.
        """
        steps_completed = (metadata or {}).get("steps_completed")
        if steps_completed is not None:
            self._mark(storage_id, completion_info(storage_id, steps_completed))
        super()._report_checkpoint(storage_id, resources, metadata)

    def _mark(self, storage_id: str, info: Mapping[str, Any]) -> None:
        manager = self._storage_manager
        if isinstance(manager, ObjectStorageManager):
            manager.mark(storage_id, info)
        elif (files := Path(manager._base_path, storage_id)).is_dir():
            write_marker(files, info)

    def download(
        self,
        storage_id: str,
        ckpt_dir: str | os.PathLike[str],
        download_mode: core.DownloadMode = core.DownloadMode.LocalWorkersShareDownload,
        *,
        selector: Callable[[str], bool] | None = None,
    ) -> None:
        manager = self._storage_manager
        if isinstance(manager, ObjectStorageManager):
            ranks = self._sharing(download_mode)
            self._fetch(ranks, manager, storage_id, Path(ckpt_dir), selector)
        else:
            super().download(storage_id, ckpt_dir, download_mode, selector=selector)

    @contextlib.contextmanager
    def restore_path(
        self,
        storage_id: str,
        download_mode: core.DownloadMode = core.DownloadMode.LocalWorkersShareDownload,
        *,
        selector: Callable[[str], bool] | None = None,
    ) -> Iterator[Path]:
        """Yield the directory with a checkpoint's files.

        ``storage_id`` is a uuid. A context that writes into a run directory also accepts the path of a checkpoint directory.

        Ranks: any; with object storage all, collectively, unless ``download_mode`` is ``NoSharedDownload``.
        """
        manager, record = self._storage_manager, self._record_of(storage_id)
        if record is not None:
            restored = self._restored_from(record, download_mode, selector)
        elif isinstance(manager, ObjectStorageManager):
            restored = self._restored(manager, storage_id, download_mode, selector)
        else:
            restored = super().restore_path(storage_id, download_mode, selector=selector)
        with restored as path:
            yield path

    def get_metadata(self, storage_id: str) -> dict[str, Any]:
        record = self._record_of(storage_id)
        found = super().get_metadata(storage_id) if record is None else read_json(record / METADATA_NAME)
        return dict(found or {})

    def _record_of(self, storage_id: str) -> Path | None:
        """Return the local directory with a checkpoint's metadata and marker, or None.

        None here: subclasses with a run directory override this method.
        """
        del storage_id
        return None

    @contextlib.contextmanager
    def _restored_from(
        self,
        record: Path,
        download_mode: core.DownloadMode,
        selector: Callable[[str], bool] | None,
    ) -> Iterator[Path]:
        """Yield the directory with the files of the checkpoint that ``record`` describes.

        Downloads the files if they are in object storage.
        """
        settings = recorded_storage(record, self._settings)
        if settings is None:
            yield record
        elif settings["type"] == "directory":
            yield Path(settings["container_path"], record.name)
        else:
            manager = ObjectStorageManager(settings, record.parent, None, is_chief=False)
            with self._restored(manager, record.name, download_mode, selector, record) as path:
                yield path

    @contextlib.contextmanager
    def _restored(
        self,
        manager: ObjectStorageManager,
        storage_id: str,
        download_mode: core.DownloadMode,
        selector: Callable[[str], bool] | None,
        record: Path | None = None,
    ) -> Iterator[Path]:
        ranks = self._sharing(download_mode)
        with contextlib.ExitStack() as stack:
            made = ""
            if ranks.local_rank == 0:
                made = str(stack.enter_context(scratch_directory("dstrial-checkpoint-")))
            path = Path(ranks.broadcast_local(made), storage_id)
            self._fetch(ranks, manager, storage_id, path, selector, record)
            yield path
            ranks.gather_local(None)  # the other ranks of the node have read the files

    def _sharing(self, download_mode: core.DownloadMode) -> core.DistributedContext:
        is_shared = core.DownloadMode(download_mode) is core.DownloadMode.LocalWorkersShareDownload
        return self._dist if is_shared else core.DummyDistributedContext()

    def _fetch(
        self,
        ranks: core.DistributedContext,
        manager: ObjectStorageManager,
        storage_id: str,
        target: Path,
        selector: Callable[[str], bool] | None,
        record: Path | None = None,
    ) -> None:
        """Download the files that any rank selects, once per node; check the manifest.

        The manifest's SHA-256 must be that in the checkpoint's metadata. The metadata are read from the directory ``record`` or,
        if ``record`` is None, from the storage.

        Ranks: all of ``ranks``, collectively.
        """
        names: list[str] | None = None
        if any(ranks.allgather(selector is not None)):
            listed = run_on_all_ranks(
                ranks, lambda: manager.names_of(storage_id) if ranks.rank == 0 else [], str
            )
            mine = [name for name in listed[0] if selector is None or selector(name)]
            names = sorted({name for chosen in ranks.allgather(mine) for name in chosen})

        def fetch() -> None:
            if ranks.local_rank == 0:
                target.mkdir(parents=True, exist_ok=True)
                object_storage.download(manager.settings, storage_id, target, names)
                metadata = (
                    self.get_metadata(storage_id) if record is None else read_json(record / METADATA_NAME)
                )
                _require_manifest(target, (metadata or {}).get(MANIFEST_DIGEST))

        run_on_all_ranks(ranks, fetch, lambda error: f"rank {ranks.rank}: {error}")


def _require_manifest(root: Path, expected: str | None) -> None:
    """Raise CheckpointDamagedError if the manifest in ``root`` has a wrong SHA-256.

    A no-op if ``expected`` is None or there is no manifest.
    """
    path = root / MANIFEST_NAME
    if expected is not None and path.is_file() and hash_file(path).sha256 != expected:
        raise CheckpointDamagedError(
            f"{MANIFEST_NAME} of the downloaded checkpoint {root.name} has another SHA-256 than {expected[:12]}, with which it "
            "was saved. Resume from an earlier checkpoint."
        )


def downloaded_record(manager: ObjectStorageManager, storage_id: str) -> Path | None:
    """Download a checkpoint's marker, manifest and metadata; return their directory.

    Returns None if the storage has no such checkpoint, or no completion marker of this checkpoint.
    """
    # The ranks of a node share the scratch directory and download at the same time.
    record = manager.scratch / f"records-{os.getpid()}" / storage_id
    record.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(CheckpointNotFoundError):
        object_storage.download(manager.settings, storage_id, record, [MARKER_NAME, *_RECORDED])
    return record if is_complete(record) else None


def shared_scratch(distributed: core.DistributedContext, stack: contextlib.ExitStack) -> Path:
    """Create a directory for all ranks of this node; closing ``stack`` deletes it.

    Ranks: all, collectively.
    """
    made = ""
    if distributed.local_rank == 0:
        made = str(stack.enter_context(scratch_directory("dstrial-checkpoints-")))
    return Path(distributed.broadcast_local(made))
