"""Run a whole search inside one trial on a master, and copy the search's events.

The trial's context directory has a file with the command line, the experiment and the events so far. The trial reports further
events as rows of metrics (group ``dsat``). The submitting command appends these events to its own file ``events.jsonl``.
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
from dstrial.dsat.backends.cluster import ClusterBackend, SlotWaits, last_lines
from dstrial.dsat.backends.trial_spec import search_config
from dstrial.dsat.config import SearchConfig
from dstrial.dsat.core.journal import EVENTS_GROUP, SEARCH_FILE, SearchRecord
from dstrial.errors import DstrialError, SearchError

logger = logging.getLogger("dstrial.dsat")

_POLL_PERIOD_S = 0.5  # between two requests for new events
_FINISH_TIMEOUT_S = 20.0  # for the trial's last event: the trial's budget ends after the command's
_STORE_TIMEOUT_S = 60.0  # for the trial to store its result files in a checkpoint
# States of an experiment whose trial runs no more.
_ENDED_STATES = (
    ExperimentState.CANCELED,
    ExperimentState.DELETED,
    ExperimentState.COMPLETED,
    ExperimentState.ERROR,
)


class SearchOnMaster:
    """A :class:`RemoteSearch` that runs in the only trial of one experiment."""

    num_parallel = 1

    def __init__(self, settings: SearchConfig, master: ClusterBackend, record: SearchRecord) -> None:
        self._settings = settings
        self._master = master
        self._record = record
        self._spec = search_config(settings, record.search_id)
        self._experiment: Experiment | None = None
        # Position, in the trial's journal, of the last event that was read. A resubmitted search continues the numbering.
        self._position = max((event.get("position", 0) for event in record.events()), default=0)
        self._has_finished = False  # whether the trial has reported the end of its search
        self._had_ended = False  # whether the experiment ended before this command found it
        self._is_ended = False
        self._next_poll_s = 0.0
        self._waits = SlotWaits()

    def describe(self) -> str:
        return f"{self._master.describe()}, all in one trial"

    def events(self) -> list[dict[str, Any]]:
        """Return the search's events since the last call; submit the search if needed.

        Before the next call, the caller must append these events to the constructor's ``record``. A search that is submitted
        again resumes from the events in ``record``.
        """
        if self._experiment is None and not self._find():
            if self._position:
                # The earlier experiment was canceled or deleted: that killed its ranks, not a configuration.
                self._record.append("interrupted", {"signal": ExperimentState.CANCELED.name})
            self._submit()
        events = self._read_events()
        if not events and self._is_ended:
            self._restart()
        return events

    def publish(self, report: Callable[[], Mapping[str, Any]]) -> bool:
        """Do nothing and return True: the trial publishes the report itself."""
        del report
        return True

    def finish(self, results: Mapping[str, str]) -> None:
        """Wait until the trial has ended and stored its results in a checkpoint.

        If the trial does not report the end of the search within 20 s, write ``results`` into the experiment's notes. Otherwise
        wait at most 60 s more.
        """
        if self._experiment is None:
            self._find()
        if self._wait(_FINISH_TIMEOUT_S, lambda: self._has_finished):
            self._wait(_STORE_TIMEOUT_S, lambda: self._is_ended)
        elif self._experiment is not None:
            self._master.show_results(self._experiment, results)

    def close(self) -> None:
        """Kill the experiment, unless it has ended."""
        if self._experiment is not None and not self._is_ended:
            self._master.kill_experiment(self._experiment)
        self._experiment = None

    # ---- machinery -------------------------------------------------------------------------------

    def _wait(self, timeout_s: float, condition: Callable[[], bool]) -> bool:
        """Poll until ``condition`` returns true; return False after ``timeout_s``.

        Events that arrive meanwhile are dropped.
        """
        give_up_at_s = time.monotonic() + timeout_s
        while not (is_met := condition()) and time.monotonic() < give_up_at_s:
            self._read_events()
            time.sleep(0.1)
        return is_met

    def _find(self) -> bool:
        found = self._experiment = self._master.retry_until_available(
            lambda: self._master.find(self._spec.label)
        )
        self._had_ended = found is not None and found.state in _ENDED_STATES
        return found is not None

    def _submit(self) -> None:
        self._has_finished = self._had_ended = self._is_ended = False
        try:
            self._experiment = self._master.create(self._spec.config, self._spec.label, self._files())
        except errors.BadRequestException as error:
            raise DstrialError(
                f"the master refuses the experiment of the search ({error}); expected it to run one. Correct what it names, "
                "and repeat the command."
            ) from error
        logger.info("experiment %d searches", self._experiment.id)

    def _restart(self) -> None:
        """Submit the search again after its experiment has ended.

        This is done if the experiment ended before this command found it, or finished with a smaller time budget.

        Raises:
            SearchError: the experiment ended unexpectedly while this command followed it.
        """
        assert self._experiment is not None
        if self._has_finished or self._had_ended:  # finished: with a smaller budget than that of this command
            self._submit()
            return
        lines: list[str] = []
        with self._master.tolerate_outage():
            lines = last_lines(self._experiment.list_trials())
        state = self._experiment.state
        output = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        raise SearchError(
            f"the search has ended before it was finished (experiment {self._experiment.id} is "
            f"{state.name.lower() if state else 'gone'}: {output[-300:]}); expected its trial to go on until then. Look at "
            "the trial's log; the same command goes on with the search in another trial."
        )

    def _files(self) -> dict[str, str]:
        flags, written = self._settings.flags, self._settings.written
        # The master stores contexts unchanged, so the trial gets secrets only through its own config.
        private = {str(secret.path[0]) for secret in secrets_in(written, SecretNames())}
        # The trial does not have the files of this command line.
        changed: dict[str, Any] = {"include": [], "sample_batch": None, "local": True}
        search = {
            "search_id": self._record.search_id,
            "num_parallel": self._settings.options.num_parallel,
            "flags": {**dataclasses.asdict(flags), **changed},
            "space": None if flags.space is None else Path(flags.space).read_text(encoding="utf-8"),
            "experiment": {name: value for name, value in written.items() if name not in private},
            "private": sorted(private),
            "events": self._record.events(),
        }
        return {SEARCH_FILE: json.dumps(search)}

    def _read_events(self) -> list[dict[str, Any]]:
        """Return new events of the trial; [] within half a second of the last request."""
        # The experiment's state is read before the events, so that no event of an ended trial is missed.
        experiment, found = self._experiment, []
        if experiment is None or self._is_ended or time.monotonic() < self._next_poll_s:
            return []
        with self._master.tolerate_outage():
            experiment.reload()
            is_ended = experiment.state in _ENDED_STATES
            trials = experiment.list_trials()
            self._waits.log(experiment, trials, self._settings.num_slots)
            rows = list(trials[0].iter_metrics(EVENTS_GROUP)) if trials else []
            for row in sorted(rows, key=lambda row: int(row.steps_completed)):
                event = json.loads(row.metrics["event"])
                self._has_finished |= event["event"] == "finished"
                if row.steps_completed > self._position:
                    self._position = int(row.steps_completed)
                    found.append({**event, "position": self._position})
            self._is_ended = is_ended
        self._next_poll_s = time.monotonic() + _POLL_PERIOD_S
        return found
