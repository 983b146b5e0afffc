"""Run dsat as ``python3 -m dstrial.dsat METHOD CONFIG.yaml MODEL_DIR``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dstrial.dsat.cli import build_parser, flags_of, with_method
from dstrial.dsat.command import EPILOG, run_command
from dstrial.errors import DstrialError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a search and return the exit status; the default method is ``predict``."""
    parser = build_parser("python3 -m dstrial.dsat")
    parser.epilog = EPILOG
    words = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(with_method(words))
    try:
        return run_command(flags_of(args))
    except DstrialError as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
