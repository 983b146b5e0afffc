"""Run the trials that a search method requests, or follow a search on a master.

Each event is appended to the search's journal (``SearchRecord``) before the search changes its state. Replaying the journal
restores the search.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dstrial.dsat.backends.base import Backend, Ended, RemoteSearch
from dstrial.dsat.backends.trial_spec import TrialSpec, full_config, measuring_spec, write_config
from dstrial.dsat.config import SearchConfig
from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.journal import BEST_NAMES, SearchRecord, SearchStatus, is_final
from dstrial.dsat.core.outcome import (
    Failure,
    FailureKind,
    Measured,
    TrialResult,
    best_of,
    outcome_from_json,
    outcome_to_json,
)
from dstrial.dsat.methods import search_method
from dstrial.dsat.methods.base import Action, Finish, Measure, Note
from dstrial.dsat.predictor.inputs import PredictInputs
from dstrial.dsat.report import (
    REPORT_NAMES,
    SearchFacts,
    ended_line,
    live_document,
    report_document,
    write_report,
)
from dstrial.errors import DstrialError, SearchError
from dstrial.local.json_files import write_json_atomically

_MIN_DEADLINE_S = 120.0  # least time limit of a trial: it may have to start ranks and compile kernels
_DEADLINE_FACTOR = 5.0  # time limit of a trial / longest known time of a trial
_REPORT_PERIOD_S = 2.0  # between two published reports

FLOPS_RULE = "FLOPS_are_a_rule"
"""Metric that is 1 if ``FLOPS_per_gpu`` was estimated from the number of parameters, because no FLOPs could be counted."""

_RULE_NOTE = (
    "no FLOPs could be counted, as with compiled or custom kernels: FLOPS_per_gpu assumes 6 for each parameter and record, "
    "and ranks configurations as throughput does all the same"
)
_FLOPS = "FLOPS_per_gpu"
_RULE_PER_PARAMETER = 6  # FLOPs per parameter and record, in forward and backward


def recorded_inputs(record: SearchRecord) -> PredictInputs | None:
    """Return the recorded inputs of method ``predict``; None if there are none."""
    event = next((event for event in record.events() if event["event"] == "inputs"), None)
    return None if event is None else PredictInputs.from_json(event)


class Driver:
    """Runs one search until it ends, is interrupted, or its budget is spent."""

    def __init__(
        self,
        settings: SearchConfig,
        record: SearchRecord,  # locked by the caller
        inputs: PredictInputs | None,  # of dry runs
        backend: Callable[[], Backend | RemoteSearch],  # called at the first trial that has to run
        print_line: Callable[[str], None],
        show: Callable[[Sequence[TrialResult]], None] = lambda _trials: None,
        *,
        poll_s: float = 0.1,
    ) -> None:
        self._settings = settings
        self._record = record
        self._method = search_method(settings.method, settings.space, settings.options, inputs)
        self._make_backend = backend
        self._backend: Backend | RemoteSearch | None = None
        self._measurer: Backend | None = None  # the backend, unless the search is remote
        self._is_replay = True  # events come from the journal, so nothing is printed
        self._print_line = print_line
        self._show = show
        self._poll_s = poll_s
        self._flops_per_record = None if inputs is None else inputs.flops_per_record
        self._notes: list[str] = []
        self.trials: dict[int, TrialResult] = {}
        self._open: dict[int, Measure] = {}  # trials without an outcome, by id
        self._handles: dict[int, dict[str, Any]] = {}  # by which the backend finds submitted trials, by id
        self._signals: list[signal.Signals] = []
        self._has_news = False  # since the last published report
        self._next_report_s = 0.0
        self._end: Finish | None = None
        self._spent_budget_s: float | None = None  # the budget, if it ended the search
        self._is_recorded = False  # whether the journal has the end of the search
        self._described_s = 0.0  # seconds that dry runs took

    def run(self, signals: list[signal.Signals]) -> SearchStatus:
        """Continue the search after the last event in its journal; return how it ended.

        The search stops when the caller's signal handlers append to ``signals``.

        Raises:
            OSError: the disk is full; with free space, the same command resumes the search.
        """
        self._signals = signals
        self._apply(self._method.start())
        for event in self._record.events():
            self._on_event(event)
        self._is_replay = False
        is_over = self._is_recorded
        try:
            if self._end is None:
                try:
                    self._search()
                except KeyboardInterrupt:
                    if not signals:
                        raise
            end = self._end if self._end is not None else signals[0]
            if isinstance(end, signal.Signals):
                self._record.append("interrupted", {"signal": end.name})
            self._write_files()
            self._write_report(end)
            if isinstance(end, Finish) and not is_over:
                self._end_trials(end)
            elif isinstance(end, signal.Signals) and self._backend is not None:
                self._backend.publish(lambda: self._report_so_far(f"interrupted by {end.name}"))
        finally:
            if self._backend is not None:
                self._backend.close()
            self._write_files()
        if isinstance(end, signal.Signals):
            return SearchStatus(end.name, False, stopped_by=end)
        return SearchStatus(end.reason, True, end.is_failure)

    def _end_trials(self, end: Finish) -> None:
        """End remaining trials, let the backend store the results, and record the end."""
        if self._backend is None:
            try:
                self._backend = self._make_backend()
            except DstrialError as error:
                self._print_line(f"remaining trials of the search could not be looked for: {error}")
                return
            if not isinstance(self._backend, RemoteSearch):
                for measure in self._open.values():
                    self._backend.adopt(self._spec(measure), self._handles.get(measure.trial_id, {}))
        try:
            self._backend.finish(self._read_files())
            if not self._is_recorded:  # the journal of a followed search already has the event
                fields = {
                    "reason": end.reason,
                    "is_failure": end.is_failure,
                    "budget_s": self._spent_budget_s,
                }
                self._record.append("finished", fields)
        except KeyboardInterrupt:
            if not self._signals:
                raise

    def _search(self) -> None:
        budget_s = self._settings.flags.budget
        # Seconds that earlier processes of this search have spent, according to the journal.
        spent_s = (
            sum(trial.seconds or 0.0 for trial in self.trials.values()) / self._settings.options.num_parallel
        )
        began_s = time.monotonic() - spent_s - self._described_s
        backend = self._backend = self._make_backend()
        if not isinstance(backend, RemoteSearch):
            self._measurer = backend
            for measure in list(self._open.values()):
                self._start(backend, measure, self._handles.get(measure.trial_id))
        while self._end is None and not self._signals:
            if budget_s is not None and time.monotonic() - began_s > budget_s:
                self._end, self._spent_budget_s = Finish("the budget is spent"), budget_s
                return
            if isinstance(backend, RemoteSearch):
                self._follow(backend)
            else:
                self._end_overdue(backend)
                self._record_ended(backend)
                self._publish_if_due(backend)
            self._show(list(self.trials.values()))
            time.sleep(self._poll_s)

    # ---- what happens ----------------------------------------------------------------------------

    def _follow(self, search: RemoteSearch) -> None:
        for event in search.events():
            self._record.restore(event)
            self._on_event(event)
            if self._end is not None:
                return

    def _on_event(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "submitted":
            self._on_submitted(int(event["trial_id"]), event)
        elif event["event"] == "result":
            self._on_result(int(event["trial_id"]), event)
        elif event["event"] == "inputs":
            self._described_s = float(event.get("seconds") or 0.0)
        elif event["event"] == "finished" and is_final(event, self._settings.flags.budget):
            self._end, self._is_recorded = Finish(event["reason"], event["is_failure"]), True
        elif event["event"] in ("interrupted", "finished"):
            # The search ended its trials itself, so they did not kill it.
            for handle in self._handles.values():
                handle.pop("attempt", None)

    def _on_submitted(self, trial_id: int, event: Mapping[str, Any]) -> None:
        trial = self.trials.get(trial_id)
        if trial is None or event.get("candidate", trial.candidate.to_json()) != trial.candidate.to_json():
            raise SearchError(
                f"trial {trial_id} measured another configuration than this release asks for; expected the trial's dstrial "
                "and numpy to be the command's. Install the same, or pass --fresh."
            )
        self._handles[trial_id] = dict(event["handle"])
        self.trials[trial_id] = dataclasses.replace(trial, handle=event["handle"])
        if not self._is_replay:
            self._print_line(f"trial {trial_id} begins: {trial.description} ({trial.why})")

    def _on_result(self, trial_id: int, event: Mapping[str, Any]) -> None:
        if trial_id not in self._open:
            raise SearchError(
                f"{self._record.events_path} has a result of trial {trial_id}, for which this search does not "
                "ask; expected the record of an equal search by the same release. Pass --fresh."
            )
        del self._open[trial_id]
        outcome = outcome_from_json(event)
        self.trials[trial_id] = dataclasses.replace(
            self.trials[trial_id], outcome=outcome, seconds=event.get("seconds")
        )
        self._has_news = True
        actions = self._method.on_result(trial_id, outcome)
        is_rule = isinstance(outcome, Measured) and bool(outcome.value(FLOPS_RULE))
        if is_rule and self._settings.flags.metric == "FLOPS_per_gpu" and _RULE_NOTE not in self._notes:
            actions = [Note(_RULE_NOTE), *actions]
        if not self._is_replay:
            self._print_line(ended_line(self.trials[trial_id], self._settings.flags.metric))
            self._write_files()
        self._apply(actions)

    def _apply(self, actions: list[Action]) -> None:
        for action in actions:
            self._has_news = True
            if isinstance(action, Measure):
                self._open[action.trial_id] = action
                description = self._settings.space.describe(action.candidate)
                self.trials[action.trial_id] = TrialResult(
                    action.trial_id, action.candidate, description, action.why
                )
                if self._measurer is not None:
                    self._start(self._measurer, action, None)
            elif isinstance(action, Finish):
                self._end = action
            elif isinstance(action, Note):
                self._notes.append(action.text)
                if not self._is_replay:
                    self._print_line(action.text)

    def _start(self, backend: Backend, measure: Measure, handle: dict[str, Any] | None) -> None:
        trial_id, spec = measure.trial_id, self._spec(measure)
        if handle is not None and backend.adopt(spec, handle):
            self._print_line(f"trial {trial_id} goes on: {self.trials[trial_id].description}")
            return
        fields = {"trial_id": trial_id, "candidate": measure.candidate.to_json()}
        self._on_event(self._record.append("submitted", {**fields, "handle": backend.start(spec)}))

    def _spec(self, measure: Measure) -> TrialSpec:
        return measuring_spec(self._settings, measure.candidate, measure.trial_id, self._record.search_id)

    def _record_ended(self, backend: Backend) -> None:
        for ended in backend.poll():
            if ended.trial_id in self._open and self._end is None:
                self._record_outcome(ended)

    def _record_outcome(self, ended: Ended) -> None:
        outcome = ended.outcome
        if isinstance(outcome, Measured):
            wrong = mismatch_with_request(outcome, self._open[ended.trial_id].candidate)
            outcome = wrong or with_model_flops(
                outcome,
                next(iter(self._measured()), None),
                flops_per_record=self._flops_per_record,
                num_replicas=self._settings.space.replicas,
            )
        fields = {"trial_id": ended.trial_id, "seconds": ended.seconds, **outcome_to_json(outcome)}
        self._on_event(self._record.append("result", fields))

    def _measured(self) -> list[Measured]:
        return [one.outcome for one in self.trials.values() if isinstance(one.outcome, Measured)]

    # ---- deadlines, files -------------------------------------------------------------------------

    def _end_overdue(self, backend: Backend) -> None:
        for trial_id, measure in list(self._open.items()):
            deadline_s, running_s = self.deadline_s(measure), backend.running_s(trial_id)
            if trial_id not in self._open or running_s <= deadline_s:
                continue
            backend.kill(trial_id)
            self._record_ended(backend)  # the trial may have reported a result before it hung
            if trial_id in self._open and self._end is None:
                message = f"it was ended after {running_s:.0f} s; expected at most {deadline_s:.0f} s"
                self._record_outcome(Ended(trial_id, Failure(FailureKind.TIMEOUT, message), running_s))

    def deadline_s(self, measure: Measure) -> float:
        """Return the time limit of a trial, in seconds.

        The limit is 5 times the longest known time, but at least two minutes. The known times are this trial's predicted time
        and those of all measured trials. If there are none, the limit is ``--trial-timeout``.
        """
        expected_s = [
            trial.seconds
            for trial in self.trials.values()
            if trial.seconds is not None and isinstance(trial.outcome, Measured)
        ]
        if measure.predicted_s is not None:
            expected_s.append(measure.predicted_s)
        if not expected_s:
            return self._settings.flags.trial_timeout
        return max(_DEADLINE_FACTOR * max(expected_s), _MIN_DEADLINE_S)

    def _write_files(self) -> None:
        """Write ``trials.json`` and the files of the best configuration.

        If they cannot be written, for example to a full disk, print a line instead of raising an exception.
        """
        trials, settings = list(self.trials.values()), self._settings
        best = best_of(trials, settings.flags.metric)
        config, metrics, experiment = (self._record.path / name for name in BEST_NAMES)
        with self._tolerate_full_disk("the results"):
            rows = [trial.to_json() for trial in trials]
            write_json_atomically(self._record.path / "trials.json", rows, sync=False)
            if best is not None and isinstance(best.outcome, Measured):
                write_json_atomically(config, settings.space.config(best.candidate))
                write_json_atomically(metrics, dict(best.outcome.metrics))
                write_config(experiment, full_config(settings, best.candidate))

    def _read_files(self) -> dict[str, str]:
        """Return the result files of the search: name -> text."""
        paths = [self._record.path / name for name in (*BEST_NAMES, "trials.json", *REPORT_NAMES)]
        return {path.name: path.read_text() for path in paths if path.exists()}

    def _write_report(self, end: Finish | signal.Signals) -> None:
        if isinstance(end, Finish):
            facts = dataclasses.replace(self._facts(end.reason), is_finished=True, is_failure=end.is_failure)
        else:
            facts = self._facts(f"interrupted by {end.name}")
        with self._tolerate_full_disk("the report"):
            write_report(self._record.path, facts, self._settings.space, list(self.trials.values()))

    @contextlib.contextmanager
    def _tolerate_full_disk(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._print_line(f"{what} cannot be written ({error}); expected room on the disk")

    def _publish_if_due(self, backend: Backend) -> None:
        if self._has_news and time.monotonic() >= self._next_report_s:
            self._has_news = not backend.publish(self._report_so_far)
            self._next_report_s = time.monotonic() + _REPORT_PERIOD_S

    def _report_so_far(self, reason: str = "") -> dict[str, Any]:
        document = report_document(self._facts(reason), self._settings.space, list(self.trials.values()))
        # If several experiments have a report, the web page shows the newest.
        return {**live_document(document), "told_s": time.time()}

    def _facts(self, reason: str) -> SearchFacts:
        settings = self._settings
        return SearchFacts(
            name=settings.experiment.name or settings.output.name,
            method=settings.method,
            metric=settings.flags.metric,
            reason=reason,
            is_finished=False,
            num_slots=settings.num_slots,
            forecasts=self._method.forecasts,
            notes=(*settings.warnings, *self._notes),
        )


# ---- measurements of one search are comparable ------------------------------------------------


def with_model_flops(
    measured: Measured,
    like: Measured | None,
    *,
    flops_per_record: float | None = None,
    num_replicas: int = 1,
) -> Measured:
    """Return a measurement whose ``FLOPS_per_gpu`` is comparable within a search.

    All measurements of a search use the same FLOPs per record, so equal throughput gives equal ``FLOPS_per_gpu``. The FLOPs are
    counted in the first measurement, else in a dry run, else estimated from the number of parameters.

    ``like`` is an earlier result of this function; None for the first measurement. ``flops_per_record`` is that of a dry run on
    one rank; None without a dry run. Without a throughput, ``measured`` is returned unchanged.
    """
    throughput = measured.value("throughput")
    if not throughput:
        return measured
    metrics = dict(measured.metrics)
    if like is not None:
        rate, flops = like.value("throughput"), like.value(_FLOPS)
        if not rate or not flops:
            return measured
        metrics[_FLOPS] = flops / rate * throughput
        if like.value(FLOPS_RULE):
            metrics[FLOPS_RULE] = 1.0
    elif not measured.value(_FLOPS):
        metrics[FLOPS_RULE] = 0.0 if flops_per_record else 1.0
        if not flops_per_record:
            flops_per_record = _RULE_PER_PARAMETER * max(measured.value("num_params") or 0.0, 1.0)
        metrics[_FLOPS] = flops_per_record * throughput / num_replicas
    return Measured(metrics)


def mismatch_with_request(measured: Measured, candidate: Candidate) -> Failure | None:
    """Return a failure if a trial used another batch or ZeRO stage than requested.

    Returns None if the trial used the requested ones. Also returns None for a trial with several engines, because the request
    may apply to only one of them.
    """
    if (measured.value("num_engines") or 1) > 1:
        return None
    requested = {
        "train_micro_batch_size_per_gpu": candidate.batch.micro_batch_size,
        "gradient_accumulation_steps": candidate.batch.accumulation,
        "zero_stage": candidate.stage,
    }
    wrong = {
        name: (found, expected)
        for name, expected in requested.items()
        if (found := measured.value(name)) is not None and round(found) != expected
    }
    if not wrong:
        return None
    trained = ", ".join(f"{name} {round(value)}" for name, (value, _) in wrong.items())
    values = ", ".join(str(value) for _, value in wrong.values())
    return Failure(
        FailureKind.USER_ERROR,
        f"the engine trains with {trained}; expected {values}, as the trial was told. Build its config with "
        "dsat.get_ds_config_from_hparams(hparams), or give the script's arguments to dsat.get_hf_args_with_overwrites.",
    )
