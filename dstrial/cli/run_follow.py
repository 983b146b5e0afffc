"""Follow an experiment of the master until it settles: log, state and signals."""

from __future__ import annotations

import dataclasses
import re
import signal
import time
from collections.abc import Callable

from dstrial.cli.run_submission import Master
from dstrial.cli.streams import det_for
from dstrial.errors import MasterError, RequestError
from dstrial.master.state_directory import StateDirectory
from dstrial.master.store.views import observe
from dstrial.master.store.views.observe import ExperimentView, LogRow
from dstrial.process_state import is_stopped

_POLL_PERIOD_S = 0.1
_LOOK_PERIOD_S = 0.3
_GONE_AFTER_S = 10.0
_STOPPED_AFTER_S = 10.0  # how long a master is stopped before that is told
_STALLS_PERIOD_S = 1.0
_REPORT_BEGINS = re.compile(r"rank \d+ failed first \(")


@dataclasses.dataclass(frozen=True, slots=True)
class FollowResult:
    """How following ended."""

    view: ExperimentView | None  # the last one; None if the experiment was deleted
    stopped_by: str | None  # the signal for which the experiment was paused
    is_detached: bool = False  # a second signal ended the following
    is_master_gone: bool = False


class LogTail:
    """Hands new lines of a trial's log to a display.

    The launcher's last lines on the failing rank, and the master's conclusion, are left out at the end: ``dstrial run`` prints
    them last. Where the trial is restarted they are shown. ``after`` has the last known line of each trial.
    """

    def __init__(
        self, master: Master, show: Callable[[int | None, str, str], None], after: dict[int, int]
    ) -> None:
        self._master = master
        self._show = show
        self._after = dict(after)
        self._report: list[str] = []
        self.has_task_lines = False

    def poll(self, trial_id: int) -> None:
        while rows := observe.new_log_rows(self._master.state, trial_id, self._after.get(trial_id, 0)):
            self._after[trial_id] = rows[-1].id
            for row in rows:
                self._show_row(row)

    def _show_row(self, row: LogRow) -> None:
        if row.source != "task":
            if row.level == "WARNING":
                for line in self._report:
                    self._show(None, "stderr", line)
                self._report = []
            if row.level == "WARNING" or (row.level == "ERROR" and not self._report):
                self._show(None, "stderr", row.text)
            elif row.text.startswith("waiting for "):
                self._show(None, "stdout", row.text)
            return
        self.has_task_lines = True
        if row.rank is None and row.stdtype == "stderr":
            if self._report or _REPORT_BEGINS.match(row.text):
                self._report.append(row.text)
                return
        elif row.rank is not None:
            self._report = []
        self._show(row.rank, row.stdtype or "stdout", row.text)


def follow(
    master: Master,
    experiment_id: int,
    signals: list[signal.Signals],
    *,
    on_look: Callable[[ExperimentView], None],
    on_stop: Callable[[signal.Signals], None],
    say: Callable[[str], None],
) -> FollowResult:
    """Wait until an experiment settles; pause it at a signal, leave at a later SIGINT.

    ``on_look`` is called about ten times a second, ``on_stop`` with the first signal once the master has been asked to pause.
    """
    stopped = StoppedMaster(master.state, say)
    asked: signal.Signals | None = None
    is_asked = False
    next_look_at_s = 0.0
    gone_since_s: float | None = None
    view = observe.experiment_view(master.state, experiment_id)
    while True:
        if signals and asked is None:
            asked = signals[0]
            if stopped.is_stopped():
                say(
                    "the master is stopped and cannot be asked to pause before it goes on (Ctrl-C again to leave that to it)"
                )
        # A stopped master would take the question and answer nothing.
        if asked is not None and not is_asked and not stopped.is_stopped():
            is_asked = _pause(master, experiment_id)
            if is_asked:
                on_stop(asked)
        if asked is not None and signal.SIGINT in signals[1:]:
            view = observe.experiment_view(master.state, experiment_id)
            return FollowResult(view, asked.name, is_detached=True)
        if time.monotonic() >= next_look_at_s:
            next_look_at_s = time.monotonic() + _LOOK_PERIOD_S
            view = observe.experiment_view(master.state, experiment_id)
            stopped.poll()
            is_gone = master.state.running() is None
            gone_since_s = (gone_since_s or time.monotonic()) if is_gone else None
        if view is None:
            return FollowResult(None, asked.name if asked else None)
        on_look(view)
        if view.is_settled:
            return FollowResult(view, asked.name if asked else None)
        # A run's own master is not started again, and ends by the signals that this process gets.
        limit_s = 0.0 if master.is_own else _GONE_AFTER_S
        if gone_since_s is not None and time.monotonic() - gone_since_s > limit_s:
            return FollowResult(view, asked.name if asked else None, is_master_gone=True)
        time.sleep(_POLL_PERIOD_S)


def kill_command(master: Master, experiment_id: int) -> str:
    """Return the command that frees an experiment's slots at once."""
    return f"{det_for(master.record.address)} experiment kill {experiment_id}"


def _pause(master: Master, experiment_id: int) -> bool:
    """Request a pause; return False if the master cannot be asked now."""
    try:
        master.client.post(f"/api/v1/experiments/{experiment_id}/pause")
    except RequestError:
        return True  # it has ended meanwhile
    except MasterError:
        return False
    return True


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

    def poll(self) -> None:
        record = self._state.running()
        if record is None or not is_stopped(record.pid):
            if self._is_told and record is not None:
                self._say("stalled: no longer, the master goes on")
            self._since_s, self._is_told = None, False
            return
        now_s = self._clock()
        if self._since_s is None:
            self._since_s = now_s
        if not self._is_told and now_s - self._since_s >= _STOPPED_AFTER_S:
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

    def poll(self) -> None:
        """Poll about once a second."""
        if self._clock() < self._next_s:
            return
        self._next_s = self._clock() + _STALLS_PERIOD_S
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
