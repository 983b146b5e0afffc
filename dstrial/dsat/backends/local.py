"""Measuring trials as processes of this machine, started through ``dstrial.launch``; there is no master."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dstrial.dsat.backends.backend import Ended
from dstrial.dsat.outcome import Failure, FailureKind, Outcome, failure_from_log, outcome_from_json
from dstrial.dsat.record import SearchRecord
from dstrial.dsat.settings import SearchSettings
from dstrial.dsat.trial_config import TrialSpec, local_command
from dstrial.errors import DstrialError
from dstrial.local.json_files import read_json
from dstrial.local.measuring import HPARAMS_VARIABLE
from dstrial.local.run_directory import RUNS_DIR_VARIABLE

_RESULT_VARIABLE = "DSTRIAL_DSAT_RESULT"
_END_S = 20.0


# The launcher's shell writes its own id before it becomes the launcher, so that a search which is killed between the
# two finds it again.
_WRITE_PID = 'echo $$ > "$0" && exec "$@"'


@dataclasses.dataclass(slots=True)
class _Running:
    """A trial whose launcher runs, or ran; ``process`` is None for one that another process of this search started."""

    directory: Path
    pid: int
    started_s: float
    process: subprocess.Popen[bytes] | None


class LocalBackend:
    """Starts one launcher per trial, in the context directory, with its output in a file.

    A launcher leads a session of its own. It survives a killed search, which finds it again by the process id in the
    trial's directory and the result file in that process's environment.

    Args:
        settings: of the search.
        record: where trials keep their files.
    """

    def __init__(self, settings: SearchSettings, record: SearchRecord) -> None:
        self._settings = settings
        self._record = record
        self._running: dict[int, _Running] = {}

    @property
    def num_parallel(self) -> int:
        """One: trials that share a machine disturb each other's times."""
        return 1

    def describe(self) -> str:
        """Name this machine."""
        return f"this machine, {self._settings.num_slots} rank(s) per trial, without a master"

    def start(self, spec: TrialSpec) -> dict[str, Any]:
        """Start a launcher, unless that of an earlier process of this search is there or has left a result."""
        if self.adopt(spec, {}):
            return {"pid": self._running[spec.trial_id].pid}
        directory = self._record.trial_path(spec.trial_id)
        directory.mkdir(parents=True, exist_ok=True)
        config_path = directory / "experiment.yaml"
        config_path.write_text(
            yaml.safe_dump(spec.config, sort_keys=False, allow_unicode=True), encoding="utf-8"
        )
        variables = {
            **os.environ,
            **self._settings.experiment.environment_variables,
            _RESULT_VARIABLE: str(_result_path(directory)),
            HPARAMS_VARIABLE: json.dumps(spec.hparams),
            RUNS_DIR_VARIABLE: str(directory / "runs"),
        }
        launcher = local_command(self._settings, str(config_path), sys.executable)
        with (directory / "output.log").open("wb") as output:
            process = subprocess.Popen(
                ["/bin/sh", "-c", _WRITE_PID, str(directory / "launcher.pid"), *launcher],
                cwd=self._settings.context_dir,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running[spec.trial_id] = _Running(directory, process.pid, time.time(), process)
        return {"pid": process.pid}

    def adopt(self, spec: TrialSpec, handle: Mapping[str, Any]) -> bool:
        """Take back a launcher that still runs, or one that has left a result."""
        del handle
        directory = self._record.trial_path(spec.trial_id)
        pid_path = directory / "launcher.pid"
        try:
            pid, started_s = int(pid_path.read_text()), pid_path.stat().st_mtime
        except (OSError, ValueError):
            return False
        if not _is_launcher(pid, directory) and _result(directory) is None:
            return False
        self._running[spec.trial_id] = _Running(directory, pid, started_s, None)
        return True

    def poll(self) -> list[Ended]:
        """Return the trials whose launchers have ended."""
        ended = []
        for trial_id, running in list(self._running.items()):
            exit_code = self._exit_code(running)
            if exit_code is None:
                continue
            del self._running[trial_id]
            outcome = self._outcome(running, exit_code)
            ended.append(Ended(trial_id, outcome, time.time() - running.started_s))
        return ended

    def running_s(self, trial_id: int) -> float:
        """Return how long a launcher has been running."""
        return time.time() - self._running[trial_id].started_s

    def kill(self, trial_id: int) -> None:
        """Ask the launcher to end its ranks, and kill it if it does not."""
        running = self._running.pop(trial_id)
        if self._exit_code(running) is not None:
            return
        # A launcher takes two requests as the wish to kill the ranks at once.
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.kill(running.pid, number)
            if self._ends_within(running, 1.0 if number is signal.SIGINT else _END_S):
                return

    def close(self) -> None:
        """End every launcher that is left."""
        for trial_id in list(self._running):
            self.kill(trial_id)

    def _ends_within(self, running: _Running, seconds: float) -> bool:
        give_up_at_s = time.monotonic() + seconds
        while self._exit_code(running) is None:
            if time.monotonic() > give_up_at_s:
                return False
            time.sleep(0.05)
        return True

    @staticmethod
    def _exit_code(running: _Running) -> int | None:
        """The launcher's exit status; -1 for one that is not our child and has ended, None while it runs."""
        if running.process is not None:
            return running.process.poll()
        return None if _is_launcher(running.pid, running.directory) else -1

    @staticmethod
    def _outcome(running: _Running, exit_code: int) -> Outcome:
        measured = _result(running.directory)
        if measured is not None:
            return measured
        log_path = running.directory / "output.log"
        lines = (
            log_path.read_text(encoding="utf-8", errors="replace").splitlines() if log_path.exists() else []
        )
        if exit_code == 0:
            return Failure(
                FailureKind.USER_ERROR,
                "it ended without having measured anything: no DeepSpeed engine made a step in a dsat_reporting_context",
            )
        if exit_code == 130:
            return Failure(FailureKind.CANCELED, "it was interrupted")
        return failure_from_log(lines, exit_code=exit_code)


def _result_path(directory: Path) -> Path:
    return directory / "result.json"


def _result(directory: Path) -> Outcome | None:
    try:
        fields = read_json(_result_path(directory))
    except DstrialError:
        return None
    return None if fields is None else outcome_from_json(fields)


def _is_launcher(pid: int, directory: Path) -> bool:
    """Say whether a process is alive and the launcher of the trial of a directory."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return state != "Z" and f"{_RESULT_VARIABLE}={_result_path(directory)}".encode() in variables
