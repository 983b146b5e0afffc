"""Measure one configuration after the other in persistent ranks.

The ranks of one launcher measure until one of them fails, hangs, or keeps memory; the next task then starts others. The search's
process appends tasks to a file that rank 0 reads, and reads the results that rank 0 appends to another. Ranks end with the
search. Nothing here knows whether that runs on a user's machine or inside the trial of a master.
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
from dstrial.dsat.core.journal import DISK_FULL_ERRORS, RESULTS_NAME, TASKS_NAME, SearchRecord
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
_NEAR = 0.10
_RATES = ("throughput", "bare_throughput", "FLOPS_per_gpu", "hardware_FLOPS_per_gpu")
_TIMES = ("latency", "latency_low", "latency_high", "forward", "backward", "step")


@dataclasses.dataclass(slots=True)
class _Task:
    spec: TrialSpec
    hparams: dict[str, Any]
    number: int = 0
    began_s: float = 0.0
    is_in_fresh_ranks: bool = False
    is_repeated: bool = False
    log_lines_before: int = 0
    spent_s: float = 0.0  # in earlier tasks of the same trial
    challenger: Measured | None = None  # measured before; this task measures the best one again


class PersistentRanks:
    """The ranks of one search.

    ``words`` launch them, ``publish`` shows the report so far.
    """

    num_parallel = 1

    def __init__(
        self,
        settings: SearchConfig,
        record: SearchRecord,
        words: Sequence[str],
        publish: Callable[[Mapping[str, Any]], bool] | None = None,
    ) -> None:
        self._settings = settings
        self._directory = record.ranks_path
        self._words = words
        self._publish = publish
        self.shows_reports = publish is not None
        self._waiting: deque[_Task] = deque()
        self._task: _Task | None = None
        self._ended: list[Ended] = []
        self._attempts: dict[int, int] = {}
        self._launcher: LauncherProcess | None = None
        self._num_tasks = 0  # of these ranks
        self._number = max((int(path.name) for path in self._directory.glob("[0-9]*")), default=0)
        self._left = self._left_behind()
        self._incumbent = Incumbent()

    def describe(self) -> str:
        return f"this machine, {self._settings.num_slots} persistent rank(s)"

    def start(self, spec: TrialSpec) -> dict[str, Any]:
        """Queue a trial; it begins after it is on record, in :meth:`poll`."""
        self._waiting.append(_Task(spec, spec.hparams))
        return {"attempt": self._attempts.get(spec.trial_id, 0) + 1}

    def adopt(self, spec: TrialSpec, handle: Mapping[str, Any]) -> bool:
        """Take a result that was left behind; give up a trial that twice ended everything."""
        row = self._left.get(spec.trial_id)
        attempts = int(handle.get("attempt") or 0)
        outcome = None if row is None else outcome_from_json(row)
        is_out_of_memory = isinstance(outcome, Failure) and outcome.kind.is_out_of_memory
        if row is not None and is_out_of_memory and row["number"] > 1:
            self._attempts[spec.trial_id] = 0  # memory counts in fresh ranks only
            return False
        if row is not None and outcome is not None:
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
            self._incumbent.consider_best(task.spec, self._settings.flags.metric)
            self._begin(task)
        if self._task is not None:
            # Read before the results, so that no result that arrives in between is lost.
            exit_code = None if self._launcher is None else self._launcher.exit_code
            row = self._result(self._task.number)
            if row is not None:
                if row["respawned"]:
                    logger.info("the ranks are replaced: %s", row["respawned"])
                    self._end_ranks()
                self._take(self._task, outcome_from_json(row))
            elif exit_code is not None:
                outcome = self._why_ended(self._task, exit_code)
                if exit_code < 0 and not self._task.is_repeated:
                    # Its launcher was killed, for which the configuration may be innocent.
                    self._task.is_repeated = True
                    self._begin(self._task, needs_fresh_ranks=True)
                else:
                    self._end_ranks()
                    self._take(self._task, outcome)
        ended, self._ended = self._ended, []
        return ended

    def running_s(self, trial_id: int) -> float:
        task = self._task
        return time.time() - task.began_s if task is not None and task.spec.trial_id == trial_id else 0.0

    def kill(self, trial_id: int) -> None:
        """End a trial; one that hangs while the best is measured again keeps its result."""
        task = self._task
        if task is not None and task.spec.trial_id == trial_id:
            self._task = None
            self._end_ranks()
            if task.challenger is not None:
                self._take(task, Failure(FailureKind.TIMEOUT, "the best one hung"))
        self._waiting = deque(task for task in self._waiting if task.spec.trial_id != trial_id)

    def publish(self, report: Mapping[str, Any]) -> bool:
        return self._publish is None or self._publish(report)

    def finish(self, results: Mapping[str, str]) -> None:
        del results
        self.close()

    def close(self) -> None:
        self._task = None
        self._waiting.clear()
        self._end_ranks()

    # ---- machinery -------------------------------------------------------------------------------

    def _begin(self, task: _Task, *, needs_fresh_ranks: bool = False) -> None:
        try:
            self._ask(task, needs_fresh_ranks=needs_fresh_ranks)
        except OSError as error:
            if error.errno not in DISK_FULL_ERRORS:
                raise
            self._task = None
            self._end_ranks()
            self._ended.append(Ended(task.spec.trial_id, Failure(FailureKind.NO_ROOM, str(error))))

    def _ask(self, task: _Task, *, needs_fresh_ranks: bool) -> None:
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
        task.number, task.is_in_fresh_ranks = self._num_tasks, self._num_tasks == 1
        task.began_s, task.log_lines_before = time.time(), len(log_lines(self._rank_directory))
        row = {"number": task.number, "trial_id": task.spec.trial_id, "hparams": task.hparams}
        append_json_line(self._rank_directory / TASKS_NAME, row)
        self._task = task

    @property
    def _rank_directory(self) -> Path:
        return self._directory / str(self._number)

    def _result(self, number: int) -> dict[str, Any] | None:
        rows = read_json_lines(self._rank_directory / RESULTS_NAME)
        return next((row for row in rows if row["number"] == number), None)

    def _end_ranks(self) -> None:
        if self._launcher is not None:
            self._launcher.end()
            self._launcher = None

    def _take(self, task: _Task, outcome: Outcome) -> None:
        """End a trial, unless it or the best one has to be measured once more."""
        self._task = None
        metric = self._settings.flags.metric
        task.spent_s += time.time() - task.began_s
        is_out_of_memory = isinstance(outcome, Failure) and outcome.kind.is_out_of_memory
        if task.challenger is not None:
            challenger = task.challenger
            best = self._incumbent.measured
            if isinstance(outcome, Measured) and best is not None:
                challenger = without_drift(challenger, drift_between(best, outcome))
            outcome = challenger
        elif is_out_of_memory and not task.is_in_fresh_ranks:
            # Memory counts in fresh ranks only: caches of earlier configurations take some of it.
            self._begin(task, needs_fresh_ranks=True)
            return
        elif isinstance(outcome, Measured) and self._incumbent.is_worth_measuring_again(outcome, metric):
            assert self._incumbent.hparams is not None
            hparams = _without_benchmark(self._incumbent.hparams)
            self._begin(_Task(task.spec, hparams, spent_s=task.spent_s, challenger=outcome))
            return
        self._incumbent.consider(task.spec.hparams, outcome, metric)
        self._ended.append(Ended(task.spec.trial_id, outcome, task.spent_s))

    def _why_ended(self, task: _Task, exit_code: int) -> Failure:
        """Return why the launcher has ended before the task had a result."""
        lines = log_lines(self._rank_directory)[task.log_lines_before :]
        if exit_code == 130:
            return Failure(FailureKind.CANCELED, "its ranks were interrupted from outside")
        failure = failure_from_log(lines, exit_code=exit_code)
        if failure.kind is FailureKind.USER_ERROR and not any(FAILURE_MARK in line for line in lines):
            # A rank says so itself where the training code fails.
            return dataclasses.replace(failure, kind=FailureKind.COMMUNICATION)
        return failure

    def _left_behind(self) -> dict[int, dict[str, Any]]:
        """End ranks of an earlier process of this search; return its results by trial."""
        directory = self._directory / str(self._number)
        if (launcher := found(directory)) is not None:
            launcher.end()
        results = {row["number"]: row for row in read_json_lines(directory / RESULTS_NAME)}
        rows: dict[int, dict[str, Any]] = {}
        for task in read_json_lines(directory / TASKS_NAME):
            row = results.get(task["number"])
            # Of several tasks of a trial the first measured the trial itself.
            if row is not None and task["trial_id"] not in rows:
                parts = ("build_s", "measure_s", "tear_down_s")
                seconds = sum(row["details"][name] for name in parts)
                rows[task["trial_id"]] = {**row, "seconds": seconds}
        return rows


def _without_benchmark(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters that measure the configuration, not the machine."""
    asked = dict(hparams.get(SETTINGS_KEY) or {})
    asked.pop(BENCHMARK_KEY, None)
    return {**hparams, SETTINGS_KEY: asked}


@dataclasses.dataclass(slots=True)
class Incumbent:
    """The best configuration so far.

    A machine gets slower or faster within a search: heat, clocks, neighbours. A result that comes near the best one or beats it
    has the best one measured again. If its two measurements disagree by more than their intervals, the times of the new result
    are corrected. Only ``end_to_end_throughput`` stays: it says what a training will do, not which configuration is better.
    """

    hparams: dict[str, Any] | None = None
    measured: Measured | None = None  # its first measurement

    def is_worth_measuring_again(self, outcome: Outcome, metric: str) -> bool:
        """Return whether a result is so near that the machine's drift could decide."""
        mine = None if self.measured is None else score(self.measured, metric)
        theirs = score(outcome, metric)
        if mine is None or theirs is None:
            return False
        return theirs >= mine - _NEAR * abs(mine)

    def consider(self, hparams: dict[str, Any], outcome: Outcome, metric: str) -> None:
        """Take a result that may be the best one from now on."""
        theirs = score(outcome, metric)
        mine = None if self.measured is None else score(self.measured, metric)
        if isinstance(outcome, Measured) and theirs is not None and (mine is None or theirs > mine):
            self.hparams, self.measured = hparams, outcome

    def consider_best(self, spec: TrialSpec, metric: str) -> None:
        """Take the best one that the search knows, of an earlier process too."""
        if spec.best is not None:
            self.consider(spec.best[0], Measured(spec.best[1]), metric)


def drift_between(before: Measured, again: Measured) -> float:
    """Return the ratio of latencies if the machine slowed; 1.0 within the intervals."""
    first, second = before.value("latency"), again.value("latency")
    if not first or not second:
        return 1.0
    ratio = second / first
    known = sum(one.value("half_width") or 0.0 for one in (before, again))
    return ratio if abs(ratio - 1.0) > known else 1.0


def without_drift(measured: Measured, drift: float) -> Measured:
    """Return a measurement as without the slowdown ``drift``, which it then names."""
    metrics: Mapping[str, float] = measured.metrics
    corrected = {
        name: value * drift if name in _RATES else value / drift if name in _TIMES else value
        for name, value in metrics.items()
    }
    return Measured({**corrected, "drift": drift})
