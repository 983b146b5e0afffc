"""``determined.launch.deepspeed`` with dstrial's launcher and the same options.

Source of the command line: ``determined/launch/deepspeed.py`` ``parse_args`` (0.38.1).
"""

from __future__ import annotations

import argparse
import sys

from dstrial import determined_imports
from dstrial.launch.__main__ import main as launch


def parse_args(args: list[str]) -> list[str]:
    """Convert the arguments of Determined's launcher to those of ``dstrial.launch``.

    Args:
        args: the command line after the module's name: ``--trial model_def:MyTrial``, or a script with its arguments,
            optionally after ``--``.

    Raises:
        SystemExit: the arguments are invalid.
    """
    parser = argparse.ArgumentParser(
        prog="determined.launch.deepspeed",
        usage="%(prog)s (--trial TRIAL)|(SCRIPT...)",
        description="Run one training process per slot.",
    )
    parser.add_argument("--trial", help="a trial class to train; then there is no SCRIPT")
    parser.add_argument("script", metavar="SCRIPT...", nargs=argparse.REMAINDER, help="what every rank runs")
    parsed = parser.parse_args(args)
    script: list[str] = parsed.script[1:] if parsed.script[:1] == ["--"] else parsed.script
    if parsed.trial is not None:
        if script:
            parser.error(f"--trial {parsed.trial} is followed by {' '.join(script)}; expected one of the two")
        return ["--trial", parsed.trial]
    if not script:
        parser.error("there is neither --trial nor a script; expected one of the two")
    return ["--", *script]


def main(script: list[str]) -> int:
    """Run ``dstrial.launch`` with the result of ``parse_args``; return the exit code."""
    determined_imports.announce("determined.launch.deepspeed")
    return launch(script)


if __name__ == "__main__":
    sys.exit(main(parse_args(sys.argv[1:])))
