"""Put Determined's core context together from a run directory, for training off any cluster."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path

from determined import core

from dstrial.local.checkpoint_store import LocalCheckpointContext, open_checkpoint_store
from dstrial.local.preempt import LocalPreemptContext
from dstrial.local.retention import KeepPolicy
from dstrial.local.run_directory import RunDirectory
from dstrial.local.searcher import LocalSearcherContext
from dstrial.local.train_context import LocalTrainContext, open_train_context


class LocalContext(core.Context):  # type: ignore[misc]  # mypy does not follow determined
    """Determined's core context whose parts keep what they are told in a run directory.

    Args:
        run_directory: where everything is kept.
        distributed: the ranks of the job; closed with the context.
        checkpoint: stores checkpoints.
        preempt: says whether to stop.
        train: keeps reports and progress.
        searcher: None if the config has no ``searcher.max_length``.
    """

    train: LocalTrainContext
    checkpoint: LocalCheckpointContext

    def __init__(
        self,
        run_directory: RunDirectory,
        *,
        distributed: core.DistributedContext,
        checkpoint: LocalCheckpointContext,
        preempt: LocalPreemptContext,
        train: LocalTrainContext,
        searcher: LocalSearcherContext | None,
    ) -> None:
        super().__init__(
            distributed=distributed, checkpoint=checkpoint, preempt=preempt, train=train, searcher=searcher
        )
        self.run_directory = run_directory

    def close(
        self,
        exc_type: type | None = None,
        exc_val: BaseException | None = None,
        exc_tb: types.TracebackType | None = None,
    ) -> None:
        """Write progress that is still held back, then close all parts. Ranks: all."""
        self.train.flush_progress()
        super().close(exc_type, exc_val, exc_tb)


def _never() -> str | None:
    return None


def init(
    run_dir: RunDirectory | Path,
    *,
    distributed: core.DistributedContext,
    metric: str | None,
    smaller_is_better: bool,
    stop_requested: Callable[[], str | None] = _never,
    keep: KeepPolicy | None = None,
    max_length: int | None = None,
    max_length_unit: core.Unit | None = None,
    preempt_mode: core.PreemptMode = core.PreemptMode.WorkersAskChief,
) -> LocalContext:
    """Make the core context of a run off any cluster.

    Use it as ``with init(...) as core_context``, as Determined's.

    Args:
        run_dir: an existing run directory, the same for all ranks.
        distributed: the ranks of the job; closed with the context.
        metric: the searcher metric (``searcher.metric``); None if there is none.
        smaller_is_better: which way it is compared.
        stop_requested: returns why the job should stop, or None to go on; must not communicate.
        keep: which checkpoints to keep; None keeps all.
        max_length: ``searcher.max_length`` if the config has it; only then is there a searcher context.
        max_length_unit: its unit; None if it was given as a bare number.
        preempt_mode: who calls ``preempt.should_preempt``.

    Raises:
        LaunchError: ``run_dir`` is no run directory.

    Ranks: all; no communication.
    """
    run_directory = run_dir if isinstance(run_dir, RunDirectory) else RunDirectory.open(run_dir)
    train = open_train_context(
        run_directory,
        is_chief=distributed.rank == 0,
        metric=metric,
        smaller_is_better=smaller_is_better,
    )
    checkpoint = open_checkpoint_store(
        distributed,
        run_directory.checkpoints_path,
        keep=keep,
        validations=train.validations,
        smaller_is_better=smaller_is_better,
    )
    searcher = (
        None if max_length is None else LocalSearcherContext(distributed, train, max_length, max_length_unit)
    )
    return LocalContext(
        run_directory,
        distributed=distributed,
        checkpoint=checkpoint,
        preempt=LocalPreemptContext(distributed, stop_requested, preempt_mode),
        train=train,
        searcher=searcher,
    )
