"""``dstrial checkpoint verify``: whether a checkpoint is whole, and if not, which file of which rank is not."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from dstrial.checkpoint.manifest import read_manifest
from dstrial.checkpoint.wholeness import Wholeness, bytes_to_read, examine
from dstrial.cli.bytes_bar import BytesBar, size_text
from dstrial.cli.checkpoint_source import (
    CheckpointSource,
    add_checkpoint_argument,
    add_place_arguments,
    find_checkpoint,
)
from dstrial.errors import CheckpointError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_EPILOG = """\
exit status: 0 if the checkpoint is whole, 1 if not, 2 for wrong usage

examples:
  dstrial checkpoint verify runs/gpt2/20260101T120000Z-1a2b3c
  dstrial checkpoint verify 6b3c3b0e-6d0f-4a55-8f1e-0d1b2b6f2c11 --json
"""


def add_parser(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the action and its arguments."""
    parser = actions.add_parser(
        "verify",
        help="read every file and say which is missing, truncated, changed or unexpected",
        description="Read every file of a checkpoint and compare it with the size and checksum that were written down "
        "when it was saved.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_checkpoint_argument(parser)
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object")
    parser.add_argument("--no-progress", action="store_true", help="draw no progress bar")
    add_place_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Verify and print; return 0 if the checkpoint is whole, else 1.

    Raises:
        DstrialError: there is no such checkpoint.
    """
    source = find_checkpoint(args.checkpoint, runs_dir=args.runs_dir, state_dir=args.state_dir)
    try:
        wholeness = verified(source, is_plain=args.no_progress or args.as_json)
    except CheckpointError as error:
        if not args.as_json:
            raise
        _print_json({"path": str(source.path), "is_whole": False, "error": str(error), "faults": []})
        return 1
    if args.as_json:
        _print_json(
            {
                "path": str(source.path),
                "is_whole": wholeness.is_whole,
                "num_files": wholeness.num_files,
                "num_bytes": wholeness.num_bytes,
                "faults": [
                    {
                        "path": fault.path,
                        "kind": fault.kind,
                        "got": fault.got,
                        "expected": fault.expected,
                        "holds": fault.role.kind,
                        "engine": fault.role.engine_idx,
                        "writer_rank": fault.role.writer_rank,
                        "reader_ranks": list(fault.reader_ranks),
                    }
                    for fault in wholeness.faults
                ],
            }
        )
    else:
        _print_text(source, wholeness)
    return 0 if wholeness.is_whole else 1


def verified(source: CheckpointSource, *, is_plain: bool) -> Wholeness:
    """Read every file of a checkpoint, with a progress bar on a terminal.

    Args:
        source: the checkpoint.
        is_plain: whether the user wants no bar.

    Raises:
        CheckpointError: its manifest is missing or damaged.
    """
    manifest = read_manifest(source.path)
    with BytesBar("verifying", bytes_to_read(manifest), is_plain=is_plain) as bar:
        return examine(source.path, manifest, needs_mark=source.needs_mark, on_bytes=bar.advance)


def _print_text(source: CheckpointSource, wholeness: Wholeness) -> None:
    size = f"{wholeness.num_files} files, {size_text(wholeness.num_bytes)}"
    if wholeness.is_whole:
        sys.stdout.write(f"{source.path} is whole: {size}\n")
        return
    for fault in wholeness.faults:
        sys.stdout.write(f"{fault}\n")
    count = len(wholeness.faults)
    sys.stdout.write(
        f"{source.path} is not whole: {count} {'fault' if count == 1 else 'faults'} in {size}. "
        "Restore the files from a copy, or use another checkpoint.\n"
    )


def _print_json(values: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(values, indent=2) + "\n")
