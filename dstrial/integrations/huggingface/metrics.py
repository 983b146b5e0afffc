"""Report a Trainer's log entries as metrics; measure throughput; check losses."""

from __future__ import annotations

import enum
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from determined import core

from dstrial.config.experiment_config.dstrial_section import TrainingChecks
from dstrial.errors import TrialContractError
from dstrial.local.train_context import LocalTrainContext
from dstrial.loop.non_finite import NonFiniteGuard

if TYPE_CHECKING:
    from transformers import TrainerState

logger = logging.getLogger("dstrial.integrations.huggingface")

_PROGRESS_INTERVAL_S = 1.0
# Prefixes of metrics of evaluations and tests; name of a metric that only the Trainer's last log entry has.
_EVALUATION = "eval_"
_TEST = "test_"
_SUMMARY = "train_loss"
# Suffixes of metrics that are not reported: durations and speeds, except an evaluation's samples per second.
_SPEED_SUFFIXES = ("_runtime", "_per_second", "_compilation_time", "_preparation_time")
_KEPT_SPEED = "_samples_per_second"
# Keys of a log entry that say when the metrics were measured.
_POSITIONS = frozenset({"epoch", "step"})


class LogKind(enum.Enum):
    """What a Trainer's log entry describes."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    SUMMARY = "summary"
    """The last log entry of a training; its values are means over the whole training."""
    OTHER = "other"


def kind_of(logs: Mapping[str, Any]) -> LogKind:
    """Classify a Trainer's log entry by its metric names.

    Source: ``transformers`` 4.56 and 5.23, ``Trainer.log``, ``evaluate`` and ``_finalize_training``.
    """
    if any(name.startswith(_EVALUATION) for name in logs):
        return LogKind.EVALUATION
    if any(name.startswith(_TEST) for name in logs):
        return LogKind.OTHER
    return LogKind.SUMMARY if _SUMMARY in logs else LogKind.TRAINING


def reported(
    logs: Mapping[str, Any], filter_metrics: Sequence[str] | None, always: Collection[str] = ()
) -> dict[str, Any]:
    """Return a log entry's metrics, without ``epoch``, ``step``, times and speeds.

    An evaluation's samples per second are included. ``filter_metrics`` are substrings: a metric is left out if its name
    contains none of them. None or empty includes all metrics. Metrics whose names are in ``always`` are never left out.
    """

    def is_reported(name: str) -> bool:
        is_kept = name.startswith(_EVALUATION) and name.endswith(_KEPT_SPEED)
        is_metric = is_kept or not (name in _POSITIONS or name.endswith(_SPEED_SUFFIXES))
        return is_metric and (not filter_metrics or any(part in name for part in filter_metrics))

    return {name: value for name, value in logs.items() if name in always or is_reported(name)}


def require_searcher_metrics(metrics: Mapping[str, Any], wanted: Sequence[tuple[str, str]]) -> None:
    """Raise TrialContractError if a metric named in ``wanted`` is missing.

    ``wanted`` has pairs (key, name): a key of the ``searcher`` section for the error, and the metric that this key names.
    """
    missing = [(key, name) for key, name in wanted if name not in metrics]
    if not missing:
        return
    settings = " and ".join(f"{key} is {name!r}" for key, name in missing)
    existing = ", ".join(sorted(metrics))
    raise TrialContractError(
        f"{settings}; expected one of the metrics that the Trainer's evaluation has: {existing}. Name one of them in the "
        "experiment config, or return it from compute_metrics (the Trainer puts eval_ before its name)."
    )


class Throughput:
    """Measures training records per second; pauses do not count as time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._resumed_s: float | None = None  # None while training pauses
        self._active_s = 0.0
        self._step: int | None = None  # step of the last report; None before the start

    def start(self, step: int) -> None:
        self._resumed_s, self._active_s, self._step = self._clock(), 0.0, step

    def pause(self) -> None:
        if self._resumed_s is not None:
            self._active_s += self._clock() - self._resumed_s
            self._resumed_s = None

    def resume(self) -> None:
        if self._resumed_s is None:
            self._resumed_s = self._clock()

    def report(self, step: int, train_batch_size: int) -> dict[str, float]:
        """Return {"samples_per_second": value} for the time since the last report.

        ``train_batch_size`` is the total over all ranks. Returns {} if there was no step since the last report.
        """
        if self._step is None or step <= self._step:
            return {}
        is_paused = self._resumed_s is None
        self.pause()
        found = {"samples_per_second": (step - self._step) * train_batch_size / max(self._active_s, 1e-9)}
        self.start(step)
        if is_paused:
            self.pause()
        return found


class MetricReporter:
    """Reports the metrics in a Trainer's log entries to Determined's core context.

    Ranks: all; rank 0 reports. No communication.

    Args:
        context: the trial's core context.
        searcher: section ``searcher`` of the experiment config; the metrics that it names are always reported.
        filter_metrics: substrings of the names of metrics to report; None reports all.
    """

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
        if isinstance(self._train, LocalTrainContext):
            self._train.rewind_to(state.global_step)
        self._last_percent = 100 * state.global_step // max(state.max_steps, 1)
        self.speed.start(state.global_step)

    def is_validated(self, step: int) -> bool:
        return step <= self._last_validation

    def log(
        self, logs: Mapping[str, Any], state: TrainerState, train_batch_size: int, *, is_stopped: bool
    ) -> None:
        """Report a log entry of training; store an evaluation's entry until ``flush``.

        ``train_batch_size`` is the total over all ranks. If ``is_stopped``, the summary entry at the end is not reported.
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
                metrics |= self.speed.report(step, train_batch_size)
            self._last_training = step
            if self._is_chief:
                self._train.report_training_metrics(step, {**metrics, **_position(state)})

    def flush(self, state: TrainerState) -> None:
        """Report the stored evaluation metrics, of all evaluation sets of a step together.

        A no-op if no entries are stored, or if the step's evaluation has already been reported.

        Raises:
            TrialContractError: a metric that the ``searcher`` section names is missing.
        """
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
        """Report the completed fraction of training.

        At most once per percent and per second; the last report is not delayed. A run directory also gets the batch counts.
        """
        if not self._is_chief or max_steps <= 0:
            return
        if isinstance(self._train, LocalTrainContext):
            self._train.report_batches(step, max_steps)
        percent, now_s = 100 * step // max_steps, time.monotonic()
        is_end = step >= max_steps
        if percent > self._last_percent and (is_end or now_s - self._last_progress_s >= _PROGRESS_INTERVAL_S):
            self._last_percent, self._last_progress_s = percent, now_s
            self._train.report_progress(min(step / max_steps, 1.0))

    def finish(self, step: int, max_steps: int) -> None:
        """Report 100 % progress; warn if ``searcher.metric`` was never reported."""
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


class LossWatch:
    """Fails or warns after several consecutive log entries with a non-finite loss.

    Args:
        exp_conf: the experiment config; ``data.dstrial.non_finite`` is ``fail``, ``warn`` or ``ignore``.
        is_chief: whether this rank logs warnings.
        is_off: disables all checks.

    Raises:
        ConfigError: a setting has an invalid value.
    """

    def __init__(self, exp_conf: Mapping[str, Any], *, is_chief: bool, is_off: bool) -> None:
        self._checks = TrainingChecks.from_config(exp_conf)
        self._is_chief = is_chief
        self._mode: Literal["fail", "warn", "ignore"] = "ignore" if is_off else self._checks.non_finite
        self._guard: NonFiniteGuard | None = None
        self._last_step = 0
        self._is_bad = False
        self._has_warned = False

    def start(self, step: int) -> None:
        self._last_step = step
        self._guard = NonFiniteGuard(
            self._mode,
            self._checks.non_finite_patience,
            is_chief=self._is_chief,
            counts=[],
            is_resumed=step > 0,
        )

    def check(self, logs: Mapping[str, Any], step: int, max_steps: int) -> None:
        """Check the loss of a log entry.

        Raises:
            NonFiniteError: ``non_finite`` is ``fail``, and too many consecutive losses were not finite.
        """
        loss = logs.get("loss")
        if self._guard is None or not isinstance(loss, (int, float)):
            return
        start, self._last_step = self._last_step, step
        self._is_bad = not _is_finite(float(loss), logs.get("grad_norm"))
        shown = {
            "loss": loss if not math.isfinite(loss) or not self._is_bad else "filtered out by transformers"
        }
        self._guard.judge([{"loss": not self._is_bad}], shown, [], start, is_last=step >= max_steps > 0)

    def is_save_unsafe(self, step: int) -> bool:
        """Return whether the newest loss is not finite, which forbids a checkpoint.

        Equal on all ranks. Always False unless ``non_finite`` is ``fail``. If True, rank 0 logs a warning.
        """
        if not self._is_bad or self._mode != "fail":
            self._has_warned = False
            return False
        if self._is_chief and not self._has_warned:
            logger.warning(
                "the state of step %d is not stored, and the checkpoints before it are kept: no loss is finite",
                step,
            )
        self._has_warned = True
        return True


def _is_finite(loss: float, grad_norm: Any) -> bool:
    """Return whether a logged loss is finite, before transformers' filter.

    By default (``logging_nan_inf_filter``), transformers logs 0 if no loss is finite. The gradient norm is then not finite
    either, unlike at a real loss of 0 (``Trainer._inner_training_loop`` of 5.23).
    """
    if loss == 0.0 and isinstance(grad_norm, (int, float)):
        return math.isfinite(grad_norm)
    return math.isfinite(loss)
