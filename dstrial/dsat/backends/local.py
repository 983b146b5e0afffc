"""Measure trials in ``dstrial.launch`` processes on this machine, not on a master."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dstrial.dsat.backends.base import Ended
from dstrial.dsat.backends.processes import LauncherProcess, found, launch, log_lines
from dstrial.dsat.backends.trial_spec import TrialSpec, measuring_command, write_config
from dstrial.dsat.config import SearchConfig
from dstrial.dsat.core.journal import SearchRecord
from dstrial.dsat.core.outcome import (
    FAILURE_MARK,
    NOTHING_MEASURED,
    Failure,
    FailureKind,
    Outcome,
    failure_from_log,
    outcome_from_json,
)
from dstrial.errors import DstrialError
from dstrial.local.json_files import read_json
from dstrial.local.run_directory import RUNS_DIR_VARIABLE
from dstrial.local.script_variables import HPARAMS_VARIABLE, RESULT_VARIABLE

_REPRODUCIBLE = (
    FailureKind.DEVICE_OOM,
    FailureKind.HOST_OOM,
    FailureKind.BAD_CONFIG,
    FailureKind.NUMERIC,
)
_RESULT_NAME = "result.json"


class LocalBackend:
    """Starts one launcher per trial, and writes the launcher's output to a file.

    A launcher leads its own session, so it survives a killed search. The next search finds the launcher by the process id in
    the trial's directory.
    """

    num_parallel = 1
    is_sequential = False

    def __init__(self, settings: SearchConfig, record: SearchRecord) -> None:
        self._settings = settings
        self._record = record
        self._running: dict[int, LauncherProcess] = {}

    def describe(self) -> str:
        return f"this machine, {self._settings.num_slots} rank(s) per trial, without a master"

    def start(self, spec: TrialSpec) -> dict[str, Any]:
        """Start a launcher, unless an earlier one still runs or has left a result."""
        if not self.adopt(spec, {}):
            directory = self._record.trial_path(spec.trial_id)
            directory.mkdir(parents=True, exist_ok=True)
            config_path = directory / "experiment.yaml"
            write_config(config_path, spec.config)
            variables = {
                **os.environ,
                **self._settings.experiment.environment_variables,
                RESULT_VARIABLE: str(directory / _RESULT_NAME),
                HPARAMS_VARIABLE: json.dumps(spec.hparams),
                RUNS_DIR_VARIABLE: str(directory / "runs"),
            }
            words = measuring_command(self._settings, str(config_path), sys.executable)
            self._running[spec.trial_id] = launch(
                words, directory, cwd=self._settings.context_dir, variables=variables
            )
        return {"pid": self._running[spec.trial_id].pid}

    def adopt(self, spec: TrialSpec, handle: Mapping[str, Any]) -> bool:
        """Adopt a launcher that runs or has left a result; False if a new start is needed.

        A reproducible error of the ranks counts as a result.
        """
        del handle
        directory = self._record.trial_path(spec.trial_id)
        launcher = found(directory)
        if launcher is None or (launcher.exit_code is not None and not _has_outcome(directory)):
            return False
        self._running[spec.trial_id] = launcher
        return True

    def poll(self) -> list[Ended]:
        ended = []
        for trial_id, launcher in list(self._running.items()):
            exit_code = launcher.exit_code
            if exit_code is None:
                continue
            del self._running[trial_id]
            directory = self._record.trial_path(trial_id)
            # A launcher of an earlier process of this search may have ended long before this poll.
            ended_s = time.time() if launcher.process is not None else _last_written_s(directory)
            ended.append(
                Ended(trial_id, _outcome(directory, exit_code), max(ended_s - launcher.started_s, 0.0))
            )
        return ended

    def running_s(self, trial_id: int) -> float:
        launcher = self._running.get(trial_id)
        return 0.0 if launcher is None else time.time() - launcher.started_s

    def kill(self, trial_id: int) -> None:
        launcher = self._running.pop(trial_id, None)
        if launcher is not None:
            launcher.end()

    def publish(self, report: Callable[[], Mapping[str, Any]]) -> bool:
        del report
        return True

    def finish(self, results: Mapping[str, str]) -> None: ...

    def close(self) -> None:
        for trial_id in list(self._running):
            self.kill(trial_id)


def _outcome(directory: Path, exit_code: int) -> Outcome:
    measured = _result(directory)
    if measured is not None:
        return measured
    if exit_code == 0:
        return NOTHING_MEASURED
    if exit_code == 130:
        return Failure(FailureKind.CANCELED, "it was interrupted")
    return failure_from_log(log_lines(directory), exit_code=exit_code)


def _has_outcome(directory: Path) -> bool:
    """Return whether a trial left a result or a reproducible error of its ranks."""
    lines = [line for line in log_lines(directory) if FAILURE_MARK in line]
    has_failed = bool(lines) and failure_from_log(lines).kind in _REPRODUCIBLE
    return has_failed or _result(directory) is not None


def _last_written_s(directory: Path) -> float:
    paths = (directory / "output.log", directory / _RESULT_NAME)
    return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)


def _result(directory: Path) -> Outcome | None:
    try:
        fields = read_json(directory / _RESULT_NAME)
    except DstrialError:
        return None
    return None if fields is None else outcome_from_json(fields)
