"""``dstrial backup``, ``down``, ``login``, ``logs`` and ``restore`` of the master."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dstrial.cli.streams import add_state_dir_argument, count_argument, det_reaches, seconds_argument
from dstrial.errors import MasterError
from dstrial.master import daemon
from dstrial.master.state_directory import StateDirectory
from dstrial.visible_text import plural, visible

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_DEFAULT_DEADLINE_S = 600.0  # default of `down --deadline`
_KILL_DEADLINE_S = 60.0  # for a master to end after its trials were killed
_LOG_POLL_PERIOD_S = 0.2  # of `logs --follow`

_DESCRIPTIONS = {
    "backup": "Copy the master's database to a consistent snapshot, and check the copy. The master may run meanwhile. Do not "
    "copy master.db by other means: recent transactions are in another file. Checkpoints are not copied.",
    "down": "Save a checkpoint of each trial, stop all trials and end the master. Experiments stay active and continue at "
    "the next `dstrial up`.",
    "login": "Log the det command in to the master of this machine, without a password, for example after a token has "
    "expired. The command uses a socket in the state directory, which only the owner of the directory can open.",
    "logs": "Print the master's own log. `det trial logs` prints the log of a trial.",
    "restore": "Replace the master's database by a backup, while no master runs. The replaced files are moved to another "
    "directory. Without PATH, list the backups.",
}


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser], command: str) -> None:
    parser = subparsers.add_parser(command, description=_DESCRIPTIONS[command])
    if command == "backup":
        parser.add_argument(
            "path",
            metavar="PATH",
            nargs="?",
            help="new file, or directory of the new file (default: backups/ in the state directory)",
        )
    elif command == "restore":
        parser.add_argument(
            "path", metavar="PATH", nargs="?", help="backup file, made by `dstrial backup` or by the master"
        )
    elif command == "login":
        parser.add_argument(
            "--user",
            metavar="NAME",
            default="determined",
            help="name of the user to log in as (default: %(default)s)",
        )
    add_state_dir_argument(parser)
    if command == "down":
        how = parser.add_mutually_exclusive_group()
        how.add_argument("--now", action="store_true", help="kill the trials instead, without a checkpoint")
        how.add_argument(
            "--deadline",
            type=functools.partial(seconds_argument, may_be_zero=True),
            metavar="SECONDS",
            default=_DEFAULT_DEADLINE_S,
            help="kill trials that have not stopped after this time (default: %(default)g)",
        )
    elif command == "logs":
        parser.add_argument("-f", "--follow", action="store_true", help="follow the log until Ctrl-C")
        parser.add_argument(
            "-n",
            "--lines",
            type=count_argument,
            metavar="N",
            default=200,
            help="print the last N lines (default: %(default)s)",
        )


def main(args: argparse.Namespace) -> int:
    run: Callable[[argparse.Namespace, StateDirectory], object] = {
        "backup": _backup,
        "down": _down,
        "login": _log_in,
        "logs": _show_logs,
        "restore": _restore,
    }[args.command]
    run(args, StateDirectory.choose(args.state_dir))
    return 0


def _backup(args: argparse.Namespace, state: StateDirectory) -> None:
    from dstrial.master.store import sqlite_file

    target = sqlite_file.new_path(state.database_path, time.time(), "master")
    if args.path is not None:
        asked = Path(args.path).absolute()
        target = asked / target.name if asked.is_dir() else asked
    sqlite_file.make_copy(state.database_path, target)
    sys.stdout.write(
        f"{target}: {target.stat().st_size / 2**20:.1f} MiB, experiments up to {sqlite_file.last_experiment(target)}, checked\n"
    )


def _restore(args: argparse.Namespace, state: StateDirectory) -> None:
    from dstrial.master.store import sqlite_file

    if args.path is None:
        _list_backups(state)
        return
    copy = Path(args.path).absolute()
    if not copy.is_file():
        raise MasterError(
            f"{copy} is missing; expected a copy of a database. See them with `dstrial restore`."
        )
    state.make()
    with state.lock():
        with contextlib.suppress(MasterError):  # a damaged database cannot be queried
            allocations = daemon.live_allocations(state)
            if allocations:
                still = f"{len(allocations)} allocations of an earlier master run on"
                sys.stderr.write(f"warning: {still}; results newer than the backup are lost\n")
        restored = sqlite_file.restore_copy(state.database_path, copy)
        state.restrict_to_owner()
    sys.stdout.write(
        f"{state.database_path} is restored from {copy}: {restored.num_experiments} experiments, the last is "
        f"{restored.last_experiment}\n"
    )
    if restored.kept is not None:
        sys.stdout.write(f"the replaced database is kept in {restored.kept}\n")
    sys.stdout.write("start the master with `dstrial up`\n")


def _list_backups(state: StateDirectory) -> None:
    from dstrial.master.store import sqlite_file

    found = sqlite_file.list_copies(state.database_path)
    if not found:
        sys.stdout.write(
            f"no copies in {sqlite_file.directory_of(state.database_path)}; make one with `dstrial backup`\n"
        )
    for one in found:
        moment = datetime.datetime.fromtimestamp(one.time_s, datetime.timezone.utc)
        last = sqlite_file.last_experiment(one.path)
        size = f"{one.path.stat().st_size / 2**20:.1f} MiB"
        sys.stdout.write(
            f"{moment:%Y-%m-%d %H:%M:%S} UTC  experiments up to {'?' if last is None else last:<6} {size:>10}  {one.path}\n"
        )


def _down(args: argparse.Namespace, state: StateDirectory) -> None:
    record = state.running()
    if record is None:
        sys.stdout.write(f"no master is running with state directory {state.path}\n")
        return
    daemon.request_stop(record, is_kill=args.now)
    has_ended = False
    if not args.now:
        try:
            has_ended = daemon.wait_for_end(state, record, args.deadline, _print_waiting)
        except KeyboardInterrupt:
            sys.stderr.write("the master is still stopping; `dstrial down --now` kills its trials\n")
            raise
        if not has_ended:
            sys.stderr.write(f"trials have not stopped within {args.deadline:g} s and are killed\n")
            daemon.request_stop(record, is_kill=True)
    if not has_ended and not daemon.wait_for_end(state, record, _KILL_DEADLINE_S):
        raise MasterError(
            f"the master, process {record.pid}, has not ended within {_KILL_DEADLINE_S:g} s; expected it to. See "
            f"{state.log_path}."
        )
    sys.stdout.write("the master has ended\n")


def _print_waiting(num_allocations: int) -> None:
    if num_allocations:
        sys.stdout.write(f"waiting for {plural(num_allocations, 'trial')} to save a checkpoint\n")
        sys.stdout.flush()


def _log_in(args: argparse.Namespace, state: StateDirectory) -> None:
    record = state.require_running()
    from dstrial.master.login import addresses_of, browser_link, log_in_as

    log_in_as(record, args.user)
    sys.stdout.write(f"det is logged in as {args.user} at {' and '.join(addresses_of(record.port))}\n")
    sys.stdout.write(f"browser: {browser_link(record, args.user)} (once, within 10 minutes)\n")
    if not det_reaches(record.address):
        sys.stdout.write(f"export DET_MASTER={record.address}\n")


def _show_logs(args: argparse.Namespace, state: StateDirectory) -> None:
    if not state.log_path.is_file():
        raise MasterError(
            f"{state.log_path} does not exist; expected the log of a master. Start one with `dstrial up`, or pass its "
            "--state-dir."
        )
    size = state.log_path.stat().st_size
    for line in daemon.tail(state.log_path, args.lines):
        sys.stdout.write(f"{visible(line)}\n")
    sys.stdout.flush()
    if args.follow:
        _follow(state.log_path, size)


def _follow(path: Path, position: int) -> None:
    """Print a growing log from byte ``position`` on, until interrupted."""
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
        time.sleep(_LOG_POLL_PERIOD_S)
