"""Have a search run inside its trial on a master, and follow its journal.

The trial is given the command line, the experiment and the journal so far as files of its context. It reports every further
event as a row of metrics (group ``dsat``), whose number of steps is the event's place in the journal.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from determined.common.api import errors
from determined.experimental.client import Experiment, ExperimentState

from dstrial.config.secrets import SecretNames, secrets_in
from dstrial.dsat.backends.cluster import ClusterBackend
from dstrial.dsat.backends.experiments import RUNS, last_lines, why_waiting
from dstrial.dsat.backends.trial_spec import search_config
from dstrial.dsat.config import SearchConfig
from dstrial.dsat.core.journal import EVENTS_GROUP, SEARCH_FILE, SearchRecord
from dstrial.errors import DstrialError

logger = logging.getLogger("dstrial.dsat")

_POLL_PERIOD_S = 0.5
_LAST_EVENTS_S = 10.0  # for the last event of a search that has ended
_WAIT_S = 60.0  # for the trial to keep the files of a search that is over
_LOG_WAIT_AFTER_S = 15.0
_ENDED = (
    ExperimentState.CANCELED,
    ExperimentState.DELETED,
    ExperimentState.COMPLETED,
    ExperimentState.ERROR,
)


class SearchOnMaster:
    """A search that runs in the trial of one experiment."""

    num_parallel = 1

    def __init__(self, settings: SearchConfig, master: ClusterBackend, record: SearchRecord) -> None:
        self._settings = settings
        self._master = master
        self._record = record
        self._spec = search_config(settings, record.search_id)
        self._experiment: Experiment | None = None
        self._rows: dict[int, dict[str, Any]] = {}
        self._is_ended = self._is_running = False
        self._next_poll_s = 0.0
        self._waiting_since_s = time.monotonic()
        self._logged_wait = ""

    def describe(self) -> str:
        return f"{self._master.describe()}, in persistent ranks"

    def begin(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Find the experiment of this search, if it lives or has news, or submit one."""
        self._find()
        if self._experiment is not None and (not self._is_ended or self.new_events(len(events))):
            return
        if self._experiment is None:
            # One that was canceled in order has not killed the search.
            events = [_without_attempt(event) for event in events]
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

    def new_events(self, num_known: int) -> list[dict[str, Any]]:
        self._poll()
        found: list[dict[str, Any]] = []
        while (row := self._rows.get(num_known + len(found) + 1)) is not None:
            found.append(row)
        self._note_slots()
        return found

    def why_ended(self) -> str:
        if self._experiment is None or not self._is_ended:
            return ""
        lines: list[str] = []
        with self._master.tolerate_outage():
            lines = last_lines(self._experiment.list_trials())
        said = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        state = self._experiment.state
        return f"experiment {self._experiment.id} is {state.name.lower() if state else 'gone'}: {said[-300:]}"

    def finish(self, results: Mapping[str, str]) -> None:
        """Wait until the trial has kept the files; keep those of one that does not end."""
        if self._experiment is None:
            self._find()
        give_up_at_s = time.monotonic() + _LAST_EVENTS_S
        while not (is_finished := self._has_finished()) and time.monotonic() < give_up_at_s:
            self._poll()
            time.sleep(0.1)
        if not is_finished:
            self.close()
            self._master.finish(results)
            return
        give_up_at_s = time.monotonic() + _WAIT_S
        while self._experiment is not None and not self._is_ended and time.monotonic() < give_up_at_s:
            self._poll()
            time.sleep(0.1)

    def _has_finished(self) -> bool:
        return any(row["event"] == "finished" for row in self._rows.values())

    def close(self) -> None:
        """End the experiment, if it is not over."""
        if self._experiment is not None and not self._is_ended:
            self._master.kill_experiment(self._experiment)
        self._experiment = None

    # ---- machinery -------------------------------------------------------------------------------

    def _find(self) -> None:
        self._experiment = self._master.retry_until_available(lambda: self._master.find(self._spec.label))
        if self._experiment is not None:
            self._master.retry_until_available(self._experiment.reload)
            self._poll()

    def _files(self, events: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        flags, written = self._settings.flags, self._settings.written
        # The trial is told secrets by its own config only: a context is kept as it is.
        private = {str(secret.path[0]) for secret in secrets_in(written, SecretNames())}
        here: dict[str, Any] = {
            "include": [],
            "sample_batch": None,
            "local": True,
        }  # there are no files of the command
        search = {
            "search_id": self._record.search_id,
            "num_parallel": self._settings.options.num_parallel,
            "flags": {**dataclasses.asdict(flags), **here, "given": sorted(flags.given)},
            "space": None if flags.space is None else Path(flags.space).read_text(encoding="utf-8"),
            "experiment": {name: value for name, value in written.items() if name not in private},
            "private": sorted(private),
            "events": list(events),
        }
        return {SEARCH_FILE: json.dumps(search)}

    def _poll(self) -> None:
        """Ask for the state, then for events, at most twice a second; none is missed."""
        experiment = self._experiment
        if experiment is None or self._is_ended or time.monotonic() < self._next_poll_s:
            return
        with self._master.tolerate_outage():
            experiment.reload()
            is_ended = experiment.state in _ENDED
            trials = experiment.list_trials()
            self._is_running = bool(trials) and trials[0].state.value in RUNS
            for row in trials[0].iter_metrics(EVENTS_GROUP) if trials else ():
                if row.steps_completed not in self._rows:
                    event = json.loads(row.metrics["event"])
                    if event["event"] == "submitted":
                        event["handle"]["experiment_id"] = experiment.id
                    self._rows[row.steps_completed] = event
            self._is_ended = is_ended
        self._next_poll_s = time.monotonic() + _POLL_PERIOD_S

    def _note_slots(self) -> None:
        """Log why the search does not go on while it has no slots."""
        if self._experiment is None or self._is_running or self._is_ended:
            if self._logged_wait:
                logger.warning("the search has its slots")
            self._logged_wait, self._waiting_since_s = "", time.monotonic()
            return
        why = why_waiting(self._experiment, self._settings.num_slots)
        is_long = bool(self._rows) or time.monotonic() - self._waiting_since_s > _LOG_WAIT_AFTER_S
        if is_long and self._logged_wait != why:
            logger.warning("the search waits for slots: %s", why)
            self._logged_wait = why


def _without_attempt(event: Mapping[str, Any]) -> Mapping[str, Any]:
    if event["event"] != "submitted":
        return event
    handle = {name: value for name, value in event["handle"].items() if name != "attempt"}
    return {**event, "handle": handle}
