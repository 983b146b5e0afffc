"""Write a search's results, best experiment and report; publish the report so far."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dstrial.dsat.backends.base import Backend
from dstrial.dsat.backends.trial_spec import full_config, write_config
from dstrial.dsat.config import SearchConfig
from dstrial.dsat.core.journal import SearchRecord
from dstrial.dsat.core.outcome import Measured, TrialResult, best_of
from dstrial.dsat.methods.base import Finish, ReportFacts
from dstrial.dsat.report.document import SearchFacts, live_document, report_document
from dstrial.dsat.report.markdown import REPORT_NAMES, write_report
from dstrial.local.json_files import write_json_atomically

_PERIOD_S = 2.0
# A report of many trials takes long to make: reports take at most about 1/20 of the search's time.
_MIN_PAUSES = 20.0


class SearchFiles:
    """Writes and reads the result files of one search."""

    def __init__(
        self, settings: SearchConfig, record: SearchRecord, print_line: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._record = record
        self._print_line = print_line

    def write(self, trials: Sequence[TrialResult]) -> None:
        """Write all trials and the best configuration; on an OSError, print a line."""
        record = self._record
        try:
            write_json_atomically(record.trials_path, [trial.to_json() for trial in trials], sync=False)
            best = best_of(trials, self._settings.flags.metric)
            if best is not None and isinstance(best.outcome, Measured):
                write_json_atomically(record.best_config_path, self._settings.space.config(best.candidate))
                write_json_atomically(record.best_metrics_path, dict(best.outcome.metrics))
                write_config(record.best_experiment_path, full_config(self._settings, best.candidate))
        except OSError as error:
            self._print_line(f"the results cannot be written ({error}); expected room on the disk")

    def write_report(
        self,
        end: Finish | signal.Signals,
        predicted: ReportFacts,
        notes: Sequence[str],
        trials: Sequence[TrialResult],
    ) -> None:
        reason = end.reason if isinstance(end, Finish) else f"interrupted by {end.name}"
        facts = self._facts(reason, predicted, notes, is_finished=isinstance(end, Finish))
        if isinstance(end, Finish):
            facts = dataclasses.replace(facts, is_failure=end.is_failure)
        try:
            write_report(self._record.path, facts, self._settings.space, trials)
        except OSError as error:
            self._print_line(f"the report cannot be written ({error}); expected room on the disk")

    def live_report(
        self, predicted: ReportFacts, notes: Sequence[str], trials: Sequence[TrialResult], reason: str = ""
    ) -> dict[str, Any]:
        facts = self._facts(reason, predicted, notes, is_finished=False)
        report = live_document(report_document(facts, self._settings.space, trials))
        return {**report, "told_s": time.time()}  # the page shows the newest of several experiments' reports

    def _facts(
        self, reason: str, predicted: ReportFacts, notes: Sequence[str], *, is_finished: bool
    ) -> SearchFacts:
        return SearchFacts(
            name=self._settings.experiment.name or self._settings.output.name,
            method=self._settings.method,
            metric=self._settings.flags.metric,
            reason=reason,
            is_finished=is_finished,
            num_slots=self._settings.num_slots,
            predicted=predicted,
            notes=(*self._settings.warnings, *notes),
        )

    def read(self) -> dict[str, str]:
        """Return file name -> text of the search's existing result files."""
        kept = (
            self._record.best_config_path,
            self._record.best_metrics_path,
            self._record.best_experiment_path,
            self._record.trials_path,
            *(self._record.path / name for name in REPORT_NAMES),
        )
        return {path.name: path.read_text() for path in kept if path.exists()}


class LiveReport:
    """Publishes the report of a running search after changes, at a limited rate."""

    def __init__(self, make: Callable[[], Mapping[str, Any]]) -> None:
        self._make = make
        self._has_news = False
        self._next_s = 0.0

    def note_news(self) -> None:
        self._has_news = True

    def publish_if_due(self, backend: Backend) -> None:
        began_s = time.monotonic()
        if not self._has_news or began_s < self._next_s:
            return
        self._has_news = not backend.publish(self._make)
        took_s = time.monotonic() - began_s
        self._next_s = began_s + max(_PERIOD_S, _MIN_PAUSES * took_s)
