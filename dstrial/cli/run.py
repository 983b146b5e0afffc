"""``dstrial run``: train one experiment on this machine, in the foreground."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dstrial.cli.arguments import add_experiment_arguments
from dstrial.cli.run_entrypoint import Entrypoint, parse_entrypoint
from dstrial.cli.run_outcome import Verdict, failure_text, judge, summary
from dstrial.cli.run_resume import ResumePoint, newest_resumable, resume_point
from dstrial.cli.streams import LastingStream
from dstrial.config import ExperimentConfig, load_experiment
from dstrial.errors import ConfigError, ConfigProblem
from dstrial.local.checkpoint_directory import newest_checkpoint
from dstrial.local.json_files import read_json
from dstrial.local.run_directory import (
    RESUME_VARIABLE,
    RUN_DIR_VARIABLE,
    RunDirectory,
    RunState,
    default_runs_dir,
    find_runs,
    utc_now,
)
from dstrial.local.run_monitor import RunMonitor, RunView

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
    add_experiment_arguments(parser, slots_help="number of ranks instead of slots_per_trial")
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
        help="go on with the newest run of this name and context that has a checkpoint, with a run, or from a checkpoint",
    )
    kind.add_argument(
        "--test",
        action="store_true",
        help="train two batches, validate once, write a checkpoint and load it again",
    )


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
    err = LastingStream(sys.stderr)
    for warning in experiment.warnings:
        err.write(f"warning: {warning}\n")
    point = None if args.resume is None else _resume_point(args, experiment)
    if point is not None and point.note is not None:
        err.write(f"warning: {point.note}\n")
    command = ["dstrial", *_own_arguments(args)]
    run_directory = None if point is None else point.run_directory
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
        with _ended_on_record(run_directory):
            return _attempt(args, experiment, entrypoint, run_directory, point)


def _resume_point(args: argparse.Namespace, experiment: ExperimentConfig) -> ResumePoint:
    return resume_point(
        args.resume,
        runs_dir=default_runs_dir(args.runs_dir),
        name=experiment.name,
        context_dir=experiment.context_dir,
    )


@contextlib.contextmanager
def _ended_on_record(run_directory: RunDirectory) -> Iterator[None]:
    """Put the end of an attempt on record when an exception ends it."""
    try:
        yield
    except BaseException as error:
        if run_directory.read_record().state is RunState.RUNNING:
            if isinstance(error, KeyboardInterrupt):
                run_directory.end_attempt(RunState.STOPPED)
            else:
                reason = str(error).partition("\n")[0]
                run_directory.end_attempt(RunState.FAILED, f"{type(error).__name__}: {reason}")
        raise


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
    point: ResumePoint | None,
) -> int:
    """Train in a run directory that this process owns, put the outcome on record and print it."""
    from dstrial.cli.run_display import Refresher, make_display
    from dstrial.launch.slots import num_slots

    is_cpu = experiment.slots_per_trial == 0
    num_ranks = 1 if entrypoint.starts_ranks or is_cpu else num_slots(args.slots, experiment.slots_per_trial)
    metric = experiment.metric
    out, err = LastingStream(sys.stdout), LastingStream(sys.stderr)
    steps_before = None if point is None else point.steps_completed
    monitor = RunMonitor(run_directory, metric=metric, since=utc_now())
    display = make_display(out, err, num_ranks=num_ranks, metric=metric, is_plain=args.no_progress)
    try:
        display.message(f"run directory: {run_directory.path}")
        if point is not None:
            display.message(f"resuming from checkpoint {point.checkpoint}")
        with Refresher(monitor.poll, display.view):
            outcome = _run_ranks(args, experiment, entrypoint, run_directory, point, num_ranks, display)
    finally:
        display.close()
    is_trial = entrypoint.trial is not None
    verdict = judge(outcome, read_json(run_directory.status_path) or {}, is_trial=is_trial)
    failure = outcome.first_failure.in_one_line if outcome.first_failure is not None else verdict.reason
    run_directory.end_attempt(verdict.state, failure if verdict.state is RunState.FAILED else None)
    if args.test:
        lines, exit_code = _end_test(run_directory, verdict, outcome)
    else:
        lines = _summary_of(args, experiment, run_directory, verdict, monitor.poll(), steps_before)
        exit_code = verdict.exit_code
    out.write("\n".join(lines) + "\n")
    if out.is_lost and err.isatty():
        err.write("\n".join(lines) + "\n")
    err.write(failure_text(outcome))
    return exit_code


def _run_ranks(
    args: argparse.Namespace,
    experiment: ExperimentConfig,
    entrypoint: Entrypoint,
    run_directory: RunDirectory,
    point: ResumePoint | None,
    num_ranks: int,
    display: Display,
) -> LaunchOutcome:
    from dstrial.launch.agent import run_ranks
    from dstrial.launch.rank_main import script_command, trial_command

    checkpoint = None if point is None else point.checkpoint
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
        command = script_command(entrypoint.words, directory=experiment.context_dir)
    since = utc_now()

    def tell_stopping(_signal_name: str) -> None:
        what = "stopping all ranks"
        if RunMonitor(run_directory, metric=None, since=since).poll().batches_trained is not None:
            what = "stopping all ranks at the same batch, saving a checkpoint"
        elif entrypoint.trial is not None:
            what = "stopping all ranks; training has not begun"
        display.message(f"{what} (Ctrl-C again to end at once)")

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
    args: argparse.Namespace,
    experiment: ExperimentConfig,
    run_directory: RunDirectory,
    verdict: Verdict,
    view: RunView,
    steps_before: int | None,
) -> list[str]:
    is_latest = False
    if verdict.state is not RunState.COMPLETED:
        runs = find_runs(default_runs_dir(args.runs_dir), experiment.name, experiment.context_dir)
        latest = newest_resumable(runs)
        is_latest = latest is not None and latest[0] == run_directory
    return summary(
        run_directory,
        verdict,
        view,
        metric=experiment.metric,
        smaller_is_better=experiment.smaller_is_better,
        steps_before=steps_before,
        resume_command=["dstrial", *_own_arguments(args, "latest" if is_latest else str(run_directory.path))],
    )


def _end_test(run_directory: RunDirectory, verdict: Verdict, outcome: LaunchOutcome) -> tuple[list[str], int]:
    """What to print after ``--test``, and its exit status; removes the run if it passed."""
    checkpoint = newest_checkpoint(run_directory.checkpoints_path)
    if verdict.state is RunState.COMPLETED and checkpoint is not None:
        shutil.rmtree(run_directory.path)
        with contextlib.suppress(OSError):
            run_directory.path.parent.rmdir()
        batches = checkpoint.steps_completed
        return [f"test passed: {batches} batches, one validation, one checkpoint written and loaded again"], 0
    if verdict.state is RunState.STOPPED and outcome.stopped_by is not None:
        ending = f"test stopped by {outcome.stopped_by}"
    else:
        ending = f"test failed: {verdict.reason or 'no checkpoint was written'}"
    return [f"{ending}; its files are in {run_directory.path}"], verdict.exit_code or 1
