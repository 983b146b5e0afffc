"""What ``python3 -m dstrial.dsat`` and ``dstrial dsat`` do: read, search, print."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator

from dstrial.dsat.arguments import PLAN
from dstrial.dsat.driver import Driver
from dstrial.dsat.full_run import run_full
from dstrial.dsat.gates import Gates
from dstrial.dsat.inputs import PredictInputs
from dstrial.dsat.late_backend import LateBackend
from dstrial.dsat.methods import search_method
from dstrial.dsat.prepare import gather_inputs, target_here
from dstrial.dsat.record import SearchEnd, SearchRecord
from dstrial.dsat.report.live import LiveTable
from dstrial.dsat.results import TrialResult, best_of, summary
from dstrial.dsat.room import NO_ROOM
from dstrial.dsat.settings import SearchSettings, read_settings, with_parallel
from dstrial.errors import LaunchError
from dstrial.local.json_files import write_text_atomically
from dstrial.ranks.stop import noted_signals

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DESCRIBING_S = 900.0

EPILOG = (
    "Exit status: 0 if the search finished and measured something; 1 if it could not, or the configuration is wrong; "
    "2 for wrong usage; 130 or 143 if SIGINT or SIGTERM interrupted it. The same command, without --fresh, goes on with it."
)


def run_command(args: argparse.Namespace) -> int:
    """Search as a parsed command line says; returns the exit status.

    Raises:
        DstrialError: the search cannot be started.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    # It tells of every retry of Determined's client; that the master is away is said once.
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    if args.search_method == PLAN:
        from dstrial.dsat.plan_command import run_plan

        return run_plan(args)
    settings = read_settings(args)
    for warning in settings.warnings:
        sys.stderr.write(f"warning: {warning}\n")
    # A method that does not exist is refused before anything is written.
    search_method(settings.method, settings.space, settings.options, Gates(settings.space))
    try:
        return _search(settings)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise LaunchError(
            f"{error.filename or settings.output} cannot be written ({error.strerror}); expected room on the disk. Make "
            "room, and repeat the command."
        ) from error


def _search(settings: SearchSettings) -> int:
    args = settings.args
    record = SearchRecord.open(settings.output, settings.fingerprint, settings.method, is_fresh=args.fresh)
    with record.lock(), noted_signals() as signals:
        _tell(f"search:        {record.path}")
        backend = LateBackend(settings, record, signals, _tell)
        settings = with_parallel(settings, _num_parallel(settings, record, backend))
        gates = Gates(settings.space, is_open=args.no_gates)
        inputs = None
        if settings.method == "predict":
            try:
                with _interruptible(signals):
                    inputs = _inputs(settings, record, backend)
            except KeyboardInterrupt:
                _tell(
                    "search:        not finished; nothing is measured yet, and the same command begins again"
                )
                return 128 + int(signals[0])
        method = search_method(settings.method, settings.space, settings.options, gates, inputs)
        table = LiveTable(
            args.metric,
            max_trials=settings.options.max_trials,
            num_parallel=settings.options.num_parallel,
            budget_s=args.budget,
        )
        with table:
            driver = Driver(
                settings,
                record,
                method,
                backend.make,
                table.tell,
                table.show,
                flops_per_record=None if inputs is None else inputs.flops_per_record,
            )
            end = driver.run(signals)
        trials = list(driver.trials.values())
        sys.stdout.write(
            "\n" + summary(record, trials, args.metric, reason=end.reason, is_finished=end.is_finished)
        )
        best = best_of(trials, args.metric)
        if args.run_full_experiment and end.is_finished and best is not None:
            return run_full(settings, record, backend, best, signals, _tell)
    return _exit_code(end, best)


@contextlib.contextmanager
def _interruptible(signals: list[signal.Signals]) -> Iterator[None]:
    """Let the block be ended by a request to stop, because it leaves nothing half done.

    Raises:
        KeyboardInterrupt: the request has come.
    """

    def end(number: int, _frame: object) -> None:
        signals.append(signal.Signals(number))
        raise KeyboardInterrupt

    if signals:
        raise KeyboardInterrupt
    before = {number: signal.signal(number, end) for number in _STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _num_parallel(settings: SearchSettings, record: SearchRecord, backend: LateBackend) -> int:
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
    write_text_atomically(path, f"{num}\n")
    return num


def _inputs(settings: SearchSettings, record: SearchRecord, backend: LateBackend) -> PredictInputs:
    """Return what ``predict`` starts from: what is on record, else what is found out now and put there."""
    for event in record.events():
        if event["event"] == "inputs":
            return PredictInputs.from_json(event)
    target = target_here(os.environ)
    if not settings.args.local:
        target = "cuda" if backend.master().has_accelerators else "cpu"
    began_s, budget_s = time.monotonic(), settings.args.budget
    # Half of a budget is for measuring at least.
    deadline_s = _DESCRIBING_S if budget_s is None else min(_DESCRIBING_S, budget_s / 2)
    inputs = gather_inputs(settings, target=target, deadline_s=deadline_s, tell=_tell)
    for note in inputs.notes:
        if not note.startswith("described by"):  # told already
            _tell(f"note:          {note}")
    record.append("inputs", {**inputs.to_json(), "seconds": time.monotonic() - began_s})
    return inputs


def options_limit(args: argparse.Namespace) -> int:
    """Return ``--max-concurrent-trials``."""
    return int(args.max_concurrent_trials)


def _exit_code(end: SearchEnd, best: TrialResult | None) -> int:
    if end.stopped_by is not None:
        return 128 + int(end.stopped_by)
    return 1 if end.is_failure or best is None else 0


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
