"""``dstrial down``: stop the master of this machine."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from dstrial.cli.up import add_state_dir_argument
from dstrial.errors import MasterError
from dstrial.master import daemon
from dstrial.master.state_directory import StateDirectory

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_DEFAULT_DEADLINE_S = 600.0
_KILL_DEADLINE_S = 60.0


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "down",
        help="stop all trials with a checkpoint and end the master",
        description="Stop all trials with a checkpoint and end the master. Their experiments stay active and go on at "
        "the next `dstrial up`.",
    )
    add_state_dir_argument(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--now", action="store_true", help="kill the trials instead, without a checkpoint")
    how.add_argument(
        "--deadline",
        type=_seconds,
        metavar="SECONDS",
        default=_DEFAULT_DEADLINE_S,
        help="kill trials that have not stopped after this time (default: %(default)g)",
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no time; expected seconds of at least 0")
    return seconds


def main(args: argparse.Namespace) -> int:
    """Stop the master; return 0 even if none is running."""
    state = StateDirectory.choose(args.state_dir)
    record = state.running()
    if record is None:
        sys.stdout.write(f"no master is running with state directory {state.path}\n")
        return 0
    daemon.request_stop(record, is_kill=args.now)
    if not args.now:
        try:
            if daemon.wait_for_end(state, record, args.deadline, _print_waiting):
                sys.stdout.write("the master has ended\n")
                return 0
        except KeyboardInterrupt:
            sys.stderr.write("the master is still stopping; `dstrial down --now` kills its trials\n")
            raise
        sys.stderr.write(f"trials have not stopped within {args.deadline:g} s and are killed\n")
        daemon.request_stop(record, is_kill=True)
    if not daemon.wait_for_end(state, record, _KILL_DEADLINE_S):
        raise MasterError(
            f"the master, process {record.pid}, has not ended within {_KILL_DEADLINE_S:g} s; expected it to. See "
            f"{state.log_path}."
        )
    sys.stdout.write("the master has ended\n")
    return 0


def _print_waiting(num_allocations: int) -> None:
    if num_allocations:
        what = "1 trial" if num_allocations == 1 else f"{num_allocations} trials"
        sys.stdout.write(f"waiting for {what} to save a checkpoint\n")
        sys.stdout.flush()
