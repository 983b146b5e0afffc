"""Internal state of a trial's context; a rank's roles (``ModelParallelUnit``)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from determined import core

from dstrial.engine.adapters.base import EngineAdapter
from dstrial.errors import CheckpointNotFoundError
from dstrial.local.run_directory import RunDirectory
from dstrial.local.script_variables import AROUND_FIT_KEY
from dstrial.local.train_context import LocalTrainContext
from dstrial.ranks.stop_signals import StopSignals
from dstrial.resume.apply import ResumedRun
from dstrial.resume.metadata import EngineRecord, run_metadata

logger = logging.getLogger("dstrial.trial")


@dataclasses.dataclass
class ModelParallelUnit:
    """A rank's replica, and whether the rank reads data and reports metrics.

    Pass one to ``context.set_mpu`` only if you implement model parallelism without DeepSpeed. For DeepSpeed's data and pipeline
    parallelism, ``context.wrap_model_engine`` creates it.

    Attributes:
        data_parallel_rank: index of this rank's replica, from 0.
        data_parallel_world_size: number of replicas.
        should_report_metrics: whether this rank's results of ``train_batch`` and ``evaluate_batch`` are used. In a
            pipeline, only ranks of the last stage have True.
        should_build_data_loader: whether this rank reads records. In a pipeline, only ranks of the first and last stage
            have True.
    """

    data_parallel_rank: int
    data_parallel_world_size: int
    should_report_metrics: bool
    should_build_data_loader: bool


def make_data_parallel_mpu(dist_context: core.DistributedContext) -> ModelParallelUnit:
    """Return this rank's ``ModelParallelUnit`` for pure data parallelism."""
    return ModelParallelUnit(
        data_parallel_rank=dist_context.get_rank(),
        data_parallel_world_size=dist_context.get_size(),
        should_report_metrics=True,
        should_build_data_loader=True,
    )


def make_deepspeed_mpu(topology: Any) -> ModelParallelUnit:
    """Return this rank's ``ModelParallelUnit`` for a pipeline engine.

    ``topology`` is ``engine.mpu``. Unlike in Determined, only the last stage, which has the loss, reports metrics. Of the
    tensor-parallel ranks of a stage, only the first reads records and reports metrics.
    """
    stage = topology.get_pipe_parallel_rank()
    last_stage = topology.get_pipe_parallel_world_size() - 1
    is_first_slice = topology.get_slice_parallel_rank() == 0
    return ModelParallelUnit(
        data_parallel_rank=topology.get_data_parallel_rank(),
        data_parallel_world_size=topology.get_data_parallel_world_size(),
        should_report_metrics=stage == last_stage and is_first_slice,
        should_build_data_loader=stage in (0, last_stage) and is_first_slice,
    )


@dataclasses.dataclass(slots=True, kw_only=True)
class TrialRuntime:
    """Internal state of a ``DeepSpeedTrialContext``; get it with ``runtime_of``.

    Attributes:
        core: Determined's core context; without a master, one that uses a run directory. Already entered.
        engines: the wrapped engines, in the order of wrapping; the same list as ``context.models``.
        given_settings: for each engine, the batch sizes, parallel sizes and class names given in its config.
        wrapped_reducers: the user's metric reducers as Determined wraps them, in the order of wrapping.
        given_hparams: the user's hyperparameters; None if not given.
        hparams: ``given_hparams``; in a resumed run with batch sizes that keep the checkpoint's ``train_batch_size``.
        exp_conf: the experiment config; None if not given.
        trial_seed: the trial's seed; None if not configured.
        steps_completed: batches trained before this process, or in the checkpoint that ``fit`` resumes from.
        resumed: the run that wrote the checkpoint to resume from, whose batch size is kept; None for a new run, or if only
            the checkpoint's weights are loaded.
        mpu: this rank's replica and roles.
        accumulates_itself: whether one ``train_batch`` call trains a whole batch (``disable_auto_grad_accumulation``).
        stop_signals: records SIGTERM and Ctrl-C as stop requests; None if not set up.
        own_run: on rank 0, the run directory whose ``run.json`` this script updates; None on other ranks, or if a launcher
            updates the file.
        is_own_run: whether this script, not a launcher, updates ``run.json``; equal on all ranks.
        current_batch_idx: the current batch, counted from 0 over the whole run; None before training.
        epoch_length: batches per epoch; None if not yet known or if the loader has no length.
    """

    core: core.Context
    engines: list[Any]
    wrapped_reducers: list[Any]
    exp_conf: dict[str, Any] | None
    given_hparams: dict[str, Any] | None
    hparams: dict[str, Any] | None
    trial_seed: int | None
    steps_completed: int
    resumed: ResumedRun | None
    mpu: ModelParallelUnit
    writes_tensorboard: bool
    adapters: list[EngineAdapter] = dataclasses.field(default_factory=list)
    given_settings: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    repro_checks_disabled: bool = False
    accumulates_itself: bool = False
    tensorboard_writer: Any = None
    is_stop_requested: bool = False
    stop_signals: StopSignals | None = None
    own_run: RunDirectory | None = None
    is_own_run: bool = False
    current_batch_idx: int | None = None
    epoch_length: int | None = None

    @property
    def distributed(self) -> core.DistributedContext:
        return self.core.distributed

    @property
    def is_chief(self) -> bool:
        return bool(self.distributed.rank == 0)

    @property
    def adapter(self) -> EngineAdapter:
        """``EngineAdapter`` of the first engine, which determines the batch sizes."""
        return self.adapters[0]

    @property
    def train_calls_per_batch(self) -> int:
        """Number of ``train_batch`` calls per optimizer step."""
        return 1 if self.accumulates_itself else self.adapter.train_calls_per_batch

    @property
    def train_batch_size(self) -> int:
        """Records per optimizer step over all replicas, from the first engine."""
        first = self.adapter
        return first.micro_batch_size * first.micro_batches_per_batch * first.data_parallel_world_size

    @property
    def forward_is_collective(self) -> bool:
        """Whether a forward pass of any engine needs all ranks, as in ZeRO 3."""
        return any(adapter.forward_is_collective for adapter in self.adapters)

    @property
    def kept_reports(self) -> LocalTrainContext | None:
        """``core.train`` if reports go to a run directory; None if only to a master."""
        train = self.core.train
        return train if isinstance(train, LocalTrainContext) else None

    @property
    def is_mirrored(self) -> bool:
        """Whether reports go to both a master and a run directory (``dstrial run``)."""
        kept = self.kept_reports
        return kept is not None and kept.cluster is not None

    @property
    def is_measured(self) -> bool:
        """Whether the autotuner (dsat) measures this trial, so that telemetry is off."""
        return bool((self.hparams or {}).get(AROUND_FIT_KEY))

    def bind_training_iterator(self, iterator: Iterator[Any] | None) -> None:
        for adapter in self.adapters:
            adapter.bind_training_iterator(iterator)

    def set_training(self, training: bool) -> None:
        for adapter in self.adapters:
            adapter.set_training(training)

    def newest_checkpoint(self) -> str | None:
        """Return the uuid of the newest complete checkpoint in the run directory.

        Returns None for a run directory of this script (``is_own_run``) without any checkpoint.

        Raises:
            CheckpointNotFoundError: the run has only incomplete checkpoints, or a launcher made it and it has no checkpoint.
        """
        newest = self.core.checkpoint.newest()
        if newest is None and self.is_own_run and not any(self.core.run_directory.checkpoints_path.iterdir()):
            if self.core.distributed.rank == 0:
                logger.info("the run %s has no checkpoint yet: training begins", self.core.run_directory.path)
            return None
        if newest is None:
            raise CheckpointNotFoundError(
                f"the run {self.core.run_directory.path} has no complete checkpoint; expected one to resume from. Start a "
                "new run, without resuming."
            )
        return str(newest.uuid)

    def close_tensorboard_writer(self) -> None:
        writer, self.tensorboard_writer = self.tensorboard_writer, None
        if writer is not None:
            writer.close()

    def checkpoint_metadata(self, layouts: Sequence[Mapping[str, Any]], trial_id: int) -> dict[str, Any]:
        """Return metadata to save in a checkpoint, to compare it with a later config.

        ``layouts`` has each engine's ``Layout`` as JSON; ``trial_id`` is the id of the trial that saves.
        """
        saved = self.resumed.saved.engines if self.resumed is not None else ()
        engines = []
        for idx, (layout, given) in enumerate(zip(layouts, self.given_settings, strict=True)):
            limit = given.get("train_micro_batch_size_per_gpu")
            if limit is None and idx < len(saved):
                limit = saved[idx].micro_batch_limit
            more = {"given": given, "micro_batch_limit": limit}
            engines.append(EngineRecord.from_layout(layout, more))
        return run_metadata(engines, trial_id)
