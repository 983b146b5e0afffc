"""``dstrial backup``: copy the master's database."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dstrial.cli.up import add_state_dir_argument
from dstrial.master.state_directory import StateDirectory

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "backup",
        help="copy the master's database, also while it runs",
        description="Copy the master's database as it is at this moment, also while the master runs and writes, and check "
        "the copy. Copying the file master.db by other means loses what is in its log. Checkpoints are not part of it.",
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        help="a new file, or a directory to put it in (default: backups/ in the state directory)",
    )
    add_state_dir_argument(parser)


def main(args: argparse.Namespace) -> int:
    from dstrial.master.store import backups, sqlite_file

    database = StateDirectory.choose(args.state_dir).database_path
    target = sqlite_file.new_path(database, time.time(), "master")
    if args.path is not None:
        asked = Path(args.path).absolute()
        target = asked / target.name if asked.is_dir() else asked
    backups.make_copy(database, target)
    sys.stdout.write(
        f"{target}: {target.stat().st_size / 2**20:.1f} MiB, experiments up to {backups.last_experiment(target)}, checked\n"
    )
    return 0
