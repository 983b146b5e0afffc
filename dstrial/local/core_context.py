"""Determined's core context on a run directory, with or without a master."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import socket
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from determined import core

from dstrial.local.checkpoint_directory import KeepPolicy, remove_incomplete_checkpoints
from dstrial.local.checkpoint_store import (
    LocalCheckpointContext,
    MirroredCheckpointContext,
    open_checkpoint_store,
)
from dstrial.local.json_files import read_json
from dstrial.local.run_directory import LOCAL_ID, RunDirectory
from dstrial.local.train_context import LocalTrainContext, repair_reports
from dstrial.object_storage import external_storage

logger = logging.getLogger(__name__)

_LAST_REPORT_S = 10.0  # timeout of the wait for the last system metrics at the end of training


class LocalPreemptContext(core.DummyPreemptContext):  # type: ignore[misc]  # mypy does not follow determined
    """Determined's preemption context without a master; it polls a function.

    ``stop_requested`` returns the reason to stop, or None. It must not communicate. Only the chief calls it, except in mode
    ``WorkersAskMaster``, in which every rank does.
    """

    def __init__(
        self,
        dist: core.DistributedContext,
        stop_requested: Callable[[], str | None],
        preempt_mode: core.PreemptMode = core.PreemptMode.WorkersAskChief,
    ) -> None:
        super().__init__(dist, preempt_mode)
        self._stop_requested = stop_requested

    def should_preempt(self, auto_ack: bool = True) -> bool:
        """Return whether the job should save a checkpoint and exit.

        Ranks: in mode ``WorkersAskChief`` all, collectively (one broadcast); in ``ChiefOnly`` rank 0; in ``WorkersAskMaster``
        any.
        """
        if not self._started or self._preempt_mode is not core.PreemptMode.WorkersAskChief:
            super().should_preempt(auto_ack)  # raises on a wrong call; does not communicate in these modes
            return self._stop_requested() is not None
        answer = self._stop_requested() is not None if self._dist.rank == 0 else None
        return bool(self._dist.broadcast(answer))


class _ProgressSession:
    """Replaces the master's session: searcher operations post their progress to it."""

    def __init__(self, train: LocalTrainContext) -> None:
        self._train = train

    def post(self, _path: str, data: str) -> None:
        self._train.report_progress(json.loads(data)["progress"])


class LocalSystemMetrics:
    """Appends a node's system metrics to a file of the run directory."""

    def __init__(self, train: LocalTrainContext, node_idx: int) -> None:
        self._train = train
        self._node_idx = node_idx

    def report(self, group: str, metrics: Mapping[str, Any], report_time: datetime.datetime) -> None:
        self._train.report_system_metrics(group, metrics, report_time, self._node_idx)

    def close(self) -> None:
        """Do nothing, because ``report`` writes each report at once."""


class NodeProfiler(core.ProfilerContext):  # type: ignore[misc]  # mypy does not follow determined
    """Determined's profiler, reporting a node's system metrics to ``sink``.

    ``sink`` has the methods of ``LocalSystemMetrics``. At the end, Determined's collector thread reports its last samples
    (determined 0.38.1 ``core/_profiler.py``). ``_close`` waits at most 10 s for this report.
    """

    def __init__(self, agent_id: str, distributed: core.DistributedContext, sink: Any) -> None:
        super().__init__(agent_id, sink, distributed)
        self._sink = sink

    def on(self, sampling_interval: int = 1, samples_per_report: int = 10) -> None:
        """Start to collect; if the machine has no disks or networks, only log a warning."""
        try:
            super().on(sampling_interval, samples_per_report)
        except (OSError, NotImplementedError) as error:
            logger.warning("system metrics are not collected: %s", error)

    def _close(self) -> None:
        collector: Any = self._collector
        if collector is None:
            return
        for one in collector._metric_collectors:
            # A stopping collector fills its window with samples of one moment. Instead, it takes one sample if it has none.
            sample = one.sample_metrics
            one.sample_metrics = lambda one=one, sample=sample: None if one.metric_samples else sample()
        super()._close()
        collector.join(_LAST_REPORT_S)
        try:
            self._sink.close()
        except Exception as error:  # noqa: BLE001  # system metrics never end a training
            logger.warning("the last system metrics are lost (%s: %s)", type(error).__name__, error)


class LocalContext(core.Context):  # type: ignore[misc]  # mypy does not follow determined
    """Determined's core context for a run without a master, stored in a run directory.

    ``searcher`` is None if the config has no ``searcher.max_length``.
    """

    train: LocalTrainContext
    checkpoint: LocalCheckpointContext
    run_directory: RunDirectory

    def close(
        self,
        exc_type: type | None = None,
        exc_val: BaseException | None = None,
        exc_tb: types.TracebackType | None = None,
    ) -> None:
        """Write the latest progress, then close all parts of the context. Ranks: all."""
        self.train.flush_progress()
        super().close(exc_type, exc_val, exc_tb)
        self.checkpoint.close()


def init(
    run_dir: RunDirectory | Path,
    exp_conf: Mapping[str, Any] | None = None,
    *,
    distributed: core.DistributedContext,
    stop_requested: Callable[[], str | None] = lambda: None,
    preempt_mode: core.PreemptMode = core.PreemptMode.WorkersAskChief,
) -> LocalContext:
    """Return the core context of a run without a master.

    ``exp_conf`` is the experiment config, from which ``searcher`` and ``checkpoint_storage`` are used. Without
    ``searcher.max_length``, the result's ``searcher`` is None. ``stop_requested`` returns the reason to stop, or None; it must
    not communicate between ranks.
    """
    config = {**(exp_conf or {}), "searcher": (exp_conf or {}).get("searcher") or {}}
    run_directory = run_dir if isinstance(run_dir, RunDirectory) else RunDirectory.open(run_dir)
    train = _train_context(run_directory, config, is_chief=distributed.rank == 0)
    max_length = core._parse_searcher_max_length(config)
    searcher = None
    if max_length is not None:
        unit = core._parse_searcher_units(config)
        searcher = core.SearcherContext(_ProgressSession(train), distributed, LOCAL_ID, max_length, unit)
    context = LocalContext(
        distributed=distributed,
        checkpoint=open_checkpoint_store(
            distributed,
            run_directory.checkpoints_path,
            settings=external_storage(config),
            keep=KeepPolicy.from_config(config.get("checkpoint_storage")),
            validations=train.validations,
            smaller_is_better=train.smaller_is_better,
        ),
        preempt=LocalPreemptContext(distributed, stop_requested, preempt_mode),
        train=train,
        searcher=searcher,
        profiler=NodeProfiler(
            socket.gethostname(), distributed, LocalSystemMetrics(train, distributed.cross_rank)
        ),
    )
    context.run_directory = run_directory
    return context


def _train_context(
    run_directory: RunDirectory,
    exp_conf: Mapping[str, Any],
    *,
    is_chief: bool,
    cluster: core.TrainContext | None = None,
) -> LocalTrainContext:
    repair_reports(run_directory, is_chief=is_chief)
    searcher = exp_conf.get("searcher") or {}
    return LocalTrainContext(
        run_directory,
        is_chief=is_chief,
        metric=searcher.get("metric"),
        smaller_is_better=bool(searcher.get("smaller_is_better", True)),
        cluster=cluster,
    )


def mirror(
    core_context: core.Context, run_directory: RunDirectory, exp_conf: Mapping[str, Any]
) -> LocalTrainContext:
    """Make a master's core context also write to a run directory.

    Replaces ``core_context.checkpoint`` and ``core_context.train``; returns the new ``train``. The context's ``tensorboard_mode``
    must be ``MANUAL``. At the end of the run, call the result's ``flush_progress`` and :func:`remove_tensorboard_directories`.
    """
    is_chief = core_context.distributed.rank == 0
    if is_chief:
        remove_incomplete_checkpoints(run_directory.checkpoints_path)
    train = _train_context(run_directory, exp_conf, is_chief=is_chief, cluster=core_context.train)
    # The user's keep policy applies during training; the master applies its defaults at the end.
    submitted = read_json(run_directory.submission_path) or {}
    settings = external_storage(exp_conf)
    if settings is not None and settings.get("container_path") == str(run_directory.checkpoints_path):
        settings = None  # `dstrial run` has put the checkpoints into the run directory
    core_context.train = train
    core_context.checkpoint = MirroredCheckpointContext(
        core_context.checkpoint,
        run_directory,
        settings=settings,
        keep=KeepPolicy.from_config(submitted.get("checkpoint_storage")),
        train=train,
    )
    return train


def remove_tensorboard_directories(core_context: core.Context, run_directory: RunDirectory) -> None:
    """Remove the empty directories that Determined creates for TensorBoard files.

    Call this at the end of a run, because ranks create the directories while they start. A no-op on ranks other than 0 and
    without a master.
    """
    if core_context.distributed.rank != 0 or core_context.info is None:
        return
    root = run_directory.checkpoints_path / core_context.info.cluster_id
    for path in sorted([root, *root.rglob("*/")], reverse=True):
        with contextlib.suppress(OSError):  # the directory is not empty, or missing
            path.rmdir()
