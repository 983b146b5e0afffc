"""Run ``dstrial dsat`` and ``python3 -m dstrial.dsat``: a search, or a plan."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dstrial.dsat.backends import BackendFactory
from dstrial.dsat.cli import SearchFlags
from dstrial.dsat.config import SearchConfig, read_config, with_parallel
from dstrial.dsat.core.journal import DISK_FULL_ERRORS, SearchRecord, SearchStatus
from dstrial.dsat.core.outcome import TrialResult, best_of
from dstrial.dsat.driver.driver import Driver
from dstrial.dsat.driver.dry_runs import gather_inputs, target_here, trace_graphs
from dstrial.dsat.driver.full_run import run_full
from dstrial.dsat.methods import METHODS, search_method
from dstrial.dsat.predictor.config_groups import ConfigGroups
from dstrial.dsat.predictor.hardware import DEVICES, nominal_machine
from dstrial.dsat.predictor.inputs import PredictInputs
from dstrial.dsat.predictor.plan import MAX_ROWS, HardwarePlan, columns, headline, make_plan, to_json
from dstrial.dsat.report.live import LiveTable, summary
from dstrial.dsat.space.filters import Filters
from dstrial.errors import ConfigError, LaunchError, SearchError
from dstrial.file_writes import replace_file
from dstrial.local.json_files import write_json_atomically
from dstrial.ranks.stop_signals import noted_signals

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DESCRIBING_S = 900.0  # time limit of all dry runs together

EPILOG = (
    "Exit status: 0 if the search finished and measured something; 1 if it could not, or the configuration is wrong; "
    "2 for wrong usage; 130 or 143 if SIGINT or SIGTERM interrupted it. The same command, without --fresh, goes on with it."
)


def run_command(flags: SearchFlags) -> int:
    """Run the search or the plan of a command line; return the exit status."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    # urllib3 logs every retry of Determined's client; dsat reports an outage once.
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    if flags.is_plan:
        return run_plan(flags)
    settings = read_config(flags)
    for warning in settings.warnings:
        sys.stderr.write(f"warning: {warning}\n")
    # Reject an unknown method before anything is written.
    search_method(settings.method, settings.space, settings.options, Filters(settings.space))
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
    with record.lock(), noted_signals() as signals:
        _print_line(f"search:        {record.path}")
        backend = BackendFactory(settings, record, signals, _print_line)
        settings = with_parallel(settings, _num_parallel(settings, record, backend))
        filters = Filters(settings.space, disabled=flags.no_gates)
        inputs = None
        if METHODS[settings.method].predicts:
            try:
                with _interruptible(signals):
                    inputs = _inputs(settings, record, backend)
            except KeyboardInterrupt:
                _print_line(
                    "search:        not finished; nothing is measured yet, and the same command begins again"
                )
                return 128 + int(signals[0])
        method = search_method(settings.method, settings.space, settings.options, filters, inputs)
        table = LiveTable(
            flags.metric,
            max_trials=settings.options.max_trials,
            num_parallel=settings.options.num_parallel,
            budget_s=flags.budget,
        )
        with table:
            driver = Driver(
                settings,
                record,
                method,
                backend.make,
                table.print_line,
                table.show,
                flops_per_record=None if inputs is None else inputs.flops_per_record,
            )
            end = driver.run(signals)
        trials = list(driver.trials.values())
        sys.stdout.write(
            "\n" + summary(record, trials, flags.metric, reason=end.reason, is_finished=end.is_finished)
        )
        best = best_of(trials, flags.metric)
        if flags.run_full_experiment and end.is_finished and best is not None:
            return run_full(settings, record, backend, best, signals, _print_line)
    return _exit_code(end, best)


@contextlib.contextmanager
def _interruptible(signals: list[signal.Signals]) -> Iterator[None]:
    """Raise KeyboardInterrupt in the block at a stop signal; append it to ``signals``."""

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


def _num_parallel(settings: SearchConfig, record: SearchRecord, backend: BackendFactory) -> int:
    """Return how many trials run at once; a resumed search keeps its recorded number."""
    path = record.path / "parallel.json"
    if path.exists():
        return int(path.read_text())
    flags, options = settings.flags, settings.options
    num, here = flags.max_concurrent_trials, backend.make()
    if "max_concurrent_trials" not in flags.given or here.is_sequential:
        num = min(num, here.num_parallel)
    if flags.max_slots is not None:
        num = min(num, flags.max_slots // settings.num_slots)
    num = max(min(num, options.max_trials), 1)
    replace_file(path, f"{num}\n")
    return num


def _inputs(settings: SearchConfig, record: SearchRecord, backend: BackendFactory) -> PredictInputs:
    """Return inputs of method ``predict`` from the journal, else from new dry runs."""
    for event in record.events():
        if event["event"] == "inputs":
            return PredictInputs.from_json(event)
    target = target_here(os.environ)
    if not settings.flags.local:
        target = "cuda" if backend.master().has_accelerators else "cpu"
    began_s, budget_s = time.monotonic(), settings.flags.budget
    # At least half of a budget is left for measurements.
    deadline_s = _DESCRIBING_S if budget_s is None else min(_DESCRIBING_S, budget_s / 2)
    inputs = gather_inputs(settings, target=target, deadline_s=deadline_s, print_line=_print_line)
    for note in inputs.notes:
        if not note.startswith("described by"):  # already printed
            _print_line(f"note:          {note}")
    record.append("inputs", {**inputs.to_json(), "seconds": time.monotonic() - began_s})
    return inputs


def _exit_code(end: SearchStatus, best: TrialResult | None) -> int:
    if end.stopped_by is not None:
        return 128 + int(end.stopped_by)
    return 1 if end.is_failure or best is None else 0


def _print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def run_plan(flags: SearchFlags) -> int:
    """Print and write a hardware plan; return 0 if any configuration fits, else 1."""
    name = flags.device
    device = DEVICES[name or "a100"]
    device_bytes = flags.device_memory or int(device.memory_bytes)
    notes = [f"speed of the {name or 'a100'}: {device.source}, 70 % of it assumed to be reached"]
    if name is None:
        notes.append("name the device with --device")
    planned: dict[int, SearchConfig] = {}
    for num_slots in flags.slots or (None,):
        try:
            asked = flags if num_slots is None else dataclasses.replace(flags, slots=(num_slots,))
            settings = read_config(asked)
            planned[settings.num_slots] = settings
        except ConfigError as error:
            if len(flags.slots or ()) < 2:
                raise
            notes.append(f"{num_slots} slot(s): {error.problems[0]}")
    if not planned:
        raise SearchError("no number of --slots suits the experiment: " + "; ".join(notes[1:]))
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
    title = headline(plans, name or "device", device_bytes)
    notes = [*dict.fromkeys(note for plan in plans.values() for note in plan.notes), *notes]
    if not epoch_records:
        notes.append("the length of an epoch is unknown: set records_per_epoch in the config")
    _print_plan(plans, title, notes, epoch_records, flags.price)
    output = Path(flags.output or "plan") / "report.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    facts = {
        "title": title,
        "is_measured": False,
        "slots": list(plans),
        "device": name,
        "device_source": device.source,
        "device_memory_bytes": device_bytes,
        "described_by": traces.described_by,
        "num_params": max(plan.num_params for plan in plans.values()),
        "epoch_records": epoch_records,
        "price": flags.price,
        "notes": notes,
    }
    found = [to_json(plan, epoch_records, flags.price) for plan in plans.values()]
    lists = {key: [row for one in found for row in one[key]] for key in ("rows", "best")}
    write_json_atomically(output, {**facts, **lists})
    _print_line(f"report:        {output.absolute()}")
    return 0 if any(row.fits for plan in plans.values() for row in plan.rows) else 1


def _print_plan(
    plans: Mapping[int, HardwarePlan],
    title: str,
    notes: Sequence[str],
    epoch_records: int,
    price: float | None,
) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 160)
    rows = [row for plan in plans.values() for row in plan.shown(max(MAX_ROWS // len(plans), 1))]
    table = Table(title=f"{title} (predicted, not measured)", title_justify="left")
    for idx, column in enumerate(columns(rows)):
        table.add_column(column, justify="left" if idx == 1 else "right")
    for row in rows:
        table.add_row(*row.cells(epoch_records, price))
    console.print(table)
    for text in notes:
        console.print(f"note: {text}")
