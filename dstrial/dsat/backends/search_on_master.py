"""Run a whole search inside one trial on a master; read results from its journal.

The trial gets the command line, the experiment and the journal so far as files of its context. It reports each further event
as a row of metrics (group ``dsat``). Methods are pure, so the search in the trial asks for the same measurements as this
command. The command reads the results of its own trials from the journal of the search in the trial.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from determined.common.api import errors
from determined.experimental.client import Experiment, ExperimentState

from dstrial.config.secrets import SecretNames, secrets_in
from dstrial.dsat.backends.base import Ended, SearchEndedError
from dstrial.dsat.backends.cluster import ClusterBackend, is_running, last_lines, why_waiting
from dstrial.dsat.backends.trial_spec import TrialSpec, search_config
from dstrial.dsat.config import SearchConfig
from dstrial.dsat.core.journal import EVENTS_GROUP, SEARCH_FILE, SearchRecord, is_final
from dstrial.dsat.core.outcome import FAILURE_MARK, FailureKind, failure_from_log, outcome_from_json
from dstrial.errors import DstrialError, SearchError

logger = logging.getLogger("dstrial.dsat")

_POLL_PERIOD_S = 0.5
_FINISH_TIMEOUT_S = 20.0  # for the trial's last event: its time budget ends seconds after the command's
_STORE_TIMEOUT_S = 60.0  # for the trial to store its files in a checkpoint
_LOG_WAIT_AFTER_S = 15.0
_ENDED_STATES = (
    ExperimentState.CANCELED,
    ExperimentState.DELETED,
    ExperimentState.COMPLETED,
    ExperimentState.ERROR,
)


class SearchOnMaster:
    """Backend of a search that runs in the only trial of one experiment."""

    num_parallel = 1
    is_sequential = True

    def __init__(self, settings: SearchConfig, master: ClusterBackend, record: SearchRecord) -> None:
        self._settings = settings
        self._master = master
        self._record = record
        self._spec = search_config(settings, record.search_id)
        self._experiment: Experiment | None = None
        self._rows: dict[int, dict[str, Any]] = {}  # journal position -> event that the trial reported
        self._awaited: set[int] = set()
        self._is_ended = self._is_running = False
        self._next_poll_s = 0.0
        self._waiting_since_s = time.monotonic()
        self._logged_wait = ""

    def describe(self) -> str:
        return f"{self._master.describe()}, in persistent ranks"

    def start(self, spec: TrialSpec) -> dict[str, Any]:
        """Register a trial, whose result ``poll`` returns; submit the search if needed."""
        if not self.adopt(spec, {}):
            self._submit()
        self._awaited.add(spec.trial_id)
        assert self._experiment is not None
        return {"experiment_id": self._experiment.id}

    def adopt(self, spec: TrialSpec, handle: Mapping[str, Any]) -> bool:
        del handle
        if self._experiment is None:
            self._find()
        if self._experiment is None:
            return False
        if self._is_ended and spec.trial_id not in self._events("result") and self._final_event() is None:
            return False
        self._awaited.add(spec.trial_id)
        return True

    def poll(self) -> list[Ended]:
        self._read_events()
        submitted, results = self._events("submitted"), self._events("result")
        ended = []
        for trial_id in sorted(self._awaited & results.keys()):
            self._awaited.remove(trial_id)
            event = results[trial_id]
            candidate = submitted.get(trial_id, {}).get("candidate")
            ended.append(Ended(trial_id, outcome_from_json(event), event.get("seconds"), candidate))
        if self._awaited and not ended:
            if (final := self._final_event()) is not None:
                raise SearchEndedError(final)
            if self._is_ended:
                self._restart()
        self._log_slots()
        return ended

    def running_s(self, trial_id: int) -> float:
        """Return 0, because the search in the trial enforces the trials' time limits."""
        del trial_id
        return 0.0

    def kill(self, trial_id: int) -> None:
        self._awaited.discard(trial_id)

    def publish(self, report: Callable[[], Mapping[str, Any]]) -> bool:
        """Return True without publishing: the search in the trial publishes its report."""
        del report
        return True

    def finish(self, results: Mapping[str, str]) -> None:
        """Wait for the trial to store its results; else store ``results`` (name -> text)."""
        if self._experiment is None:
            self._find()
        if not self._wait(_FINISH_TIMEOUT_S, lambda: bool(self._finished_events())):
            self.close()
            self._master.finish(results)
        elif self._experiment is not None:
            self._wait(_STORE_TIMEOUT_S, lambda: self._is_ended)

    def close(self) -> None:
        """Kill the experiment, unless it has ended."""
        if self._experiment is not None and not self._is_ended:
            self._master.kill_experiment(self._experiment)
        self._experiment = None

    # ---- machinery -------------------------------------------------------------------------------

    def _wait(self, timeout_s: float, condition: Callable[[], bool]) -> bool:
        give_up_at_s = time.monotonic() + timeout_s
        while not (is_met := condition()) and time.monotonic() < give_up_at_s:
            self._read_events()
            time.sleep(0.1)
        return is_met

    def _find(self) -> None:
        self._experiment = self._master.retry_until_available(lambda: self._master.find(self._spec.label))
        if self._experiment is not None:
            self._master.retry_until_available(self._experiment.reload)
            self._read_events()

    def _submit(self) -> None:
        events = self._journal()
        self._rows.clear()
        self._is_ended = False
        try:
            self._experiment = self._master.create(self._spec.config, self._spec.label, self._files(events))
        except errors.BadRequestException as error:
            raise DstrialError(
                f"the master refuses the experiment of the search ({error}); expected it to run one. Correct what it names, "
                "and repeat the command."
            ) from error
        logger.info("experiment %d searches", self._experiment.id)

    def _restart(self) -> None:
        """Submit the search again if its trial ran out of memory or budget, else raise.

        The search in the trial counts how often each configuration killed it, so ``max_restarts`` need not cover that.
        """
        assert self._experiment is not None
        if self._finished_events():  # with a smaller budget than that of this command
            self._submit()
            return
        lines: list[str] = []
        with self._master.tolerate_outage():
            lines = last_lines(self._experiment.list_trials())
        state = self._experiment.state
        # Lines with the mark come from ranks; the failure of a rank does not end the search.
        failure = failure_from_log([line for line in lines if FAILURE_MARK not in line])
        is_killed = state is ExperimentState.ERROR and failure.kind is FailureKind.HOST_OOM
        if is_killed and self._events("submitted"):
            logger.warning("experiment %d ran out of memory; another goes on", self._experiment.id)
            self._submit()
            return
        output = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        raise SearchError(
            f"the search has ended before it was finished (experiment {self._experiment.id} is "
            f"{state.name.lower() if state else 'gone'}: {output[-300:]}); expected its trial to go on until then. Look at "
            "the trial's log; the same command goes on with the search in another trial."
        )

    def _journal(self) -> list[dict[str, Any]]:
        """Return the recorded events, with the attempts that the last experiment counted.

        An attempt is a start of a trial's measurement. A canceled experiment was not killed by a configuration, so
        :meth:`_find` ignores it.
        """
        attempts: dict[int, dict[str, Any]] = {}
        for _, row in sorted(self._rows.items()):
            if row["event"] == "submitted" and "attempt" in row["handle"]:
                attempts[row["trial_id"]] = {"attempt": row["handle"]["attempt"]}
            elif row["event"] in ("interrupted", "finished"):
                attempts.clear()
        events = []
        for event in self._record.events():
            if event["event"] == "submitted":
                event = {**event, "handle": {**event["handle"], **attempts.get(event["trial_id"], {})}}
            events.append(event)
        return events

    def _files(self, events: list[dict[str, Any]]) -> dict[str, str]:
        flags, written = self._settings.flags, self._settings.written
        # The master stores contexts unchanged, so the trial gets secrets only through its own config.
        private = {str(secret.path[0]) for secret in secrets_in(written, SecretNames())}
        # The trial does not have the files of this command line.
        changed: dict[str, Any] = {"include": [], "sample_batch": None, "local": True}
        search = {
            "search_id": self._record.search_id,
            "num_parallel": self._settings.options.num_parallel,
            "flags": {**dataclasses.asdict(flags), **changed, "given": sorted(flags.given)},
            "space": None if flags.space is None else Path(flags.space).read_text(encoding="utf-8"),
            "experiment": {name: value for name, value in written.items() if name not in private},
            "private": sorted(private),
            "events": events,
        }
        return {SEARCH_FILE: json.dumps(search)}

    def _events(self, kind: str) -> dict[int, dict[str, Any]]:
        """Return trial id -> event of this kind that the search has reported."""
        return {row["trial_id"]: row for _, row in sorted(self._rows.items()) if row["event"] == kind}

    def _finished_events(self) -> list[dict[str, Any]]:
        return [row for _, row in sorted(self._rows.items()) if row["event"] == "finished"]

    def _final_event(self) -> dict[str, Any] | None:
        """Return the ``finished`` event of the search in the trial; None if there is none.

        An end for lack of time is ignored if this command's time budget is larger.
        """
        budget_s = self._settings.flags.budget
        return next((row for row in self._finished_events() if is_final(row, budget_s)), None)

    def _read_events(self) -> None:
        """Read the experiment's state and events, at most twice a second.

        The state is read first, so that no event of an ended trial is missed.
        """
        experiment = self._experiment
        if experiment is None or self._is_ended or time.monotonic() < self._next_poll_s:
            return
        with self._master.tolerate_outage():
            experiment.reload()
            is_ended = experiment.state in _ENDED_STATES
            trials = experiment.list_trials()
            self._is_running = is_running(trials)
            for row in trials[0].iter_metrics(EVENTS_GROUP) if trials else ():
                if row.steps_completed not in self._rows:
                    self._rows[row.steps_completed] = json.loads(row.metrics["event"])
            self._is_ended = is_ended
        self._next_poll_s = time.monotonic() + _POLL_PERIOD_S

    def _log_slots(self) -> None:
        if self._experiment is None or self._is_running or self._is_ended:
            if self._logged_wait:
                logger.warning("the search has its slots")
            self._logged_wait, self._waiting_since_s = "", time.monotonic()
            return
        wait = why_waiting(self._experiment, self._settings.num_slots)
        is_long = bool(self._rows) or time.monotonic() - self._waiting_since_s > _LOG_WAIT_AFTER_S
        if is_long and self._logged_wait != wait:
            logger.warning("the search waits for slots: %s", wait)
            self._logged_wait = wait
