"""Tells of a stopped master and of stalled trials, which ``run`` waits for."""

from __future__ import annotations

import time
from collections.abc import Callable

from dstrial.cli.run_submission import Master
from dstrial.master.state_directory import StateDirectory
from dstrial.master.store.views import observe
from dstrial.process_state import is_stopped

STOPPED_AFTER_S = 10.0  # how long a master is stopped before that is told
_LOOK_PERIOD_S = 1.0


class StoppedMaster:
    """Tells of a master that a signal or a debugger holds; trials go on meanwhile."""

    def __init__(
        self, state: StateDirectory, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._state = state
        self._say = say
        self._clock = clock
        self._since_s: float | None = None
        self._is_told = False

    def is_stopped(self) -> bool:
        """Return whether requests to it would block."""
        record = self._state.running()
        return record is not None and is_stopped(record.pid)

    def look(self) -> None:
        record = self._state.running()
        if record is None or not is_stopped(record.pid):
            if self._is_told and record is not None:
                self._say("stalled: no longer, the master goes on")
            self._since_s, self._is_told = None, False
            return
        now_s = self._clock()
        if self._since_s is None:
            self._since_s = now_s
        if not self._is_told and now_s - self._since_s >= STOPPED_AFTER_S:
            self._is_told = True
            self._say(
                f"stalled: the master, process {record.pid}, is stopped (SIGSTOP), and nothing of what runs arrives. "
                f"Let it go on with `kill -CONT {record.pid}`."
            )


class StalledTrials:
    """Tells once which trials of an experiment stall, and when they go on."""

    def __init__(
        self,
        master: Master,
        experiment_id: int,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = master.state
        self._experiment_id = experiment_id
        self._say = say
        self._clock = clock
        self._next_s = 0.0
        self._told: dict[int, str] = {}

    def look(self) -> None:
        """Poll about once a second."""
        if self._clock() < self._next_s:
            return
        self._next_s = self._clock() + _LOOK_PERIOD_S
        found = {
            one.trial_id: one.text
            for one in observe.stalled(self._state)
            if one.experiment_id == self._experiment_id
        }
        for trial_id, text in found.items():
            if self._told.get(trial_id) != text:
                self._say(f"trial {trial_id}: stalled: {text}")
        for trial_id in self._told.keys() - found.keys():
            self._say(f"trial {trial_id}: stalled: no longer")
        self._told = found
