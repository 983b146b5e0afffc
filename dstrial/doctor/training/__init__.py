"""``dstrial doctor --train``: short real trainings that show what works here."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dstrial.doctor.training.check import Check

__all__ = ["TrainOptions", "run_training_checks"]


@dataclasses.dataclass(frozen=True, slots=True)
class TrainOptions:
    """What training checks are asked for.

    Attributes:
        only: names of checks to run; empty for all.
        skip: names of checks to leave out.
        output: where JSON and report are kept; a new directory ``doctor/<stamp>`` below that of all runs if None.
        json: whether the JSON is printed at the end, instead of the last lines for people.
    """

    minutes: float = 8
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    output: Path | None = None
    json: bool = False


def run_training_checks(options: TrainOptions, checks: Sequence[Check] | None = None) -> int:
    """Run the checks, keep ``result.json`` and ``report.md``, and show how they go.

    Args:
        options: what is asked for.
        checks: all checks that there are; those of ``catalogue`` if None.

    Returns:
        The exit status: 0 if nothing failed, 1 if a check did.

    Raises:
        DstrialError: a name is no check's, or the minutes are no positive number.
        OSError: the directory cannot be written.
    """
    from dstrial.doctor.training.check import CHECKS, Status, chosen
    from dstrial.doctor.training.report import Record, headline
    from dstrial.doctor.training.runner import run_checks, shown
    from dstrial.errors import DstrialError

    if not 0 < options.minutes < 24 * 60:
        raise DstrialError(
            f"--minutes is {options.minutes:g}; expected a number above 0. Pass how long the checks may take."
        )
    planned = chosen(options.only, options.skip, CHECKS if checks is None else checks)
    directory = _directory(options.output)
    record = Record(directory, minutes=options.minutes, planned=tuple(check.name for check in planned))
    sys.stderr.write(f"results are kept in {directory}\n")
    with shown() as told:
        results = run_checks(planned, record, minutes=options.minutes, told=told)
    if options.json:
        sys.stdout.write(json.dumps(record.value, indent=2) + "\n")
    else:
        sys.stdout.write(f"{headline(record.value)}\nreport: {record.report_path}\n")
    sys.stdout.flush()
    return int(any(result.status is Status.FAILED for result in results))


def _directory(asked: Path | None) -> Path:
    from dstrial.context_directory import make_output_directory
    from dstrial.local.run_directory import default_runs_dir

    if asked is not None:
        made = asked.absolute()
        made.mkdir(parents=True, exist_ok=True)
        return made
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    parent = default_runs_dir() / "doctor"
    make_output_directory(parent)
    for attempt in range(1000):
        made = parent / (f"{stamp}-{attempt}" if attempt else stamp)
        try:
            made.mkdir()
        except FileExistsError:
            continue
        return made
    raise FileExistsError(parent / stamp)
