"""The flags that name hosts, the same for each command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dstrial.config.documents import read_yaml
from dstrial.errors import ConfigError, ConfigProblem
from dstrial.hosts.hostfile import Host, read_hosts

if TYPE_CHECKING:
    from argparse import _ArgumentGroup

    from dstrial.hosts.preflight import Preflight

_SLOTS_KEY = "resources.slots_per_trial"
_FILTER = "HOST[:SLOT,SLOT...][@HOST...]"


def add_host_arguments(parser: argparse.ArgumentParser, *, is_required: bool = False) -> _ArgumentGroup:
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
    group.add_argument("--include", default="", metavar=_FILTER, help="use only these hosts and slots")
    group.add_argument("--exclude", default="", metavar=_FILTER, help="use all hosts and slots but these")
    group.add_argument("--python", metavar="PATH", help="interpreter on each host (default: this one's path)")
    return group


def require_hostfile(args: argparse.Namespace) -> None:
    """Refuse flags of hosts without a hostfile."""
    given = {"--include": args.include, "--exclude": args.exclude, "--python": args.python}
    problems = [
        ConfigProblem(flag, "given without --hostfile", "both or none", "Add --hostfile FILE.")
        for flag, value in given.items()
        if value
    ]
    if args.hostfile is None and problems:
        raise ConfigError(problems)


def hosts_of(args: argparse.Namespace) -> tuple[Host, ...]:
    return read_hosts(args.hostfile, include=args.include, exclude=args.exclude)


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


def placement_lines(preflight: Preflight) -> list[str]:
    """Return a line for each host: its slots and address."""
    lines = []
    for ready in preflight.hosts:
        count = len(ready.host.slots)
        slots = f", slots {','.join(map(str, ready.host.slots))}" if ready.host.is_filtered else ""
        plural = "s" if count != 1 else ""
        lines.append(f"{ready.host.name}: {count} slot{plural} at {ready.address} ({ready.interface}){slots}")
    return lines
