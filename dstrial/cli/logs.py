"""``dstrial logs``: the master's own log."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dstrial.cli.up import add_state_dir_argument
from dstrial.errors import MasterError
from dstrial.master.daemon import tail
from dstrial.master.state_directory import StateDirectory
from dstrial.visible_text import visible

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_POLL_PERIOD_S = 0.2


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "logs",
        help="print the master's own log",
        description="Print the master's own log. A trial's is printed by `det trial logs`.",
    )
    add_state_dir_argument(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="follow the log until Ctrl-C")
    parser.add_argument(
        "-n", "--lines", type=_count, metavar="N", default=200, help="the last N lines (default: %(default)s)"
    )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of lines; expected an integer of at least 0")
    return int(text)


def main(args: argparse.Namespace) -> int:
    state = StateDirectory.choose(args.state_dir)
    if not state.log_path.is_file():
        raise MasterError(
            f"{state.log_path} does not exist; expected the log of a master. Start one with `dstrial up`, or pass its "
            "--state-dir."
        )
    size = state.log_path.stat().st_size
    for line in tail(state.log_path, args.lines):
        sys.stdout.write(f"{visible(line)}\n")
    sys.stdout.flush()
    if args.follow:
        _follow(state.log_path, size)
    return 0


def _follow(path: Path, position: int) -> None:
    """Print appended text until interrupted; restart at 0 if the file was truncated."""
    while True:
        size = path.stat().st_size
        if size < position:
            position = 0
        if size > position:
            with path.open("rb") as file:
                file.seek(position)
                content = file.read()
            complete = content[: content.rfind(b"\n") + 1]
            position += len(complete)
            sys.stdout.write(visible(complete.decode("utf-8", errors="replace")))
            sys.stdout.flush()
        time.sleep(_POLL_PERIOD_S)
