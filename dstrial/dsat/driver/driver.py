"""Run a search: ask the method, run trials, act only on what is on record.

Says what a backend is asked to run for a measurement, and how long it may run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dstrial.dsat.backends.base import Backend, Ended, RemoteSearch
from dstrial.dsat.backends.trial_spec import TrialSpec, measuring_spec
from dstrial.dsat.config import SearchConfig
from dstrial.dsat.core.journal import DISK_FULL_ERRORS, SearchRecord, SearchStatus, is_final
from dstrial.dsat.core.outcome import (
    Failure,
    FailureKind,
    Measured,
    Outcome,
    TrialResult,
    highest,
    outcome_from_json,
    outcome_to_json,
)
from dstrial.dsat.driver.disk_full import DiskFullQueue
from dstrial.dsat.driver.normalize import caveats, normalized
from dstrial.dsat.driver.outputs import LiveReport, SearchFiles
from dstrial.dsat.methods.base import Action, ConfigSearch, Finish, Measure, Note, Skip
from dstrial.dsat.report.live import ended_line
from dstrial.errors import DstrialError, SearchError

logger = logging.getLogger("dstrial.dsat")

_SHORTEST_DEADLINE_S = 120.0
_DEADLINE_FACTOR = 5.0
_SLACK_S = 10.0  # for the event of another process that ends at its budget


class Driver:
    """Runs one search until it ends, is interrupted, or its budget is spent."""

    def __init__(
        self,
        settings: SearchConfig,
        record: SearchRecord,  # locked by the caller
        method: ConfigSearch,
        backend: Callable[[], Backend | RemoteSearch],  # called at the first trial that has to run
        print_line: Callable[[str], None],
        show: Callable[[Sequence[TrialResult]], None] = lambda _trials: None,
        *,
        poll_s: float = 0.1,
        flops_per_record: float | None = None,  # of a dry run, on one rank; used where none are counted
    ) -> None:
        self._settings = settings
        self._record = record
        self._method = method
        self._make_backend = backend
        self._backend: Backend | RemoteSearch | None = None
        self._print_line = print_line
        self._show = show
        self._poll_s = poll_s
        self._flops_per_record = flops_per_record
        self._notes: list[str] = []
        self.trials: dict[int, TrialResult] = {}
        self._open: dict[int, Measure] = {}
        self._signals: list[signal.Signals] = []
        self._disk_full_queue = DiskFullQueue(record, print_line, lambda: bool(self._signals), poll_s)
        self._files = SearchFiles(settings, record, print_line)
        self._live_report = LiveReport(self._report_so_far)
        self._end: Finish | None = None
        self._is_cleared = False
        self._described_s = 0.0

    def run(self, signals: list[signal.Signals]) -> SearchStatus:
        """Go on with the search where its record ends."""
        self._signals = signals
        handles = self._replay()
        end: Finish | signal.Signals
        try:
            try:
                end = self._end if self._end is not None else self._search(handles)
            except KeyboardInterrupt:
                if not signals:
                    raise
                end = signals[0]
            if isinstance(end, signal.Signals) and not isinstance(self._backend, RemoteSearch):
                with contextlib.suppress(KeyboardInterrupt):  # of a record that cannot be written now
                    self._disk_full_queue.append("interrupted", {"signal": end.name})
            self._write_files()
            self._files.write_report(
                end, self._method.report_facts(), self._notes, list(self.trials.values())
            )
            if isinstance(end, Finish) and not self._is_cleared:
                self._clear(handles)
            elif (
                isinstance(end, signal.Signals)
                and self._backend is not None
                and not isinstance(self._backend, RemoteSearch)
                and self._backend.shows_reports
            ):
                self._backend.publish(self._report_so_far(f"interrupted by {end.name}"))
        finally:
            if self._backend is not None:
                self._backend.close()
            self._write_files()
        if isinstance(end, signal.Signals):
            return SearchStatus(end.name, False, stopped_by=end)
        return SearchStatus(end.reason, True, end.is_failure)

    def _clear(self, handles: dict[int, dict[str, Any]]) -> None:
        """End what still runs and keep the files there; once, even after a kill."""
        if self._backend is None:
            try:
                self._backend = self._make_backend()
            except DstrialError as error:
                self._print_line(
                    f"what the search may have left where its trials ran could not be looked for: {error}"
                )
                return
            if not isinstance(self._backend, RemoteSearch):
                for measure in self._open.values():
                    self._backend.adopt(self._spec(measure), handles.get(measure.trial_id, {}))
        try:
            self._backend.finish(self._files.read())
            self._disk_full_queue.append("cleared", {})
        except KeyboardInterrupt:
            if not self._signals:
                raise

    def _search(self, handles: dict[int, dict[str, Any]]) -> Finish | signal.Signals:
        budget_s = self._settings.flags.budget
        # Time that earlier processes of this search have spent, as far as it is on record.
        spent_s = (
            sum(trial.seconds or 0.0 for trial in self.trials.values()) / self._settings.options.num_parallel
        )
        began_s = time.monotonic() - spent_s - self._described_s
        backend = self._backend = self._make_backend()
        if isinstance(backend, RemoteSearch):
            return self._follow(backend, handles, began_s)
        for measure in list(self._open.values()):
            self._start(measure, handles.get(measure.trial_id))
        while True:
            if self._signals:
                return self._signals[0]
            if budget_s is not None and time.monotonic() - began_s > budget_s:
                self._finish(Finish("the budget is spent"), budget_s=budget_s)
            else:
                self._end_overdue()
                for trial_id in self._disk_full_queue.take_due():
                    self._start(self._open[trial_id], None)
                self._take_ended()
            if self._end is not None:
                return self._end
            self._live_report.publish_if_due(backend)
            self._show(list(self.trials.values()))
            time.sleep(self._poll_s)

    def _follow(
        self, search: RemoteSearch, handles: dict[int, dict[str, Any]], began_s: float
    ) -> Finish | signal.Signals:
        """Take the events of a search that another process runs, until it ends."""
        budget_s = self._settings.flags.budget
        events = self._record.events()
        search.begin(events)
        num_known = len(events)
        while self._end is None:
            if self._signals:
                return self._signals[0]
            # The other process keeps the budget itself, unless it was begun with a larger one.
            if budget_s is not None and time.monotonic() - began_s > budget_s + _SLACK_S:
                finish = Finish("the budget is spent")
                self._finish(finish, budget_s=budget_s)
                return finish
            why_ended = search.why_ended()  # asked before the events, so that none is missed
            for event in search.new_events(num_known):
                num_known += 1
                self._disk_full_queue.append(event["event"], event)
                notes_before = len(self._notes)
                self._replay_event(event, handles)
                for note in self._notes[notes_before:]:
                    self._print_line(note)
                self._print_event(event)
            if why_ended and self._end is None:
                raise SearchError(
                    f"the search has ended before it was finished ({why_ended}); expected its trial to go on until then. Look at "
                    "the trial's log; the same command goes on with the search in another trial."
                )
            self._show(list(self.trials.values()))
            time.sleep(self._poll_s)
        if not any(event["event"] == "finished" for event in self._record.events()[len(events) :]):
            self._finish(self._end)  # a replay knows the end before the event comes
        return self._end

    def _print_event(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "submitted":
            trial = self.trials[event["trial_id"]]
            self._print_line(f"trial {trial.trial_id} begins: {trial.description} ({trial.why})")
        elif event["event"] == "result":
            self._print_line(ended_line(self.trials[event["trial_id"]], self._settings.flags.metric))
            self._write_files()

    # ---- what happens ----------------------------------------------------------------------------

    def _replay(self) -> dict[int, dict[str, Any]]:
        """Replay the record to the method; return the handles of trials that were running."""
        events = self._record.events()
        self._apply(self._method.start(), is_replay=True)
        handles: dict[int, dict[str, Any]] = {}
        for event in events:
            self._replay_event(event, handles)
        for trial_id, handle in handles.items():
            if trial_id in self.trials:
                self.trials[trial_id] = dataclasses.replace(self.trials[trial_id], handle=handle)
        return handles

    def _replay_event(self, event: Mapping[str, Any], handles: dict[int, dict[str, Any]]) -> None:
        if event["event"] == "submitted":
            trial_id = int(event["trial_id"])
            own = self.trials[trial_id].candidate.to_json() if trial_id in self.trials else None
            if "candidate" in event and event["candidate"] != own:
                raise SearchError(
                    f"trial {trial_id} measured another configuration than this release asks for; expected the trial's dstrial "
                    "and numpy to be the command's. Install the same, or pass --fresh."
                )
            handles[trial_id] = event["handle"]
        elif event["event"] == "result":
            trial_id = int(event["trial_id"])
            if trial_id not in self._open:
                raise SearchError(
                    f"{self._record.events_path} has a result of trial {trial_id}, for which this search does not "
                    "ask; expected the record of an equal search by the same release. Pass --fresh."
                )
            self._settle(trial_id, outcome_from_json(event), event.get("seconds"), is_replay=True)
            if trial_id in handles:
                self.trials[trial_id] = dataclasses.replace(self.trials[trial_id], handle=handles[trial_id])
        elif event["event"] == "interrupted":
            # Trials that were ended in order have not ended their search.
            for handle in handles.values():
                handle.pop("attempt", None)
        elif event["event"] == "inputs":
            self._described_s = float(event.get("seconds") or 0.0)
        elif event["event"] == "finished" and is_final(event, self._settings.flags.budget):
            self._end = Finish(event["reason"], event["is_failure"])
        elif event["event"] == "cleared":
            self._is_cleared = self._end is not None

    def _apply(self, actions: list[Action], *, is_replay: bool = False) -> None:
        for action in actions:
            self._live_report.note_news()
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
                    self._print_line(action.text)
            elif not is_replay and isinstance(action, Skip):
                logger.info(
                    "not measured: %s: %s", self._settings.space.describe(action.candidate), action.reason
                )

    def _start(self, measure: Measure, handle: dict[str, Any] | None) -> None:
        spec = self._spec(measure)
        if handle is not None and self._trials_backend.adopt(spec, handle):
            self._print_line(f"trial {measure.trial_id} goes on: {self.trials[measure.trial_id].description}")
            return
        if not self._disk_full_queue.was_postponed(measure.trial_id):
            self._print_line(
                f"trial {measure.trial_id} begins: {self.trials[measure.trial_id].description} ({measure.why})"
            )
        try:
            handle = self._trials_backend.start(spec)
        except OSError as error:
            if error.errno not in DISK_FULL_ERRORS:
                raise
            self._disk_full_queue.postpone(measure.trial_id, str(error))
            return
        self.trials[measure.trial_id] = dataclasses.replace(self.trials[measure.trial_id], handle=handle)
        self._disk_full_queue.append(
            "submitted",
            {"trial_id": measure.trial_id, "candidate": measure.candidate.to_json(), "handle": handle},
        )

    def _spec(self, measure: Measure) -> TrialSpec:
        settings, search_id = self._settings, self._record.search_id
        best = highest(list(self.trials.values()), settings.flags.metric)
        compared = None
        if best is not None:
            trial, measured = best
            of_best = measuring_spec(settings, trial.candidate, trial.trial_id, search_id)
            compared = of_best.hparams, dict(measured.metrics)
        spec = measuring_spec(settings, measure.candidate, measure.trial_id, search_id)
        return dataclasses.replace(spec, best=compared)

    def _take_ended(self) -> None:
        for ended in self._trials_backend.poll():
            if ended.trial_id in self._open and self._end is None:
                self._take(ended)

    def _take(self, ended: Ended) -> None:
        if isinstance(ended.outcome, Failure) and self._disk_full_queue.is_cause_of(ended.outcome):
            self._disk_full_queue.postpone(ended.trial_id, ended.outcome.message)
            return
        seconds = ended.seconds
        outcome = normalized(
            ended.outcome,
            self._open[ended.trial_id].candidate,
            self._measured(),
            flops_per_record=self._flops_per_record,
            num_replicas=self._settings.space.replicas,
        )
        self._disk_full_queue.append(
            "result", {"trial_id": ended.trial_id, "seconds": seconds, **outcome_to_json(outcome)}
        )
        self._settle(ended.trial_id, outcome, seconds, is_replay=False)

    def _settle(self, trial_id: int, outcome: Outcome, seconds: float | None, *, is_replay: bool) -> None:
        del self._open[trial_id]
        self._live_report.note_news()
        self.trials[trial_id] = dataclasses.replace(self.trials[trial_id], outcome=outcome, seconds=seconds)
        actions = self._method.on_result(trial_id, outcome)
        if isinstance(outcome, Measured) and self._settings.flags.metric == "FLOPS_per_gpu":
            notes = [note for note in caveats(outcome, self._measured()[0]) if note not in self._notes]
            actions = [*map(Note, notes), *actions]
        if not is_replay:
            self._print_line(ended_line(self.trials[trial_id], self._settings.flags.metric))
            self._write_files()
        self._apply(actions, is_replay=is_replay)

    @property
    def _trials_backend(self) -> Backend:
        """The backend of a search whose trials this process starts."""
        assert self._backend is not None
        assert not isinstance(self._backend, RemoteSearch)
        return self._backend

    def _measured(self) -> list[Measured]:
        return [one.outcome for one in self.trials.values() if isinstance(one.outcome, Measured)]

    def _finish(self, finish: Finish, *, is_replay: bool = False, budget_s: float | None = None) -> None:
        """End the search; a replay does so after the last result, recorded end or not."""
        self._end = finish
        if not is_replay:
            fields = {"reason": finish.reason, "is_failure": finish.is_failure, "budget_s": budget_s}
            self._disk_full_queue.append("finished", fields)

    # ---- deadlines, files -------------------------------------------------------------------------

    def _end_overdue(self) -> None:
        for trial_id, measure in list(self._open.items()):
            if trial_id not in self._open or self._disk_full_queue.is_postponed(trial_id):
                continue
            deadline_s = self.deadline_s(measure)
            running_s = self._trials_backend.running_s(trial_id)
            if running_s > deadline_s:
                self._trials_backend.kill(trial_id)
                self._take_ended()  # it may have been measured before it hung
                is_open = trial_id in self._open and not self._disk_full_queue.is_postponed(trial_id)
                if not is_open or self._end is not None:
                    continue
                message = f"it was ended after {running_s:.0f} s; expected at most {deadline_s:.0f} s"
                self._take(Ended(trial_id, Failure(FailureKind.TIMEOUT, message), running_s))

    def deadline_s(self, measure: Measure) -> float:
        """Return a trial's limit: 5 times what is expected, else ``--trial-timeout``.

        Expected is the predicted time, or that of the longest measured trial if it is longer. The limit is at least two minutes,
        because ranks may have to be started first, and a trial that is ended too early is lost to the search.
        """
        took = [
            trial.seconds
            for trial in self.trials.values()
            if trial.seconds is not None and isinstance(trial.outcome, Measured)
        ]
        expected_s = max(
            [*took, *([] if measure.predicted_s is None else [measure.predicted_s])], default=None
        )
        if expected_s is None:
            return self._settings.flags.trial_timeout
        return max(_DEADLINE_FACTOR * expected_s, _SHORTEST_DEADLINE_S)

    def _report_so_far(self, reason: str = "") -> dict[str, Any]:
        facts = self._method.report_facts()
        return self._files.live_report(facts, self._notes, list(self.trials.values()), reason)

    def _write_files(self) -> None:
        self._files.write(list(self.trials.values()))
