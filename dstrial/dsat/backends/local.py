"""Run each trial of a search on this machine, in new ranks."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dstrial.dsat.backends.base import Ended
from dstrial.dsat.backends.trial_spec import TrialSpec, training_command, write_config
from dstrial.dsat.config import SearchConfig
from dstrial.dsat.core.journal import SearchRecord
from dstrial.dsat.core.outcome import (
    NOTHING_MEASURED,
    Failure,
    FailureKind,
    Outcome,
    failure_from_log,
    outcome_from_json,
)
from dstrial.fork_server.client import ForkedProcess, OwnForkServer, new_process, trains_trial_class
from dstrial.fork_server.fork import Program
from dstrial.local.json_files import read_json
from dstrial.local.run_directory import RUNS_DIR_VARIABLE
from dstrial.local.script_variables import HPARAMS_VARIABLE, RESULT_VARIABLE
from dstrial.ranks.identity import may_have_accelerator

_MAX_ATTEMPTS = 2  # a trial during which the search was killed so often counts as out of memory
_IMPORT_TIMEOUT_S = 60.0  # for the fork server to import torch
_SERVER = OwnForkServer(["dstrial.launch.imported_ahead"])  # forks launchers that have torch imported
# (signal, seconds that the launcher has to end). The launcher kills its ranks at the second SIGINT.
_END_SIGNALS = ((signal.SIGINT, 1.0), (signal.SIGINT, 20.0), (signal.SIGKILL, 20.0))


@dataclasses.dataclass(frozen=True, slots=True)
class _Launcher:
    """The process that starts the ranks of a trial."""

    process: subprocess.Popen[bytes] | ForkedProcess
    started_s: float

    def end(self) -> None:
        for number, timeout_s in _END_SIGNALS:
            if self.process.poll() is not None:
                return
            os.kill(self.process.pid, number)
            give_up_at_s = time.monotonic() + timeout_s
            while self.process.poll() is None and time.monotonic() < give_up_at_s:
                time.sleep(0.05)


class LocalBackend:
    """Starts a launcher per trial, and writes the output of the ranks to a file.

    A launcher is a process that starts the ranks of a trial. When this process ends, the kernel kills the launchers and thereby
    their ranks.
    """

    num_parallel = 1

    def __init__(self, settings: SearchConfig, record: SearchRecord) -> None:
        self._settings = settings
        self._record = record
        self._waiting: deque[TrialSpec] = deque()
        self._running: dict[int, _Launcher] = {}
        self._ended: list[Ended] = []
        self._attempts: dict[int, int] = {}

    def describe(self) -> str:
        return f"this machine, {self._settings.num_slots} rank(s) per trial, without a master"

    def start(self, spec: TrialSpec) -> dict[str, Any]:
        """Queue a trial; return ``{"attempt": number}`` for :meth:`adopt`.

        The number counts the starts of this trial, from 1. The next :meth:`poll` starts the trial; by then the caller must have
        recorded the attempt.
        """
        self._waiting.append(spec)
        return {"attempt": self._attempts.get(spec.trial_id, 0) + 1}

    def adopt(self, spec: TrialSpec, handle: Mapping[str, Any]) -> bool:
        """Return whether :meth:`poll` will return an outcome of an interrupted trial.

        The trial ran when its search was killed. If its ranks wrote a result, that is the outcome. Otherwise, after the first
        attempt, returns False, and the search starts the trial again. After two attempts the outcome is ``HOST_OOM``, the
        likely reason why the search was killed twice.
        """
        self._attempts[spec.trial_id] = attempts = int(handle.get("attempt") or 0)
        if (measured := self._result_of(spec.trial_id)) is not None:
            self._ended.append(Ended(spec.trial_id, measured))
            return True
        if attempts < _MAX_ATTEMPTS:
            return False
        message = f"its search was killed {attempts} times, as when the machine's memory runs out"
        self._ended.append(Ended(spec.trial_id, Failure(FailureKind.HOST_OOM, message)))
        return True

    def poll(self) -> list[Ended]:
        while self._waiting:
            spec = self._waiting.popleft()
            self._running[spec.trial_id] = self._launch(spec)
        for trial_id, launcher in list(self._running.items()):
            exit_code = launcher.process.poll()
            if exit_code is not None:
                del self._running[trial_id]
                outcome = self._outcome(trial_id, exit_code)
                self._ended.append(Ended(trial_id, outcome, time.time() - launcher.started_s))
        ended, self._ended = self._ended, []
        return ended

    def running_s(self, trial_id: int) -> float:
        launcher = self._running.get(trial_id)
        return 0.0 if launcher is None else time.time() - launcher.started_s

    def kill(self, trial_id: int) -> None:
        launcher = self._running.pop(trial_id, None)
        if launcher is not None:
            launcher.end()
            if (measured := self._result_of(trial_id)) is not None:
                self._ended.append(Ended(trial_id, measured, time.time() - launcher.started_s))

    def publish(self, report: Callable[[], Mapping[str, Any]]) -> bool:
        del report
        return True

    def finish(self, results: Mapping[str, str]) -> None:
        del results
        self.close()

    def close(self) -> None:
        self._waiting.clear()
        for trial_id in list(self._running):
            self.kill(trial_id)

    # ---- machinery -------------------------------------------------------------------------------

    def output_of(self, trial_id: int) -> str:
        """Return the output of a trial's launcher and ranks; empty before the start."""
        path = self._record.trial_path(trial_id) / "output.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def _launch(self, spec: TrialSpec) -> _Launcher:
        directory = self._record.trial_path(spec.trial_id)
        directory.mkdir(parents=True, exist_ok=True)
        config_path = directory / "experiment.yaml"
        write_config(config_path, spec.config)
        # A rank on the CPU trains with one thread, as in a slot of the master of `dstrial run`.
        threads = {} if may_have_accelerator() else {"OMP_NUM_THREADS": "1"}
        variables = {
            **threads,
            **os.environ,
            **self._settings.experiment.environment_variables,
            RUNS_DIR_VARIABLE: str(directory / "runs"),
            RESULT_VARIABLE: str(directory / "result.json"),
            HPARAMS_VARIABLE: json.dumps(spec.hparams),
        }
        words = training_command(self._settings, str(config_path), sys.executable)
        cwd = str(Path.cwd() / self._settings.context_dir)
        with open(os.devnull, "rb") as null, (directory / "output.log").open("wb") as output:  # noqa: PTH123
            files = [null.fileno(), output.fileno(), output.fileno()]
            if trains_trial_class(words[1:]):
                program = Program(words[1:], variables, cwd, has_spare=True)
                process: subprocess.Popen[bytes] | ForkedProcess = _SERVER.run(
                    program, files, _IMPORT_TIMEOUT_S
                )
            else:
                process = new_process(words, variables, cwd, files)
        return _Launcher(process, time.time())

    def _result_of(self, trial_id: int) -> Outcome | None:
        """Return the measurement that a trial's ranks wrote; None if they wrote none."""
        fields = read_json(self._record.trial_path(trial_id) / "result.json")
        return None if fields is None else outcome_from_json(fields)

    def _outcome(self, trial_id: int, exit_code: int) -> Outcome:
        if (measured := self._result_of(trial_id)) is not None:
            return measured
        if exit_code == 0:
            return NOTHING_MEASURED
        if exit_code == 130:
            return Failure(FailureKind.CANCELED, "its ranks were interrupted from outside")
        return failure_from_log(self.output_of(trial_id).splitlines(), exit_code=exit_code)
