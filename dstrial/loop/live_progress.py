"""Show the progress of ``Trainer.fit`` as text lines."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from dstrial.local.run_monitor import report_line, to_report
from dstrial.trial.context import DeepSpeedTrialContext


class LiveProgress:
    """Metric sink that prints each report.

    Args:
        batches_total: length of the run in batches; None if the length is in epochs.
        metric: validation metric to show; None shows ``loss``, or the first metric if there is no ``loss``.

    Attributes:
        newest: newest metrics of each group (``training``, ``validation``).
    """

    def __init__(self, batches_total: int | None, metric: str | None, *, is_silent: bool) -> None:
        self._batches_total = batches_total
        self._metric = metric
        self._is_silent = is_silent
        self.newest: dict[str, Mapping[str, Any]] = {}

    def open(self, context: DeepSpeedTrialContext) -> None:
        del context

    def report(self, group: str, batches_trained: int, metrics: Mapping[str, Any]) -> None:
        self.newest[group] = dict(metrics)
        if self._is_silent:
            return
        report = to_report(group, batches_trained, metrics)
        try:
            sys.stdout.write(report_line(report, self._batches_total, self._metric) + "\n")
            sys.stdout.flush()
        except (OSError, ValueError):  # a closed output must not end training
            self._is_silent = True

    def close(self) -> None:
        pass
