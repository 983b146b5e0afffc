"""What older scripts ask of a searcher: how long to train, and to be told how far that is."""

from __future__ import annotations

from determined import core


class CurrentOperation:
    """The one operation of a trial, as ``DetCallback.current_op`` of Determined before 0.38 gave it.

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
        """Whether ``report_completed`` was called."""
        return self._is_completed

    def report_progress(self, length: float) -> None:
        """Report how far training is, in the unit of ``length``. Ranks: any; only the chief does anything."""
        if self._is_chief and self.length > 0:
            self._train.report_progress(min(max(length / self.length, 0.0), 1.0))

    def report_completed(self, searcher_metric: float | None = None) -> None:
        """Say that the operation is done; the metric is what the last validation has reported already."""
        del searcher_metric
        if not self._is_completed:
            self._is_completed = True
            self.report_progress(self.length)
