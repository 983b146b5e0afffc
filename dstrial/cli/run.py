"""``dstrial run``: train one experiment on this machine and follow it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
from dstrial.hosts.arguments import add_host_arguments, require_hostfile
from dstrial.hosts.hostfile import Host
from dstrial.local.checkpoint_directory import newest_checkpoint
from dstrial.local.json_files import read_json
from dstrial.local.run_directory import (
    RunDirectory,
    RunState,
    default_runs_dir,
    find_runs,
    shown_path,
    utc_now,
)
from dstrial.local.run_monitor import RunMonitor, RunView
from dstrial.storage_guard import STORAGE_MARKER
from dstrial.visible_text import visible

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from dstrial.cli.run_display import Display
    from dstrial.cli.run_follow import FollowResult
    from dstrial.cli.run_site import RunSite
    from dstrial.cli.run_submission import Master
    from dstrial.hosts.preflight import Preflight
    from dstrial.launch.failures import LaunchOutcome
    from dstrial.master.store.views.observe import ExperimentView
    from dstrial.slurm.allocation import Allocation

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
    hosts: tuple[Host, ...] = ()
    allocation: Allocation | None = None
    known_run: RunDirectory | None = None

    @property
    def num_slots(self) -> int:
        """Slots of the trial, over all hosts."""
        if self.hosts:
            return sum(len(host.slots) for host in self.hosts)
        return self.args.slots if self.args.slots is not None else self.experiment.slots_per_trial


def main(args: argparse.Namespace) -> int:
    request = _read_request(args)
    if args.slurm and request.allocation is None:
        from dstrial.cli.run_slurm_submission import prepare, submit_and_follow

        known = request.known_run or run_directory_of(args)
        inner = _own_arguments(args, slots=request.num_slots)
        submission = prepare(args, request.experiment, inner, None if known is None else known.path)
        return submit_and_follow(args, submission)
    if not request.hosts:
        return _run(request, _attempt)
    from dstrial.cli.run_site import BatchJob, RunSite

    site = RunSite() if request.allocation is None else BatchJob(request.allocation)
    with site.watched():
        return _run_on_hosts(request, site)


def _run_on_hosts(request: _Request, site: RunSite) -> int:
    from dstrial.cli.run_hosts import ready_hosts

    args = request.args
    own = request.known_run or run_directory_of(args)
    runs_dir = default_runs_dir(args.runs_dir) if own is None else own.path.parent
    preflight = ready_hosts(args, request.experiment, request.hosts, runs_dir, site.transport)
    try:
        return _run(request, functools.partial(_attempt_on_hosts, preflight=preflight, site=site))
    finally:
        preflight.close()


def _run(request: _Request, attempt: Callable[[_Request, RunDirectory], int]) -> int:
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
        return attempt(request, run_directory)


def _read_request(args: argparse.Namespace) -> _Request:
    """Read and check everything that can be checked before anything is created."""
    point = chosen_point(args)
    resumed = None if point is None else point.saved_run()
    overrides = [*args.config, *_trust_override(args, point), *_logger_override(args)]
    if args.override_optimizer:
        overrides.append("data.dstrial.override_optimizer=true")
    run_slurm.require_slurm_flags(args)
    require_hostfile(args, is_under_slurm=args.slurm)
    allocation = run_slurm.own_allocation(args)
    hosts: tuple[Host, ...] = ()
    if args.hostfile is not None or allocation is not None:
        from dstrial.cli.run_hosts import chosen_hosts

        hosts = chosen_hosts(args, allocation)
    slots = sum(len(host.slots) for host in hosts) if hosts else args.slots
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
    if hosts or args.slurm:
        from dstrial.cli.run_hosts import require_trainable_on_hosts

        require_trainable_on_hosts(given, entrypoint, is_search=is_search)
    else:
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
        hosts,
        allocation,
        _known_run(args, point),
    )


def _show_warnings(args: argparse.Namespace, given: ExperimentConfig, point: ResumePoint | None) -> None:
    """Write warnings of a request, and what a resumed run keeps, to stderr."""
    err = LossTolerantStream(sys.stderr)
    if not args.slurm and (hint := run_slurm.unused_nodes_hint()) is not None:
        err.write(f"warning: {hint}\n")
    for warning in given.warnings:
        err.write(f"warning: {warning}\n")
    has_master = not args.slurm and args.hostfile is None
    has_slurm = args.slurm or (has_master and _has_engine())
    if unused := unused_by_run(given.raw, has_master=has_master, has_slurm=has_slurm):
        err.write(
            f"warning: {given.path}: `dstrial run` does not use {', '.join(unused)}: ranks are processes "
            f"without containers{'' if has_master else ' and without a master'}, checkpoints lie in the run directory\n"
        )
    if point is None:
        return
    if point.note is not None:
        err.write(f"warning: {point.note}\n")
    for note in given.notes:
        if f"checkpoint {point.checkpoint.name}: " in note:
            err.write(f"{note}\n")


def _has_engine() -> bool:
    from dstrial.master.backends.queued.backend import shown_engine
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
    if is_search and (args.test or args.resume):
        problem = ConfigProblem(
            f"{experiment.path}: searcher.name",
            f"{experiment.raw['searcher']['name']!r} with {'--test' if args.test else '--resume'}",
            "'single', one trial",
            "Add --config searcher.name=single and concrete hyperparameters."
            if args.test
            else "Go on with a search by the command that it printed as `resume with`.",
        )
    elif entrypoint.trial is None and args.test:
        problem = ConfigProblem(
            f"{experiment.path}: entrypoint",
            f"{experiment.entrypoint!r} with --test",
            "a trial class, which can be stopped after two batches",
            "Run the script without --test, or write entrypoint: model_def:MyTrial.",
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
    for flag in ("hostfile", "include", "exclude", "interface", "master_port", "python"):
        value = getattr(args, flag)
        if value:
            words += [f"--{flag.replace('_', '-')}", str(value)]
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
    if (resume or args.resume) is not None:
        words += ["--resume", resume or args.resume]
    return words


def _attempt(request: _Request, run_directory: RunDirectory) -> int:
    """Train in a run directory that this process owns; record and print the outcome."""
    from dstrial.cli.run_submission import find_or_start_master
    from dstrial.ranks.stop_signals import noted_signals

    num_slots = request.num_slots
    _require_startable(request)
    out, err = LossTolerantStream(sys.stdout), LossTolerantStream(sys.stderr)
    with noted_signals() as signals:
        master, is_new_master = find_or_start_master(num_slots)
        if is_new_master:
            out.write(f"started a master at {master.record.address}, which `{typed('dstrial')} down` ends\n")
        if request.is_search:
            from dstrial.cli.run_search import search

            return search(
                request.experiment,
                request.entrypoint,
                master,
                run_directory,
                signals,
                out,
                num_slots=num_slots,
                max_restarts=request.max_restarts,
            )
        return _train(request, master, run_directory, signals, out, err, num_slots)


def _attempt_on_hosts(
    request: _Request, run_directory: RunDirectory, *, preflight: Preflight, site: RunSite
) -> int:
    """Train on hosts, without a master; record and print the outcome."""
    from dstrial.cli.run_display import Refresher, make_display
    from dstrial.cli.run_hosts import HostRun

    args, point, metric = request.args, request.point, request.experiment.metric
    out, err = LossTolerantStream(sys.stdout), LossTolerantStream(sys.stderr)
    if request.known_run is not None:
        run_directory.begin_attempt(["dstrial", *_own_arguments(args)])
        run_directory.write_config(request.experiment.raw)
    site.begin(run_directory)
    monitor = RunMonitor(run_directory, metric=metric, since=utc_now())
    display = make_display(out, err, num_ranks=request.num_slots, metric=metric, is_plain=args.no_progress)
    try:
        display.message(f"run directory: {shown_path(run_directory.path)}")
        if point is not None:
            display.message(f"resuming from checkpoint {point.checkpoint}")
        run = HostRun(
            args,
            request.experiment,
            request.entrypoint,
            request.hosts,
            run_directory,
            resume=None if point is None else point.checkpoint,
            overrides=request.overrides,
            max_restarts=request.max_restarts,
            display=display,
            site=site,
        )
        with Refresher(monitor.poll, display.view):
            outcome = run.train(preflight)
    finally:
        display.close()
    status = read_json(run_directory.status_path) or {}
    verdict = judge(outcome, status)
    verdict = site.judged(verdict, outcome.stopped_by, run_directory)
    lines, exit_code = _recorded(request, run_directory, verdict, outcome, monitor)
    if site.is_started_again:  # nobody has to type it
        lines = [line for line in lines if not line.startswith("resume with:")]
    _print_end(lines, outcome, out, err)
    site.leave(out)
    return exit_code


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
    out: LossTolerantStream,
    err: LossTolerantStream,
    num_slots: int,
) -> int:
    from dstrial.cli.run_display import Refresher, make_display
    from dstrial.cli.run_follow import LogTail, follow, kill_command
    from dstrial.master.store.views import observe

    experiment, args, point = request.experiment, request.args, request.point
    metric = experiment.metric
    num_ranks = 1 if request.entrypoint.starts_ranks else max(num_slots, 1)
    since = utc_now()
    monitor = RunMonitor(run_directory, metric=metric, since=since)
    display = make_display(out, err, num_ranks=num_ranks, metric=metric, is_plain=args.no_progress)
    try:
        display.message(f"run directory: {shown_path(run_directory.path)}")
        if point is not None:
            display.message(f"resuming from checkpoint {point.checkpoint}")
        context = list_context(experiment.context_dir)
        display.message(f"context:       {context_text(context)}")
        experiment_id, known = _start(request, master, run_directory, num_slots, context)
        display.message(
            f"experiment:    {experiment_id} ({det_for(master.record.address)} experiment describe {experiment_id})"
        )
        display.message(f"page:          {page_of(master.record.address, experiment_id)}")
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
            display.message(_stop_text(request, has_trained=has_trained))

        with Refresher(monitor.poll, display.view):
            followed = follow(
                master, experiment_id, signals, on_look=on_look, on_stop=on_stop, say=display.message
            )
    finally:
        display.close()
    lines, exit_code, outcome = _end(request, master, run_directory, followed, monitor)
    if followed.is_detached:
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


def _stop_text(request: _Request, *, has_trained: bool) -> str:
    what = "stopping all ranks"
    if has_trained:
        what = "stopping all ranks at the same batch, saving a checkpoint"
    elif request.entrypoint.trial is not None:
        what = "stopping all ranks, training has not begun"
    limit_s = request.experiment.preemption_timeout_s
    return (
        f"{what}; ranks that have not ended after {limit_s} s (preemption_timeout) are killed "
        "(Ctrl-C again to leave that to the master)"
    )


def _end(
    request: _Request,
    master: Master,
    run_directory: RunDirectory,
    followed: FollowResult,
    monitor: RunMonitor,
) -> tuple[list[str], int, LaunchOutcome]:
    outcome = outcome_of(run_directory, followed)
    verdict = judge_experiment(followed, judge(outcome, read_json(run_directory.status_path) or {}))
    lines, exit_code = _recorded(request, run_directory, verdict, outcome, monitor)
    if not request.args.test and verdict.state is not RunState.COMPLETED and followed.view is not None:
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
    request: _Request, master: Master, run_directory: RunDirectory, num_slots: int, context: Context
) -> tuple[int, dict[int, int]]:
    """Submit the run, activate its paused experiment, or join the active one.

    Returns the experiment's number, and the last line of earlier attempts in the logs of its trials.
    """
    from dstrial.cli import run_submission as submission
    from dstrial.master.store.views import observe

    experiment, point = request.experiment, request.point
    files = context.v1_files()
    config = submission.submitted_config(
        experiment, request.entrypoint, num_slots=num_slots, max_restarts=request.max_restarts
    )
    mark = submission.fingerprint(config, files)
    if point is None and request.known_run is not None:
        run_directory.begin_attempt(["dstrial", *_own_arguments(request.args)])
        run_directory.write_config(experiment.raw)
    if point is not None and point.run_directory is not None:
        newest = newest_checkpoint(run_directory.checkpoints_path)
        is_newest = newest is not None and newest.path == point.checkpoint
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
