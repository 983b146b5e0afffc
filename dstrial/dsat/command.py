"""What ``python3 -m dstrial.dsat`` and ``dstrial dsat`` do: read, search, print."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from dstrial.dsat.arguments import PLAN
from dstrial.dsat.driver import Driver, SearchEnd
from dstrial.dsat.gates import Gates
from dstrial.dsat.inputs import PredictInputs
from dstrial.dsat.methods import search_method
from dstrial.dsat.prepare import gather_inputs, target_here
from dstrial.dsat.record import SearchRecord
from dstrial.dsat.report.live import LiveTable
from dstrial.dsat.results import TrialResult, best_of, summary
from dstrial.dsat.settings import SearchSettings, read_settings, with_parallel
from dstrial.dsat.trial_config import full_config
from dstrial.ranks.stop import noted_signals

if TYPE_CHECKING:
    from dstrial.dsat.backends.backend import Backend
    from dstrial.dsat.backends.master import MasterBackend

EPILOG = (
    "Exit status: 0 if the search finished and measured something; 1 if it could not, or the configuration is wrong; "
    "2 for wrong usage; 130 or 143 if SIGINT or SIGTERM interrupted it. The same command goes on with it."
)


def run_command(args: argparse.Namespace) -> int:
    """Search as a parsed command line says; returns the exit status.

    Raises:
        DstrialError: the search cannot be started.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    if args.search_method == PLAN:
        from dstrial.dsat.plan_command import run_plan

        return run_plan(args)
    settings = read_settings(args)
    for warning in settings.warnings:
        sys.stderr.write(f"warning: {warning}\n")
    # A method that does not exist is refused before anything is written.
    search_method(settings.method, settings.space, settings.options, Gates(settings.space))
    record = SearchRecord.open(settings.output, settings.fingerprint, settings.method, is_fresh=args.fresh)
    with record.lock(), noted_signals() as signals:
        _tell(f"search:        {record.path}")
        backend = _Later(settings, record)
        settings = with_parallel(settings, _num_parallel(settings, record, backend))
        gates = Gates(settings.space, is_open=args.no_gates)
        inputs = _inputs(settings, record, backend) if settings.method == "predict" else None
        method = search_method(settings.method, settings.space, settings.options, gates, inputs)
        table = LiveTable(
            args.metric,
            max_trials=settings.options.max_trials,
            num_parallel=settings.options.num_parallel,
            budget_s=args.budget,
        )
        with table:
            driver = Driver(settings, record, method, backend.make, table.tell, table.show)
            end = driver.run(signals)
        trials = list(driver.trials.values())
        sys.stdout.write(
            "\n" + summary(record, trials, args.metric, reason=end.reason, is_finished=end.is_finished)
        )
        best = best_of(trials, args.metric)
        if args.run_full_experiment and end.is_finished and best is not None:
            return _run_full(settings, record, backend, best)
    return _exit_code(end, best)


class _Later:
    """Makes the backend once, when it is first needed."""

    def __init__(self, settings: SearchSettings, record: SearchRecord) -> None:
        self._settings = settings
        self._record = record
        self._backend: Backend | None = None
        self._master: MasterBackend | None = None

    def make(self) -> Backend:
        """Return the backend.

        Raises:
            DstrialError: there is no master.
        """
        if self._backend is None:
            self._backend = self._made()
            _tell(f"trials run on: {self._backend.describe()}")
        return self._backend

    def master(self) -> MasterBackend:
        """Return what talks to the master, whether trials are launched there or measured by a worker.

        Raises:
            DstrialError: there is no master.
        """
        from dstrial.dsat.backends.master import MasterBackend

        if self._master is None:
            self._master = MasterBackend(self._settings)
        return self._master

    def _made(self) -> Backend:
        """A trial class is measured by a worker; a script has to be launched anew for every configuration."""
        settings = self._settings
        has_worker = settings.trial is not None and not settings.args.no_worker
        if settings.args.local:
            from dstrial.dsat.backends.local import LocalBackend, LocalPlace
            from dstrial.dsat.backends.worker import WorkerBackend

            if has_worker:
                return WorkerBackend(settings, LocalPlace(settings, self._record))
            return LocalBackend(settings, self._record)
        if has_worker:
            from dstrial.dsat.backends.master_place import MasterPlace
            from dstrial.dsat.backends.worker import WorkerBackend

            return WorkerBackend(settings, MasterPlace(settings, self.master(), self._record.search_id))
        return self.master()


def _num_parallel(settings: SearchSettings, record: SearchRecord, backend: _Later) -> int:
    """Return how many trials run at the same time: the first answer of a search holds, so that it can be replayed."""
    path = record.path / "parallel.json"
    if path.exists():
        return int(path.read_text())
    args, options = settings.args, settings.options
    num = (
        options_limit(args)
        if "max_concurrent_trials" in args.given
        else min(options_limit(args), backend.make().num_parallel)
    )
    if args.max_slots is not None:
        num = min(num, args.max_slots // settings.num_slots)
    num = max(min(num, options.max_trials), 1)
    path.write_text(f"{num}\n")
    return num


def _inputs(settings: SearchSettings, record: SearchRecord, backend: _Later) -> PredictInputs:
    """Return what ``predict`` starts from: what is on record, else what is found out now and put there."""
    for event in record.events():
        if event["event"] == "inputs":
            return PredictInputs.from_json(event)
    target = target_here(os.environ)
    if not settings.args.local:
        target = "cuda" if backend.master().has_accelerators else "cpu"
    inputs = gather_inputs(settings, target=target, tell=_tell)
    record.append("inputs", inputs.to_json())
    return inputs


def options_limit(args: argparse.Namespace) -> int:
    """Return ``--max-concurrent-trials``."""
    return int(args.max_concurrent_trials)


def _run_full(settings: SearchSettings, record: SearchRecord, backend: _Later, best: TrialResult) -> int:
    """Train the experiment with the best configuration; on this machine to its end, on a master it is submitted."""
    config = full_config(settings, best.candidate)
    path = record.path / "full_experiment.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), encoding="utf-8")
    if settings.args.local:
        return _train_here(settings, path)
    number_path = record.path / "full_experiment_id.txt"
    if not number_path.exists():
        number_path.write_text(f"{backend.master().create_full_experiment(config)}\n")
    _tell(f"Created experiment {number_path.read_text().strip()}")
    return 0


def _train_here(settings: SearchSettings, path: Path) -> int:
    import subprocess

    command = [
        sys.executable,
        "-m",
        "dstrial.launch",
        "--slots",
        str(settings.num_slots),
        "--config",
        str(path),
    ]
    command += ["--context-dir", "."]
    if settings.trial is None:
        _tell(f"the full experiment is a script; train it with the config {path}")
        return 0
    environment = {**os.environ, "DSTRIAL_RUNS_DIR": str(path.parent / "runs")}
    command += ["--trial", settings.trial]
    return subprocess.run(command, cwd=settings.context_dir, env=environment, check=False).returncode


def _exit_code(end: SearchEnd, best: TrialResult | None) -> int:
    if end.stopped_by is not None:
        return 128 + int(end.stopped_by)
    return 1 if end.is_failure or best is None else 0


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
