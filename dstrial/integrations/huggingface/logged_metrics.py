"""Make reports of what a Trainer logs: which group, which names, how fast; pure."""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from dstrial.errors import TrialContractError

_EVALUATION = "eval_"
_TEST = "test_"
_SUMMARY = "train_loss"
# How long a phase took and how fast it was in the Trainer's own words; samples per second of an evaluation are kept.
_SPEED_SUFFIXES = ("_runtime", "_per_second", "_compilation_time", "_preparation_time")
_KEPT_SPEED = "_samples_per_second"
_POSITIONS = frozenset({"epoch", "step"})


class LogKind(enum.Enum):
    """The subject of a Trainer's log line."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    SUMMARY = "summary"
    """The last line of a training, with means over all of it."""
    OTHER = "other"


def kind_of(logs: Mapping[str, Any]) -> LogKind:
    """Classify a log line by its names.

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
    """Return the metrics of a log line that are to be reported.

    ``filter_metrics`` are parts of names, of which a metric must have one; None or empty reports all. Names in ``always`` pass.
    """
    return {
        name: value
        for name, value in logs.items()
        if name in always or (_is_metric(name) and _passes(name, filter_metrics))
    }


def _is_metric(name: str) -> bool:
    if name in _POSITIONS:
        return False
    if name.startswith(_EVALUATION) and name.endswith(_KEPT_SPEED):
        return True
    return not name.endswith(_SPEED_SUFFIXES)


def _passes(name: str, filter_metrics: Sequence[str] | None) -> bool:
    return not filter_metrics or any(part in name for part in filter_metrics)


def require_searcher_metrics(metrics: Mapping[str, Any], wanted: Sequence[tuple[str, str]]) -> None:
    """Refuse an evaluation without the ``wanted`` (config key, metric name) pairs."""
    missing = [(key, name) for key, name in wanted if name not in metrics]
    if not missing:
        return
    said = " and ".join(f"{key} is {name!r}" for key, name in missing)
    existing = ", ".join(sorted(metrics))
    raise TrialContractError(
        f"{said}; expected one of the metrics that the Trainer's evaluation has: {existing}. Name one of them in the "
        "experiment config, or return it from compute_metrics (the Trainer puts eval_ before its name)."
    )


@dataclasses.dataclass(slots=True)
class Throughput:
    """Counts records and tokens per second, without evaluations and checkpoints."""

    clock: Callable[[], float] = time.monotonic
    _since_s: float | None = None
    _paused_s: float = 0.0
    _pause_began_s: float | None = None
    _step: int = 0
    _tokens: float = 0.0

    def start(self, step: int, tokens: float) -> None:
        self._since_s, self._paused_s, self._pause_began_s = self.clock(), 0.0, None
        self._step, self._tokens = step, tokens

    def pause(self) -> None:
        if self._pause_began_s is None:
            self._pause_began_s = self.clock()

    def resume(self) -> None:
        if self._pause_began_s is not None:
            self._paused_s += self.clock() - self._pause_began_s
            self._pause_began_s = None

    def report(self, step: int, tokens: float, train_batch_size: int) -> dict[str, float]:
        """Return the speed since the last report; ``train_batch_size`` is over all ranks."""
        found: dict[str, float] = {}
        if self._since_s is not None and step > self._step:
            is_paused = self._pause_began_s is not None
            now_s = self._pause_began_s if self._pause_began_s is not None else self.clock()
            elapsed_s = max(now_s - self._since_s - self._paused_s, 1e-9)
            found["samples_per_second"] = (step - self._step) * train_batch_size / elapsed_s
            if tokens > self._tokens:
                found["tokens_per_second"] = (tokens - self._tokens) / elapsed_s
            self.start(step, tokens)
            if is_paused:
                self.pause()
        return found
