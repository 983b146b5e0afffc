"""What of a Trainer's training is reported: metrics, evaluations, progress."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from determined import core

from dstrial.integrations.huggingface.logged_metrics import (
    LogKind,
    Throughput,
    kind_of,
    reported,
    require_searcher_metrics,
)
from dstrial.local.mirror import MirroredTrainContext
from dstrial.local.train_context import LocalTrainContext

if TYPE_CHECKING:
    from transformers import TrainerState

logger = logging.getLogger("dstrial.integrations.huggingface")

_PROGRESS_INTERVAL_S = 1.0


class MetricReporter:
    """Reports of one training: every rank counts, the chief reports."""

    def __init__(
        self, context: core.Context, searcher: Mapping[str, Any], filter_metrics: Sequence[str] | None
    ) -> None:
        self.speed = Throughput()
        self._train = context.train
        self._is_chief = context.distributed.rank == 0
        self._filter = filter_metrics
        wanted = [(f"searcher.{key}", searcher.get(key)) for key in ("metric", "time_metric")]
        self._wanted = [(key, str(name)) for key, name in wanted if name]
        self._last_training = -1
        self._last_validation = -1
        self._last_percent = 0
        self._last_progress_s = 0.0
        self._evaluated: dict[str, Any] = {}
        self._evaluated_step = -1

    def start(self, state: TrainerState) -> None:
        if isinstance(self._train, (LocalTrainContext, MirroredTrainContext)):
            self._train.rewind_to(state.global_step)
        self._last_percent = 100 * state.global_step // max(state.max_steps, 1)
        self.speed.start(state.global_step, float(state.num_input_tokens_seen))

    def is_validated(self, step: int) -> bool:
        return step <= self._last_validation

    def log(
        self, logs: Mapping[str, Any], state: TrainerState, train_batch_size: int, *, is_stopped: bool
    ) -> None:
        """Report a line of training metrics; collect an evaluation's.

        ``train_batch_size`` is over all ranks. With ``is_stopped`` the summary, a mean over a part of training, is not reported.
        """
        kind, step = kind_of(logs), state.global_step
        if kind is LogKind.EVALUATION:
            if step != self._evaluated_step:
                self.flush(state)
                self._evaluated, self._evaluated_step = {}, step
            self._evaluated |= logs
        elif step > self._last_training and (
            kind is LogKind.TRAINING or (kind is LogKind.SUMMARY and not is_stopped)
        ):
            metrics = reported(logs, self._filter)
            if kind is LogKind.TRAINING:
                metrics |= self.speed.report(step, float(state.num_input_tokens_seen), train_batch_size)
            self._last_training = step
            if self._is_chief:
                self._train.report_training_metrics(step, {**metrics, **_position(state)})

    def flush(self, state: TrainerState) -> None:
        """Report the evaluation sets of a step together, once. Ranks: all, alike."""
        step, logs = self._evaluated_step, self._evaluated
        if not logs:
            return
        self._evaluated, self._evaluated_step = {}, -1
        if self.is_validated(step):
            return
        names = [name for _, name in self._wanted]
        metrics = {**reported(logs, self._filter, names), **_position(state)}
        require_searcher_metrics(metrics, self._wanted)
        self._last_validation = step
        if self._is_chief:
            self._train.report_validation_metrics(step, metrics)

    def progress(self, step: int, max_steps: int) -> None:
        """Report how far training is: at most a hundred times, and once a second."""
        if not self._is_chief or max_steps <= 0:
            return
        if isinstance(self._train, (LocalTrainContext, MirroredTrainContext)):
            self._train.report_batches(step, max_steps)
        percent, now_s = 100 * step // max_steps, time.monotonic()
        is_end = step >= max_steps
        if percent > self._last_percent and (is_end or now_s - self._last_progress_s >= _PROGRESS_INTERVAL_S):
            self._last_percent, self._last_progress_s = percent, now_s
            self._train.report_progress(min(step / max_steps, 1.0))

    def finish(self, step: int, max_steps: int) -> None:
        """Report that training is complete; warn if the searcher has no metric."""
        self.progress(max(step, max_steps), max_steps)
        metric = dict(self._wanted).get("searcher.metric")
        if self._is_chief and metric is not None and self._last_validation < 0:
            logger.warning(
                "searcher.metric is %r, and training has ended without an evaluation; give the Trainer an eval_dataset, or call "
                "trainer.evaluate()",
                metric,
            )


def _position(state: TrainerState) -> dict[str, Any]:
    return {"batches": state.global_step, "epochs": float(state.epoch or 0.0)}


class CurrentOperation:
    """A trial's one operation, as ``DetCallback.current_op`` before Determined 0.38.

    Args:
        length: how long the Trainer trains, in batches or epochs.
        train: where progress is reported.
        is_chief: whether this is rank 0, which reports.
    """

    def __init__(self, length: float, train: core.TrainContext, *, is_chief: bool) -> None:
        self.length = int(length) if float(length).is_integer() else length
        self._train = train
        self._is_chief = is_chief
        self._is_completed = False

    @property
    def is_completed(self) -> bool:
        return self._is_completed

    def report_progress(self, length: float) -> None:
        """Report how far training is, in the unit of ``length``. Ranks: any; chief acts."""
        if self._is_chief and self.length > 0:
            self._train.report_progress(min(max(length / self.length, 0.0), 1.0))

    def report_completed(self, searcher_metric: float | None = None) -> None:
        """Say that the operation is done; the last validation has reported its metric."""
        del searcher_metric
        if not self._is_completed:
            self._is_completed = True
            self.report_progress(self.length)
