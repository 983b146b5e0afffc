"""Follow an experiment until it has ended or paused; judge how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
import time
from collections.abc import Callable, Mapping

from dstrial.cli.submit import Master
from dstrial.errors import DstrialError, MasterError, RequestError
from dstrial.launch.failures import LaunchOutcome
from dstrial.local.json_files import read_json
from dstrial.local.run_directory import RunDirectory, RunState
from dstrial.master.store.views import observe
from dstrial.master.store.views.observe import ExperimentView, LogRow

_POLL_PERIOD_S = 0.3  # between polls of signals, logs and the experiment's state
_GONE_AFTER_S = 10.0  # a master that was ended may be started again within this time
_FAILURE_HEADLINE = re.compile(r"rank \d+ failed first \(")  # first line of the launcher's report
_BY_SIGTERM = 128 + signal.SIGTERM


@dataclasses.dataclass(frozen=True, slots=True)
class FollowResult:
    """Why ``follow`` returned, and the experiment's state at that time."""

    view: ExperimentView | None  # None if the experiment was deleted
    stopped_by: str | None  # name of the signal for which the experiment was paused
    is_detached: bool = False  # a second Ctrl-C left the experiment to the master
    is_master_gone: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """How an attempt at a run (from start or resume to end) has ended."""

    state: RunState
    exit_code: int  # of ``dstrial run``
    reason: str | None = None  # why the attempt did not complete, or was stopped


class LogTail:
    """Passes new lines of the trials' logs to ``show(text, rank, stream)``.

    The launcher's report on the first failed rank and the master's error line are withheld, because the summary repeats them.
    If the master restarts the trial, the withheld report is shown. ``after`` maps a trial's id to the id of the last log line
    already shown.
    """

    def __init__(
        self, master: Master, show: Callable[[str, int | None, str], None], after: dict[int, int]
    ) -> None:
        self._master = master
        self._show = show
        self._after = dict(after)
        self._withheld_report: list[str] = []

    def poll(self, trial_id: int) -> None:
        while rows := observe.new_log_rows(self._master.state, trial_id, self._after.get(trial_id, 0)):
            self._after[trial_id] = rows[-1].id
            for row in rows:
                self._show_row(row)

    def _show_row(self, row: LogRow) -> None:
        if row.source != "task":
            if row.level == "WARNING":
                for line in self._withheld_report:
                    self._show(line, None, "stderr")
                self._withheld_report = []
            if row.level == "WARNING" or (row.level == "ERROR" and not self._withheld_report):
                self._show(row.text, None, "stderr")
            elif row.text.startswith("waiting for "):
                self._show(row.text, None, "stdout")
            return
        if row.rank is None and row.stdtype == "stderr":
            if self._withheld_report or _FAILURE_HEADLINE.match(row.text):
                self._withheld_report.append(row.text)
                return
        elif row.rank is not None:
            self._withheld_report = []
        self._show(row.text, row.rank, row.stdtype or "stdout")


def follow(
    master: Master,
    experiment_id: int,
    signals: list[signal.Signals],
    *,
    on_poll: Callable[[ExperimentView], None],
    on_stop: Callable[[], None],
) -> FollowResult:
    """Wait until an experiment has ended or is paused, and return why.

    The caller's signal handler appends to ``signals``: the first signal pauses the experiment, a second SIGINT ends only this
    call. ``on_poll`` is called about three times a second, ``on_stop`` after the pause request.
    """
    is_pausing = False
    gone_since_s: float | None = None
    # A run's own master is not restarted. It receives the same signals as this process, and exits.
    gone_after_s = 0.0 if master.is_own else _GONE_AFTER_S
    while True:
        now_s = time.monotonic()
        if signals and not is_pausing:
            is_pausing = _pause(master, experiment_id)
            if is_pausing:
                on_stop()
        stopped_by = signals[0].name if signals else None
        is_detached = signal.SIGINT in signals[1:]
        view = observe.experiment_view(master.state, experiment_id)
        gone_since_s = (gone_since_s or now_s) if master.state.running() is None else None
        if is_detached:
            return FollowResult(view, stopped_by, is_detached=True)
        if view is None:
            return FollowResult(None, stopped_by)
        on_poll(view)
        if view.is_settled:
            return FollowResult(view, stopped_by)
        if gone_since_s is not None and now_s - gone_since_s > gone_after_s:
            return FollowResult(view, stopped_by, is_master_gone=True)
        time.sleep(_POLL_PERIOD_S)


def _pause(master: Master, experiment_id: int) -> bool:
    try:
        master.client.post(f"/api/v1/experiments/{experiment_id}/pause")
    except RequestError:
        return True  # the experiment has ended meanwhile
    except MasterError:
        return False
    return True


def outcome_of(run_directory: RunDirectory, followed: FollowResult) -> LaunchOutcome:
    """Return the outcome of a run's last attempt: exit codes and first failed rank.

    Source: files that the launchers wrote or, if there is no file, the exit code that the master recorded.
    """
    found = []
    with contextlib.suppress(DstrialError):
        files = [fields for path in run_directory.outcome_paths() if (fields := read_json(path))]
        found = [LaunchOutcome.from_json(fields) for fields in files]
    if found:
        # There is one launcher per host: take the host on which the first rank failed by itself.
        outcome = min(found, key=lambda one: (one.failed_s is None, one.is_consequence, one.failed_s))
    else:
        trials = () if followed.view is None else followed.view.trials
        exit_code = next((trial.exit_code for trial in trials if trial.exit_code is not None), 0)
        if followed.stopped_by is not None:
            exit_code = 0  # the pause ended the trial
        outcome = LaunchOutcome(exit_code, None, (exit_code,), None, ())
    return dataclasses.replace(outcome, stopped_by=followed.stopped_by)


def judge_experiment(followed: FollowResult, judged: Verdict, *, has_own_master: bool = False) -> Verdict:
    """Return how an attempt at a run ended, considering the experiment's state.

    ``judged`` is the verdict on the ranks or trials, from ``judge`` or ``judge_search``. It is returned unless one of these
    events overrides it: the experiment was deleted or cancelled or has failed, the master has ended, or the user has detached.
    ``has_own_master`` is true if the master serves only this run; the run then ends with the master.
    """
    view = followed.view
    if view is None:
        return Verdict(RunState.FAILED, 1, "the experiment was deleted")
    if has_own_master and followed.is_detached:
        return Verdict(RunState.STOPPED, 128 + signal.SIGINT, "ended at once")
    if has_own_master and followed.is_master_gone:
        # A signal that ends a Slurm job also reaches the run's own master, which stops the trial.
        return Verdict(RunState.FAILED, 1, "its master has ended") if followed.stopped_by is None else judged
    if followed.is_detached:
        saved = max((trial.batches_saved or 0 for trial in view.trials), default=0)
        what = f"batch {saved}" if saved else "nothing"
        reason = f"left to the master, which has saved {what} so far"
        return Verdict(RunState.STOPPED, 128 + signal.SIGINT, reason)
    if followed.is_master_gone:
        return Verdict(RunState.STOPPED, 1, "the master has ended")
    if view.state == "CANCELED":
        return Verdict(RunState.STOPPED, 1, "cancelled")
    if view.state == "ERROR" and judged.state is not RunState.FAILED:
        exit_code = next((trial.exit_code for trial in view.trials if trial.exit_code), 1)
        reasons = [trial.exit_reason for trial in view.trials if len(view.trials) == 1] + [view.end_reason]
        return Verdict(RunState.FAILED, exit_code, next(filter(None, reasons), "the trial failed"))
    return judged


def judge(outcome: LaunchOutcome, status: Mapping[str, object]) -> Verdict:
    """Return how a run's attempt ended, from the ranks' outcome and ``status.json``.

    A second Ctrl-C means STOPPED. A failed rank, or an ``early_exit`` in the status, means FAILED. A stop signal means STOPPED,
    unless training had completed before. Otherwise the attempt has completed, also if the trial itself requested the stop. Any
    other status that begins with ``stopped`` means STOPPED. The launcher reports an exit with 0 before the end of training as a
    failure.
    """
    text = str(status.get("status", ""))
    if outcome.ended_at_once:
        return Verdict(RunState.STOPPED, outcome.exit_code, "ended at once")
    if outcome.first_failure is not None:
        return Verdict(RunState.FAILED, outcome.exit_code or 1, outcome.first_failure.headline.rstrip(":"))
    if outcome.stopped_by is not None and text != "completed":
        exit_code = 128 + signal.Signals[outcome.stopped_by].value
        return Verdict(RunState.STOPPED, exit_code, outcome.stopped_by)
    # Training had ended, and the stop signal reached the ranks while they shut down.
    was_only_asked_to_stop = outcome.stopped_by is not None and set(outcome.exit_codes) <= {0, _BY_SIGTERM}
    if outcome.exit_code != 0 and not (text == "completed" and was_only_asked_to_stop):
        return Verdict(RunState.FAILED, outcome.exit_code, f"exit code {outcome.exit_code}")
    if status.get("early_exit") is not None:
        return Verdict(RunState.FAILED, 1, f"the trial gave up: {status['early_exit']}")
    if text == "stopped: requested":
        return Verdict(RunState.COMPLETED, 0, "the trial's own request")
    if text.startswith("stopped"):
        return Verdict(RunState.STOPPED, _BY_SIGTERM, text.partition(": ")[2] or text)
    return Verdict(RunState.COMPLETED, 0)


def judge_search(followed: FollowResult) -> Verdict:
    """Return how a search ended: COMPLETED if the experiment completed, else STOPPED.

    The verdict's ``reason`` is the signal that stopped the command (SIGINT, SIGTERM), else the experiment's state. Failures of
    trials are not considered; ``judge_experiment`` adds them.
    """
    state = "deleted" if followed.view is None else followed.view.state.lower()
    if state == "completed":
        return Verdict(RunState.COMPLETED, 0)
    if followed.stopped_by is not None:
        return Verdict(RunState.STOPPED, 128 + signal.Signals[followed.stopped_by], followed.stopped_by)
    return Verdict(RunState.STOPPED, 1, state)
