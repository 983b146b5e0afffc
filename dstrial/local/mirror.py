"""A trial's reports and checkpoints, kept in a run directory beside the master.

The run directory of ``dstrial run`` has the same files as for training without a master, whether or not somebody follows.
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from determined import core
from determined.common.api import bindings
from determined.common.api.errors import ForbiddenException, NotFoundException

from dstrial.checkpoint.completion_marker import remove_marker, write_marker
from dstrial.local.checkpoint_directory import (
    KeepPolicy,
    checkpoints_to_delete,
    list_checkpoints,
    remove_incomplete_checkpoints,
)
from dstrial.local.json_files import read_json
from dstrial.local.run_directory import RunDirectory, utc_now
from dstrial.local.train_context import LocalTrainContext, repair_reports

logger = logging.getLogger("dstrial.local")


class MirroredTrainContext(LocalTrainContext):
    """Keeps a trial's reports in a run directory, and sends them to the master."""

    def __init__(
        self,
        cluster: core.TrainContext,
        run_directory: RunDirectory,
        *,
        is_chief: bool,
        metric: str | None,
        smaller_is_better: bool,
    ) -> None:
        super().__init__(run_directory, is_chief=is_chief, metric=metric, smaller_is_better=smaller_is_better)
        self._cluster = cluster
        self._exp_id = cluster._exp_id
        self._trial_id = cluster._trial_id
        self._metrics = cluster._metrics

    def set_status(self, status: str) -> None:
        super().set_status(status)
        self._cluster.set_status(status)

    def set_metadata(self, metadata: dict[str, Any]) -> dict[str, Any] | None:
        super().set_metadata(metadata)
        stored: dict[str, Any] | None = self._cluster.set_metadata(metadata)
        return stored

    def get_metadata(self) -> dict[str, Any] | None:
        metadata: dict[str, Any] | None = self._cluster.get_metadata()
        return metadata

    def _report_trial_metrics(
        self,
        group: str,
        steps_completed: int,
        metrics: dict[str, Any],
        batch_metrics: list[dict[str, Any]] | None = None,
    ) -> None:
        super()._report_trial_metrics(group, steps_completed, metrics, batch_metrics)
        self._cluster._report_trial_metrics(group, steps_completed, metrics, batch_metrics)

    def report_early_exit(self, reason: core.EarlyExitReason) -> None:
        super().report_early_exit(reason)
        self._cluster.report_early_exit(reason)

    def report_progress(self, progress: float) -> None:
        super().report_progress(progress)
        self._cluster.report_progress(progress)


class MirroredCheckpointContext(core.CheckpointContext):  # type: ignore[misc]  # see above
    """Stores whole checkpoints in a run directory, and reports them to the master."""

    def __init__(
        self,
        cluster: core.CheckpointContext,
        run_directory: RunDirectory,
        *,
        keep: KeepPolicy | None,
        train: LocalTrainContext,
        smaller_is_better: bool,
    ) -> None:
        super().__init__(
            cluster._dist,
            cluster._storage_manager,
            cluster._session,
            cluster._task_id,
            cluster._allocation_id,
            cluster._tensorboard_mode,
            cluster._tensorboard_manager,
            cluster._storage_backend_id,
        )
        self._run_directory = run_directory
        self._keep = keep
        self._train = train
        self._smaller_is_better = smaller_is_better
        self._owned: dict[str, bool] = {}

    def _report_checkpoint(
        self,
        storage_id: str,
        resources: dict[str, int] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """Complete the checkpoint on disk before the master learns of it. Ranks: 0."""
        path = self._run_directory.checkpoints_path / storage_id
        steps_completed = (metadata or {}).get("steps_completed")
        if path.is_dir() and steps_completed is not None:
            write_marker(path, {"uuid": storage_id, "steps_completed": steps_completed, "time": utc_now()})
        super()._report_checkpoint(storage_id, resources, metadata)
        self._apply_keep_policy()

    def _apply_keep_policy(self) -> None:
        if self._keep is None:
            return
        stored = sorted(list_checkpoints(self._run_directory.checkpoints_path), key=lambda found: found.time)
        superfluous = checkpoints_to_delete(
            [(checkpoint.uuid, checkpoint.steps_completed) for checkpoint in stored],
            self._train.validations(),
            self._keep,
            smaller_is_better=self._smaller_is_better,
        )
        for storage_id in superfluous:
            if not self._is_own(storage_id):
                continue
            remove_marker(self._run_directory.checkpoints_path / storage_id)
            self.delete(storage_id)
            logger.debug("deleted checkpoint %s, which the keep policy does not keep", storage_id)

    def _is_own(self, storage_id: str) -> bool:
        """Return whether this trial has saved a checkpoint, not an experiment before it.

        The master lets a trial delete its own only, and refuses when the files are gone already (Determined 0.38.1
        ``core/_checkpoint.py``, ``delete``).
        """
        if storage_id not in self._owned:
            try:
                found = bindings.get_GetCheckpoint(self._session, checkpointUuid=storage_id).checkpoint
            except (ForbiddenException, NotFoundException):
                found = None  # of another trial, or another master
            self._owned[storage_id] = found is not None and found.taskId == self._task_id
        return self._owned[storage_id]

    @contextlib.contextmanager
    def restore_path(
        self,
        storage_id: str,
        download_mode: core.DownloadMode = core.DownloadMode.LocalWorkersShareDownload,
        *,
        selector: Callable[[str], bool] | None = None,
    ) -> Iterator[pathlib.Path]:
        """Yield a checkpoint's directory, by uuid or by path (``dstrial run --resume``)."""
        if pathlib.Path(storage_id).is_absolute():
            yield pathlib.Path(storage_id)
            return
        with super().restore_path(storage_id, download_mode, selector=selector) as path:
            yield path

    def get_metadata(self, storage_id: str) -> dict[str, Any]:
        if pathlib.Path(storage_id).is_absolute():
            return dict(read_json(pathlib.Path(storage_id) / "metadata.json") or {})
        metadata: dict[str, Any] = super().get_metadata(storage_id)
        return metadata


def mirror(
    core_context: core.Context,
    run_directory: RunDirectory,
    *,
    metric: str | None,
    smaller_is_better: bool,
    keep: KeepPolicy | None,
) -> MirroredTrainContext:
    """Have a cluster's core context keep everything in a run directory as well.

    Replaces the parts of ``core_context``, which ``core.init`` has made with manual TensorBoard files, and returns its
    ``train``. At the end, call the ``flush_progress`` of that and :func:`remove_tensorboard_directories`. ``keep`` None keeps
    all checkpoints.
    """
    is_chief = core_context.distributed.rank == 0
    repair_reports(run_directory, is_chief=is_chief)
    if is_chief:
        for name, num_bytes in remove_incomplete_checkpoints(run_directory.checkpoints_path).items():
            logger.info("removed checkpoint %s, which was never completed (%s bytes)", name, f"{num_bytes:,}")
    train = MirroredTrainContext(
        core_context.train,
        run_directory,
        is_chief=is_chief,
        metric=metric,
        smaller_is_better=smaller_is_better,
    )
    core_context.train = train
    core_context.checkpoint = MirroredCheckpointContext(
        core_context.checkpoint,
        run_directory,
        keep=keep,
        train=train,
        smaller_is_better=smaller_is_better,
    )
    return train


def remove_tensorboard_directories(core_context: core.Context, run_directory: RunDirectory) -> None:
    """Remove the directories that Determined makes for TensorBoard files.

    A run directory has them in ``tensorboard/``. Call it at the end of a run: while ranks begin, one may still create what
    another removes.
    """
    if core_context.distributed.rank != 0 or core_context.info is None:
        return
    root = run_directory.checkpoints_path / core_context.info.cluster_id
    for path in sorted([root, *root.rglob("*/")], reverse=True):
        with contextlib.suppress(OSError):  # not empty, or not there
            path.rmdir()
