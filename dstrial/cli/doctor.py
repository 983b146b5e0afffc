"""``dstrial doctor``: whether training can work here, and with ``--train`` does."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import math
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrial import __version__
from dstrial.doctor.checkup import CheckupOptions, run
from dstrial.doctor.finding import Group, Status, count, in_words
from dstrial.errors import DstrialError
from dstrial.file_writes import replace_file

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from rich.console import Console

SCHEMA = 1
"""Version of what ``--json`` prints; it grows when a key is taken away or means something else."""

_NEXT = "`dstrial doctor --train` trains on this machine for some minutes and proves the rest."
_FIRST_MEND = (
    "Mend what is a problem; then `dstrial doctor --train` trains here for some minutes and proves the rest."
)
DOCUMENT_NAME = "doctor.json"
"""What ``--output`` keeps, the same as ``--json`` prints."""

_STYLES: dict[Status, str] = {"ok": "green", "note": "yellow", "problem": "bold red"}
_TRAIN_ONLY = {"minutes": "--minutes", "only": "--only", "skip": "--skip"}
_DEFAULT_MINUTES = 8.0


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand and its arguments."""
    parser = subparsers.add_parser(
        "doctor",
        help="say whether this machine has what training needs, or prove it by training",
        description="Look at Python, torch, DeepSpeed, devices, compilers, network, limits, disks and the master; each line "
        "is ok, a note or a problem, with what to do. Exits 0 if there is no problem, else 1. Trains nothing without --train.",
    )
    parser.set_defaults(usage_error=parser.error)
    parser.add_argument(
        "--fast", action="store_true", help="import no library: read versions from their files"
    )
    parser.add_argument(
        "--json", action="store_true", dest="as_json", help="print one JSON object instead of text"
    )
    parser.add_argument(
        "--require-gpus",
        type=_count_argument,
        nargs="?",
        const=1,
        default=0,
        metavar="N",
        help="it is a problem if fewer than N accelerators are visible (default with the option: 1)",
    )
    parser.add_argument(
        "--runs-dir", metavar="DIR", help="directory of all runs (default: $DSTRIAL_RUNS_DIR or runs)"
    )
    parser.add_argument(
        "--state-dir", metavar="DIR", help="the master's state directory, as for `dstrial up`"
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        help=f"directory for the reports: {DOCUMENT_NAME}, or those of --train (which keeps them below the runs by default)",
    )
    parser.add_argument(
        "--deadline",
        type=_seconds_argument,
        default=CheckupOptions().import_deadline_s,
        metavar="SECONDS",
        help="when an import counts as hanging (default: %(default)g)",
    )
    training = parser.add_argument_group("training")
    training.add_argument(
        "--train", action="store_true", help="train on what is there: each check a process of its own"
    )
    training.add_argument(
        "--minutes",
        type=_seconds_argument,
        metavar="M",
        help=f"what all checks may take together (default: {_DEFAULT_MINUTES:g})",
    )
    training.add_argument("--only", nargs="+", action="extend", metavar="NAME", help="run these checks")
    training.add_argument("--skip", nargs="+", action="extend", metavar="NAME", help="leave these checks out")


def _count_argument(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of accelerators; expected 0 or more")
    return int(text)


def _seconds_argument(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration; expected a number above 0")
    return value


def main(args: argparse.Namespace) -> int:
    """Look and print; return 0 if there is no problem, else 1; train with ``--train``."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What others have named may not be written in every encoding; a sign in its place may.
        sys.stdout.reconfigure(errors="backslashreplace")
    if args.train:
        return _train(args)
    misplaced = [option for name, option in _TRAIN_ONLY.items() if getattr(args, name) is not None]
    if misplaced:
        args.usage_error(f"{', '.join(misplaced)} belongs to --train")
    options = CheckupOptions(
        is_fast=args.fast,
        state_dir=args.state_dir,
        runs_dir=args.runs_dir,
        num_gpus=args.require_gpus,
        import_deadline_s=args.deadline,
    )
    began_at_s = time.monotonic()
    groups = []
    show = _silent if args.as_json else _text_printer()
    for group in run(options):
        groups.append(group)
        show(group)
    seconds = time.monotonic() - began_at_s
    counts = count(groups)
    text = json.dumps(document(groups, seconds), indent=2, ensure_ascii=False) + "\n"
    if args.output is not None:
        _keep(Path(args.output), text)
    if args.as_json:
        sys.stdout.write(text)
    else:
        sys.stdout.write(
            f"\n{in_words(counts)} in {seconds:.1f} s. {_FIRST_MEND if counts['problem'] else _NEXT}\n"
        )
    return 1 if counts["problem"] else 0


def _keep(directory: Path, text: str) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(directory / DOCUMENT_NAME, text)
    except OSError as error:
        raise DstrialError(
            f"--output is {directory}, where nothing can be written ({error.strerror}); expected a directory. Name another one."
        ) from error


def _train(args: argparse.Namespace) -> int:
    if args.fast:
        args.usage_error("--fast does not go with --train")
    # Imports what trains; only this path may.
    training: Any = importlib.import_module("dstrial.doctor.training")
    options = training.TrainOptions(
        minutes=_DEFAULT_MINUTES if args.minutes is None else args.minutes,
        only=tuple(args.only or ()),
        skip=tuple(args.skip or ()),
        output=None if args.output is None else Path(args.output),
        json=args.as_json,
    )
    return int(training.run_training_checks(options))


def document(groups: Iterable[Group], seconds: float) -> dict[str, Any]:
    """Return what ``--json`` prints.

    ``schema``: an integer; ``dstrial``: the version; ``ok``: whether there is no problem; ``counts``: ``ok``, ``note`` and
    ``problem`` -> how many; ``seconds``: what all took; ``groups``: in the order of the text, each with ``name``, ``seconds``
    and ``findings``, each of these with ``name``, ``status`` (``ok``, ``note`` or ``problem``), ``what`` and ``todo`` (empty
    if nothing is to be done). Names stay between versions; ``what`` and ``todo`` are for people.
    """
    found = list(groups)
    counts = count(found)
    return {
        "schema": SCHEMA,
        "dstrial": __version__,
        "ok": counts["problem"] == 0,
        "counts": counts,
        "seconds": round(seconds, 3),
        "groups": [group.to_json() for group in found],
    }


def _silent(group: Group) -> None:
    """Show nothing: the JSON object comes at the end."""


def _text_printer() -> Any:
    if not sys.stdout.isatty():
        return lambda group: _write_plain(group)
    from rich.console import Console

    console = Console(highlight=False)
    return lambda group: _print_coloured(console, group)


def _write_plain(group: Group) -> None:
    """One line per finding, whatever its length, so that ``grep`` finds all of it."""
    lines = [f"{group.name} ({group.seconds:.2f} s)"]
    for finding in group.findings:
        lines.append(f"  {finding.status:<8} {finding.name}: {finding.what}")
        if finding.todo:
            lines.append(f"           -> {finding.todo}")
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _print_coloured(console: Console, group: Group) -> None:
    from rich.table import Table
    from rich.text import Text

    console.print(Text.assemble((group.name, "bold"), (f"  {group.seconds:.2f} s", "dim")))
    table = Table.grid(padding=(0, 1))
    for width in (2, 7, 22):
        table.add_column(width=width)
    table.add_column(overflow="fold")
    for finding in group.findings:
        what = Text(finding.what)
        if finding.todo:
            what.append(f"\n{finding.todo}", style="cyan")
        table.add_row("", Text(finding.status, style=_STYLES[finding.status]), Text(finding.name), what)
    console.print(table)
