"""A trial's reports and checkpoints, kept in a run directory beside the master.

The run directory of ``dstrial run`` has the same files as for training without a master, whether or not somebody follows.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import pathlib
from collections.abc import Callable, Iterator, Mapping
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
from dstrial.local.train_context import LocalTrainContext, open_train_context

logger = logging.getLogger("dstrial.local")


class MirroredTrainContext(core.TrainContext):  # type: ignore[misc]  # mypy does not follow determined
    """Sends a trial's reports to the master and keeps them in a run directory."""

    def __init__(self, cluster: core.TrainContext, kept: LocalTrainContext) -> None:
        self._cluster = cluster
        self._kept = kept
        self._exp_id = cluster._exp_id
        self._trial_id = cluster._trial_id
        self._metrics = cluster._metrics

    def set_status(self, status: str) -> None:
        self._kept.set_status(status)
        self._cluster.set_status(status)

    def set_metadata(self, metadata: dict[str, Any]) -> dict[str, Any] | None:
        self._kept.set_metadata(metadata)
        stored: dict[str, Any] | None = self._cluster.set_metadata(metadata)
        return stored

    def get_metadata(self) -> dict[str, Any] | None:
        metadata: dict[str, Any] | None = self._cluster.get_metadata()
        return metadata

    def _get_last_validation(self) -> int | None:
        return self._kept._get_last_validation()

    def report_training_metrics(
        self,
        steps_completed: int,
        metrics: dict[str, Any],
        batch_metrics: list[dict[str, Any]] | None = None,
    ) -> None:
        self._kept.report_training_metrics(steps_completed, metrics, batch_metrics)
        self._cluster.report_training_metrics(steps_completed, metrics, batch_metrics)

    def report_validation_metrics(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        self._kept.report_validation_metrics(steps_completed, metrics)
        self._cluster.report_validation_metrics(steps_completed, metrics)

    def report_metrics(self, group: str, steps_completed: int, metrics: dict[str, Any]) -> None:
        self._kept.report_metrics(group, steps_completed, metrics)
        self._cluster.report_metrics(group, steps_completed, metrics)

    def report_early_exit(self, reason: core.EarlyExitReason) -> None:
        self._kept.report_early_exit(reason)
        self._cluster.report_early_exit(reason)

    def report_progress(self, progress: float) -> None:
        self._kept.report_progress(progress)
        self._cluster.report_progress(progress)

    def report_batches(self, batches_trained: int, batches_total: int) -> None:
        self._kept.report_batches(batches_trained, batches_total)

    def note_steps(self, num_steps: int, num_skipped: int) -> None:
        self._kept.note_steps(num_steps, num_skipped)

    def note_telemetry(self, totals: Mapping[str, Any]) -> None:
        self._kept.note_telemetry(totals)

    def report_system_metrics(
        self, group: str, metrics: Mapping[str, Any], report_time: datetime.datetime, node_idx: int
    ) -> None:
        """Keep averages of a node; their collector sends them to the master itself."""
        self._kept.report_system_metrics(group, metrics, report_time, node_idx)

    def rewind_to(self, steps_completed: int) -> int:
        # The master does so by itself.
        return self._kept.rewind_to(steps_completed)

    def flush_progress(self) -> None:
        self._kept.flush_progress()

    def get_experiment_best_validation(self) -> float | None:
        """Return the best value of the run and of the experiments that it continues."""
        return self._kept.get_experiment_best_validation()

    def get_tensorboard_path(self) -> pathlib.Path:
        return self._kept.get_tensorboard_path()

    def upload_tensorboard_files(
        self,
        selector: Callable[[pathlib.Path], bool] = lambda _: True,
        mangler: Callable[[pathlib.Path, int], pathlib.Path] = lambda path, _: path,
    ) -> None:
        """Do nothing: event files are written where they stay."""


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
    kept = open_train_context(
        run_directory, is_chief=is_chief, metric=metric, smaller_is_better=smaller_is_better
    )
    if is_chief:
        for name, num_bytes in remove_incomplete_checkpoints(run_directory.checkpoints_path).items():
            logger.info("removed checkpoint %s, which was never completed (%s bytes)", name, f"{num_bytes:,}")
    train = MirroredTrainContext(core_context.train, kept)
    core_context.train = train
    core_context.checkpoint = MirroredCheckpointContext(
        core_context.checkpoint,
        run_directory,
        keep=keep,
        train=kept,
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
