"""``dstrial run``: train one experiment on this machine and follow it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrial.checkpoint.manifest import MANIFEST_NAME, hash_file
from dstrial.cli import run_slurm
from dstrial.cli.run_entrypoint import Entrypoint, parse_entrypoint
from dstrial.cli.run_outcome import (
    Verdict,
    at_failure,
    failure_text,
    judge,
    judge_experiment,
    outcome_of,
    summary,
)
from dstrial.cli.run_resume import (
    ResumePoint,
    add_experiment_arguments,
    chosen_point,
    newest_resumable,
    run_directory_of,
)
from dstrial.cli.streams import LossTolerantStream, context_text, det_for, page_of, typed
from dstrial.config import ExperimentConfig, load_experiment
from dstrial.config.documents import read_yaml
from dstrial.config.dotted_keys import apply_overrides, dstrial_section
from dstrial.config.experiment_config.check import unused_by_run
from dstrial.config.experiment_config.dstrial_section import HOOK_NAME, requirements_of
from dstrial.config.experiment_config.loggers import KEY as LOGGERS_KEY
from dstrial.config.experiment_config.loggers import LOGGERS, with_loggers
from dstrial.context_directory import Context, list_context
from dstrial.errors import ConfigError, ConfigProblem, LaunchError
from dstrial.hosts.hostfile import Host, add_host_arguments, given_slots, hosts_of, python_of
from dstrial.hosts.srun import hosts_of_allocation
from dstrial.launch.failures import LaunchOutcome
from dstrial.local.checkpoint_directory import newest_checkpoint
from dstrial.local.json_files import read_json
from dstrial.local.run_directory import (
    RUN_DIR_VARIABLE,
    RunDirectory,
    RunState,
    default_runs_dir,
    find_runs,
    shown_path,
    utc_now,
)
from dstrial.local.run_monitor import RunMonitor, RunView
from dstrial.master import daemon
from dstrial.slurm.allocation import Allocation, allocation_of
from dstrial.storage_guard import STORAGE_MARKER
from dstrial.visible_text import visible

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from dstrial.cli.run_display import Display
    from dstrial.cli.run_follow import FollowResult
    from dstrial.cli.run_submission import Master
    from dstrial.master.store.views.observe import ExperimentView

_EPILOG = (
    "Ctrl-C and SIGTERM pause the experiment with a checkpoint; a second Ctrl-C leaves that to the master. "
    "Exit status: 0 if training completed; 130 or 143 if SIGINT or SIGTERM paused it; that of the first rank "
    "that failed; 1 for a wrong configuration and for an experiment that was cancelled; 2 for wrong usage."
)


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "run",
        help="train one experiment on this machine and follow it",
        description="Check an experiment, submit it to this machine's master, which is started if none runs, follow "
        "it to its end, and say where its files lie.",
        epilog=_EPILOG,
    )
    add_experiment_arguments(parser, slots_help="number of slots instead of slots_per_trial")
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
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help="with --resume: load the checkpoint also where it holds classes that are not on dstrial's list, which can run any "
        "code: for checkpoints of people whom you trust",
    )
    parser.add_argument(
        "--override-optimizer",
        action="store_true",
        help="where a checkpoint is loaded, use the optimizer's settings (lr, weight_decay, betas, ...) of this run instead of "
        "the checkpoint's",
    )
    kind.add_argument(
        "--test",
        action="store_true",
        help="train two batches, validate once, write a checkpoint and load it again",
    )
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        help="directory of this run: it begins there, and where it has a checkpoint it goes on from the newest one",
    )
    parser.add_argument(
        "--logger",
        choices=tuple(LOGGERS),
        action="append",
        default=[],
        help="report metrics there as well, beside TensorBoard and the loggers of EXP.yaml; repeatable",
    )
    parser.add_argument(
        "--predict-memory",
        action="store_true",
        help="predict where memory goes before training, as `dstrial memory` does, and show it beside what was measured",
    )
    parser.add_argument(
        "--debug",
        action="store_true",
        help="train on one rank in this process, without a master: breakpoint() has the terminal",
    )
    add_host_arguments(parser)
    run_slurm.add_slurm_arguments(parser)


@dataclasses.dataclass(frozen=True, slots=True)
class _Request:
    """The command line, read and checked."""

    args: argparse.Namespace
    experiment: ExperimentConfig
    entrypoint: Entrypoint
    point: ResumePoint | None
    is_search: bool
    max_restarts: int
    overrides: tuple[str, ...]
    num_slots: int  # of the trial, over all hosts
    hosts: tuple[Host, ...] = ()
    allocation: Allocation | None = None
    known_run: RunDirectory | None = None


def main(args: argparse.Namespace) -> int:
    request = _read_request(args)
    if args.slurm and request.allocation is None:
        from dstrial.cli.run_slurm_submission import prepare, submit_and_follow

        known = request.known_run or run_directory_of(args)
        inner = _own_arguments(args, slots=request.num_slots)
        submission = prepare(args, request.experiment, inner, None if known is None else known.path)
        return submit_and_follow(args, submission)
    if request.hosts:
        _check_hosts(request)
    return _run(request)


def _check_hosts(request: _Request) -> None:
    """Check whether the hosts can train together, and show them."""
    from dstrial.cli.run_submission import require_hosts
    from dstrial.hosts.hostfile import placement_lines
    from dstrial.hosts.preflight import check_hosts
    from dstrial.hosts.srun import transport_of

    args, allocation = request.args, request.allocation
    if allocation is None:
        require_hosts(request.hosts)
    own = request.known_run or run_directory_of(args)
    preflight = check_hosts(
        request.hosts,
        python=python_of(args),
        shared_directory=default_runs_dir(args.runs_dir) if own is None else own.path.parent,
        environ={**os.environ, **request.experiment.environment_variables},
        transport=None if allocation is None else transport_of(allocation),
    )
    out = LossTolerantStream(sys.stdout)
    out.write("".join(f"{'host:':<15}{line}\n" for line in placement_lines(preflight)))


def _run(request: _Request) -> int:
    """Create or open the run's directory, and train in it."""
    args = request.args
    command = ["dstrial", *_own_arguments(args)]
    run_directory = request.known_run
    experiment = request.experiment
    if run_directory is None:
        own = run_directory_of(args)
        run_directory = RunDirectory.create(
            default_runs_dir(args.runs_dir),
            name=f"{experiment.name}-test" if args.test else experiment.name,
            context_dir=experiment.context_dir,
            command=command,
            config=experiment.raw,
            path=None if own is None else own.path,
        )
    with run_directory.lock(), _ended_on_record(run_directory):
        if args.predict_memory:
            from dstrial.cli.memory import predict_run

            problem = predict_run(run_directory, experiment, request.num_slots)
            if problem is not None:
                sys.stdout.write(f"where memory goes is not predicted: {problem}\n")
        return _debug(request, run_directory) if args.debug else _attempt(request, run_directory)


def _read_request(args: argparse.Namespace) -> _Request:
    """Read and check everything that can be checked before anything is created."""
    point = chosen_point(args)
    resumed = None if point is None else point.saved_run()
    overrides = [*args.config, *_trust_override(args, point), *_logger_override(args)]
    if args.override_optimizer:
        overrides.append("data.dstrial.override_optimizer=true")
    run_slurm.require_slurm_flags(args)
    allocation = allocation_of(os.environ) if args.slurm and not args.print_sbatch else None
    hosts, slots = _hosts_and_slots(args, allocation)
    given = load_experiment(
        args.experiment,
        args.context_dir,
        overrides,
        require_concrete=False,
        require_entrypoint=True,
        slots=slots,
        resumed=resumed,
    )
    is_search = given.raw["searcher"]["name"] != "single"
    if not is_search:
        given = load_experiment(
            args.experiment,
            args.context_dir,
            overrides,
            require_entrypoint=True,
            slots=slots,
            resumed=resumed,
        )
    entrypoint = parse_entrypoint(given.entrypoint, str(given.path))
    _require_trainable(args, given, entrypoint, is_search=is_search)
    context = list_context(given.context_dir)
    context.require_packable()
    given = dataclasses.replace(given, warnings=(*given.warnings, *context.warnings()))
    _show_warnings(args, given, point)
    return _Request(
        args,
        given,
        entrypoint,
        point,
        is_search,
        _max_restarts(args, given),
        tuple(overrides),
        slots if slots is not None else given.slots_per_trial,
        hosts,
        allocation,
        _known_run(args, point),
    )


def _hosts_and_slots(
    args: argparse.Namespace, allocation: Allocation | None
) -> tuple[tuple[Host, ...], int | None]:
    """Return the hosts, none for this machine, and the trial's slots, None by default.

    Over hosts that is ``--slots``, or a ``slots_per_trial`` that the user has written, else all slots.
    """
    if args.hostfile is None and allocation is None:
        return (), 1 if args.debug else args.slots
    wanted = args.slots or given_slots(Path(args.experiment), args.config)
    hosts = hosts_of(args) if allocation is None else hosts_of_allocation(allocation, wanted)
    present = sum(len(host.slots) for host in hosts)
    if wanted is not None and wanted > present:
        shown = ", ".join(f"{host.name} {len(host.slots)}" for host in hosts)
        problem = ConfigProblem(
            "the number of slots",
            str(wanted),
            f"at most {present}, what {args.hostfile} offers ({shown})",
            "Ask for fewer slots, or add hosts.",
        )
        raise ConfigError([problem])
    return hosts, wanted or present


def _show_warnings(args: argparse.Namespace, given: ExperimentConfig, point: ResumePoint | None) -> None:
    """Write warnings of a request, and what a resumed run keeps, to stderr."""
    err = LossTolerantStream(sys.stderr)
    if not args.slurm and (hint := run_slurm.unused_nodes_hint()) is not None:
        err.write(f"warning: {hint}\n")
    for warning in given.warnings:
        err.write(f"warning: {warning}\n")
    if unused := unused_by_run(given.raw, has_slurm=args.slurm or _has_engine()):
        err.write(
            f"warning: {given.path}: `dstrial run` does not use {', '.join(unused)}: ranks are processes "
            "without containers, checkpoints lie in the run directory\n"
        )
    if point is None:
        return
    if point.note is not None:
        err.write(f"warning: {point.note}\n")
    for note in given.notes:
        if f"checkpoint {point.checkpoint.name}: " in note:
            err.write(f"{note}\n")


def _has_engine() -> bool:
    from dstrial.master.backends.status import shown_engine
    from dstrial.master.state_directory import StateDirectory

    return shown_engine(StateDirectory.choose().path) is not None


def _known_run(args: argparse.Namespace, point: ResumePoint | None) -> RunDirectory | None:
    """Return the run to resume; None for a new one."""
    if point is not None and point.run_directory is not None:
        return point.run_directory
    own = run_directory_of(args)
    return None if own is None or not own.record_path.is_file() else RunDirectory.open(own.path)


def _trust_override(args: argparse.Namespace, point: ResumePoint | None) -> list[str]:
    """Return ``--trust-code`` as a setting that names the files by their manifest."""
    if not args.trust_code:
        return []
    manifest = None if point is None else point.checkpoint / MANIFEST_NAME
    if manifest is None or not manifest.is_file():
        problem = ConfigProblem(
            "--trust-code",
            "given without --resume"
            if point is None
            else f"given for {point.checkpoint}, which has no {MANIFEST_NAME}",
            "a checkpoint that dstrial wrote",
            "Name it with --resume, or leave --trust-code out.",
        )
        raise ConfigError([problem])
    # Only these files: what the run writes later has to be vouched for by itself.
    return [f"data.dstrial.trust_checkpoint_code='{hash_file(manifest).sha256}'"]


def _logger_override(args: argparse.Namespace) -> list[str]:
    """Return the loggers of the config and of ``--logger`` as one setting."""
    if not args.logger:
        return []
    document = apply_overrides(read_yaml(Path(args.experiment), args.experiment), args.config)
    loggers = with_loggers(dstrial_section(document.value).get("loggers"), args.logger)
    return [] if loggers is None else [f"{LOGGERS_KEY}={json.dumps(loggers)}"]


def _max_restarts(args: argparse.Namespace, experiment: ExperimentConfig) -> int:
    """Return ``max_restarts`` if set, else 0: failures are told at once."""
    if args.test:
        return 0
    is_given = "max_restarts" in (read_yaml(experiment.path, str(experiment.path)).value or {})
    is_given = is_given or any(override.startswith("max_restarts=") for override in args.config)
    return experiment.max_restarts if is_given else 0


@contextlib.contextmanager
def _ended_on_record(run_directory: RunDirectory) -> Iterator[None]:
    """Record the end of an attempt when an exception ends it."""
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
    args: argparse.Namespace, experiment: ExperimentConfig, entrypoint: Entrypoint, *, is_search: bool
) -> None:
    problem: ConfigProblem | None = None
    if is_search and args.slurm:
        problem = ConfigProblem(
            f"{experiment.path}: searcher.name",
            f"{experiment.raw['searcher']['name']!r} with --slurm",
            "'single', one trial",
            "Add --config searcher.name=single and concrete hyperparameters, or start a master: dstrial up --backend slurm, or "
            "--slurm in an allocation.",
        )
    elif is_search and (args.test or args.resume or args.debug):
        problem = ConfigProblem(
            f"{experiment.path}: searcher.name",
            f"{experiment.raw['searcher']['name']!r} with "
            f"{'--test' if args.test else '--debug' if args.debug else '--resume'}",
            "'single', one trial",
            "Add --config searcher.name=single and concrete hyperparameters."
            if args.test or args.debug
            else "Go on with a search by the command that it printed as `resume with`.",
        )
    elif entrypoint.trial is None and args.test:
        problem = ConfigProblem(
            f"{experiment.path}: entrypoint",
            f"{experiment.entrypoint!r} with --test",
            "a trial class, which can be stopped after two batches",
            "Run the script without --test, or write entrypoint: model_def:MyTrial.",
        )
    elif args.debug and entrypoint.trial is None:
        problem = ConfigProblem(
            f"{experiment.path}: entrypoint",
            f"{experiment.entrypoint!r} with --debug",
            "a trial class",
            "Start the script itself under the debugger: python -m pdb SCRIPT.",
        )
    elif args.debug and (args.slurm or args.hostfile is not None or (args.slots or 1) > 1):
        problem = ConfigProblem(
            "--debug",
            "given with --slurm, --hostfile or --slots",
            "one rank in this process",
            "Leave the others out.",
        )
    if problem is not None:
        raise ConfigError([problem])
    if entrypoint.trial is not None and not args.test:
        experiment.require_max_length()


def _own_arguments(
    args: argparse.Namespace, resume: str | None = None, *, slots: int | None = None
) -> list[str]:
    """Return this command line with another ``--resume`` or number of slots."""
    words = ["run", args.experiment]
    if args.context_dir != ".":
        words.append(args.context_dir)
    for override in args.config:
        words += ["--config", override]
    if (slots or args.slots) is not None:
        words += ["--slots", str(slots or args.slots)]
    if args.runs_dir is not None:
        words += ["--runs-dir", args.runs_dir]
    for flag in ("hostfile", "include", "exclude", "python"):
        value = getattr(args, flag)
        if value:
            words += [f"--{flag}", str(value)]
    if args.slurm:
        words.append("--slurm")
    for argument in args.sbatch_arg:
        words.append(f"--sbatch-arg={argument}")
    for logger in args.logger:
        words += ["--logger", logger]
    if args.predict_memory:
        words.append("--predict-memory")
    if args.no_progress:
        words.append("--no-progress")
    if args.trust_code:
        words.append("--trust-code")
    if args.override_optimizer:
        words.append("--override-optimizer")
    if args.test:
        words.append("--test")
    if args.debug:
        words.append("--debug")
    if (resume or args.resume) is not None:
        words += ["--resume", resume or args.resume]
    return words


def _attempt(request: _Request, run_directory: RunDirectory) -> int:
    """Train in a run directory that this process owns; record and print the outcome."""
    from dstrial.ranks.stop_signals import noted_signals

    _require_startable(request)
    out, err = LossTolerantStream(sys.stdout), LossTolerantStream(sys.stderr)
    job = None if request.allocation is None else run_slurm.BatchJob(request.allocation, run_directory)
    noted = noted_signals(*([] if job is None else [signal.SIGUSR1]))
    with noted as signals, _master_of(request, run_directory, out) as master:
        if request.is_search:
            from dstrial.cli.run_search import search

            return search(
                request.experiment,
                request.entrypoint,
                master,
                run_directory,
                signals,
                out,
                num_slots=request.num_slots,
                max_restarts=request.max_restarts,
                python=python_of(request.args),
            )
        if job is not None:
            job.watch(signals)
        exit_code = _train(request, master, run_directory, signals, job, out, err)
    if request.args.test and exit_code == 0:
        shutil.rmtree(run_directory.path)
        with contextlib.suppress(OSError):
            run_directory.path.parent.rmdir()
    if job is not None:
        job.requeue(out)
    return exit_code


@contextlib.contextmanager
def _master_of(request: _Request, run_directory: RunDirectory, out: LossTolerantStream) -> Iterator[Master]:
    """Return the master that trains.

    That is the user's, which is started if none runs; in a job of Slurm's it is one of the run's own.
    """
    from dstrial.cli.run_submission import find_or_start_master, own_master
    from dstrial.master.daemon import MasterOptions

    args = request.args
    if request.allocation is not None:
        options = MasterOptions(num_slots=request.num_slots, python=args.python, is_under_slurm=True)
        with own_master(run_directory, options) as master:
            yield master
        return
    options = MasterOptions(
        hostfile=str(args.hostfile.absolute()) if request.hosts else None,
        include=args.include,
        exclude=args.exclude,
        python=args.python,
    )
    master, is_new = find_or_start_master(request.num_slots, options if request.hosts else None)
    if is_new:
        out.write(f"started a master at {master.record.address}, which `{typed('dstrial')} down` ends\n")
    yield master


def _debug(request: _Request, run_directory: RunDirectory) -> int:
    """Train on one rank in this process, which keeps its terminal; record the outcome."""
    from dstrial import determined_imports
    from dstrial.launch import rank_main

    experiment, point = request.experiment, request.point
    assert request.entrypoint.trial is not None
    if request.known_run is not None:
        run_directory.begin_attempt(["dstrial", *_own_arguments(request.args)])
        run_directory.write_config(experiment.raw)
    os.environ.update(experiment.environment_variables)
    os.environ[RUN_DIR_VARIABLE] = str(run_directory.path)
    os.environ.update(determined_imports.variables(os.environ, experiment.raw))
    determined_imports.install_if_asked()
    sys.stdout.write(f"run directory: {shown_path(run_directory.path)}\n")
    command = rank_main.trial_command(
        request.entrypoint.trial,
        context_dir=experiment.context_dir,
        config=experiment.path,
        overrides=request.overrides,
        run_dir=run_directory.path,
        resume=None if point is None else str(point.checkpoint),
        test_mode=request.args.test,
    )
    exit_code = 0
    try:
        rank_main.main(command[3:])
    except SystemExit as exit_:
        exit_code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    outcome = LaunchOutcome(exit_code, None, (exit_code,), None, ())
    verdict = judge(outcome, read_json(run_directory.status_path) or {})
    run_directory.end_attempt(verdict.state, verdict.reason)
    return verdict.exit_code


def _require_startable(request: _Request) -> None:
    """Refuse a program or script that does not exist before the master tries it."""
    experiment = request.experiment
    if (
        request.entrypoint.trial is not None
        or requirements_of(experiment.raw)
        or (experiment.context_dir / HOOK_NAME).is_file()
    ):
        return  # What it installs may bring the program.
    from dstrial.launch.rank_main import script_command

    program = script_command(request.entrypoint.words, directory=request.experiment.context_dir)[0]
    if shutil.which(program) is None and not (request.experiment.context_dir / program).is_file():
        raise LaunchError(
            f"the command is {program!r}; expected a program that can be run. Check its path and permissions."
        )


def _train(
    request: _Request,
    master: Master,
    run_directory: RunDirectory,
    signals: list[signal.Signals],
    job: run_slurm.BatchJob | None,
    out: LossTolerantStream,
    err: LossTolerantStream,
) -> int:
    from dstrial.cli.run_display import Refresher, make_display
    from dstrial.cli.run_follow import LogTail, follow, kill_command
    from dstrial.master.store.views import observe

    experiment, args, point = request.experiment, request.args, request.point
    metric = experiment.metric
    num_ranks = 1 if request.entrypoint.starts_ranks else max(request.num_slots, 1)
    since = utc_now()
    monitor = RunMonitor(run_directory, metric=metric, since=since)
    display = make_display(out, err, num_ranks=num_ranks, metric=metric, is_plain=args.no_progress)
    try:
        display.message(f"run directory: {shown_path(run_directory.path)}")
        if point is not None:
            display.message(f"resuming from checkpoint {point.checkpoint}")
        context = list_context(experiment.context_dir)
        display.message(f"context:       {context_text(context)}")
        experiment_id, known = _start(request, master, run_directory, context)
        if not master.is_own:
            address = master.record.address
            display.message(
                f"experiment:    {experiment_id} ({det_for(address)} experiment describe {experiment_id})"
            )
            display.message(f"page:          {page_of(address, experiment_id)}")
        log = LogTail(master, _shower(display), known)

        looked = {"waited_until_s": time.time()}

        def on_look(view: ExperimentView) -> None:
            for trial in view.trials:
                log.poll(trial.id)
            if monitor.has_begun or view.is_settled:
                return
            now_s = time.time()
            for one in observe.starting(master.state, experiment_id)[:1]:
                display.starting(one.text, now_s - one.since_s)
                looked["waited_until_s"] = now_s
                return
            if not log.has_task_lines:
                display.starting("starting the trial's processes", now_s - looked["waited_until_s"])

        def on_stop(_signal: signal.Signals) -> None:
            has_trained = (
                RunMonitor(run_directory, metric=None, since=since).poll().batches_trained is not None
            )
            display.message(_stop_text(request, master, has_trained=has_trained))

        with Refresher(monitor.poll, display.view):
            followed = follow(
                master, experiment_id, signals, on_look=on_look, on_stop=on_stop, say=display.message
            )
    finally:
        display.close()
    lines, exit_code, outcome = _end(request, master, run_directory, followed, monitor, job)
    if followed.is_detached and master.is_own:
        daemon.request_stop(master.record, is_kill=True)
    elif followed.is_detached:
        lines.append(f"{'kill with:':<15}{kill_command(master, experiment_id)}")
    _print_end(lines, outcome, out, err)
    return exit_code


def _print_end(
    lines: Sequence[str], outcome: LaunchOutcome, out: LossTolerantStream, err: LossTolerantStream
) -> None:
    out.write(visible("\n".join(lines)) + "\n")
    if out.is_lost and err.isatty():
        err.write(visible("\n".join(lines)) + "\n")
    err.write(visible(failure_text(outcome)))


def _stop_text(request: _Request, master: Master, *, has_trained: bool) -> str:
    what = "stopping all ranks"
    if has_trained:
        what = "stopping all ranks at the same batch, saving a checkpoint"
    elif request.entrypoint.trial is not None:
        what = "stopping all ranks, training has not begun"
    limit_s = request.experiment.preemption_timeout_s
    return (
        f"{what}; ranks that have not ended after {limit_s} s (preemption_timeout) are killed "
        f"(Ctrl-C again {'kills them now' if master.is_own else 'to leave that to the master'})"
    )


def _end(
    request: _Request,
    master: Master,
    run_directory: RunDirectory,
    followed: FollowResult,
    monitor: RunMonitor,
    job: run_slurm.BatchJob | None,
) -> tuple[list[str], int, LaunchOutcome]:
    outcome = outcome_of(run_directory, followed)
    judged = judge(outcome, read_json(run_directory.status_path) or {})
    verdict = judge_experiment(followed, judged, has_own_master=master.is_own)
    if job is not None:
        verdict = job.judged(verdict, outcome.stopped_by, run_directory)
    lines, exit_code = _recorded(request, run_directory, verdict, outcome, monitor)
    if job is not None and job.will_requeue:  # nobody has to type it
        lines = [line for line in lines if not line.startswith("resume with:")]
    is_over = request.args.test or master.is_own or verdict.state is RunState.COMPLETED
    if not is_over and followed.view is not None:
        lines += _ways_on(followed, master)
    return lines, exit_code, outcome


def _recorded(
    request: _Request,
    run_directory: RunDirectory,
    verdict: Verdict,
    outcome: LaunchOutcome,
    monitor: RunMonitor,
) -> tuple[list[str], int]:
    failure = outcome.first_failure.in_one_line if outcome.first_failure is not None else verdict.reason
    run_directory.end_attempt(verdict.state, failure if verdict.state is RunState.FAILED else None)
    if request.args.test:
        return _end_test(run_directory, verdict, outcome)
    steps_before = None if request.point is None else request.point.steps_completed
    view = at_failure(monitor.poll(), outcome)
    return _summary_of(request, run_directory, verdict, view, steps_before), verdict.exit_code


def _start(
    request: _Request, master: Master, run_directory: RunDirectory, context: Context
) -> tuple[int, dict[int, int]]:
    """Submit the run, activate its paused experiment, or join the active one.

    Returns the experiment's number, and the last line of earlier attempts in the logs of its trials.
    """
    from dstrial.cli import run_submission as submission
    from dstrial.master.store.views import observe

    experiment, point = request.experiment, request.point
    files = context.v1_files()
    config = submission.submitted_config(
        experiment, request.entrypoint, num_slots=request.num_slots, max_restarts=request.max_restarts
    )
    mark = submission.fingerprint(config, files)
    if request.known_run is not None:
        newest = newest_checkpoint(run_directory.checkpoints_path)
        is_newest = (None if newest is None else newest.path) == (None if point is None else point.checkpoint)
        living = submission.running_experiment(master, run_directory, mark, is_newest=is_newest)
        if living is None or living.state == "PAUSED":
            run_directory.begin_attempt(["dstrial", *_own_arguments(request.args)])
            run_directory.write_config(experiment.raw)
        if living is not None:
            known = {trial.id: observe.last_log_id(master.state, trial.id) for trial in living.trials}
            if living.state == "PAUSED":
                master.client.post(f"/api/v1/experiments/{living.id}/activate")
            return living.id, known
    storage: dict[str, Any] = dict(config.get("checkpoint_storage") or {})
    whole = submission.config_of_run(
        config,
        experiment,
        run_directory,
        checkpoint=None if point is None else point.checkpoint,
        is_test=request.args.test,
        is_search=False,
        python=python_of(request.args),
        shows_progress=not request.args.no_progress,
    )
    # Before the trial can start, which reads it.
    remembered = submission.Submission(0, master.record.cluster_id, mark, storage)
    remembered.write(run_directory)
    # Else the trial would wait for the storage of a run directory that was removed and is made anew.
    if request.known_run is None:
        run_directory.checkpoints_path.mkdir(parents=True, exist_ok=True)
        (run_directory.checkpoints_path / STORAGE_MARKER).touch()
    experiment_id = submission.submit(master, whole, files)
    dataclasses.replace(remembered, experiment_id=experiment_id).write(run_directory)
    return experiment_id, {}


def _shower(display: Display) -> Any:
    def show(rank: int | None, stream: str, line: str) -> None:
        if rank is None:
            display.message(line)
        else:
            display.rank_line(rank, stream, line)

    return show


def _ways_on(followed: FollowResult, master: Master) -> list[str]:
    view = followed.view
    assert view is not None
    if followed.is_master_gone:
        return [f"{'master:':<15}has ended; experiment {view.id} goes on at the next `{typed('dstrial')} up`"]
    if view.state == "PAUSED":
        return [f"{'or with:':<15}{det_for(master.record.address)} experiment activate {view.id}"]
    return []


def _summary_of(
    request: _Request,
    run_directory: RunDirectory,
    verdict: Verdict,
    view: RunView,
    steps_before: int | None,
) -> list[str]:
    experiment, args = request.experiment, request.args
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
        resume_command=[
            typed("dstrial"),
            *_own_arguments(args, "latest" if is_latest else str(run_directory.path)),
        ],
    )


def _end_test(run_directory: RunDirectory, verdict: Verdict, outcome: LaunchOutcome) -> tuple[list[str], int]:
    checkpoint = newest_checkpoint(run_directory.checkpoints_path)
    if verdict.state is RunState.COMPLETED and checkpoint is not None:
        batches = checkpoint.steps_completed
        return [f"test passed: {batches} batches, one validation, one checkpoint written and loaded again"], 0
    if verdict.state is RunState.STOPPED and outcome.stopped_by is not None:
        ending = f"test stopped by {outcome.stopped_by}"
    else:
        ending = f"test failed: {verdict.reason or 'no checkpoint was written'}"
    return [f"{ending}; its files are in {run_directory.path}"], verdict.exit_code or 1
