"""``dstrial checkpoint``: inspect, verify, compare and convert checkpoints."""

from __future__ import annotations

import argparse
import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction

ACTIONS = ("inspect", "verify", "diff", "export", "reshape")
"""Actions; ``dstrial.cli.checkpoint_<action>`` has ``add_parser(actions)`` and ``main(args)``."""

_EPILOG = """\
CHECKPOINT is a checkpoint's directory, the directory of a run (its newest checkpoint), or the UUID of a checkpoint
of the running master or of a run below --runs-dir.

examples:
  dstrial checkpoint inspect runs/gpt2/20260101T120000Z-1a2b3c
  dstrial checkpoint verify 6b3c3b0e-6d0f-4a55-8f1e-0d1b2b6f2c11
  dstrial checkpoint diff BEFORE AFTER --optimizer
  dstrial checkpoint export CHECKPOINT model.safetensors --format safetensors
  dstrial checkpoint reshape CHECKPOINT for-4-slots --slots 4 --zero-stage 3
"""


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "checkpoint",
        help="inspect, verify, compare, export and reshape checkpoints",
        description="Look into checkpoints, verify, compare, export and reshape them. Needs no accelerator.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action in ACTIONS:
        importlib.import_module(f"dstrial.cli.checkpoint_{action}").add_parser(actions)


def main(args: argparse.Namespace) -> int:
    # Unpickling DeepSpeed objects imports DeepSpeed, which must not probe for accelerators.
    os.environ["DS_ACCELERATOR"] = "cpu"
    return int(importlib.import_module(f"dstrial.cli.checkpoint_{args.action}").main(args))
