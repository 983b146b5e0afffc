"""``dstrial dsat``: tune the DeepSpeed configuration of an experiment."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from dstrial.dsat.cli import add_methods, flags_of, with_method
from dstrial.dsat.command import EPILOG, run_command

if TYPE_CHECKING:
    from argparse import _SubParsersAction
    from collections.abc import Sequence


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "dsat",
        description="Measure DeepSpeed configurations of an experiment and write the best one.",
        epilog=EPILOG,
    )
    add_methods(parser.add_subparsers(dest="search_method", metavar="METHOD", required=True))


def with_defaults(words: Sequence[str]) -> list[str]:
    """Return the words after ``dstrial dsat``; insert ``predict`` if none is a method.

    Words for help or ``plan``, and an empty list, are returned unchanged.
    """
    return with_method(words)


def main(args: argparse.Namespace) -> int:
    return run_command(flags_of(args))
