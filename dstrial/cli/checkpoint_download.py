"""``dstrial checkpoint download``: copy a checkpoint and verify the copy."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dstrial.checkpoint.integrity import check_integrity, damaged_error
from dstrial.checkpoint.manifest import MANIFEST_NAME
from dstrial.cli.checkpoint import add_action, add_shared_options, find_checkpoint
from dstrial.errors import CheckpointError
from dstrial.visible_text import size_text

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_EPILOG = """\
A checkpoint in object storage is downloaded with the credentials in environment variables such as AWS_ACCESS_KEY_ID and
AWS_SECRET_ACCESS_KEY. Without credentials, the running master downloads the checkpoint if it knows it.

examples:
  dstrial checkpoint download runs/gpt2/20260101T120000Z-1a2b3c
  dstrial checkpoint download 6b3c3b0e-6d0f-4a55-8f1e-0d1b2b6f2c11 -o a-copy
"""


def add_parser(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_action(
        actions,
        "download",
        help="copy a checkpoint from a directory or object storage into a new directory, and verify the copy",
        description="Copy the files of a checkpoint into a new directory, and compare them with their checksums.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "-o",
        "--output-dir",
        metavar="DIR",
        help="directory to create (default: checkpoints/UUID in the current directory)",
    )
    add_shared_options(parser, trust=False)


def main(args: argparse.Namespace) -> int:
    if args.output_dir is not None:
        _require_new(Path(args.output_dir))  # before a long download
    source = find_checkpoint(args.checkpoint, runs_dir=args.runs_dir, state_dir=args.state_dir)
    target = Path(args.output_dir or Path("checkpoints", source.path.name))
    _require_new(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source.path, target)
    text = "without a manifest, so nothing is verified"
    if (target / MANIFEST_NAME).is_file():
        report = check_integrity(target, needs_mark=source.run_directory is not None)
        if not report.is_intact:
            raise damaged_error(target, report.faults)
        text = f"{report.num_files} files, {size_text(report.num_bytes)}, verified"
    sys.stdout.write(f"checkpoint {source.path.name} is in {target}: {text}\n")
    return 0


def _require_new(target: Path) -> None:
    if target.exists():
        raise CheckpointError(
            f"--output-dir is {str(target)!r}, which exists; expected a new directory. Name another."
        )
