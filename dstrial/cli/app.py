"""Entry point of ``dstrial``: imports and runs the module of one subcommand.

A subcommand's module has ``add_parser(subparsers)``, which adds the arguments, and ``main(args)``, which returns the exit status.
An optional ``with_defaults(words)`` inserts default arguments. Torch, deepspeed and determined must not be imported at top level.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

import dstrial
from dstrial.cli.streams import to_null_device
from dstrial.errors import DstrialError
from dstrial.process_state import open_closed_streams

COMMAND_GROUPS = {
    "train": {
        "init": "write a small, complete project",
        "check": "check an experiment config and its DeepSpeed config; starts nothing",
        "run": "train one experiment on this machine and follow it",
        "list": "list the experiments of this machine's master",
        "show": "show an experiment and its trials",
        "kill": "end experiments without a checkpoint",
    },
    "tune": {
        "dsat": "tune the DeepSpeed configuration of an experiment",
        "memory": "predict a model's memory, and whether it needs several devices",
    },
    "checkpoints": {
        "checkpoint": "inspect, verify, compare, export and reshape checkpoints",
        "convert": "convert another tool's config to an experiment config",
    },
    "master": {
        "up": "start the master of this machine in the background",
        "down": "stop all trials with a checkpoint and end the master",
        "status": "show the master's address, slots, experiments and disk use",
        "logs": "print the master's own log",
        "login": "log det in to the master of this machine, without a password",
        "backup": "copy the master's database, also while the master runs",
        "restore": "restore the master's database from a backup",
        "webhook": "manage webhooks: HTTP requests on events of experiments",
    },
    "machine": {
        "doctor": "check whether this machine can train; --train makes a test run",
        "hosts": "check whether the hosts of a hostfile can train together",
    },
}
"""Title of a group in the help -> name of each subcommand -> its line in the help."""
COMMANDS = {name: text for group in COMMAND_GROUPS.values() for name, text in group.items()}

_MODULES = {
    **dict.fromkeys(("backup", "down", "login", "logs", "restore"), "master"),
    **dict.fromkeys(("list", "show", "kill"), "experiments"),
}
"""Subcommand -> its module, for modules of several subcommands."""


class _Parser(argparse.ArgumentParser):
    """A parser that suggests the nearest command or option for a misspelt word."""

    subcommands: Mapping[str, _Parser] = {}

    def add_subparsers(self, **kwargs: Any) -> Any:
        action = super().add_subparsers(**kwargs)
        self.subcommands = action.choices
        return action

    def walk(self) -> Iterator[_Parser]:
        yield self
        for parser in self.subcommands.values():
            yield from parser.walk()

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '([^']*)'|unrecognized arguments: (\S+)", message)
        if wrong is not None:
            options = re.findall(r"--[a-z][a-z-]*", "".join(parser.format_help() for parser in self.walk()))
            choices = re.findall(r"[\w-]+", message.partition("choose from")[2])
            word = wrong[1] or wrong[2].partition("=")[0]
            near = difflib.get_close_matches(word, choices or options, n=1, cutoff=0.6 if choices else 0.8)
            if near:
                message = f"{message.partition(' (choose from')[0]}; did you mean {near[0]}?"
        super().error(message)


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """Return the parser of all subcommands; add arguments only to that of ``command``."""
    width = max(map(len, COMMANDS))
    listing = "".join(
        f"\n{title}:\n" + "".join(f"  {name:<{width}}  {text}\n" for name, text in group.items())
        for title, group in COMMAND_GROUPS.items()
    )
    parser = _Parser(
        prog="dstrial",
        usage="dstrial COMMAND ...",
        description=f"Determined-style trials for DeepSpeed.\n{listing}",
        epilog="`dstrial COMMAND --help` shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dstrial {dstrial.__version__}")
    subparsers = parser.add_subparsers(
        prog="dstrial", dest="command", metavar="COMMAND", required=True, help=argparse.SUPPRESS
    )
    for name in COMMANDS:
        if name != command:
            subparsers.add_parser(name)
        elif name in _MODULES:
            _module(name).add_parser(subparsers, name)
        else:
            _module(name).add_parser(subparsers)
    return parser


def _module(command: str) -> ModuleType:
    return importlib.import_module(f"dstrial.cli.{_MODULES.get(command, command)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status.

    0: success, 1: user error, 2: wrong usage, 130: Ctrl-C, 141: broken output pipe.
    """
    open_closed_streams()
    argv = sys.argv[1:] if argv is None else list(argv)
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        import argcomplete

        words = os.environ.get("COMP_LINE", "").split()
        argcomplete.autocomplete(build_parser(next((word for word in words if word in COMMANDS), None)))
    command = next((word for word in argv if word in COMMANDS), None)
    args = build_parser(command).parse_args(_with_defaults(command, argv))
    module = _module(args.command)
    try:
        exit_code = _run(module, args)
        sys.stdout.flush()
    except BrokenPipeError:
        to_null_device(sys.stdout)
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return exit_code


def _with_defaults(command: str | None, argv: list[str]) -> list[str]:
    if command is None:
        return argv
    complete = getattr(_module(command), "with_defaults", None)
    first = argv.index(command) + 1
    return argv if complete is None else [*argv[:first], *complete(argv[first:])]


def _run(module: ModuleType, args: argparse.Namespace) -> int:
    try:
        return int(module.main(args))
    except DstrialError as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
