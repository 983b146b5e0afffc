"""The flags that name hosts, the same for each command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dstrial.config.documents import read_yaml
from dstrial.errors import ConfigError, ConfigProblem
from dstrial.hosts.hostfile import Host, read_hosts

if TYPE_CHECKING:
    from dstrial.hosts.preflight import Preflight

_SLOTS_KEY = "resources.slots_per_trial"
FILTER = "HOST[:SLOT,SLOT...][@HOST...]"
"""How ``--include`` and ``--exclude`` name hosts."""


def add_host_arguments(parser: argparse.ArgumentParser, *, is_required: bool = False) -> None:
    group = parser.add_argument_group(
        "hosts", "Train on several machines, which ssh reaches without a password."
    )
    group.add_argument(
        "--hostfile",
        type=Path,
        required=is_required,
        metavar="FILE",
        help="lines `NAME slots=N`, DeepSpeed's format",
    )
    group.add_argument("--include", default="", metavar=FILTER, help="use only these hosts and slots")
    group.add_argument("--exclude", default="", metavar=FILTER, help="use all hosts and slots but these")
    group.add_argument(
        "--interface", metavar="NAME", help="network interface (default: one by which all reach each other)"
    )
    group.add_argument(
        "--master-port",
        type=int,
        default=0,
        metavar="PORT",
        help="for the rendezvous on the first host (default: $MASTER_PORT or a free one)",
    )
    group.add_argument("--python", metavar="PATH", help="interpreter on each host (default: this one's path)")


def require_hostfile(args: argparse.Namespace, *, is_under_slurm: bool = False) -> None:
    """Refuse flags of hosts without a hostfile, or nodes of Slurm."""
    given = {
        "--include": args.include,
        "--exclude": args.exclude,
        "--interface": args.interface,
        "--master-port": args.master_port,
        "--python": args.python,
    }
    has_hosts = args.hostfile is not None or is_under_slurm
    problems = [
        ConfigProblem(flag, "given without --hostfile", "both or none", "Add --hostfile FILE.")
        for flag, value in given.items()
        if value
    ]
    if not has_hosts and problems:
        raise ConfigError(problems)


def hosts_of(args: argparse.Namespace, num_slots: int | None = None) -> tuple[Host, ...]:
    return read_hosts(args.hostfile, include=args.include, exclude=args.exclude, num_slots=num_slots)


def given_slots(config: Path, overrides: Sequence[str] = ()) -> int | None:
    """Return ``resources.slots_per_trial`` of a config or override, None by default.

    Its default, one slot, is for one machine: without it all slots of a hostfile are used.
    """
    for override in reversed(overrides):
        key, _, value = override.partition("=")
        if key == _SLOTS_KEY and value.isdecimal():
            return int(value) or None
    resources = (read_yaml(config, str(config)).value or {}).get("resources")
    slots = resources.get("slots_per_trial") if isinstance(resources, dict) else None
    return slots if isinstance(slots, int) and slots > 0 else None


def python_of(args: argparse.Namespace) -> str:
    return args.python or sys.executable


def port_of(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> int:
    text = str(args.master_port or environ.get("MASTER_PORT") or 0)
    if text.isdecimal() and int(text) < 65_536:
        return int(text)
    flag = "--master-port" if args.master_port else "MASTER_PORT"
    raise ConfigError([ConfigProblem(flag, repr(text), "a port, 1 to 65535", "Leave it out for a free one.")])


def placement_lines(preflight: Preflight, *, unit: str = "rank") -> list[str]:
    """Return a line for each host: its ranks, address and slots.

    ``unit="slot"`` counts slots where no ranks are placed yet.
    """
    lines = []
    first = 0
    for ready in preflight.hosts:
        count = len(ready.host.slots)
        last = first + count - 1
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        if unit == "slot":
            ranks = f"{count} slot{'s' if count != 1 else ''}"
        slots = f", slots {','.join(map(str, ready.host.slots))}" if ready.host.is_filtered else ""
        lines.append(f"{ready.host.name}: {ranks} at {ready.address} ({ready.interface}){slots}")
        first = last + 1
    return lines
