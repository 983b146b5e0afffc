"""``dstrial checkpoint``, and the resolution of its argument CHECKPOINT."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrial import object_storage
from dstrial.checkpoint.completion_marker import MARKER_NAME, is_uuid
from dstrial.checkpoint.integrity import verify_files
from dstrial.checkpoint.layout import Layout
from dstrial.checkpoint.manifest import (
    MANIFEST_DIGEST,
    MANIFEST_NAME,
    Manifest,
    hash_file,
    is_own_manifest,
    layouts_of,
    read_manifest,
)
from dstrial.cli.streams import add_state_dir_argument, det_for
from dstrial.errors import CheckpointError, CheckpointNotFoundError, MasterError, RequestError
from dstrial.local.checkpoint_directory import newest_checkpoint
from dstrial.local.run_directory import RunDirectory, default_runs_dir
from dstrial.master.lifecycle.checkpoint_gc import checkpoint_directory
from dstrial.master.state_directory import StateDirectory
from dstrial.object_storage import recorded_storage
from dstrial.scratch import scratch_directory

if TYPE_CHECKING:
    from argparse import _SubParsersAction

ACTIONS = ("inspect", "verify", "diff", "export", "reshape", "download")
"""Actions; the module ``checkpoint_<action>`` of each has ``add_parser(actions)`` and ``main(args)``."""

_EPILOG = """\
CHECKPOINT is one of: the directory of a checkpoint; the directory of a run, for the run's newest checkpoint; the UUID of a
checkpoint of the running master or of a run below --runs-dir; best, for the best checkpoint of the newest run.

examples:
  dstrial checkpoint inspect runs/gpt2/20260101T120000Z-1a2b3c
  dstrial checkpoint verify 6b3c3b0e-6d0f-4a55-8f1e-0d1b2b6f2c11
  dstrial checkpoint diff BEFORE AFTER --optimizer
  dstrial checkpoint export CHECKPOINT model.safetensors --format safetensors
  dstrial checkpoint reshape CHECKPOINT for-4-slots --slots 4 --zero-stage 3
  dstrial checkpoint download CHECKPOINT -o a-copy
"""
_DOWNLOADS = contextlib.ExitStack()  # copies of checkpoints in object storage
atexit.register(_DOWNLOADS.close)
# A directory that contains one of these is a checkpoint, possibly a damaged one.
_CHECKPOINT_FILES = (MANIFEST_NAME, MARKER_NAME, "load_data.json", "dstrial_rank0.pt", "model0")


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "checkpoint",
        description="Inspect, verify, compare, export, reshape and download checkpoints. No action needs an accelerator.",
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


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointSource:
    """The checkpoint of a CHECKPOINT argument, its run and the master's record of it."""

    path: Path  # absolute
    run_directory: RunDirectory | None = None  # None outside of a run, where no completion mark is needed
    record: Mapping[str, Any] | None = None  # the master's ``v1Checkpoint``; None if no master was queried


@dataclasses.dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """A checkpoint, its manifest, and how each engine's state is split over ranks."""

    source: CheckpointSource
    manifest: Manifest
    layouts: tuple[Layout, ...]

    @property
    def path(self) -> Path:
        return self.source.path


def open_checkpoint(asked: str, args: argparse.Namespace) -> OpenCheckpoint:
    """Resolve a CHECKPOINT argument and read the manifest; do not verify files.

    ``asked`` is the argument; ``args`` has the options of :func:`add_shared_options`.
    """
    source = find_checkpoint(asked, runs_dir=args.runs_dir, state_dir=args.state_dir)
    manifest = read_manifest(source.path)
    return OpenCheckpoint(source, manifest, layouts_of(manifest, source.path))


def add_action(
    actions: _SubParsersAction[argparse.ArgumentParser],
    name: str,
    *,
    help: str,  # noqa: A002 - argparse's name
    description: str,
    epilog: str,
    checkpoints: Sequence[str] = ("checkpoint",),
) -> argparse.ArgumentParser:
    """Add and return the parser of an action such as ``verify``.

    ``checkpoints`` are the names of the parser's positional arguments, each of which takes a CHECKPOINT.
    """
    parser = actions.add_parser(
        name,
        help=help,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = "directory of a checkpoint or a run, a UUID, or best (see `dstrial checkpoint --help`)"
    for dest in checkpoints:
        parser.add_argument(dest, metavar=dest.upper(), help=text)
    return parser


def add_shared_options(parser: argparse.ArgumentParser, *, json: bool = False, trust: bool = True) -> None:
    """Add ``--runs-dir`` and ``--state-dir``, in which UUIDs are looked up.

    If ``json`` is true, ``--json`` is also added; if ``trust`` is true, ``--trust-code``.
    """
    if json:
        parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object")
    if trust:
        parser.add_argument(
            "--trust-code",
            action="store_true",
            help="load the checkpoint even if its pickles have classes that dstrial does not know; such classes can run any "
            "code, so trust the checkpoint's author",
        )
    parser.add_argument(
        "--runs-dir",
        metavar="DIR",
        help="directory of all runs, searched first for a UUID (default: $DSTRIAL_RUNS_DIR or ./runs)",
    )
    add_state_dir_argument(parser)


def find_checkpoint(
    asked: str, *, runs_dir: str | None = None, state_dir: str | None = None
) -> CheckpointSource:
    """Return the checkpoint that ``asked`` names: a directory, a UUID or ``best``.

    The directory of a run stands for the run's newest checkpoint. ``best`` stands for the best checkpoint of the newest run in
    ``runs_dir``. A UUID is looked up in ``runs_dir``, then at the master of ``state_dir``. If ``runs_dir`` or ``state_dir`` is
    None, the environment variable or default applies. A checkpoint in object storage is downloaded; the copy is deleted at
    exit. Files are not verified.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        MasterError: the master has the checkpoint, but its files are not on this machine.
    """
    if asked == "best" and not Path(asked).exists():
        asked = _best_of_newest_run(default_runs_dir(runs_dir))
    path, state = Path(asked), StateDirectory.choose(state_dir)
    if path.is_symlink() and not path.exists():  # ``best``, in object storage or deleted
        asked = path.readlink().name
    if path.is_dir():
        return _with_files(_in_directory(path.resolve(), asked), state)
    if not is_uuid(asked):
        got = "no directory" if not path.exists() else "a file"
        raise CheckpointNotFoundError(
            f"checkpoint is {asked!r}, {got}; expected the directory of a checkpoint or of a run, a checkpoint's UUID, or "
            "`best`. Name one that a run has printed."
        )
    runs = default_runs_dir(runs_dir)
    for found in sorted(runs.glob(f"*/*/checkpoints/{asked}")):
        return _with_files(_in_directory(found.resolve(), asked), state)
    return _from_master(asked, state, runs)


def _best_of_newest_run(runs_dir: Path) -> str:
    # The names of run directories begin with their time.
    newest = max(runs_dir.glob("*/*/run.json"), key=lambda path: path.parent.name, default=None)
    if newest is None or not RunDirectory(newest.parent).best_path.is_symlink():
        found = f"the newest run, {newest.parent}, has none" if newest else f"there is no run in {runs_dir}"
        raise CheckpointNotFoundError(
            f"checkpoint is 'best', and {found}; expected a run that `dstrial run` has ended, with a validation at a "
            "checkpoint. Name a checkpoint, or `best` of another run directory."
        )
    return str(RunDirectory(newest.parent).best_path)


def _with_files(source: CheckpointSource, state: StateDirectory) -> CheckpointSource:
    """Return ``source`` with the directory that has the checkpoint's files.

    A checkpoint's directory in a run may contain only a record that names the storage with the files. Files in object storage
    are downloaded to a new directory.
    """
    settings = recorded_storage(source.path)
    if settings is None:
        return source
    if not object_storage.is_object_storage(settings):
        return dataclasses.replace(source, path=Path(settings["container_path"]) / source.path.name)
    target = _new_directory(source.path.name)
    try:
        object_storage.download(settings, source.path.name, target)
    except CheckpointError as error:
        if state.running() is None:
            raise
        try:
            from_master = _from_master(source.path.name, state, default_runs_dir())
        except CheckpointNotFoundError:  # the master does not know it: the user needs the storage's message
            raise error from None
        return dataclasses.replace(from_master, run_directory=source.run_directory)
    return dataclasses.replace(source, path=target)


def _new_directory(uuid: str) -> Path:
    target = _DOWNLOADS.enter_context(scratch_directory("dstrial-download-")) / uuid
    target.mkdir()
    return target


def has_trusted_code(source: CheckpointSource) -> bool:
    """Return whether ``load_data.json`` and ``code/`` of a checkpoint can be trusted.

    These files must match the manifest, and the manifest must be signed by this account or have the SHA-256 that the master
    registered. Other files are not checked.
    """
    manifest = read_manifest(source.path)
    reported = ((source.record or {}).get("metadata") or {}).get(MANIFEST_DIGEST)
    is_known = reported is not None and reported == hash_file(source.path / MANIFEST_NAME).sha256
    if not is_known and not is_own_manifest(source.path):
        return False
    names = [name for name in manifest.files if name == "load_data.json" or name.startswith("code/")]
    present = [
        path.relative_to(source.path).as_posix()
        for path in (source.path / "code").rglob("*")
        if not path.is_dir() or path.is_symlink()
    ]
    return set(present) <= set(names) and not verify_files(source.path, manifest, names)


def _in_directory(path: Path, asked: str) -> CheckpointSource:
    if RunDirectory(path).record_path.is_file():
        if RunDirectory(path).is_search:
            best = RunDirectory(path).best_path
            fix = f"the best, {best}, or the UUID of another one" if best.is_symlink() else "its UUID"
            raise CheckpointNotFoundError(
                f"the run {path} is a search, whose checkpoints belong to several trials; expected one checkpoint. Name {fix}."
            )
        newest = newest_checkpoint(RunDirectory(path).checkpoints_path)
        if newest is None:
            raise CheckpointNotFoundError(
                f"the run {path} has no complete checkpoint; expected one. Name another run, or the directory of a checkpoint."
            )
        return CheckpointSource(newest.path, RunDirectory(path))
    if not any((path / name).exists() for name in _CHECKPOINT_FILES):
        raise CheckpointNotFoundError(
            f"checkpoint is {asked!r}, a directory without {MANIFEST_NAME}; expected the directory of a checkpoint that dstrial "
            "wrote, or of a run. Name one that a run has printed."
        )
    return CheckpointSource(path, RunDirectory.of_checkpoint(path))


def _from_master(asked: str, state: StateDirectory, runs: Path) -> CheckpointSource:
    from dstrial.master.login import session

    record = state.running()
    if record is None:
        raise CheckpointNotFoundError(
            f"checkpoint {asked} is in no run of {runs}, and no master runs with state directory {state.path}; expected one of "
            "them to know it. Start the master with `dstrial up`, or name the checkpoint's directory."
        )
    client = session(record)
    try:
        answer = client.get(f"/api/v1/checkpoints/{asked}")["checkpoint"]
    except RequestError as error:
        raise CheckpointNotFoundError(
            f"checkpoint {asked} is in no run of {runs}, and the master at {record.address} does not know it ({error}); expected "
            f"a checkpoint's UUID. Look for it with `{det_for(record.address)} experiment list-checkpoints EXPERIMENT`."
        ) from error
    storage = answer["training"]["experimentConfig"].get("checkpoint_storage") or {}
    if object_storage.is_object_storage(storage):
        target = _new_directory(asked)
        client.extract(f"/checkpoints/{asked}", target)
        return CheckpointSource(target, record=answer)
    try:
        path = checkpoint_directory(storage, asked)
    except MasterError as error:
        raise CheckpointError(
            f"checkpoint {asked} is stored in {storage.get('type')!r}; expected a directory of this machine. Fetch it with "
            f"`{det_for(record.address)} checkpoint download {asked}`, and name the directory."
        ) from error
    if not path.is_dir():
        state_of = str(answer.get("state", "")).removeprefix("STATE_").lower()
        raise CheckpointNotFoundError(
            f"checkpoint {asked} of the master at {record.address} is {state_of}, and {path} is no directory; expected its "
            "files. Name a checkpoint that is not deleted."
        )
    found = _in_directory(path.resolve(), asked)
    return dataclasses.replace(found, record=answer)
