"""``dstrial login``: log ``det`` in to this machine's master without a password."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from dstrial.cli.up import add_state_dir_argument
from dstrial.errors import MasterError
from dstrial.master.state_directory import StateDirectory

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "login",
        help="log det in to the master of this machine, without a password",
        description="Log the det command in to the master of this machine, without a password, where tokens were lost or "
        "have expired or a password is forgotten. It asks at a socket in the state directory, which only its owner reaches.",
    )
    parser.add_argument(
        "--user", metavar="NAME", default="determined", help="the user to log in as (default: %(default)s)"
    )
    add_state_dir_argument(parser)


def main(args: argparse.Namespace) -> int:
    state = StateDirectory.choose(args.state_dir)
    record = state.running()
    if record is None:
        raise MasterError(
            f"no master is running with state directory {state.path}; expected one. Start it with `dstrial up`."
        )
    from dstrial.master.login import addresses_of, browser_link, log_in_as

    log_in_as(record, args.user)
    sys.stdout.write(f"det is logged in as {args.user} at {' and '.join(addresses_of(record.port))}\n")
    sys.stdout.write(f"browser: {browser_link(record, args.user)} (once, within 10 minutes)\n")
    return 0
