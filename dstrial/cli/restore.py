"""``dstrial restore``: restore the master's database from a backup."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dstrial.cli.up import add_state_dir_argument
from dstrial.errors import MasterError
from dstrial.master.state_directory import StateDirectory

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from dstrial.master.store.backups import Restored


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "restore",
        help="restore the master's database from a backup",
        description="Replace the master's database by a backup, while no master runs. The replaced files are kept beside it, "
        "and ids of experiments and trials are not reused. Without PATH, list the backups.",
    )
    parser.add_argument(
        "path", metavar="PATH", nargs="?", help="a backup, made by `dstrial backup` or by the master"
    )
    add_state_dir_argument(parser)


def main(args: argparse.Namespace) -> int:
    from dstrial.master.store import backups

    state = StateDirectory.choose(args.state_dir)
    if args.path is None:
        return _list(state)
    copy = Path(args.path).absolute()
    if not copy.is_file():
        raise MasterError(
            f"{copy} is missing; expected a copy of a database. See them with `dstrial restore`."
        )
    state.make()
    with state.lock():
        _warn_of_trials(state)
        restored = backups.restore_copy(state.database_path, copy)
        state.close_to_others()
    _print(state, copy, restored)
    return 0


def _list(state: StateDirectory) -> int:
    from dstrial.master.store import backups, sqlite_file

    found = sqlite_file.list_copies(state.database_path)
    if not found:
        sys.stdout.write(
            f"no copies in {sqlite_file.directory_of(state.database_path)}; make one with `dstrial backup`\n"
        )
    for one in found:
        moment = datetime.datetime.fromtimestamp(one.time_s, datetime.timezone.utc)
        last = backups.last_experiment(one.path)
        size = f"{one.path.stat().st_size / 2**20:.1f} MiB"
        sys.stdout.write(
            f"{moment:%Y-%m-%d %H:%M:%S} UTC  experiments up to {'?' if last is None else last:<6} {size:>10}  {one.path}\n"
        )
    return 0


def _warn_of_trials(state: StateDirectory) -> None:
    from dstrial.master.daemon import living_allocations

    with contextlib.suppress(MasterError):  # a damaged database cannot be queried
        allocations = living_allocations(state)
        if allocations:
            sys.stderr.write(
                f"warning: {len(allocations)} allocations of an earlier master run on; results newer than the backup are lost\n"
            )


def _print(state: StateDirectory, copy: Path, restored: Restored) -> None:
    sys.stdout.write(
        f"{state.database_path} is restored from {copy}: {restored.num_experiments} experiments, the last is "
        f"{restored.last_experiment}; the next one gets number {restored.next_experiment}\n"
    )
    if restored.kept is not None:
        sys.stdout.write(f"what was there is kept in {restored.kept}\n")
    sys.stdout.write("start the master with `dstrial up`\n")
