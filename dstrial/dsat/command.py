"""Run the commands of ``dstrial dsat``: searches, or a plan for other hardware."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from dstrial.dsat.backends.base import Backend, RemoteSearch
from dstrial.dsat.backends.trial_spec import full_config, training_command, write_config
from dstrial.dsat.cli import SearchFlags
from dstrial.dsat.config import SearchConfig, read_config, with_parallel
from dstrial.dsat.core.journal import DISK_FULL_ERRORS, SearchRecord
from dstrial.dsat.core.outcome import TrialResult, best_of
from dstrial.dsat.driver import Driver, recorded_inputs
from dstrial.dsat.dry_runs import DRY_RUNS_DEADLINE_S, gather_inputs, target_here, trace_graphs
from dstrial.dsat.methods import PREDICT
from dstrial.dsat.predictor.config_groups import ConfigGroups
from dstrial.dsat.predictor.hardware import DEVICES, nominal_machine
from dstrial.dsat.predictor.inputs import PredictInputs
from dstrial.dsat.predictor.plan import MAX_ROWS, PlanRow, columns, headline, make_plan, to_json
from dstrial.dsat.report import summary
from dstrial.errors import ConfigError, LaunchError, SearchError
from dstrial.file_writes import replace_file
from dstrial.local.checkpoint_directory import newest_checkpoint
from dstrial.local.json_files import write_json_atomically
from dstrial.local.run_directory import RUN_DIR_VARIABLE, RUNS_DIR_VARIABLE, RunDirectory, RunState
from dstrial.ranks.stop_signals import noted_signals
from dstrial.resume.metadata import RESUME_VARIABLE

if TYPE_CHECKING:
    from dstrial.dsat.backends.cluster import ClusterBackend

_MAX_PARALLEL = 16  # most trials at the same time, unless --max-concurrent-trials is given

EPILOG = (
    "Exit status: 0 if the search finished with a measurement; 1 if no measurement succeeded, or the config is wrong; "
    "2 for wrong usage; 130 or 143 if SIGINT or SIGTERM interrupted the search. The same command without --fresh resumes an "
    "interrupted search."
)


def run_command(flags: SearchFlags) -> int:
    """Run a search, or a ``plan`` for other hardware; return the exit status."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    # urllib3 logs every retry of Determined's client; dsat reports an outage once.
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    if flags.is_plan:
        return run_plan(flags)
    settings = read_config(flags)
    for warning in settings.warnings:
        sys.stderr.write(f"warning: {warning}\n")
    try:
        return _search(settings)
    except OSError as error:
        if error.errno not in DISK_FULL_ERRORS:
            raise
        raise LaunchError(
            f"{error.filename or settings.output} cannot be written ({error.strerror}); expected room on the disk. Make "
            "room, and repeat the command."
        ) from error


def _search(settings: SearchConfig) -> int:
    flags = settings.flags
    record = SearchRecord.open(settings.output, settings.fingerprint, settings.method, is_fresh=flags.fresh)
    with record.lock(), contextlib.ExitStack() as stack:
        _print_line(f"search:        {record.path}")
        signals: list[signal.Signals] = []

        @functools.cache
        def master() -> ClusterBackend:
            from dstrial.dsat.backends.cluster import ClusterBackend

            return ClusterBackend(settings, lambda: bool(signals))

        @functools.cache
        def backend() -> Backend | RemoteSearch:
            made = _make_backend(settings, record, master)
            _print_line(f"trials run on: {made.describe()}")
            return made

        try:
            settings = with_parallel(settings, _num_parallel(settings, record, backend))
            inputs = _inputs(settings, record, master) if settings.method == PREDICT else None
        except KeyboardInterrupt:
            _print_line(
                "search:        not finished; nothing is measured yet, and the same command begins again"
            )
            return 128 + signal.SIGINT
        signals = stack.enter_context(noted_signals())
        return _run(settings, record, inputs, master, backend, signals)


def _make_backend(
    settings: SearchConfig, record: SearchRecord, master: Callable[[], ClusterBackend]
) -> Backend | RemoteSearch:
    """Return the backend that will run the trials of a search.

    With ``--local``, trials run on this machine, and ``master`` is not called. On a master, method ``predict`` measures a trial
    class inside one trial, if some agent has enough slots. Otherwise each measurement is an experiment. ``master`` returns the
    backend of a Determined master.
    """
    if settings.flags.local:
        from dstrial.dsat.backends.local import LocalBackend

        return LocalBackend(settings, record)
    if (
        settings.trial is None
        or settings.method != PREDICT
        or not master().has_machine_for(settings.num_slots)
    ):
        return master()
    from dstrial.dsat.backends.search_on_master import SearchOnMaster

    return SearchOnMaster(settings, master(), record)


def _run(
    settings: SearchConfig,
    record: SearchRecord,
    inputs: PredictInputs | None,
    master: Callable[[], ClusterBackend],
    backend: Callable[[], Backend | RemoteSearch],
    signals: list[signal.Signals],
) -> int:
    flags = settings.flags
    driver = Driver(settings, record, inputs, backend, _print_line)
    end = driver.run(signals)
    trials = list(driver.trials.values())
    text = summary(record, trials, flags.metric, reason=end.reason, is_finished=end.is_finished)
    sys.stdout.write(f"\n{text}")
    best = best_of(trials, flags.metric)
    if flags.run_full_experiment and end.is_finished and best is not None:
        if signals:
            _print_line("full run:      not begun; the same command begins it")
            return 128 + int(signals[0])
        return _train_best(settings, record, best, master)
    if end.stopped_by is not None:
        return 128 + int(end.stopped_by)
    return 1 if end.is_failure or best is None else 0


def _num_parallel(
    settings: SearchConfig, record: SearchRecord, backend: Callable[[], Backend | RemoteSearch]
) -> int:
    """Return how many trials may run at once; a resumed search reuses its number."""
    path = record.path / "parallel.json"
    if path.exists():
        return int(path.read_text())
    flags, options = settings.flags, settings.options
    num, here = flags.max_concurrent_trials or _MAX_PARALLEL, backend()
    if flags.max_concurrent_trials is None or isinstance(here, RemoteSearch):
        num = min(num, here.num_parallel)
    if flags.max_slots is not None:
        num = min(num, flags.max_slots // settings.num_slots)
    num = max(min(num, options.max_trials), 1)
    replace_file(path, f"{num}\n")
    return num


def _inputs(
    settings: SearchConfig, record: SearchRecord, master: Callable[[], ClusterBackend]
) -> PredictInputs:
    if (known := recorded_inputs(record)) is not None:
        return known
    target = target_here(os.environ)
    if not settings.flags.local:
        target = "cuda" if master().has_accelerators else "cpu"
    began_s, budget_s = time.monotonic(), settings.flags.budget
    # At least half of a budget is left for measurements.
    deadline_s = DRY_RUNS_DEADLINE_S if budget_s is None else min(DRY_RUNS_DEADLINE_S, budget_s / 2)
    inputs = gather_inputs(settings, target=target, deadline_s=deadline_s, print_line=_print_line)
    for note in inputs.notes:
        if not note.startswith("described by"):  # already printed
            _print_line(f"note:          {note}")
    record.append("inputs", {**inputs.to_json(), "seconds": time.monotonic() - began_s})
    return inputs


def _train_best(
    settings: SearchConfig, record: SearchRecord, best: TrialResult, master: Callable[[], ClusterBackend]
) -> int:
    """Submit the training of the best configuration, or run it here; return 0.

    With ``--local``, a launcher replaces this process, so the function returns only if the training was already complete.
    """
    config = full_config(settings, best.candidate)
    path = record.path / "full_experiment.yaml"
    write_config(path, config)
    if settings.flags.local:
        records = sorted((record.path / "runs").glob("*/*/run.json"), reverse=True)
        runs = [RunDirectory.open(found.parent) for found in records]
        trained = next((run for run in runs if run.read_record().state is RunState.COMPLETED), None)
        if trained is None:
            _train_here(settings, path, runs)
        _print_line(f"full run:      {trained.path}")
        return 0
    number_path = record.path / "full_experiment_id.txt"
    if not number_path.exists():
        number = master().create_full_experiment(config, record.search_id)
        replace_file(number_path, f"{number}\n")
    created = number_path.read_text().strip()
    _print_line(f"Created experiment {created}")
    _print_line(f"follow it:     det experiment logs -f {created}")
    return 0


def _train_here(settings: SearchConfig, path: Path, runs: list[RunDirectory]) -> NoReturn:
    """Replace this process by a training with the experiment config ``path``.

    The training resumes the first of ``runs`` that has a checkpoint. If none has, a new run starts.
    """
    directory = path.parent / "runs"
    variables = {RUNS_DIR_VARIABLE: str(directory)}
    saved = next((run for run in runs if newest_checkpoint(run.checkpoints_path) is not None), None)
    if saved is not None:
        variables |= {RUN_DIR_VARIABLE: str(saved.path), RESUME_VARIABLE: "latest"}
    _print_line(f"full run:      {directory}; if it is interrupted, the same command goes on with it")
    command = training_command(settings, str(path), sys.executable)
    os.chdir(settings.context_dir)
    os.execve(command[0], command, {**os.environ, **variables})  # noqa: S606  # it takes over the signals


def _print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _planned(flags: SearchFlags) -> tuple[dict[int, SearchConfig], list[str]]:
    """Return (number of ranks -> settings, reasons why other numbers are rejected).

    Raises:
        SearchError: the experiment suits no number of ``--slots``.
    """
    planned: dict[int, SearchConfig] = {}
    refused: list[str] = []
    for num_slots in flags.slots or (None,):
        try:
            asked = flags if num_slots is None else dataclasses.replace(flags, slots=(num_slots,))
            settings = read_config(asked)
            planned[settings.num_slots] = settings
        except ConfigError as error:
            if len(flags.slots or ()) < 2:
                raise
            refused.append(f"{num_slots} slot(s): {error.problems[0]}")
    if not planned:
        raise SearchError("no number of --slots suits the experiment: " + "; ".join(refused))
    return planned, refused


def run_plan(flags: SearchFlags) -> int:
    """Predict what fits on other hardware, print it and write ``report.json``.

    Returns the exit status: 0 if any configuration fits, else 1.
    """
    name = flags.device or "a100"
    device = DEVICES[name]
    device_bytes = flags.device_memory or int(device.memory_bytes)
    planned, refused = _planned(flags)
    settings = next(iter(planned.values()))
    traces = trace_graphs(settings, ConfigGroups(settings.space), print_line=_print_line)
    if not traces.found:
        reason = next(iter(traces.failures.values()), "nothing was dry-run")
        raise SearchError(f"the plan needs a description of the training code, and there is none: {reason}")
    plans = {}
    for num_slots, settings in planned.items():
        width = settings.space.bytes_per_value
        machine = nominal_machine(device, num_slots, per_machine=flags.per_machine, bytes_per_value=width)
        inputs = traces.inputs(ConfigGroups(settings.space))
        plans[num_slots] = make_plan(
            settings.space,
            dataclasses.replace(inputs, machine=machine, capacity_bytes=float(device_bytes)),
            num_slots=num_slots,
            peak_flops_per_s=device.half_flops_per_s if width == 2 else device.single_flops_per_s,
        )
    epoch_records = settings.experiment.raw.get("records_per_epoch") or max(
        trace.epoch_records for trace in traces.found.values()
    )
    num_params = max(trace.parameters for trace in traces.found.values())
    title = headline(plans, num_params, f"{flags.device or 'device'} ({device_bytes / 2**30:.4g} GiB)")
    notes = [
        *inputs.notes,
        f"speed of the {name}: {device.source}, 70 % of it assumed to be reached",
        *refused,
    ]
    if flags.device is None:
        notes.append("name the device with --device")
    if not epoch_records:
        notes.append("the length of an epoch is unknown: set records_per_epoch in the config")
    _print_plan(plans, title, notes, epoch_records, flags.price)
    output = Path(flags.output or "plan") / "report.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "title": title,
        "is_measured": False,
        "slots": list(plans),
        "device": flags.device,
        "device_source": device.source,
        "device_memory_bytes": device_bytes,
        "described_by": traces.described_by,
        "num_params": num_params,
        "epoch_records": epoch_records,
        "price": flags.price,
        "notes": notes,
        "rows": [row for rows in plans.values() for row in to_json(rows, epoch_records, flags.price)],
    }
    write_json_atomically(output, document)
    _print_line(f"report:        {output.absolute()}")
    return 0 if any(row.fits for rows in plans.values() for row in rows) else 1


def _print_plan(
    plans: Mapping[int, Sequence[PlanRow]],
    title: str,
    notes: Sequence[str],
    epoch_records: int,
    price: float | None,
) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 160)
    rows = [row for each in plans.values() for row in each[: max(MAX_ROWS // len(plans), 1)]]
    table = Table(title=f"{title} (predicted, not measured)", title_justify="left")
    for idx, column in enumerate(columns(rows)):
        table.add_column(column, justify="left" if idx == 1 else "right")
    for row in rows:
        table.add_row(*row.cells(epoch_records, price))
    console.print(table)
    for text in notes:
        console.print(f"note: {text}")
