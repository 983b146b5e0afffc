"""Run trials on this machine, in new ranks for each trial or in persistent ranks.

Persistent ranks are processes that measure one trial after the other, until a rank fails, hangs or leaks memory; then new ranks
start. They read tasks from a file that the search writes, and write results to another. They also run in a trial on a master.
"""

from __future__ import annotations

import abc
import dataclasses
import json
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrial.dsat.backends.base import Ended
from dstrial.dsat.backends.processes import LauncherProcess, found, launch, log_lines
from dstrial.dsat.backends.trial_spec import TrialSpec, measuring_command, write_config
from dstrial.dsat.config import SearchConfig
from dstrial.dsat.core.journal import RESULTS_NAME, TASKS_NAME, SearchRecord
from dstrial.dsat.core.outcome import (
    FAILURE_MARK,
    NOTHING_MEASURED,
    Failure,
    FailureKind,
    Measured,
    Outcome,
    failure_from_log,
    outcome_from_json,
    score,
)
from dstrial.local.json_files import append_json_line, read_json, read_json_lines
from dstrial.local.run_directory import RUNS_DIR_VARIABLE
from dstrial.local.script_variables import BENCHMARK_KEY, HPARAMS_VARIABLE, RESULT_VARIABLE, SETTINGS_KEY
from dstrial.process_state import start_ticks

logger = logging.getLogger("dstrial.dsat")

_MAX_ATTEMPTS = 2
_NEAR = 0.10  # the incumbent is measured again after a result that is at most this fraction worse
_RATES = ("throughput", "FLOPS_per_gpu", "hardware_FLOPS_per_gpu")
_TIMES = ("latency", "latency_low", "latency_high", "forward", "backward", "step")


class _QueuedTrials(abc.ABC):
    """Base of the local backends; queues trials and counts how often each has started."""

    num_parallel = 1

    def __init__(self, settings: SearchConfig, record: SearchRecord) -> None:
        self._settings = settings
        self._record = record
        self._waiting: deque[TrialSpec] = deque()
        self._ended: list[Ended] = []
        self._attempts: dict[int, int] = {}

    def start(self, spec: TrialSpec) -> dict[str, Any]:
        """Queue a trial; return its attempt number as the handle for :meth:`adopt`."""
        self._waiting.append(spec)
        return {"attempt": self._attempts.get(spec.trial_id, 0) + 1}

    def adopt(self, spec: TrialSpec, handle: Mapping[str, Any]) -> bool:
        """Return whether a trial is over because its search was killed twice while it ran."""
        self._attempts[spec.trial_id] = attempts = int(handle.get("attempt") or 0)
        if attempts >= _MAX_ATTEMPTS:
            message = f"its search was killed {attempts} times, as when the machine's memory runs out"
            self._ended.append(Ended(spec.trial_id, Failure(FailureKind.HOST_OOM, message)))
        return attempts >= _MAX_ATTEMPTS

    def publish(self, report: Callable[[], Mapping[str, Any]]) -> bool:
        del report
        return True

    def finish(self, results: Mapping[str, str]) -> None:
        del results
        self.close()

    @abc.abstractmethod
    def close(self) -> None:
        """End all trials and their processes."""

    def _launch(
        self, words: Sequence[str], directory: Path, variables: Mapping[str, str] | None = None
    ) -> LauncherProcess:
        inherited = {**os.environ, **self._settings.experiment.environment_variables}
        return launch(
            words,
            directory,
            cwd=self._settings.context_dir,
            variables={**inherited, RUNS_DIR_VARIABLE: str(directory / "runs"), **(variables or {})},
        )


class LocalBackend(_QueuedTrials):
    """Starts one launcher per trial, and writes the launcher's output to a file."""

    is_sequential = False

    def __init__(self, settings: SearchConfig, record: SearchRecord) -> None:
        super().__init__(settings, record)
        self._running: dict[int, LauncherProcess] = {}

    def describe(self) -> str:
        return f"this machine, {self._settings.num_slots} rank(s) per trial, without a master"

    def adopt(self, spec: TrialSpec, handle: Mapping[str, Any]) -> bool:
        """End a killed search's launcher; return whether its trial has an outcome.

        The outcome is the result that the trial's ranks wrote, or an error after a second kill of the search. If there is none,
        the caller must start the trial again.
        """
        directory = self._record.trial_path(spec.trial_id)
        if (launcher := found(directory)) is not None:
            launcher.end()
        if (fields := read_json(directory / "result.json")) is not None:
            self._ended.append(Ended(spec.trial_id, outcome_from_json(fields)))
            return True
        return super().adopt(spec, handle)

    def poll(self) -> list[Ended]:
        while self._waiting:
            self._begin(self._waiting.popleft())
        for trial_id, launcher in list(self._running.items()):
            exit_code = launcher.exit_code
            if exit_code is not None:
                del self._running[trial_id]
                outcome = _outcome(self._record.trial_path(trial_id), exit_code)
                self._ended.append(Ended(trial_id, outcome, time.time() - launcher.started_s))
        ended, self._ended = self._ended, []
        return ended

    def _begin(self, spec: TrialSpec) -> None:
        directory = self._record.trial_path(spec.trial_id)
        directory.mkdir(parents=True, exist_ok=True)
        config_path = directory / "experiment.yaml"
        write_config(config_path, spec.config)
        variables = {
            RESULT_VARIABLE: str(directory / "result.json"),
            HPARAMS_VARIABLE: json.dumps(spec.hparams),
        }
        words = measuring_command(self._settings, str(config_path), sys.executable)
        self._running[spec.trial_id] = self._launch(words, directory, variables)

    def running_s(self, trial_id: int) -> float:
        launcher = self._running.get(trial_id)
        return 0.0 if launcher is None else time.time() - launcher.started_s

    def kill(self, trial_id: int) -> None:
        launcher = self._running.pop(trial_id, None)
        if launcher is not None:
            launcher.end()

    def close(self) -> None:
        self._waiting.clear()
        for trial_id in list(self._running):
            self.kill(trial_id)


def _outcome(directory: Path, exit_code: int) -> Outcome:
    if (fields := read_json(directory / "result.json")) is not None:
        return outcome_from_json(fields)
    if exit_code == 0:
        return NOTHING_MEASURED
    return _failure(log_lines(directory), exit_code)


def _failure(lines: Sequence[str], exit_code: int) -> Failure:
    if exit_code == 130:
        return Failure(FailureKind.CANCELED, "its ranks were interrupted from outside")
    return failure_from_log(lines, exit_code=exit_code)


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


class PersistentRanks(_QueuedTrials):
    """Runs all trials of a search in the same ranks, which command ``words`` launches."""

    is_sequential = True

    def __init__(self, settings: SearchConfig, record: SearchRecord, words: Sequence[str]) -> None:
        super().__init__(settings, record)
        self._words = words
        self._task: _Task | None = None
        self._launcher: LauncherProcess | None = None
        self._num_tasks = 0  # started in the current ranks
        self._number = max((int(path.name) for path in record.ranks_path.glob("[0-9]*")), default=0)
        if (earlier := found(self._rank_directory)) is not None:
            earlier.end()
        self._incumbent = Incumbent(settings.flags.metric)

    def describe(self) -> str:
        return f"this machine, {self._settings.num_slots} persistent rank(s)"

    def poll(self) -> list[Ended]:
        if self._task is None and self._waiting:
            spec = self._waiting.popleft()
            if spec.best is not None:
                hparams, metrics = spec.best
                self._incumbent.consider(hparams, Measured(metrics))
            self._begin(_Task(spec, spec.hparams))
        if self._task is not None:
            self._poll_task(self._task)
        ended, self._ended = self._ended, []
        return ended

    def running_s(self, trial_id: int) -> float:
        task = self._task
        return time.time() - task.began_s if task is not None and task.spec.trial_id == trial_id else 0.0

    def kill(self, trial_id: int) -> None:
        """Kill a trial and its ranks; keep the trial's result if it was already measured.

        A trial with a good result may still run: it then measures the best configuration again, and this second measurement may
        hang.
        """
        task = self._task
        if task is not None and task.spec.trial_id == trial_id:
            self._task = None
            self._end_ranks()
            if task.challenger is not None:
                self._take(task, Failure(FailureKind.TIMEOUT, "the best one hung"))
        self._waiting = deque(spec for spec in self._waiting if spec.trial_id != trial_id)

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
            search = f"{os.getpid()}:{start_ticks(os.getpid())}"
            words = [*self._words, "--tasks", str(directory), "--search", search]
            self._launcher = self._launch(words, directory)
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
            lines = log_lines(self._rank_directory)[task.num_log_lines_before :]
            failure = _failure(lines, exit_code)
            if failure.kind is FailureKind.USER_ERROR and not any(FAILURE_MARK in line for line in lines):
                # Ranks mark errors of the training code in the log. Without a mark, another cause is likely.
                failure = dataclasses.replace(failure, kind=FailureKind.COMMUNICATION)
            self._end_ranks()
            self._take(task, failure)

    @property
    def _rank_directory(self) -> Path:
        return self._record.ranks_path / str(self._number)

    def _end_ranks(self) -> None:
        if self._launcher is not None:
            self._launcher.end()
            self._launcher = None

    def _take(self, task: _Task, outcome: Outcome) -> None:
        """Record a task's outcome, or begin another measurement that its trial needs."""
        self._task = None
        task.spent_s += time.time() - task.began_s
        if task.challenger is not None:
            outcome = self._incumbent.without_drift(task.challenger, outcome)
        elif isinstance(outcome, Failure) and outcome.kind.is_out_of_memory and task.number > 1:
            # Caches of earlier configurations occupy memory, so the error counts in fresh ranks only.
            self._begin(task, needs_fresh_ranks=True)
            return
        elif isinstance(outcome, Measured) and self._incumbent.is_worth_measuring_again(outcome):
            asked = dict(self._incumbent.hparams)
            asked[SETTINGS_KEY] = {k: v for k, v in asked[SETTINGS_KEY].items() if k != BENCHMARK_KEY}
            self._begin(_Task(task.spec, asked, spent_s=task.spent_s, challenger=outcome))
            return
        self._incumbent.consider(task.spec.hparams, outcome)
        self._ended.append(Ended(task.spec.trial_id, outcome, task.spent_s))


class Incumbent:
    """The best configuration so far, which is measured again to correct for drift.

    The speed of a machine changes during a search. If another configuration's result is better than the incumbent's, or nearly
    as good, the incumbent is measured again. If the incumbent's two latencies differ by more than their confidence intervals,
    the other configuration's result is corrected by the ratio of the two. ``end_to_end_throughput`` is not corrected, because it
    is not used to compare configurations.
    """

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self.hparams: dict[str, Any] = {}
        self.measured = Measured({})  # the incumbent's first measurement; empty without an incumbent

    def is_worth_measuring_again(self, outcome: Measured) -> bool:
        """Return whether a result is better than the incumbent, or at most 10 % worse."""
        best, new = score(self.measured, self._metric), score(outcome, self._metric)
        return best is not None and new is not None and new >= best - _NEAR * abs(best)

    def consider(self, hparams: dict[str, Any], outcome: Outcome) -> None:
        """Make a configuration the incumbent if its outcome is better."""
        best, new = score(self.measured, self._metric), score(outcome, self._metric)
        if isinstance(outcome, Measured) and new is not None and (best is None or new > best):
            self.hparams, self.measured = hparams, outcome

    def without_drift(self, challenger: Measured, again: Outcome) -> Measured:
        """Return ``challenger``, corrected by the incumbent's new measurement ``again``.

        The drift is the incumbent's new latency divided by its first latency, or 1 if noise can explain the difference. Rates of
        ``challenger`` are multiplied by the drift, and times are divided by it.
        """
        if not isinstance(again, Measured):
            return challenger
        before_us, now_us = self.measured.value("latency"), again.value("latency")
        drift = now_us / before_us if before_us and now_us else 1.0
        if abs(drift - 1.0) <= sum(one.value("half_width") or 0.0 for one in (self.measured, again)):
            drift = 1.0
        corrected = {
            name: value * drift if name in _RATES else value / drift if name in _TIMES else value
            for name, value in challenger.metrics.items()
        }
        return Measured({**corrected, "drift": drift})
