"""The arguments by which ``dstrial check`` and ``dstrial run`` are told the experiment."""

from __future__ import annotations

import argparse

from dstrial.launch.arguments import slots_argument


def add_experiment_arguments(parser: argparse.ArgumentParser, *, slots_help: str) -> None:
    """Add ``EXP.yaml``, ``CONTEXT_DIR``, ``--config`` and ``--slots``.

    Args:
        parser: a subcommand's parser.
        slots_help: what ``--slots`` means there.
    """
    parser.add_argument("experiment", metavar="EXP.yaml", help="experiment config")
    parser.add_argument(
        "context_dir",
        metavar="CONTEXT_DIR",
        nargs="?",
        default=".",
        help="model definition directory (default: .)",
    )
    parser.add_argument(
        "--config",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="replace one value of EXP.yaml; repeatable",
    )
    parser.add_argument("--slots", type=slots_argument, metavar="N", help=slots_help)
