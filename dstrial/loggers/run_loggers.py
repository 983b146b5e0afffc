"""Pass a run's reports to loggers; each logger has a thread and a bounded queue."""

from __future__ import annotations

import collections
import hashlib
import logging
import os
import re
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import platformdirs

from dstrial.config.experiment_config.loggers import LoggerSpec, how_to_install, logger_specs
from dstrial.config.secrets import SecretNames, masked
from dstrial.engine.random_state import RngState
from dstrial.errors import DstrialError
from dstrial.local.json_files import read_json
from dstrial.local.run_directory import RUN_DIR_VARIABLE, TEST_VARIABLE, RunDirectory, experiment_slug
from dstrial.loggers.logger import FinalState, Group, LoggedRun, Logger, Report, numbers_of
from dstrial.loggers.mlflow_logger import MLflowLogger
from dstrial.loggers.wandb_logger import WandbLogger
from dstrial.runtime import cluster_info
from dstrial.trial.context import DeepSpeedTrialContext, runtime_of
from dstrial.trial.runtime import TrialRuntime

logger = logging.getLogger("dstrial.loggers")

# Timeout of the wait for `Logger.begin`: training begins afterwards, because user code should not run during imports.
BEGIN_S = 60.0
END_S = 30.0  # timeout of the wait for `Logger.end` at the end of a run
CAPACITY = 10_000  # maximum number of queued reports per logger; further reports are lost
# Interval at which a logger's thread polls its queue; waking the thread for each report would slow the training loop down.
POLL_S = 1.0


_PASSWORD = re.compile(r"://[^/\s@]*@")

MAKERS: Mapping[str, Callable[[Mapping[str, Any]], Logger]] = {
    "wandb": WandbLogger,
    "mlflow": MLflowLogger,
}
"""Name of a logger -> function that makes the logger from its options in the config."""


class LoggerThread:
    """Runs a logger on a background thread; turns the logger's errors into warnings.

    Only the methods ``wait_begun`` and ``wait_ended`` block.
    """

    def __init__(self, name: str, made: Logger, run: LoggedRun, *, capacity: int = CAPACITY) -> None:
        self.name = name
        self._logger = made
        self._run = run
        self._capacity = capacity
        self._reports: collections.deque[Report] = collections.deque()
        self._begun, self._ended, self._is_over = threading.Event(), threading.Event(), threading.Event()
        self._state: FinalState = "completed"
        self._has_warned = False
        self._num_given = self._num_kept = 0
        # A daemon thread, so that a hanging logger does not prevent the exit of the process.
        threading.Thread(target=self._work, name=f"dstrial-{name}", daemon=True).start()

    def wait_begun(self, deadline_s: float) -> None:
        """Wait until ``Logger.begin`` has returned or failed.

        The wait ends with a warning when ``time.monotonic()`` reaches ``deadline_s``.
        """
        if not self._begun.wait(max(deadline_s - time.monotonic(), 0.0)):
            self._warn("it has not started yet; training continues, and reports are queued")

    def report(self, report: Report) -> None:
        self._num_given += 1
        if len(self._reports) < self._capacity:
            self._reports.append(report)

    def end(self, state: FinalState) -> None:
        self._state = state
        self._is_over.set()

    def wait_ended(self, deadline_s: float) -> None:
        """Wait until the logger has ended; warn if reports are lost.

        The wait ends with a warning when ``time.monotonic()`` reaches ``deadline_s``.
        """
        if not self._ended.wait(max(deadline_s - time.monotonic(), 0.0)):
            self._warn("it has not ended and is left behind")
        if num_lost := self._num_given - self._num_kept:
            self._warn(f"{num_lost} of {self._num_given} reports are lost")

    # ---- the thread ------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            where = self._logger.begin(self._run)
        except BaseException as error:  # noqa: BLE001  # the boundary of a thread
            self._warn(
                f"it cannot start: {_described(error, self.name)}. No report of this run is stored there; training continues."
            )
            self._capacity = 0
            self._reports.clear()
            self._begun.set()
            self._ended.set()
            return
        logger.info("logger %s: run %s (%s)", self.name, self._run.name, where)
        self._begun.set()
        while not (self._is_over.wait(POLL_S) and not self._reports):
            if self._reports:
                self._log()
        try:
            self._logger.end(self._state)
        except BaseException as error:  # noqa: BLE001  # the boundary of a thread
            self._warn(f"it cannot end the run: {_described(error, self.name)}")
        self._ended.set()

    def _log(self) -> None:
        reports = [self._reports.popleft() for _ in range(len(self._reports))]
        try:
            self._logger.log(reports)
            self._num_kept += len(reports)
        except BaseException as error:  # noqa: BLE001  # the boundary of a thread
            if not self._has_warned:
                self._has_warned = True
                first = reports[0].batches_trained
                self._warn(
                    f"reports from batch {first} on are lost: {_described(error, self.name)}; training continues"
                )

    def _warn(self, text: str) -> None:
        logger.warning("logger %s: %s", self.name, text)


def _described(error: BaseException, name: str) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == name:
        return f"{name} is not installed. {how_to_install(name)}"
    text = _PASSWORD.sub("://", f"{type(error).__name__}: {error}".strip())
    return " ".join(text.split())[:500].rstrip(".")


class RunLoggers:
    """Context manager that passes a run's metrics to its loggers; ends them on exit."""

    takes_telemetry = True

    def __init__(
        self,
        made: Sequence[tuple[str, Logger]],
        *,
        begin_s: float = BEGIN_S,
        end_s: float = END_S,
        capacity: int = CAPACITY,
    ) -> None:
        self._made = made
        self._begin_s, self._end_s, self._capacity = begin_s, end_s, capacity
        self._threads: list[LoggerThread] = []
        self._epoch_length: Callable[[], int | None] = lambda: None
        self._left_out: set[str] = set()
        self._is_stopped = False

    @property
    def sinks(self) -> list[RunLoggers]:
        return [self] if self._made else []

    def note_stop(self) -> None:
        """Record that training has stopped early, so that the final state is ``stopped``."""
        self._is_stopped = True

    # ---- methods of a metric sink ----------------------------------------------------------------------

    def open(self, context: DeepSpeedTrialContext) -> None:
        runtime = runtime_of(context)
        self._epoch_length = lambda: runtime.epoch_length
        self.begin(logged_run(runtime))

    def begin(self, run: LoggedRun) -> None:
        """Start all loggers on a run; wait until each logger's ``begin`` returns or fails.

        The wait ends after ``begin_s`` seconds in total.
        """
        # Restore random states afterwards, because loggers may draw random numbers.
        before = RngState.read()
        self._threads = [LoggerThread(name, made, run, capacity=self._capacity) for name, made in self._made]
        deadline_s = time.monotonic() + self._begin_s
        for thread in self._threads:
            thread.wait_begun(deadline_s)
        before.restore()

    def report(self, group: Group, batches_trained: int, metrics: Mapping[str, Any]) -> None:
        numbers, others = numbers_of(metrics)
        # Telemetry always has values that are not numbers: do not log their omission.
        if group != "telemetry" and (new := sorted(set(others) - self._left_out)):
            self._left_out.update(new)
            logger.info("metrics that are not numbers are not logged: %s", ", ".join(new))
        length = self._epoch_length()
        report = Report(group, batches_trained, batches_trained / length if length else None, numbers)
        for thread in self._threads:
            thread.report(report)

    def close(self) -> None:
        """Do nothing: the loggers are ended by ``__exit__``, which knows the final state."""

    # ---- the block -------------------------------------------------------------------------------------

    def __enter__(self) -> RunLoggers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        is_leaving = isinstance(error, SystemExit) and not error.code
        self.end(
            "failed"
            if error is not None and not is_leaving
            else "stopped"
            if self._is_stopped
            else "completed"
        )

    def end(self, state: FinalState) -> None:
        """End all loggers; wait up to ``end_s`` seconds in total. Idempotent."""
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.end(state)
        deadline_s = time.monotonic() + self._end_s
        for thread in threads:
            thread.wait_ended(deadline_s)


def loggers_of(context: DeepSpeedTrialContext, *, is_test: bool = False) -> RunLoggers:
    """Return the loggers in a trial's experiment config.

    There are no loggers on ranks above 0, in test runs, and in trials that the autotuner (dsat) measures.
    """
    runtime = runtime_of(context)
    specs: Sequence[LoggerSpec] = logger_specs(runtime.exp_conf)
    if not runtime.is_chief or is_test or runtime.is_measured or os.environ.get(TEST_VARIABLE) == "1":
        specs = ()
    return RunLoggers([(spec.name, MAKERS[spec.name](spec.options)) for spec in specs])


# ---- the identity of a run ------------------------------------------------------------------------------


def logged_run(runtime: TrialRuntime) -> LoggedRun:
    """Return the description of a trial's run for loggers.

    The run's id is a hash of the run directory's creation time and the experiment's name. Without a run directory, the id is a
    hash of the ids of master and trial. Ranks: only rank 0; no communication.
    """
    config = dict(runtime.exp_conf or {})
    config.pop("hyperparameters", None)
    info = cluster_info()
    directory = _run_directory(runtime, info)
    name = str(
        config.get("name") or (None if directory is None else directory.read_record().name) or "dstrial"
    )
    if directory is not None:
        own, group, identity = directory.path.name, name, f"run {directory.read_record().started} {name}"
        files, store = directory.path, _all_runs(directory, name)
    else:
        assert info is not None, "a trial has a run directory or a master"
        experiment, trial = info.trial.experiment_id, info.trial.trial_id
        own, group = f"trial {trial}", f"{name} (experiment {experiment})"
        identity = f"cluster {info.cluster_id} trial {trial}"
        store = Path(platformdirs.user_data_dir("dstrial")) / "loggers"
        files = store / f"{info.cluster_id}-{trial}"
    run_id = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return LoggedRun(
        run_id=run_id,
        name=own,
        group=group,
        project=name,
        hyperparameters=masked(dict(runtime.hparams or {}), SecretNames()),
        config=masked(config, SecretNames()),
        directory=files,
        store=store,
    )


def _run_directory(runtime: TrialRuntime, info: Any) -> RunDirectory | None:
    """Return this run's directory; None if only a master records the trial."""
    if info is None:
        found: RunDirectory = runtime.core.run_directory
        return found
    path = os.environ.get(RUN_DIR_VARIABLE)
    if not path or not runtime.is_mirrored:
        return None
    directory = RunDirectory.open(path)
    try:
        submitted = (read_json(directory.submission_path) or {}).get("experiment_id")
    except DstrialError:
        submitted = None
    # An experiment that was forked from this one has the same environment variables, but is another run: compare experiment ids.
    # The stored id is 0 until the master has assigned one.
    return directory if submitted in (None, 0, info.trial.experiment_id) else None


def _all_runs(directory: RunDirectory, name: str) -> Path:
    """Return the directory that contains the runs of all experiments.

    If the parent of ``directory`` is not named after experiment ``name``, return the path of ``directory``.
    """
    parent = directory.path.parent
    return parent.parent if parent.name == experiment_slug(name) else directory.path
