"""``dstrial run``: train one experiment on this machine, in the foreground."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dstrial.checkpoint.manifest import MANIFEST_NAME
from dstrial.checkpoint.mark import is_complete
from dstrial.cli.run_entrypoint import Entrypoint, parse_entrypoint
from dstrial.cli.run_outcome import Verdict, judge, print_failure, summary
from dstrial.config import ExperimentConfig, load_experiment
from dstrial.errors import CheckpointNotFoundError, ConfigError, ConfigProblem, DstrialError
from dstrial.local.checkpoint_directory import newest_checkpoint
from dstrial.local.json_files import read_json
from dstrial.local.run_directory import (
    RESUME_VARIABLE,
    RUN_DIR_VARIABLE,
    RunDirectory,
    RunState,
    default_runs_dir,
    newest_run,
    utc_now,
)
from dstrial.local.run_monitor import RunMonitor

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from dstrial.cli.run_display import Display
    from dstrial.launch.agent import LaunchOutcome

_EPILOG = (
    "Ctrl-C and SIGTERM stop all ranks at the same batch with a checkpoint; a second Ctrl-C ends them at once. "
    "Exit status: 0 if training completed; 130 or 143 if SIGINT or SIGTERM stopped it; that of the first rank "
    "that failed; 1 for a wrong configuration; 2 for wrong usage."
)


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand and its arguments."""
    parser = subparsers.add_parser(
        "run",
        help="train one experiment on this machine, in the foreground",
        description="Check an experiment, train it on this machine in the foreground, and say where its files lie.",
        epilog=_EPILOG,
    )
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
    parser.add_argument(
        "--slots", type=_slots, metavar="N", help="number of ranks instead of slots_per_trial"
    )
    parser.add_argument(
        "--runs-dir", metavar="DIR", help="directory of all runs (default: $DSTRIAL_RUNS_DIR or runs)"
    )
    parser.add_argument(
        "--no-progress", action="store_true", help="print plain lines instead of a progress bar"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--resume",
        metavar="latest|RUN_DIR|CHECKPOINT",
        help="go on with the newest run of this name and context, with a run, or from a checkpoint",
    )
    kind.add_argument(
        "--test",
        action="store_true",
        help="train two batches, validate once, write a checkpoint and load it again",
    )


def _slots(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a number of slots; expected at least 1")
    return value


def main(args: argparse.Namespace) -> int:
    """Train and return the exit status; see the epilog of ``dstrial run --help``.

    Raises:
        DstrialError: the experiment cannot be started.
    """
    experiment = load_experiment(
        args.experiment, args.context_dir, args.config, require_entrypoint=True, slots=args.slots
    )
    entrypoint = parse_entrypoint(experiment.entrypoint, str(experiment.path))
    _require_trainable(args, experiment, entrypoint)
    for warning in experiment.warnings:
        sys.stderr.write(f"warning: {warning}\n")
    run_directory, checkpoint = _run_to_go_on_with(args, experiment)
    command = ["dstrial", *_own_arguments(args)]
    is_new = run_directory is None
    if run_directory is None:
        run_directory = RunDirectory.create(
            default_runs_dir(args.runs_dir),
            name=f"{experiment.name}-test" if args.test else experiment.name,
            context_dir=experiment.context_dir,
            command=command,
            config=experiment.raw,
        )
    with run_directory.lock():
        if not is_new:
            run_directory.begin_attempt(command)
            run_directory.write_config(experiment.raw)
        return _attempt(args, experiment, entrypoint, run_directory, checkpoint)


def _require_trainable(
    args: argparse.Namespace, experiment: ExperimentConfig, entrypoint: Entrypoint
) -> None:
    if entrypoint.trial is None and args.test:
        problem = ConfigProblem(
            f"{experiment.path}: entrypoint",
            f"{experiment.entrypoint!r} with --test",
            "a trial class, which can be stopped after two batches",
            "Run the script without --test, or write entrypoint: model_def:MyTrial.",
        )
        raise ConfigError([problem])
    if entrypoint.trial is not None and not args.test:
        experiment.require_max_length()


def _run_to_go_on_with(
    args: argparse.Namespace, experiment: ExperimentConfig
) -> tuple[RunDirectory | None, Path | None]:
    """Resolve ``--resume`` to a run, None for a new one, and the checkpoint to load."""
    if args.resume is None:
        return None, None
    if args.resume == "latest":
        runs_dir = default_runs_dir(args.runs_dir)
        run_directory = newest_run(runs_dir, experiment.name, experiment.context_dir)
        if run_directory is None:
            raise CheckpointNotFoundError(
                f"--resume is 'latest', and {runs_dir} has no run of {experiment.name!r} with the context directory "
                f"{experiment.context_dir.resolve()}; expected one. Leave --resume out to start one, or pass "
                "--runs-dir."
            )
        return run_directory, _newest_of(run_directory)
    path = Path(args.resume).resolve()
    if RunDirectory(path).record_path.is_file():
        run_directory = RunDirectory.open(path)
        return run_directory, _newest_of(run_directory)
    if is_complete(path) or (path / MANIFEST_NAME).is_file():
        owner = RunDirectory(path.parent.parent)
        is_of_a_run = owner.record_path.is_file() and owner.checkpoints_path == path.parent
        if not is_of_a_run or is_complete(path):
            return (owner if is_of_a_run else None), path
    raise CheckpointNotFoundError(
        f"--resume is {args.resume!r}; expected 'latest', a run directory, or the directory of a complete "
        "checkpoint. Name one that a run has printed."
    )


def _newest_of(run_directory: RunDirectory) -> Path:
    checkpoint = newest_checkpoint(run_directory.checkpoints_path)
    if checkpoint is None:
        raise CheckpointNotFoundError(
            f"the run {run_directory.path} has no complete checkpoint; expected one to resume from. Leave --resume "
            "out to start anew."
        )
    return checkpoint.path


def _own_arguments(args: argparse.Namespace, resume: str | None = None) -> list[str]:
    """This command line again, with another ``--resume``."""
    words = ["run", args.experiment]
    if args.context_dir != ".":
        words.append(args.context_dir)
    for override in args.config:
        words += ["--config", override]
    if args.slots is not None:
        words += ["--slots", str(args.slots)]
    if args.runs_dir is not None:
        words += ["--runs-dir", args.runs_dir]
    if args.no_progress:
        words.append("--no-progress")
    if args.test:
        words.append("--test")
    if (resume or args.resume) is not None:
        words += ["--resume", resume or args.resume]
    return words


def _attempt(
    args: argparse.Namespace,
    experiment: ExperimentConfig,
    entrypoint: Entrypoint,
    run_directory: RunDirectory,
    checkpoint: Path | None,
) -> int:
    """Train in a run directory that this process owns, put the outcome on record and print it."""
    from dstrial.cli.run_display import Refresher, make_display
    from dstrial.launch.slots import num_slots

    is_cpu = experiment.slots_per_trial == 0
    num_ranks = 1 if entrypoint.starts_ranks or is_cpu else num_slots(args.slots, experiment.slots_per_trial)
    metric = experiment.metric
    monitor = RunMonitor(run_directory, metric=metric, since=utc_now())
    display = make_display(num_ranks=num_ranks, metric=metric, is_plain=args.no_progress)
    display.message(f"run directory: {run_directory.path}")
    if checkpoint is not None:
        display.message(f"resuming from checkpoint {checkpoint}")
    try:
        with Refresher(monitor.poll, display.view):
            outcome = _run_ranks(args, experiment, entrypoint, run_directory, checkpoint, num_ranks, display)
    except KeyboardInterrupt:
        run_directory.end_attempt(RunState.STOPPED)
        return 128 + signal.SIGINT
    except DstrialError as error:
        run_directory.end_attempt(RunState.FAILED, str(error))
        raise
    finally:
        display.close()
    verdict = judge(
        outcome, read_json(run_directory.status_path) or {}, is_trial=entrypoint.trial is not None
    )
    run_directory.end_attempt(verdict.state, verdict.reason if verdict.state is RunState.FAILED else None)
    if args.test:
        return _end_test(run_directory, verdict, outcome)
    sys.stdout.write("\n".join(_summary_of(args, experiment, run_directory, verdict)) + "\n")
    print_failure(outcome)
    return verdict.exit_code


def _run_ranks(
    args: argparse.Namespace,
    experiment: ExperimentConfig,
    entrypoint: Entrypoint,
    run_directory: RunDirectory,
    checkpoint: Path | None,
    num_ranks: int,
    display: Display,
) -> LaunchOutcome:
    from dstrial.launch.agent import run_ranks
    from dstrial.launch.rank_main import script_command, trial_command

    env = dict(experiment.environment_variables)
    env[RUN_DIR_VARIABLE] = str(run_directory.path)
    env["DET_PYTHON_EXECUTABLE"] = sys.executable
    env["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), env.get("PATH", os.environ.get("PATH", ""))]
    )
    if checkpoint is not None:
        env[RESUME_VARIABLE] = str(checkpoint)
    if experiment.slots_per_trial == 0:
        env["DS_ACCELERATOR"] = "cpu"
    if entrypoint.trial is not None:
        command = trial_command(
            entrypoint.trial,
            context_dir=experiment.context_dir,
            config=experiment.path,
            overrides=args.config,
            run_dir=run_directory.path,
            resume=None if checkpoint is None else str(checkpoint),
            test_mode=args.test,
        )
    else:
        command = script_command(entrypoint.words)

    def tell_stopping(_signal_name: str) -> None:
        display.message(
            "stopping all ranks at the same batch, saving a checkpoint (Ctrl-C again to end at once)"
        )

    with _working_directory(experiment.context_dir):
        return run_ranks(
            command,
            num_ranks=num_ranks,
            env=env,
            log_dir=run_directory.attempt_logs_path(run_directory.read_record().num_attempts),
            shutdown_timeout_s=experiment.preemption_timeout_s,
            on_line=display.rank_line,
            on_stop=tell_stopping,
        )


@contextlib.contextmanager
def _working_directory(path: Path) -> Iterator[None]:
    """Ranks start in the context directory, and the launcher hands on this process's own."""
    before = Path.cwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


def _summary_of(
    args: argparse.Namespace, experiment: ExperimentConfig, run_directory: RunDirectory, verdict: Verdict
) -> list[str]:
    newest = newest_run(default_runs_dir(args.runs_dir), experiment.name, experiment.context_dir)
    resume = "latest" if newest == run_directory else str(run_directory.path)
    return summary(
        run_directory,
        verdict,
        metric=experiment.metric,
        smaller_is_better=experiment.smaller_is_better,
        resume_command=["dstrial", *_own_arguments(args, resume)],
    )


def _end_test(run_directory: RunDirectory, verdict: Verdict, outcome: LaunchOutcome) -> int:
    checkpoint = newest_checkpoint(run_directory.checkpoints_path)
    if verdict.state is RunState.COMPLETED and checkpoint is not None:
        shutil.rmtree(run_directory.path)
        with contextlib.suppress(OSError):
            run_directory.path.parent.rmdir()
        sys.stdout.write(
            f"test passed: {checkpoint.steps_completed} batches, one validation, one checkpoint written and loaded again\n"
        )
        return 0
    reason = verdict.reason or "no checkpoint was written"
    sys.stdout.write(f"test failed: {reason}; its files are in {run_directory.path}\n")
    print_failure(outcome)
    return verdict.exit_code or 1
