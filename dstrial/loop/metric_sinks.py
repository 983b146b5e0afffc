"""Where reported metrics go besides the trial's own record; TensorBoard is one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from determined import tensorboard, util

from dstrial.telemetry.samples import GROUP
from dstrial.trial.context import DeepSpeedTrialContext, runtime_of

_UPLOAD_INTERVAL_S = 5.0


class MetricSink(Protocol):
    """Takes reported metrics, on the chief only.

    Methods are called one at a time, all on one thread, which is not the training thread: ``open``, ``close`` and validations
    while training waits, training reports while it goes on. An exception of a sink ends training on all ranks at their next
    point of agreement; nothing is reported after it.

    A sink with a true attribute ``takes_telemetry`` also gets reports of the group ``telemetry``.
    """

    def open(self, context: DeepSpeedTrialContext) -> None:
        """Begin; called once, when the first batch to train is known."""

    def report(
        self, group: Literal["training", "validation"], batches_trained: int, metrics: Mapping[str, Any]
    ) -> None:
        """Take one report.

        Args:
            group: ``training`` or ``validation``.
            batches_trained: finished batches of the run; a resumed run may report a number again.
            metrics: metric name -> value over all ranks, mostly numbers; not to be changed.
        """

    def close(self) -> None:
        """End; called once if ``open`` was called, also after an error."""


class TensorBoardSink:
    """Writes scalar metrics as events, unless the context's logging is switched off."""

    takes_telemetry = True

    def open(self, context: DeepSpeedTrialContext) -> None:
        self._context = context

    def report(self, group: str, batches_trained: int, metrics: Mapping[str, Any]) -> None:
        if not self._context.get_enable_tensorboard_logging():
            return
        writer = self._context.get_tensorboard_writer()
        if group == GROUP:
            for name, value in metrics.items():
                if util.is_numerical_scalar(value):
                    writer.add_scalar(f"Telemetry/{name}", value, batches_trained)
            return
        prefix = "val" if group == "validation" else ""
        for name, value in metrics.items():
            tag = name if name.startswith(prefix) else f"{prefix}_{name}"
            if util.is_numerical_scalar(value):
                writer.add_scalar(f"Determined/{tag}", value, batches_trained)

    def close(self) -> None:
        """Do nothing: the context closes its writer."""


SINKS: tuple[Callable[[], MetricSink], ...] = (TensorBoardSink,)
"""What makes the sinks that every run has; each decides by itself whether it has anything to do."""


class MetricSinks:
    """All sinks of a run, and the TensorBoard files of this rank."""

    def __init__(self, context: DeepSpeedTrialContext, own: Sequence[MetricSink] = ()) -> None:
        self._context = context
        self._runtime = runtime_of(context)
        self._waiting = [*(make() for make in SINKS), *own]
        self._opened: list[MetricSink] = []
        self._uploaded_s = -_UPLOAD_INTERVAL_S

    def open(self) -> None:
        while self._runtime.is_chief and self._waiting:
            sink = self._waiting.pop(0)
            self._opened.append(sink)
            sink.open(self._context)

    def report(
        self, group: Literal["training", "validation"], batches_trained: int, metrics: Mapping[str, Any]
    ) -> None:
        for sink in self._opened:
            sink.report(group, batches_trained, metrics)

    def report_telemetry(self, batches_trained: int, metrics: Mapping[str, Any]) -> None:
        for sink in self._opened:
            if getattr(sink, "takes_telemetry", False):
                sink.report(GROUP, batches_trained, metrics)  # type: ignore[arg-type]  # they have said so

    def close(self) -> None:
        """Close all opened sinks; raise the first failure afterwards."""
        failure: Exception | None = None
        while self._opened:
            try:
                self._opened.pop().close()
            except Exception as error:  # noqa: BLE001  # raised below, after the other sinks are closed
                failure = failure or error
        if failure is not None:
            raise failure

    def is_upload_due(self) -> bool:
        is_early = time.monotonic() - self._uploaded_s < _UPLOAD_INTERVAL_S
        return not is_early and self._runtime.writes_tensorboard

    def upload(self) -> None:
        """Upload the chief's TensorBoard events, and any rank's profiler traces."""
        if not self._runtime.writes_tensorboard:
            return
        self._uploaded_s = time.monotonic()
        if self._runtime.tensorboard_writer is not None:
            self._runtime.tensorboard_writer.flush()
        is_chief = self._runtime.is_chief
        self._runtime.core.train.upload_tensorboard_files(
            lambda path: is_chief or not path.match("*tfevents*"), tensorboard.util.get_rank_aware_path
        )
