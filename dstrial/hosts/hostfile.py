"""Parse hostfiles and host filters in DeepSpeed's format; define their flags.

A line is ``NAME slots=N``; ``#`` begins a comment. Filters ``NAME[:SLOT,SLOT...]`` are joined by ``@``. A missing file
is an error, while DeepSpeed trains on one machine. Source: DeepSpeed 0.19.8 ``launcher/runner.py``, ``_parse_hostfile`` and
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
_MAX_SLOTS = 65_536
_SLOTS_KEY = "resources.slots_per_trial"
_FILTER = "HOST[:SLOT,SLOT...][@HOST...]"


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """A machine and its usable slots."""

    name: str  # ssh's destination: a name, an address, or an alias of ``~/.ssh/config``
    slots: tuple[int, ...]  # indices of devices, ascending, from 0, in rank order
    is_filtered: bool = False  # whether a filter excludes some slots of the hostfile


def read_hosts(path: Path, *, include: str = "", exclude: str = "") -> tuple[Host, ...]:
    """Return the hosts and slots of a hostfile that the filters allow, in order.

    At most one filter may be given; ``host1@host2:0,2`` means all slots of host1, and slots 0 and 2 of host2.

    Raises:
        ConfigError: all problems of the file and the filters.
    """
    hosts = _read(path)
    problems: list[ConfigProblem] = []
    if include and exclude:
        problems.append(
            ConfigProblem("--include", "given beside --exclude", "one of the two", "Leave one of them out.")
        )
    elif include:
        hosts = _filtered(hosts, include, "--include", path, problems)
    elif exclude:
        hosts = _filtered(hosts, exclude, "--exclude", path, problems)
    if not problems and not hosts:
        problems.append(
            ConfigProblem(
                "--exclude" if exclude else str(path),
                repr(exclude) if exclude else "without a host",
                "at least one host that is left" if exclude else "lines `NAME slots=N`, one a host",
                "Exclude fewer hosts." if exclude else "Add the hosts to train on.",
            )
        )
    if problems:
        raise ConfigError(problems)
    return hosts


def _read(path: Path) -> tuple[Host, ...]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        problem = ConfigProblem(
            "--hostfile",
            f"{str(path)!r}, which cannot be read ({reason})",
            "a file of lines `NAME slots=N`",
            f"Correct the path, which is relative to {Path.cwd()}.",
        )
        raise ConfigError([problem]) from error
    found: dict[str, Host] = {}
    lines: dict[str, int] = {}
    problems: list[ConfigProblem] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match = _LINE.fullmatch(words)
        name, slots = (match["name"], int(match["slots"])) if match is not None else ("", 0)
        wrong = None
        if match is None:
            wrong = (repr(words), "`NAME slots=N`", "Write the host's name and its slots.")
        elif not _NAME.fullmatch(name):
            wrong = (repr(name), "a host's name or address", "Correct the name.")
        elif name in lines:
            got = f"{name!r} once more, as in line {lines[name]}"
            wrong = (got, "each host once", "Give its slots in one line.")
        elif not 1 <= slots <= _MAX_SLOTS:
            wrong = (f"slots={slots}", f"1 to {_MAX_SLOTS} slots", "Leave the host out, or give it slots.")
        if wrong is not None:
            problems.append(ConfigProblem(f"{path}:{number}", *wrong))
        else:
            found[name] = Host(name, tuple(range(slots)))
        lines.setdefault(name, number)
    if problems:
        raise ConfigError(problems)
    return tuple(found.values())


def _filtered(
    hosts: Sequence[Host], text: str, flag: str, path: Path, problems: list[ConfigProblem]
) -> tuple[Host, ...]:
    by_name = {host.name: host for host in hosts}
    named: dict[str, set[int]] = {}
    for part in text.split("@"):
        name, colon, numbers = part.strip().partition(":")
        host = by_name.get(name)
        if host is None:
            problems.append(
                ConfigProblem(
                    flag,
                    repr(text) if not name else f"{text!r}, and {name!r} is not in {path}",
                    f"hosts of {', '.join(by_name) or 'a hostfile that names some'}",
                    "Correct the name.",
                )
            )
            continue
        wanted = (
            {int(one) if one.isdecimal() else -1 for one in numbers.split(",")} if colon else {*host.slots}
        )
        if not wanted <= {*host.slots}:
            problems.append(
                ConfigProblem(
                    flag,
                    repr(part),
                    f"slots 0 to {host.slots[-1]} of {name}, joined by commas",
                    f"Correct the slots, or those of {name} in {path}.",
                )
            )
            continue
        named.setdefault(name, set()).update(wanted)
    kept = []
    for host in hosts:
        chosen = named.get(host.name, set())
        left = chosen if flag == "--include" else {*host.slots} - chosen
        if left:
            kept.append(Host(host.name, tuple(sorted(left)), is_filtered=left != {*host.slots}))
    return tuple(kept)


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
    """Raise ConfigError if a flag that needs ``--hostfile`` is given without it."""
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
    """Return ``resources.slots_per_trial`` of a config; None if it is not set.

    ``overrides`` are ``key=value`` texts that win over the config file. If the key is not set, a run on hosts uses all their
    slots; the config's default of 1 is for single machines.
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
    """Return one line per checked host: its name, slots and address."""
    lines = []
    for ready in hosts:
        count = len(ready.host.slots)
        slots = f", slots {','.join(map(str, ready.host.slots))}" if ready.host.is_filtered else ""
        plural = "s" if count != 1 else ""
        lines.append(f"{ready.host.name}: {count} slot{plural} at {ready.address} ({ready.interface}){slots}")
    return lines
