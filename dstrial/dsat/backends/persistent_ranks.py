"""Measure one configuration after the other in the same, persistent ranks.

The ranks of one launcher measure until a rank fails, hangs or leaks memory; the next task then starts new ranks. The search
appends tasks to a file that rank 0 reads, and reads the results that rank 0 appends to another file. Ranks end with the search.
This module works on a user's machine and in a trial on a master.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrial.dsat.backends.base import Ended
from dstrial.dsat.backends.processes import LauncherProcess, found, launch, log_lines
from dstrial.dsat.backends.trial_spec import TrialSpec
from dstrial.dsat.config import SearchConfig
from dstrial.dsat.core.journal import RESULTS_NAME, TASKS_NAME, SearchRecord
from dstrial.dsat.core.outcome import (
    FAILURE_MARK,
    Failure,
    FailureKind,
    Measured,
    Outcome,
    failure_from_log,
    outcome_from_json,
    score,
)
from dstrial.local.json_files import append_json_line, read_json_lines
from dstrial.local.run_directory import RUNS_DIR_VARIABLE
from dstrial.local.script_variables import BENCHMARK_KEY, SETTINGS_KEY
from dstrial.process_state import start_ticks

logger = logging.getLogger("dstrial.dsat")

_MAX_ATTEMPTS = 2
_NEAR = 0.10  # a result worse than the incumbent by at most this fraction has the incumbent measured again
_RATES = ("throughput", "bare_throughput", "FLOPS_per_gpu", "hardware_FLOPS_per_gpu")
_TIMES = ("latency", "latency_low", "latency_high", "forward", "backward", "step")


@dataclasses.dataclass(slots=True)
class _Task:
    spec: TrialSpec
    hparams: dict[str, Any]
    number: int = 0  # position among the tasks of the same ranks; task 1 runs in fresh ranks
    began_s: float = 0.0
    is_retry: bool = False
    num_log_lines_before: int = 0
    spent_s: float = 0.0  # in earlier tasks of the same trial
    challenger: Measured | None = None  # the trial's result, if this task measures the incumbent again


class PersistentRanks:
    """Backend that runs all trials of one search in the same ranks.

    ``words`` is the command line of the launcher. ``publish`` implements ``Backend.publish``; the default does nothing.
    """

    num_parallel = 1
    is_sequential = True

    def __init__(
        self,
        settings: SearchConfig,
        record: SearchRecord,
        words: Sequence[str],
        publish: Callable[[Callable[[], Mapping[str, Any]]], bool] = lambda _report: True,
    ) -> None:
        self._settings = settings
        self._directory = record.ranks_path
        self._words = words
        self.publish = publish
        self._waiting: deque[_Task] = deque()
        self._task: _Task | None = None
        self._ended: list[Ended] = []
        self._attempts: dict[int, int] = {}
        self._launcher: LauncherProcess | None = None
        self._num_tasks = 0  # started in the current ranks
        self._number = max((int(path.name) for path in self._directory.glob("[0-9]*")), default=0)
        self._earlier_results = self._end_earlier_ranks()
        self._incumbent = Incumbent()

    def describe(self) -> str:
        return f"this machine, {self._settings.num_slots} persistent rank(s)"

    def start(self, spec: TrialSpec) -> dict[str, Any]:
        """Queue a trial, which the next :meth:`poll` begins; return its attempt number."""
        self._waiting.append(_Task(spec, spec.hparams))
        return {"attempt": self._attempts.get(spec.trial_id, 0) + 1}

    def adopt(self, spec: TrialSpec, handle: Mapping[str, Any]) -> bool:
        """Reuse an earlier result; return False if the trial must be measured again.

        A trial fails if the search was killed twice while it measured the trial.
        """
        row = self._earlier_results.get(spec.trial_id)
        attempts = int(handle.get("attempt") or 0)
        if row is not None:
            outcome = outcome_from_json(row)
            is_full = isinstance(outcome, Failure) and outcome.kind is FailureKind.NO_ROOM
            # An out-of-memory error counts in fresh ranks only, a full disk never.
            if is_full or (_is_out_of_memory(outcome) and row["number"] > 1):
                self._attempts[spec.trial_id] = 0
                return False
            self._ended.append(Ended(spec.trial_id, outcome, row["seconds"]))
        elif attempts >= _MAX_ATTEMPTS:
            message = f"its search was killed {attempts} times, as when the machine's memory runs out"
            self._ended.append(Ended(spec.trial_id, Failure(FailureKind.HOST_OOM, message)))
        else:
            self._attempts[spec.trial_id] = attempts
            return False
        return True

    def poll(self) -> list[Ended]:
        if self._task is None and self._waiting:
            task = self._waiting.popleft()
            if task.spec.best is not None:
                hparams, metrics = task.spec.best
                self._incumbent.consider(hparams, Measured(metrics), self._settings.flags.metric)
            self._begin(task)
        if self._task is not None:
            self._poll_task(self._task)
        ended, self._ended = self._ended, []
        return ended

    def running_s(self, trial_id: int) -> float:
        task = self._task
        return time.time() - task.began_s if task is not None and task.spec.trial_id == trial_id else 0.0

    def kill(self, trial_id: int) -> None:
        """Kill a trial and its ranks; keep the trial's result if it was already measured.

        After a good result, the ranks still measure the best configuration again, which may hang.
        """
        task = self._task
        if task is not None and task.spec.trial_id == trial_id:
            self._task = None
            self._end_ranks()
            if task.challenger is not None:
                self._take(task, Failure(FailureKind.TIMEOUT, "the best one hung"))
        self._waiting = deque(task for task in self._waiting if task.spec.trial_id != trial_id)

    def finish(self, results: Mapping[str, str]) -> None:
        del results
        self.close()

    def close(self) -> None:
        self._task = None
        self._waiting.clear()
        self._end_ranks()

    # ---- machinery -------------------------------------------------------------------------------

    def _begin(self, task: _Task, *, needs_fresh_ranks: bool = False) -> None:
        if needs_fresh_ranks or (self._launcher is not None and self._launcher.exit_code is not None):
            self._end_ranks()
        if self._launcher is None:
            self._number += 1
            self._num_tasks = 0
            directory = self._rank_directory
            directory.mkdir(parents=True, exist_ok=True)
            variables = {
                **os.environ,
                **self._settings.experiment.environment_variables,
                RUNS_DIR_VARIABLE: str(directory / "runs"),
            }
            search = f"{os.getpid()}:{start_ticks(os.getpid())}"
            words = [*self._words, "--tasks", str(directory), "--search", search]
            self._launcher = launch(words, directory, cwd=self._settings.context_dir, variables=variables)
        self._num_tasks += 1
        task.number, task.began_s = self._num_tasks, time.time()
        task.num_log_lines_before = len(log_lines(self._rank_directory))
        row = {"number": task.number, "trial_id": task.spec.trial_id, "hparams": task.hparams}
        append_json_line(self._rank_directory / TASKS_NAME, row)
        self._task = task

    def _poll_task(self, task: _Task) -> None:
        # The exit code is read before the results, so that no result that arrives in between is lost.
        exit_code = None if self._launcher is None else self._launcher.exit_code
        rows = read_json_lines(self._rank_directory / RESULTS_NAME)
        row = next((row for row in rows if row["number"] == task.number), None)
        if row is not None:
            if row["respawned"]:
                logger.info("the ranks are replaced: %s", row["respawned"])
                self._end_ranks()
            self._take(task, outcome_from_json(row))
        elif exit_code is not None and exit_code < 0 and not task.is_retry:
            # The launcher was killed, which need not be the configuration's fault.
            task.is_retry = True
            self._begin(task, needs_fresh_ranks=True)
        elif exit_code is not None:
            failure = self._failure_of_launcher(task, exit_code)
            self._end_ranks()
            self._take(task, failure)

    @property
    def _rank_directory(self) -> Path:
        return self._directory / str(self._number)

    def _end_ranks(self) -> None:
        if self._launcher is not None:
            self._launcher.end()
            self._launcher = None

    def _take(self, task: _Task, outcome: Outcome) -> None:
        """Record the outcome of a task, or begin another measurement for the same trial."""
        self._task = None
        metric = self._settings.flags.metric
        task.spent_s += time.time() - task.began_s
        if task.challenger is not None:
            best, again = self._incumbent.measured, outcome
            outcome = task.challenger
            if isinstance(again, Measured) and best is not None:
                outcome = without_drift(task.challenger, drift_between(best, again))
        elif _is_out_of_memory(outcome) and task.number > 1:
            # Caches of earlier configurations occupy memory, so the error counts in fresh ranks only.
            self._begin(task, needs_fresh_ranks=True)
            return
        elif isinstance(outcome, Measured) and self._incumbent.is_worth_measuring_again(outcome, metric):
            assert self._incumbent.hparams is not None
            hparams = _without_benchmark(self._incumbent.hparams)
            self._begin(_Task(task.spec, hparams, spent_s=task.spent_s, challenger=outcome))
            return
        self._incumbent.consider(task.spec.hparams, outcome, metric)
        self._ended.append(Ended(task.spec.trial_id, outcome, task.spent_s))

    def _failure_of_launcher(self, task: _Task, exit_code: int) -> Failure:
        lines = log_lines(self._rank_directory)[task.num_log_lines_before :]
        if exit_code == 130:
            return Failure(FailureKind.CANCELED, "its ranks were interrupted from outside")
        failure = failure_from_log(lines, exit_code=exit_code)
        if failure.kind is FailureKind.USER_ERROR and not any(FAILURE_MARK in line for line in lines):
            # Ranks mark errors of the training code in the log. Without a mark, another cause is likely.
            return dataclasses.replace(failure, kind=FailureKind.COMMUNICATION)
        return failure

    def _end_earlier_ranks(self) -> dict[int, dict[str, Any]]:
        """End the ranks of an earlier process of this search; return trial id -> result."""
        if (launcher := found(self._rank_directory)) is not None:
            launcher.end()
        results = {row["number"]: row for row in read_json_lines(self._rank_directory / RESULTS_NAME)}
        rows: dict[int, dict[str, Any]] = {}
        for task in read_json_lines(self._rank_directory / TASKS_NAME):
            row = results.get(task["number"])
            # If a trial has several tasks, the first one measured the trial itself.
            if row is not None and task["trial_id"] not in rows:
                parts = ("build_s", "measure_s", "tear_down_s")
                seconds = sum(row["details"][name] for name in parts)
                rows[task["trial_id"]] = {**row, "seconds": seconds}
        return rows


def _is_out_of_memory(outcome: Outcome) -> bool:
    return isinstance(outcome, Failure) and outcome.kind.is_out_of_memory


def _without_benchmark(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters without the request to benchmark the machine."""
    asked = dict(hparams.get(SETTINGS_KEY) or {})
    asked.pop(BENCHMARK_KEY, None)
    return {**hparams, SETTINGS_KEY: asked}


@dataclasses.dataclass(slots=True)
class Incumbent:
    """The best configuration so far.

    A machine gets slower or faster during a search: heat, clocks, neighbours. After a result that is near the incumbent's, or
    better, the incumbent is measured again. If its two measurements differ by more than their intervals, the times and rates of
    the new result are corrected. ``end_to_end_throughput`` is not corrected: it predicts a training, and ranks no
    configurations.
    """

    hparams: dict[str, Any] | None = None
    measured: Measured | None = None  # the incumbent's first measurement

    def is_worth_measuring_again(self, outcome: Outcome, metric: str) -> bool:
        """Return whether a result is better than the incumbent, or at most 10 % worse."""
        best = None if self.measured is None else score(self.measured, metric)
        new = score(outcome, metric)
        return best is not None and new is not None and new >= best - _NEAR * abs(best)

    def consider(self, hparams: dict[str, Any], outcome: Outcome, metric: str) -> None:
        """Make a configuration the best one if its ``outcome`` has a better ``metric``."""
        best = None if self.measured is None else score(self.measured, metric)
        new = score(outcome, metric)
        if isinstance(outcome, Measured) and new is not None and (best is None or new > best):
            self.hparams, self.measured = hparams, outcome


def drift_between(before: Measured, again: Measured) -> float:
    """Return the latency ratio ``again / before``; 1.0 if the difference may be noise."""
    first, second = before.value("latency"), again.value("latency")
    if not first or not second:
        return 1.0
    ratio = second / first
    known = sum(one.value("half_width") or 0.0 for one in (before, again))
    return ratio if abs(ratio - 1.0) > known else 1.0


def without_drift(measured: Measured, drift: float) -> Measured:
    """Return a measurement with rates multiplied, and times divided, by ``drift``."""
    corrected = {
        name: value * drift if name in _RATES else value / drift if name in _TIMES else value
        for name, value in measured.metrics.items()
    }
    return Measured({**corrected, "drift": drift})
