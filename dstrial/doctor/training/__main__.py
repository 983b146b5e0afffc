"""Run training checks without the ``dstrial`` command."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dstrial.doctor.training import TrainOptions, run_training_checks
from dstrial.errors import DstrialError

_DESCRIPTION = (
    "Run training checks without the ``dstrial`` command: ``python -m dstrial.doctor.training --minutes 8``."
)


def main() -> int:
    """Read the command line and run; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dstrial.doctor.training", description=_DESCRIPTION)
    parser.add_argument("--minutes", type=float, default=8.0, help="for all checks together (default: 8)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="a check to run, among others named so"
    )
    parser.add_argument("--skip", action="append", default=[], metavar="NAME", help="a check to leave out")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="where results are kept (default: runs/doctor/<stamp>)"
    )
    parser.add_argument("--json", action="store_true", help="print the JSON at the end")
    args = parser.parse_args()
    try:
        return run_training_checks(
            TrainOptions(args.minutes, _names(args.only), _names(args.skip), args.output, args.json)
        )
    except DstrialError as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _names(given: list[str]) -> tuple[str, ...]:
    return tuple(name for word in given for name in word.split(",") if name)


if __name__ == "__main__":
    sys.exit(main())
