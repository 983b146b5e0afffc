"""``dstrial checkpoint verify``: check the files of a checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from dstrial.checkpoint.completion_marker import read_marker
from dstrial.checkpoint.integrity import IntegrityReport, bytes_to_read, check_integrity
from dstrial.checkpoint.manifest import (
    MANIFEST_DIGEST,
    MANIFEST_NAME,
    hash_file,
    is_own_manifest,
    read_manifest,
)
from dstrial.cli.checkpoint import CheckpointSource, add_action, add_shared_options, find_checkpoint
from dstrial.cli.streams import bytes_bar, print_json
from dstrial.errors import CheckpointError, RequestError
from dstrial.master.state_directory import StateDirectory
from dstrial.visible_text import plural, size_text

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_EPILOG = """\
The manifest lists the files of a checkpoint with their checksums. Somebody who changes a file can also change the manifest.
Therefore the SHA-256 of the manifest is compared with the SHA-256 that the trial registered with the master. The result is
one of three: equal, changed, or not registered with the running master.

exit status: 0 if the checkpoint is intact, 1 if a file or the manifest has changed, 2 for wrong usage

examples:
  dstrial checkpoint verify runs/gpt2/20260101T120000Z-1a2b3c
  dstrial checkpoint verify 6b3c3b0e-6d0f-4a55-8f1e-0d1b2b6f2c11 --json
"""


def add_parser(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_action(
        actions,
        "verify",
        help="read every file; report missing, truncated, changed and unexpected files",
        description="Read every file of a checkpoint and compare it with the size and checksum that the manifest has "
        "recorded when the checkpoint was saved.",
        epilog=_EPILOG,
    )
    add_shared_options(parser, json=True, trust=False)


def main(args: argparse.Namespace) -> int:
    """Verify a checkpoint's files and manifest; return 0 if intact, else 1."""
    source = find_checkpoint(args.checkpoint, runs_dir=args.runs_dir, state_dir=args.state_dir)
    try:
        manifest = read_manifest(source.path)
        with bytes_bar("verifying", bytes_to_read(manifest), is_plain=args.as_json) as advance:
            report = check_integrity(
                source.path, manifest, needs_mark=source.run_directory is not None, on_bytes=advance
            )
    except CheckpointError as error:
        if not args.as_json:
            raise
        print_json({"path": str(source.path), "is_whole": False, "error": str(error), "faults": []})
        return 1
    registration = _registration(source, StateDirectory.choose(args.state_dir))
    if args.as_json:
        print_json(
            {
                "path": str(source.path),
                "is_whole": report.is_intact,
                "num_files": report.num_files,
                "num_bytes": report.num_bytes,
                "registration": registration,
                "faults": [dataclasses.asdict(fault) for fault in report.faults],
            }
        )
    else:
        _print_text(source, report)
        sys.stdout.write(f"{_registration_text(registration)}\n")
    return 0 if report.is_intact and registration["state"] != "changed" else 1


def _registration(source: CheckpointSource, state: StateDirectory) -> dict[str, Any]:
    """Compare a manifest with the SHA-256 that the running master registered.

    The result has these keys. ``state``: ``registered`` if both agree, ``changed`` if they differ, ``unknown`` if nothing is
    registered. ``by``: the master's address, or None. ``registered`` and ``found``: the SHA-256 at the master (or None) and of
    the file. ``is_signed``: whether this account has signed the manifest.
    """
    from dstrial.master.login import session

    found = hash_file(source.path / MANIFEST_NAME).sha256
    running, record = state.running(), source.record
    if record is None and running is not None:
        try:
            record = session(running).get(f"/api/v1/checkpoints/{_uuid_of(source.path)}")["checkpoint"]
        except RequestError as error:
            if error.status not in (400, 404):
                raise
    registered = None if record is None else (record.get("metadata") or {}).get(MANIFEST_DIGEST)
    return {
        "state": "unknown" if registered is None else "registered" if registered == found else "changed",
        "by": None if running is None else running.address,
        "registered": registered,
        "found": found,
        "is_signed": is_own_manifest(source.path),
    }


def _registration_text(one: dict[str, Any]) -> str:
    found = one["found"][:12]
    if one["state"] == "registered":
        return f"manifest: as registered by the master at {one['by']} (SHA-256 {found})"
    if one["state"] == "changed":
        return (
            f"manifest changed since the master at {one['by']} registered it: SHA-256 is {found}; expected "
            f"{one['registered'][:12]}. The manifest was replaced: use another checkpoint."
        )
    who = "no master runs" if one["by"] is None else f"the master at {one['by']} has no manifest of it"
    signed = "bears" if one["is_signed"] else "does not bear"
    return f"not registered here: {who}; the manifest {signed} this account's signature (SHA-256 {found})"


def _uuid_of(path: Path) -> str:
    """Return a checkpoint's UUID, percent-encoded for a URL.

    If the completion mark has no UUID, the directory's name is returned.
    """
    try:
        name = read_marker(path).get("uuid")
    except CheckpointError:
        name = None
    return quote(name if isinstance(name, str) else path.name, safe="")


def _print_text(source: CheckpointSource, report: IntegrityReport) -> None:
    size = f"{report.num_files} files, {size_text(report.num_bytes)}"
    if report.is_intact:
        sys.stdout.write(f"{source.path} is intact: {size}\n")
        return
    for fault in report.faults:
        sys.stdout.write(f"{fault}\n")
    sys.stdout.write(
        f"{source.path} is damaged: {plural(len(report.faults), 'fault')} in {size}. "
        "Restore the files from a copy, or use another checkpoint.\n"
    )
