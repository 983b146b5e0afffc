"""TensorBoard: reported metrics as events, and handing the files of every rank over."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from determined import tensorboard, util

from dstrial.trial.context import DeepSpeedTrialContext, runtime_of

_UPLOAD_INTERVAL_S = 5.0


class EventFiles:
    """Writes and hands over the TensorBoard files of this rank, unless the context's logging is switched off.

    Args:
        context: the trial's context, whose writer is used.
    """

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self._context = context
        self._runtime = runtime_of(context)
        self._uploaded_s = -_UPLOAD_INTERVAL_S

    def write(self, prefix: str, batches_trained: int, metrics: Mapping[str, Any]) -> None:
        """Write every scalar metric as an event, under Determined's tags. Ranks: the chief.

        Args:
            prefix: put before names that do not begin with it; empty for none.
            batches_trained: the step of the events.
            metrics: metric name -> value.
        """
        if not self._runtime.writes_tensorboard:
            return
        writer = self._context.get_tensorboard_writer()
        for name, value in metrics.items():
            tag = name if name.startswith(prefix) else f"{prefix}_{name}"
            if util.is_numerical_scalar(value):
                writer.add_scalar(f"Determined/{tag}", value, batches_trained)

    def upload(self, at_once: bool = True) -> None:
        """Hand this rank's files over: the chief its events, every rank its profiler traces. Ranks: any.

        Args:
            at_once: whether to do it even if the last time is less than five seconds ago.
        """
        now_s = time.monotonic()
        is_early = not at_once and now_s - self._uploaded_s < _UPLOAD_INTERVAL_S
        if is_early or not self._runtime.writes_tensorboard:
            return
        self._uploaded_s = now_s
        if self._runtime.tensorboard_writer is not None:
            self._runtime.tensorboard_writer.flush()
        is_chief = self._runtime.is_chief
        self._runtime.core.train.upload_tensorboard_files(
            lambda path: is_chief or not path.match("*tfevents*"), tensorboard.util.get_rank_aware_path
        )
