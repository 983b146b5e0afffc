"""Parse hostfiles and host filters in DeepSpeed's format; define their flags.

A line is ``NAME slots=N``; ``#`` begins a comment. Filters ``NAME[:SLOT,SLOT...]`` are joined by ``@``. A missing file is an
error; DeepSpeed would train on one machine instead. Source: DeepSpeed 0.19.8 ``launcher/runner.py``, ``_parse_hostfile`` and
``parse_resource_filter``.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dstrial.config.documents import read_yaml
from dstrial.errors import ConfigError, ConfigProblem

if TYPE_CHECKING:
    from argparse import _ArgumentGroup

    from dstrial.hosts.preflight import ReadyHost

_LINE = re.compile(r"(?P<name>\S+)\s+slots=(?P<slots>\d+)\s*")
# Names that ssh accepts as a host and cannot mistake for an option.
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.@:%-]*[A-Za-z0-9_])?")
_MAX_SLOTS = 65_536  # of one host; a larger number is a typing error
_SLOTS_KEY = "resources.slots_per_trial"
_FILTER = "HOST[:SLOT,SLOT...][@HOST...]"


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """A machine and its usable slots."""

    name: str  # ssh's destination: a name, an address, or an alias of ``~/.ssh/config``
    slots: tuple[int, ...]  # indices of devices, ascending, from 0, in rank order
    is_filtered: bool = False  # whether a filter excludes some slots of the hostfile


def read_hosts(path: Path, *, include: str = "", exclude: str = "") -> tuple[Host, ...]:
    """Return a hostfile's hosts with the slots that a filter allows, in file order.

    Either ``include`` or ``exclude`` may be given; "" means no filter. The filter ``host1@host2:0,2`` names all slots of host1,
    and slots 0 and 2 of host2. A host without an allowed slot is left out.

    Raises:
        ConfigError: the file or the filter is invalid, both filters are given, or no host is left.
    """
    hosts = _read(path)
    if not hosts:
        raise _error(
            str(path), "without a host", "lines `NAME slots=N`, one a host", "Add the hosts to train on."
        )
    if include and exclude:
        raise _error("--include", "given beside --exclude", "one of the two", "Leave one of them out.")
    if not (include or exclude):
        return hosts
    flag = "--include" if include else "--exclude"
    named = _named_slots(hosts, include or exclude, flag, path)
    kept = []
    for host in hosts:
        chosen = named.get(host.name, set())
        left = chosen if include else {*host.slots} - chosen
        if left:
            kept.append(Host(host.name, tuple(sorted(left)), is_filtered=left != {*host.slots}))
    if not kept:
        raise _error(flag, repr(exclude), "at least one host that is left", "Exclude fewer hosts.")
    return tuple(kept)


def _error(where: str, got: str, expected: str, fix: str) -> ConfigError:
    return ConfigError([ConfigProblem(where, got, expected, fix)])


def _read(path: Path) -> tuple[Host, ...]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        got, fix = (
            f"{str(path)!r}, which cannot be read ({reason})",
            f"Correct the path, which is relative to {Path.cwd()}.",
        )
        raise _error("--hostfile", got, "a file of lines `NAME slots=N`", fix) from error
    found: dict[str, Host] = {}
    problems: list[ConfigProblem] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match = _LINE.fullmatch(words)
        if match is None or not _NAME.fullmatch(match["name"]) or not 1 <= int(match["slots"]) <= _MAX_SLOTS:
            expected = f"`NAME slots=N` with a host's name or address and 1 to {_MAX_SLOTS} slots"
            problems.append(ConfigProblem(f"{path}:{number}", repr(words), expected, "Correct the line."))
        elif match["name"] in found:
            got = f"{match['name']!r} once more"
            problems.append(
                ConfigProblem(f"{path}:{number}", got, "each host once", "Give its slots in one line.")
            )
        else:
            found[match["name"]] = Host(match["name"], tuple(range(int(match["slots"]))))
    if problems:
        raise ConfigError(problems)
    return tuple(found.values())


def _named_slots(hosts: Sequence[Host], text: str, flag: str, path: Path) -> dict[str, set[int]]:
    """Return host name -> indices of slots, for the hosts that a filter names.

    ``text`` is the filter. ``flag``, its command-line option, and ``path``, the hostfile, are shown in errors.
    """
    by_name = {host.name: host for host in hosts}
    named: dict[str, set[int]] = {}
    problems: list[ConfigProblem] = []
    for part in text.split("@"):
        name, colon, numbers = part.strip().partition(":")
        host = by_name.get(name)
        if host is None:
            got = f"{text!r}, and {name!r} is not in {path}"
            problems.append(ConfigProblem(flag, got, f"hosts of {', '.join(by_name)}", "Correct the name."))
            continue
        wanted = (
            {int(one) if one.isdecimal() else -1 for one in numbers.split(",")} if colon else {*host.slots}
        )
        if not wanted <= {*host.slots}:
            expected = f"slots 0 to {host.slots[-1]} of {name}, joined by commas"
            problems.append(ConfigProblem(flag, repr(part), expected, "Correct the slots."))
        named.setdefault(name, set()).update(wanted)
    if problems:
        raise ConfigError(problems)
    return named


def add_host_arguments(parser: argparse.ArgumentParser, *, is_required: bool = False) -> _ArgumentGroup:
    group = parser.add_argument_group(
        "hosts", "Train on several machines. ssh must reach these machines without a password."
    )
    group.add_argument(
        "--hostfile",
        type=Path,
        required=is_required,
        metavar="FILE",
        help="file with one line `NAME slots=N` per host, DeepSpeed's format",
    )
    group.add_argument("--include", default="", metavar=_FILTER, help="use only these hosts and slots")
    group.add_argument("--exclude", default="", metavar=_FILTER, help="do not use these hosts and slots")
    group.add_argument(
        "--python",
        metavar="PATH",
        help="Python interpreter on each host (default: the path of the interpreter that runs this command)",
    )
    return group


def require_hostfile(args: argparse.Namespace) -> None:
    """Raise ConfigError if a flag is given that has no effect without ``--hostfile``."""
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
    """Return ``resources.slots_per_trial`` of a config file; None if it is unset or 0.

    ``overrides`` are texts ``key=value`` that take precedence over the file. None means that a run on several hosts uses all
    slots of these hosts. (The config's default of 1 is for single machines.)
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


def placement_lines(hosts: Sequence[ReadyHost]) -> list[str]:
    """Return a line of text for each checked host: its name, slots and address."""
    lines = []
    for ready in hosts:
        count = len(ready.host.slots)
        slots = f", slots {','.join(map(str, ready.host.slots))}" if ready.host.is_filtered else ""
        plural = "s" if count != 1 else ""
        lines.append(f"{ready.host.name}: {count} slot{plural} at {ready.address} ({ready.interface}){slots}")
    return lines
