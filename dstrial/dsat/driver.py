"""Run a search: ask the method, start trials, wait for them, and put everything on record before acting on it."""

from __future__ import annotations

import dataclasses
import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dstrial.dsat.backends.backend import Backend, Ended
from dstrial.dsat.methods.method import Action, Finish, Measure, Note, SearchMethod, Skip
from dstrial.dsat.outcome import Failure, FailureKind, Outcome, outcome_from_json, outcome_to_json
from dstrial.dsat.record import SearchRecord
from dstrial.dsat.report import REPORT_NAMES, SearchFacts, write_report
from dstrial.dsat.results import TrialResult, write_results
from dstrial.dsat.settings import SearchSettings
from dstrial.dsat.trial_config import measuring_spec
from dstrial.errors import SearchError

logger = logging.getLogger("dstrial.dsat")

_SHORTEST_DEADLINE_S = 120.0
_DEADLINE_FACTOR = 5.0
_DISK_RETRY_S = 10.0
_SLACK_S = 300.0  # for starting a worker, and for ending its ranks at the deadline


@dataclasses.dataclass(frozen=True, slots=True)
class SearchEnd:
    """How running a search ended.

    Attributes:
        reason: one line.
        is_finished: whether nothing is left to do; else the same command goes on.
        is_failure: whether the search failed: nothing could be measured.
        stopped_by: the signal that interrupted it; None if none did.
    """

    reason: str
    is_finished: bool
    is_failure: bool = False
    stopped_by: signal.Signals | None = None


class Driver:
    """Runs one search until it ends, is interrupted, or its budget is spent.

    Args:
        settings: of the search.
        record: its files; locked by the caller.
        method: a new method of these settings.
        backend: makes the place where trials run, at the first trial that has to run.
        tell: prints a line for a person.
        show: is given the trials again and again while the search waits.
        poll_s: how long it waits between two looks at the trials that run, seconds.
    """

    def __init__(
        self,
        settings: SearchSettings,
        record: SearchRecord,
        method: SearchMethod,
        backend: Callable[[], Backend],
        tell: Callable[[str], None],
        show: Callable[[Sequence[TrialResult]], None] = lambda _trials: None,
        *,
        poll_s: float = 0.1,
    ) -> None:
        self._settings = settings
        self._record = record
        self._method = method
        self._make_backend = backend
        self._backend: Backend | None = None
        self._tell = tell
        self._show = show
        self._poll_s = poll_s
        self._notes: list[str] = []
        self.trials: dict[int, TrialResult] = {}
        self._open: dict[int, Measure] = {}
        self._end: Finish | None = None

    def run(self, signals: list[signal.Signals]) -> SearchEnd:
        """Go on with the search where its record ends.

        Args:
            signals: grows when the process is asked to stop.

        Raises:
            DstrialError: trials cannot be started.
        """
        handles = self._replay()
        end: Finish | signal.Signals
        try:
            end = self._end if self._end is not None else self._search(signals, handles)
            self._write_files()
            self._write_report(end)
            if self._backend is not None and isinstance(end, Finish):
                kept = (
                    self._record.best_config_path,
                    self._record.best_metrics_path,
                    self._record.trials_path,
                    *(self._record.path / name for name in REPORT_NAMES),
                )
                self._backend.finish({path.name: path.read_text() for path in kept if path.exists()})
        finally:
            if self._backend is not None:
                self._backend.close()
            self._write_files()
        if isinstance(end, signal.Signals):
            return SearchEnd(end.name, False, stopped_by=end)
        return SearchEnd(end.reason, True, end.is_failure)

    def _search(
        self, signals: list[signal.Signals], handles: dict[int, dict[str, Any]]
    ) -> Finish | signal.Signals:
        budget_s = self._settings.args.budget
        # What earlier processes of this search have spent, as far as it is on record.
        spent_s = (
            sum(trial.seconds or 0.0 for trial in self.trials.values()) / self._settings.options.num_parallel
        )
        began_s = time.monotonic() - spent_s
        backend = self._backend = self._make_backend()
        for measure in list(self._open.values()):
            self._start(measure, handles.get(measure.trial_id))
        while True:
            if signals:
                return signals[0]
            if budget_s is not None and time.monotonic() - began_s > budget_s:
                self._finish(Finish("the budget is spent"), budget_s=budget_s)
            else:
                self._end_overdue()
                for ended in backend.poll():
                    if ended.trial_id in self._open:
                        self._take(ended)
            if self._end is not None:
                return self._end
            self._show(list(self.trials.values()))
            time.sleep(self._poll_s)

    # ---- what happens ----------------------------------------------------------------------------

    def _replay(self) -> dict[int, dict[str, Any]]:
        """Bring the method to where the record ends; returns the handles of trials that were running."""
        events = self._record.events()
        self._apply(self._method.start(), is_replay=True)
        handles: dict[int, dict[str, Any]] = {}
        for event in events:
            if event["event"] == "submitted":
                handles[event["trial_id"]] = event["handle"]
            elif event["event"] == "result":
                trial_id = int(event["trial_id"])
                if trial_id not in self._open:
                    raise SearchError(
                        f"{self._record.events_path} has a result of trial {trial_id}, for which this search does not "
                        "ask; expected the record of an equal search by the same release. Pass --fresh."
                    )
                self._settle(trial_id, outcome_from_json(event), event.get("seconds"), is_replay=True)
            elif event["event"] == "finished" and self._is_final(event):
                self._end = Finish(event["reason"], event["is_failure"])
        for trial_id, handle in handles.items():
            if trial_id in self.trials:
                self.trials[trial_id] = dataclasses.replace(self.trials[trial_id], handle=handle)
        return handles

    def _is_final(self, event: Mapping[str, Any]) -> bool:
        """Say whether an end holds: one for a spent budget does not where more is given now."""
        spent_s, budget_s = event.get("budget_s"), self._settings.args.budget
        return spent_s is None or (budget_s is not None and budget_s <= spent_s)

    def _apply(self, actions: list[Action], *, is_replay: bool = False) -> None:
        for action in actions:
            if isinstance(action, Measure):
                self._open[action.trial_id] = action
                description = self._settings.space.describe(action.candidate)
                self.trials[action.trial_id] = TrialResult(
                    action.trial_id, action.candidate, description, action.why
                )
                if not is_replay:
                    self._start(action, None)
            elif isinstance(action, Finish):
                self._finish(action, is_replay=is_replay)
            elif isinstance(action, Note):
                self._notes.append(action.text)
                if not is_replay:
                    self._tell(action.text)
            elif not is_replay and isinstance(action, Skip):
                logger.info(
                    "not measured: %s: %s", self._settings.space.describe(action.candidate), action.reason
                )

    def _start(self, measure: Measure, handle: dict[str, Any] | None) -> None:
        assert self._backend is not None
        spec = measuring_spec(self._settings, measure.candidate, measure.trial_id, self._record.search_id)
        spec = dataclasses.replace(spec, deadline_s=self.deadline_s(measure))
        if handle is not None and self._backend.adopt(spec, handle):
            self._tell(f"trial {measure.trial_id} goes on: {self.trials[measure.trial_id].description}")
            return
        self._tell(
            f"trial {measure.trial_id} begins: {self.trials[measure.trial_id].description} ({measure.why})"
        )
        handle = self._backend.start(spec)
        self.trials[measure.trial_id] = dataclasses.replace(self.trials[measure.trial_id], handle=handle)
        self._append("submitted", {"trial_id": measure.trial_id, "handle": handle})

    def _take(self, ended: Ended) -> None:
        seconds = ended.seconds
        self._append(
            "result",
            {"trial_id": ended.trial_id, "seconds": seconds, **outcome_to_json(ended.outcome)},
        )
        self._settle(ended.trial_id, ended.outcome, seconds, is_replay=False)

    def _settle(self, trial_id: int, outcome: Outcome, seconds: float | None, *, is_replay: bool) -> None:
        del self._open[trial_id]
        self.trials[trial_id] = dataclasses.replace(self.trials[trial_id], outcome=outcome, seconds=seconds)
        actions = self._method.on_result(trial_id, outcome)
        if not is_replay:
            self._tell(_told(self.trials[trial_id], self._settings.args.metric))
            self._record.write_snapshot(self._method.snapshot())
            self._write_files()
        self._apply(actions, is_replay=is_replay)

    def _finish(self, finish: Finish, *, is_replay: bool = False, budget_s: float | None = None) -> None:
        """End the search; in a replay the end follows from the last result, whether it is on record or not."""
        if not is_replay and self._backend is not None:
            for trial_id in self._open:
                self._backend.kill(trial_id)
        self._open.clear()
        self._end = finish
        if not is_replay:
            fields = {"reason": finish.reason, "is_failure": finish.is_failure, "budget_s": budget_s}
            self._append("finished", fields)

    # ---- deadlines, disk -------------------------------------------------------------------------

    def _end_overdue(self) -> None:
        assert self._backend is not None
        for trial_id, measure in list(self._open.items()):
            deadline_s = self.deadline_s(measure)
            running_s = self._backend.running_s(trial_id)
            if running_s > deadline_s + (_SLACK_S if self._backend.keeps_deadlines else 0.0):
                self._backend.kill(trial_id)
                message = f"it was ended after {running_s:.0f} s; expected at most {deadline_s:.0f} s"
                self._take(Ended(trial_id, Failure(FailureKind.TIMEOUT, message), running_s))

    def deadline_s(self, measure: Measure) -> float:
        """Return how long a trial may run: five times what is expected, or ``--trial-timeout`` where nothing is.

        Expected is what was predicted, or the longest of the trials that have measured something; at least two minutes.
        """
        took = [
            trial.seconds
            for trial in self.trials.values()
            if trial.seconds is not None
            and trial.outcome is not None
            and not isinstance(trial.outcome, Failure)
        ]
        expected_s = measure.predicted_s if measure.predicted_s is not None else max(took, default=None)
        if expected_s is None:
            return float(self._settings.args.trial_timeout)
        return max(_DEADLINE_FACTOR * expected_s, _SHORTEST_DEADLINE_S)

    def _append(self, kind: str, fields: dict[str, Any]) -> None:
        """Put an event on record; while the disk is full, wait and say so."""
        while True:
            try:
                self._record.append(kind, fields)
            except OSError as error:
                self._tell(f"{self._record.events_path} cannot be written ({error.strerror}); trying again")
                time.sleep(_DISK_RETRY_S)
            else:
                return

    def _write_files(self) -> None:
        try:
            write_results(
                self._record, self._settings.space, list(self.trials.values()), self._settings.args.metric
            )
        except OSError as error:
            self._tell(f"the results cannot be written ({error}); expected room on the disk")

    def _write_report(self, end: Finish | signal.Signals) -> None:
        facts = SearchFacts(
            name=self._settings.experiment.name or self._settings.output.name,
            method=self._settings.method,
            metric=self._settings.args.metric,
            reason=end.reason if isinstance(end, Finish) else f"interrupted by {end.name}",
            is_finished=isinstance(end, Finish),
            num_slots=self._settings.num_slots,
            snapshot=self._method.snapshot(),
            notes=tuple(self._notes),
        )
        try:
            write_report(self._record.path, facts, self._settings.space, list(self.trials.values()))
        except OSError as error:
            self._tell(f"the report cannot be written ({error}); expected room on the disk")


def _told(trial: TrialResult, metric: str) -> str:
    if isinstance(trial.outcome, Failure):
        return f"trial {trial.trial_id} failed ({trial.outcome.kind.value}): {trial.outcome.message}"
    value = None if trial.outcome is None else trial.outcome.value(metric)
    half_width = None if trial.outcome is None else trial.outcome.value("half_width")
    shown = "nothing" if value is None else f"{value:.5g}"
    within = "" if half_width is None else f" ± {half_width:.1%}"
    return f"trial {trial.trial_id} measured {metric} {shown}{within}"
