"""Arguments of commands on an experiment: config, entrypoint and ``--resume``."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from dstrial.checkpoint.completion_marker import is_complete
from dstrial.checkpoint.manifest import MANIFEST_NAME, read_saved_run
from dstrial.config.experiment_config.config import experiment_name
from dstrial.errors import CheckpointNotFoundError, ConfigError, ConfigProblem
from dstrial.local.checkpoint_directory import list_checkpoints, newest_checkpoint
from dstrial.local.run_directory import LOCAL_ID, RunDirectory, default_runs_dir, find_runs
from dstrial.resume.metadata import SavedRun

_TRIAL_PATTERN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_SHELL_SYNTAX = re.compile(r"[;&|<>$`\n]")
_OUR_LAUNCHER = "dstrial.launch"
# Modules that start ranks, in place of which the master runs `dstrial.launch`.
_LAUNCH_MODULES = (
    _OUR_LAUNCHER,
    "determined.launch.deepspeed",
    "determined.launch.torch_distributed",
    "determined.launch.horovod",
)
FOREIGN_LAUNCHERS = ("torchrun", "deepspeed", "mpirun", "mpiexec", "srun", "accelerate")
"""Names of other launchers' commands, which start the ranks themselves."""


def add_experiment_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments ``EXP.yaml``, ``CONTEXT_DIR`` and ``--config``."""
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
        help="replace one value of EXP.yaml, or add a hyperparameter with +KEY=VALUE; repeatable",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Entrypoint:
    """A parsed entrypoint: a trial class, or a command."""

    trial: str | None  # ``module:Class``; None for a command
    words: tuple[str, ...] = ()  # the command
    starts_ranks: bool = False  # the command is a launcher such as torchrun, which runs once, not per rank


def parse_entrypoint(entrypoint: str | Sequence[str] | None, where: str) -> Entrypoint:
    """Parse an entrypoint; strip launchers that ``dstrial run`` replaces.

    ``model_def:MyTrial`` and ``python3 -m dstrial.launch --trial model_def:MyTrial`` are trials. Before a script, ``python3 -m
    dstrial.launch`` and Determined's launch layers are stripped. Other commands are returned unchanged, but run in a shell if
    they have shell syntax. ConfigError is raised for an empty or invalid entrypoint; its message names the config by ``where``.
    """
    if not entrypoint:
        raise _error(
            where, "not given", "Add entrypoint: model_def:MyTrial for class MyTrial in model_def.py."
        )
    if isinstance(entrypoint, str):
        try:
            words = tuple(shlex.split(entrypoint))
        except ValueError as error:
            raise _error(where, f"{entrypoint!r} ({error})", "Close the quotation.") from error
    else:
        words = tuple(entrypoint)
    if len(words) == 1 and _TRIAL_PATTERN.fullmatch(words[0]):
        return Entrypoint(words[0])
    launched = _launcher_arguments(words)
    if isinstance(entrypoint, str) and _SHELL_SYNTAX.search(entrypoint):
        if launched is not None:
            fix = "Remove the shell syntax, or start the entrypoint in a shell yourself."
            raise _error(where, f"{entrypoint!r}, a launcher within shell syntax", fix)
        return Entrypoint(None, ("sh", "-c", entrypoint))
    if launched is not None:
        return _parse_launcher_arguments(launched, where, entrypoint)
    return Entrypoint(None, words, starts_ranks=Path(words[0]).name in FOREIGN_LAUNCHERS)


def _launcher_arguments(words: Sequence[str]) -> tuple[str, ...] | None:
    for word_idx, (flag, module) in enumerate(itertools.pairwise(words)):
        if flag == "-m" and module in _LAUNCH_MODULES:
            rest = tuple(words[word_idx + 2 :])
            if module != _OUR_LAUNCHER and "--" in rest:
                return rest[rest.index("--") + 1 :]
            return rest
    return None


def _parse_launcher_arguments(rest: tuple[str, ...], where: str, entrypoint: object) -> Entrypoint:
    while rest and rest[0].startswith("--"):
        option, has_value, value = rest[0].partition("=")
        rest = rest[1:]
        if option == "--":
            break
        if not has_value:
            value, rest = "".join(rest[:1]), rest[1:]
        if option == "--trial":
            if not _TRIAL_PATTERN.fullmatch(value):
                raise _error(where, f"{entrypoint!r}", "Write --trial model_def:MyTrial.")
            return Entrypoint(value)
    if rest:
        return Entrypoint(None, rest)
    raise _error(where, f"{entrypoint!r}", "Add --trial model_def:MyTrial, or a script.")


def _error(where: str, got: str, fix: str) -> ConfigError:
    return ConfigError([ConfigProblem(f"{where}: entrypoint", got, "module:Class, or a command", fix)])


@dataclasses.dataclass(frozen=True, slots=True)
class ResumePoint:
    """The checkpoint from which to resume, and the run that continues."""

    run_directory: RunDirectory | None  # None starts a new run from the checkpoint
    checkpoint: Path
    note: str | None = None  # a warning, for example that an older run continues

    @property
    def steps_completed(self) -> int | None:
        """Batches trained at the checkpoint; None if a new run starts or if unknown."""
        if self.run_directory is None:
            return None
        stored = list_checkpoints(self.run_directory.checkpoints_path)
        return next((found.steps_completed for found in stored if found.path == self.checkpoint), None)

    def saved_run(self) -> SavedRun | None:
        """Return the checkpoint's metadata for config checks; None if it has no manifest."""
        if not (self.checkpoint / MANIFEST_NAME).is_file():
            return None  # the user's own script wrote the checkpoint
        return read_saved_run(self.checkpoint).of_trial(LOCAL_ID)


def resume_point_of(args: argparse.Namespace) -> ResumePoint | None:
    """Return the checkpoint that the options name for a resume; None for a new run.

    If the run in ``--run-dir`` has checkpoints, the result is its newest one, and ``--resume`` is ignored. Otherwise the result
    is what ``--resume`` names in ``--runs-dir``; with ``--run-dir``, that checkpoint then starts a new run.
    """
    own = run_directory_of(args)
    if own is not None and own.record_path.is_file():
        resumable = newest_resumable([own])
        if resumable is not None:
            return ResumePoint(own, resumable[1])
    if args.resume is None:
        return None
    point = resume_point(
        args.resume,
        runs_dir=default_runs_dir(args.runs_dir),
        name=experiment_name(args.experiment, args.config),
        context_dir=Path(args.context_dir),
    )
    return point if own is None else dataclasses.replace(point, run_directory=None)


def run_directory_of(args: argparse.Namespace) -> RunDirectory | None:
    """Return the run directory of ``--run-dir``; None if the flag is absent."""
    path = getattr(args, "run_dir", None)
    return None if path is None else RunDirectory(Path(path).absolute())


def newest_resumable(runs: list[RunDirectory]) -> tuple[RunDirectory, Path] | None:
    """Return the first run with a complete checkpoint, and its newest checkpoint.

    Returns None if no run has a checkpoint. Searches, whose checkpoints belong to several trials, are skipped.
    """
    for run_directory in runs:
        if run_directory.is_search:
            continue
        checkpoint = newest_checkpoint(run_directory.checkpoints_path)
        if checkpoint is not None:
            return run_directory, checkpoint.path
    return None


def resume_point(resume: str, *, runs_dir: Path, name: str, context_dir: Path) -> ResumePoint:
    """Return the checkpoint and the run that the value of ``--resume`` names.

    The value is ``latest``, a run directory, or a checkpoint directory. ``latest`` is the newest run in ``runs_dir`` with this
    experiment ``name`` and ``context_dir`` that has a complete checkpoint. A checkpoint that belongs to a search or to no run
    has no run to continue.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
    """
    path = Path(resume).resolve()
    is_run = RunDirectory(path).record_path.is_file()
    if resume == "latest" or is_run:
        runs = find_runs(runs_dir, name, context_dir) if resume == "latest" else [RunDirectory.open(path)]
        found = newest_resumable(runs)
        if found is None:
            where = f"the run {path}"
            if resume == "latest":
                where = f"no run of {name!r} with the context directory {context_dir.resolve()} in {runs_dir}"
            raise CheckpointNotFoundError(
                f"--resume is {resume!r}, and {where} has {'a' if resume == 'latest' else 'no'} complete checkpoint; expected "
                "one to resume from. Leave --resume out to start anew, or name a checkpoint's directory."
            )
        run_directory, checkpoint = found
        note = None
        if run_directory != runs[0]:
            note = f"the newest run {runs[0].path} has no complete checkpoint; resuming {run_directory.path}"
        return ResumePoint(run_directory, checkpoint, note)
    if is_complete(path) or (path / MANIFEST_NAME).is_file():
        owner = RunDirectory.of_checkpoint(path)
        if owner is None or is_complete(path):
            return ResumePoint(None if owner is None or owner.is_search else owner, path)
    raise CheckpointNotFoundError(
        f"--resume is {resume!r}; expected 'latest', a run directory, or the directory of a complete "
        "checkpoint. Name one that a run has printed."
    )
