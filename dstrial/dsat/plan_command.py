"""What ``dstrial dsat plan`` does: describe, dry-run, predict, print; on this machine, for another one."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from dstrial.dsat.arguments import parsed_defaults
from dstrial.dsat.machine import DEVICES, nominal_machine
from dstrial.dsat.memory_model import DeviceMemory, unmeasured_peak
from dstrial.dsat.plan import Plan, headline, make_plan, one_device, table_rows
from dstrial.dsat.prepare import gather_inputs, on_one_device
from dstrial.dsat.settings import read_settings
from dstrial.errors import SearchError
from dstrial.local.json_files import write_json_atomically

_COLUMNS = ("configuration", "verdict", "GiB, phase", "host GiB", "records/s (80 %)", "largest micro batch")


def run_plan(args: argparse.Namespace) -> int:
    """Plan as a parsed command line says; returns 0 if anything fits, else 1.

    Raises:
        DstrialError: the configuration is wrong, or nothing could be described.
    """
    name = args.device
    device = DEVICES[name or "a100"]
    device_bytes = int(args.device_memory or device.memory_bytes)
    settings = read_settings(parsed_defaults(args))
    space = settings.space
    inputs = gather_inputs(settings, target="cuda", capacity_bytes=device_bytes, tell=_tell)
    if not inputs.runs:
        reason = next(iter(inputs.failures.values()), "nothing was dry-run")
        raise SearchError(f"the plan needs a description of the training code, and there is none: {reason}")
    machine = nominal_machine(
        device, settings.num_slots, per_machine=args.per_machine, bytes_per_value=space.bytes_per_value
    )
    plan = make_plan(space, dataclasses.replace(inputs, machine=machine))
    alone: list[str] = []
    if settings.num_slots > 1:
        device_memory = DeviceMemory.cuda(device_bytes)
        for kind, run in on_one_device(settings, capacity_bytes=device_bytes):
            alone.append(one_device(kind, unmeasured_peak(device_memory, run.device, 1), device_bytes))
    plan = dataclasses.replace(plan, notes=(*alone, *plan.notes))
    title = headline(plan, settings.num_slots, name or "device", device_bytes)
    _print(plan, title, None if name else "times are those of an a100; name the device with --device")
    output = Path(args.output or "plan") / "report.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    facts = {
        "title": title,
        "slots": settings.num_slots,
        "device": name,
        "device_memory_bytes": device_bytes,
        "described_by": inputs.described_by,
        "train_batch_size": space.own().batch.train_batch_size,
    }
    write_json_atomically(output, {**facts, **plan.to_json()})
    _tell(f"report:        {output.absolute()}")
    return 0 if any(row.fits for row in plan.rows) else 1


def _print(plan: Plan, title: str, note: str | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 160)
    table = Table(title=f"{title} (predicted, not measured)", title_justify="left")
    for idx, column in enumerate(_COLUMNS):
        table.add_column(column, justify="left" if idx < 2 else "right")
    for cells in table_rows(plan.rows):
        table.add_row(*cells)
    console.print(table)
    for number, row in enumerate(plan.best, 1):
        console.print(
            f"predicted best {number}: {row.description}: {row.throughput:.4g} records/s "
            f"({row.throughput_low:.3g} to {row.throughput_high:.3g}), not measured"
        )
    for text in (*plan.notes, *([note] if note else [])):
        console.print(f"note: {text}")


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
