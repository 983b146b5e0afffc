"""Entry point of ``dstrial``: imports and runs the module of one subcommand.

A subcommand's module has ``add_parser(subparsers)``, which adds the arguments, and ``main(args)``, which returns the exit
status. An optional ``with_defaults(words)`` inserts default arguments. The module must not import torch, deepspeed or determined
at top level.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from types import ModuleType

import dstrial
from dstrial.cli.streams import to_null_device
from dstrial.errors import DstrialError
from dstrial.process_state import open_closed_streams

COMMANDS = {
    "backup": "copy the master's database, also while it runs",
    "check": "check an experiment config and its DeepSpeed config; starts nothing",
    "checkpoint": "inspect, verify, compare, export and reshape checkpoints",
    "convert": "convert another tool's config to an experiment config",
    "doctor": "check whether this machine can train, with --train by a test run",
    "down": "stop all trials with a checkpoint and end the master",
    "dsat": "tune the DeepSpeed configuration of an experiment",
    "hosts": "check whether the hosts of a hostfile can train together",
    "login": "log det in to the master of this machine, without a password",
    "logs": "print the master's own log",
    "memory": "predict a model's memory, and whether it needs several devices",
    "restore": "restore the master's database from a backup",
    "run": "train one experiment on this machine and follow it",
    "status": "show the master's address, slots, experiments and disk use",
    "up": "start the master of this machine in the background",
    "webhook": "manage webhooks: HTTP requests on events of experiments",
}
"""Name of each subcommand -> its line in the help."""

_MASTER_COMMANDS = ("backup", "down", "login", "logs", "restore")  # all in module ``master``


def build_parser(command: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dstrial", description="Determined-style trials for DeepSpeed.")
    parser.add_argument("--version", action="version", version=f"dstrial {dstrial.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, help_text in COMMANDS.items():
        if name != command:
            subparsers.add_parser(name, help=help_text)
        elif name in _MASTER_COMMANDS:
            _module(name).add_parser(subparsers, name, help_text)
        else:
            _module(name).add_parser(subparsers)
    return parser


def _module(command: str) -> ModuleType:
    return importlib.import_module(f"dstrial.cli.{'master' if command in _MASTER_COMMANDS else command}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status.

    0: success, 1: user error, 2: wrong usage, 130: Ctrl-C, 141: broken output pipe.
    """
    open_closed_streams()
    argv = sys.argv[1:] if argv is None else list(argv)
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
