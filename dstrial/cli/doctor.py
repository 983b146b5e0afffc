"""``dstrial doctor``: check whether training can work on this machine."""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrial import __version__
from dstrial.cli.streams import (
    add_runs_dir_argument,
    add_state_dir_argument,
    count_argument,
    print_json,
    seconds_argument,
)
from dstrial.doctor.checkup import CheckupOptions, run
from dstrial.doctor.finding import Group, count
from dstrial.errors import DstrialError
from dstrial.file_writes import replace_file
from dstrial.visible_text import plural

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from dstrial.doctor.proof import Step

SCHEMA = 1  # version of ``--json``; incremented when a key is removed or changes its meaning

_NEXT = "`dstrial doctor --train` trains on this machine and proves the rest."
DOCUMENT_NAME = "doctor.json"  # written to ``--output``, same content as ``--json``

_DEFAULT_MINUTES = 5.0


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "doctor",
        description="Check Python, torch, DeepSpeed, devices, compilers, network, limits, disks and the master. Each line is "
        "ok, a note, or a problem with its fix. Exits 0 if there is no problem, else 1. Only --train trains.",
    )
    parser.set_defaults(usage_error=parser.error)
    parser.add_argument(
        "--fast",
        action="store_true",
        help="import no library: skip the checks of torch, DeepSpeed and compilers",
    )
    parser.add_argument(
        "--json", action="store_true", dest="as_json", help="print one JSON object instead of text"
    )
    parser.add_argument(
        "--require-gpus",
        type=count_argument,
        nargs="?",
        const=1,
        default=0,
        metavar="N",
        help="report a problem if fewer than N accelerators are visible (N is 1 unless given)",
    )
    add_runs_dir_argument(parser)
    add_state_dir_argument(parser)
    parser.add_argument(
        "--output",
        metavar="DIR",
        help=f"directory for {DOCUMENT_NAME}; with --train also for result.json and the logs of the test run",
    )
    parser.add_argument(
        "--deadline",
        type=seconds_argument,
        default=CheckupOptions().import_deadline_s,
        metavar="SECONDS",
        help="time after which an import counts as hanging (default: %(default)g)",
    )
    parser.add_argument(
        "--train",
        action="store_true",
        help="train a small model on this machine's devices: train, save, resume, reshape, measure",
    )
    parser.add_argument(
        "--minutes",
        type=seconds_argument,
        metavar="M",
        help=f"time limit of --train in minutes (default: {_DEFAULT_MINUTES:g})",
    )


def main(args: argparse.Namespace) -> int:
    """Run the checks; return 1 for a problem or a failed step of ``--train``, else 0."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names from elsewhere may not be encodable on this terminal: replace such characters.
        sys.stdout.reconfigure(errors="backslashreplace")
    if args.train:
        return _train(args)
    if args.minutes is not None:
        args.usage_error("--minutes belongs to --train")
    options = CheckupOptions(
        is_fast=args.fast,
        state_dir=args.state_dir,
        runs_dir=args.runs_dir,
        num_gpus=args.require_gpus,
        import_deadline_s=args.deadline,
    )
    began_at_s = time.monotonic()
    groups = []
    for group in run(options):
        groups.append(group)
        if not args.as_json:
            _write(group)
    seconds = time.monotonic() - began_at_s
    counts = count(groups)
    text = json.dumps(document(groups, seconds), indent=2, ensure_ascii=False) + "\n"
    if args.output is not None:
        _write_output(Path(args.output), DOCUMENT_NAME, text)
    if args.as_json:
        sys.stdout.write(text)
    else:
        said = f"{counts['ok']} ok, {plural(counts['note'], 'note')}, {plural(counts['problem'], 'problem')}"
        sys.stdout.write(f"\n{said} in {seconds:.1f} s. {'' if counts['problem'] else _NEXT}".rstrip() + "\n")
    return 1 if counts["problem"] else 0


def _write_output(directory: Path, name: str, text: str) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(directory / name, text)
    except OSError as error:
        raise DstrialError(
            f"--output is {directory}, where nothing can be written ({error.strerror}); expected a directory. Name another one."
        ) from error


def _train(args: argparse.Namespace) -> int:
    from dstrial.doctor.proof import RESULT_NAME, prove

    if args.fast:
        args.usage_error("--fast does not go with --train")
    output = None if args.output is None else Path(args.output)
    if output is not None:
        _write_output(output, RESULT_NAME, "{}\n")  # fail before minutes of training if it cannot be written
    found = prove(
        minutes=_DEFAULT_MINUTES if args.minutes is None else args.minutes,
        output=output,
        show=(lambda _: None) if args.as_json else _show_step,
    )
    if args.as_json:
        print_json(found)
    return int(any(step["status"] != "ok" for step in found["steps"]))


def _show_step(step: Step) -> None:
    sys.stdout.write(f"{step.status:<12}{step.name} ({step.seconds:.1f} s): {step.what}\n")
    if step.output:
        sys.stdout.write(step.output + "\n")
    sys.stdout.flush()


def document(groups: Iterable[Group], seconds: float) -> dict[str, Any]:
    """Return the JSON document of ``--json``.

    Keys: ``schema`` (an integer), ``dstrial`` (the version), ``ok`` (whether there is no problem), ``counts`` (by status),
    ``seconds`` (in total) and ``groups``. A group has ``name``, ``seconds`` and ``findings``; a finding has ``name``, ``status``
    (``ok``, ``note`` or ``problem``), ``what`` and ``todo`` (texts; ``todo`` may be empty). Names are stable between versions.
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


def _write(group: Group) -> None:
    """Print one line per finding, so that ``grep`` finds complete messages."""
    lines = [f"{group.name} ({group.seconds:.2f} s)"]
    for finding in group.findings:
        lines.append(f"  {finding.status:<8} {finding.name}: {finding.what}")
        if finding.todo:
            lines.append(f"           -> {finding.todo}")
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
