"""``dstrial hosts``: check whether the hosts of a hostfile can train together."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dstrial.cli.streams import print_json, text_table
from dstrial.errors import HostError
from dstrial.hosts.hostfile import add_host_arguments, hosts_of, python_of
from dstrial.hosts.preflight import ReadyHost, check_hosts
from dstrial.local.run_directory import default_runs_dir

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_DESCRIPTION = """\
Log in to all hosts in parallel and check the requirements of training on them together: host names, ssh keys, Python and
its packages, slots, the network between the hosts, and the shared directory. Starts no training, and leaves no
files. `dstrial run --hostfile` and `dstrial up --hostfile` make the same check before they start anything.
"""


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "hosts", description="Check whether the hosts of a hostfile can train together."
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser(
        "check",
        help="check the hosts; starts no training",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 if all hosts are ready, 1 if not, 2 for wrong usage.",
    )
    add_host_arguments(check, is_required=True)
    check.add_argument(
        "--runs-dir",
        metavar="DIR",
        help="directory of all runs, which all hosts must share (default: $DSTRIAL_RUNS_DIR or runs)",
    )
    check.add_argument("--json", action="store_true", help="print the results as JSON")


def main(args: argparse.Namespace) -> int:
    """Check the hosts and print their properties; return 0 if they can train together.

    If there are problems, HostError lists all of them. With ``--json``, the problems are printed instead, and 1 is returned.
    """
    hosts = hosts_of(args)
    try:
        checked = check_hosts(
            hosts,
            python=python_of(args),
            shared_directory=default_runs_dir(args.runs_dir),
            environ=os.environ,
        )
    except HostError as error:
        if not args.json:
            raise
        problems = [{"host": one.host, "is": one.got, "fix": one.fix} for one in error.problems]
        print_json({"ready": False, "problems": problems})
        return 1
    if args.json:
        print_json(_document(checked))
    else:
        _print(checked)
    return 0


def _document(checked: Sequence[ReadyHost]) -> dict[str, Any]:
    hosts = [
        {
            "host": ready.host.name,
            "slots": list(ready.host.slots),
            "accelerators": ready.facts.num_accelerators,
            "address": ready.address,
            "interface": ready.interface,
            "python": ready.facts.python,
            "versions": dict(ready.facts.versions),
        }
        for ready in checked
    ]
    return {"ready": True, "hosts": hosts}


def _print(checked: Sequence[ReadyHost]) -> None:
    rows = [
        (
            ready.host.name,
            len(ready.host.slots),
            ready.facts.num_accelerators or "CPU",
            f"{ready.address} ({ready.interface})",
            ready.facts.python,
            ready.facts.versions["torch"],
        )
        for ready in checked
    ]
    header = ("host", "slots", "devices", "address", "Python", "torch")
    slots = sum(len(ready.host.slots) for ready in checked)
    sys.stdout.write(f"{text_table(header, rows)}{len(checked)} hosts with {slots} slots are ready\n")
