"""Measure trials as ``dstrial.launch`` processes here, without a master."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrial.config.documents import yaml_text
from dstrial.config.secrets import SecretNames, secrets_in
from dstrial.dsat.backends.base import Ended
from dstrial.dsat.backends.processes import LauncherProcess, found, launch, log_lines
from dstrial.dsat.backends.trial_spec import TrialSpec, local_command
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
from dstrial.file_writes import replace_file
from dstrial.local.json_files import read_json
from dstrial.local.run_directory import RUNS_DIR_VARIABLE
from dstrial.local.script_variables import HPARAMS_VARIABLE, RESULT_VARIABLE

_REPEATABLE = (
    FailureKind.DEVICE_OOM,
    FailureKind.HOST_OOM,
    FailureKind.BAD_CONFIG,
    FailureKind.NUMERIC,
)


class LocalBackend:
    """Starts a launcher per trial in the context directory; its output is in a file.

    A launcher leads a session of its own and survives a killed search, which finds it again by the process id in the trial's
    directory and the result file in that process's environment.
    """

    shows_reports = False

    def __init__(self, settings: SearchConfig, record: SearchRecord) -> None:
        self._settings = settings
        self._record = record
        self._running: dict[int, LauncherProcess] = {}

    @property
    def num_parallel(self) -> int:
        return 1

    def describe(self) -> str:
        return f"this machine, {self._settings.num_slots} rank(s) per trial, without a master"

    def start(self, spec: TrialSpec) -> dict[str, Any]:
        """Start a launcher, unless an earlier one still runs or has left a result."""
        if self.adopt(spec, {}):
            return {"pid": self._running[spec.trial_id].pid}
        directory = self._record.trial_path(spec.trial_id)
        directory.mkdir(parents=True, exist_ok=True)
        config_path = directory / "experiment.yaml"
        is_private = bool(secrets_in(spec.config, SecretNames()))
        replace_file(config_path, yaml_text(spec.config), is_private=is_private)
        variables = {
            **os.environ,
            **self._settings.experiment.environment_variables,
            RESULT_VARIABLE: str(_result_path(directory)),
            HPARAMS_VARIABLE: json.dumps(spec.hparams),
            RUNS_DIR_VARIABLE: str(directory / "runs"),
        }
        words = local_command(self._settings, str(config_path), sys.executable)
        running = launch(words, directory, cwd=self._settings.context_dir, variables=variables)
        self._running[spec.trial_id] = running
        return {"pid": running.pid}

    def adopt(self, spec: TrialSpec, handle: Mapping[str, Any]) -> bool:
        """Take back a launcher that runs, has a result, or an error that would recur."""
        del handle
        directory = self._record.trial_path(spec.trial_id)
        running = found(directory)
        if running is None:
            return False
        if running.exit_code is not None and _result(directory) is None and not _has_failed(directory):
            return False
        self._running[spec.trial_id] = running
        return True

    def poll(self) -> list[Ended]:
        ended = []
        for trial_id, running in list(self._running.items()):
            exit_code = running.exit_code
            if exit_code is None:
                continue
            del self._running[trial_id]
            outcome = _outcome(self._record.trial_path(trial_id), exit_code)
            # A launcher of an earlier process of this search may have ended long before this poll.
            directory = self._record.trial_path(trial_id)
            ended_s = time.time() if running.process is not None else _last_written_s(directory)
            ended.append(Ended(trial_id, outcome, max(ended_s - running.started_s, 0.0)))
        return ended

    def running_s(self, trial_id: int) -> float:
        running = self._running.get(trial_id)
        return 0.0 if running is None else time.time() - running.started_s

    def kill(self, trial_id: int) -> None:
        running = self._running.pop(trial_id, None)
        if running is not None:
            running.end()

    def publish(self, report: Mapping[str, Any]) -> bool:
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


def _has_failed(directory: Path) -> bool:
    """Return whether the ranks of a trial reported an error of its configuration."""
    lines = [line for line in log_lines(directory) if FAILURE_MARK in line]
    return bool(lines) and failure_from_log(lines).kind in _REPEATABLE


def _last_written_s(directory: Path) -> float:
    paths = (directory / "output.log", _result_path(directory))
    return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)


def _result_path(directory: Path) -> Path:
    return directory / "result.json"


def _result(directory: Path) -> Outcome | None:
    try:
        fields = read_json(_result_path(directory))
    except DstrialError:
        return None
    return None if fields is None else outcome_from_json(fields)
