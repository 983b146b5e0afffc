"""``dstrial run``: find or start a master, submit an experiment, and follow it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dstrial.checkpoint.manifest import MANIFEST_NAME, hash_file
from dstrial.cli import display, slurm_job
from dstrial.cli.experiment_arguments import (
    Entrypoint,
    ResumePoint,
    add_experiment_arguments,
    newest_resumable,
    parse_entrypoint,
    resume_point_of,
    run_directory_of,
)
from dstrial.cli.follow import (
    FollowResult,
    LogTail,
    Verdict,
    follow,
    judge,
    judge_experiment,
    judge_search,
    outcome_of,
)
from dstrial.cli.streams import (
    LossTolerantStream,
    add_runs_dir_argument,
    command_of,
    context_text,
    det_for,
    page_of,
)
from dstrial.cli.submit import (
    Master,
    RunRequest,
    command_line,
    find_or_start_master,
    own_master,
    require_hosts,
    submit,
)
from dstrial.config.documents import read_yaml
from dstrial.config.experiment_config.config import ExperimentConfig, load_experiment
from dstrial.context_directory import list_context
from dstrial.errors import ConfigError, ConfigProblem
from dstrial.hosts.hostfile import Host, add_host_arguments, given_slots, hosts_of, placement_lines, python_of
from dstrial.hosts.srun import hosts_of_allocation
from dstrial.launch.failures import LaunchOutcome
from dstrial.launch.slots import slots_argument
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
from dstrial.ranks.stop_signals import noted_signals
from dstrial.slurm.allocation import Allocation, allocation_of
from dstrial.visible_text import visible

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from dstrial.master.store.views.observe import ExperimentView

_EPILOG = (
    "Ctrl-C and SIGTERM pause the experiment with a checkpoint; after a second Ctrl-C this command does not wait for the "
    "checkpoint. Exit status: 0 if training completed; 130 or 143 if SIGINT or SIGTERM paused the experiment; if ranks "
    "failed, the exit status of the first failed rank; 1 if the config is wrong or the experiment was cancelled; 2 for wrong "
    "usage."
)


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "run",
        description="Check an experiment, submit it to this machine's master, follow it to its end, and print the paths of "
        "its files. If no master runs, the command starts one.",
        epilog=_EPILOG,
    )
    add_experiment_arguments(parser)
    parser.add_argument(
        "--slots", type=slots_argument, metavar="N", help="number of slots instead of slots_per_trial"
    )
    add_runs_dir_argument(parser)
    parser.add_argument(
        "--no-progress", action="store_true", help="print plain lines instead of a progress bar"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--resume",
        metavar="latest|RUN_DIR|CHECKPOINT",
        help="resume from latest (the newest run with this name and CONTEXT_DIR that has a checkpoint), from the run in "
        "RUN_DIR, or from CHECKPOINT",
    )
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help="with --resume: load the checkpoint even if its pickles have classes that dstrial does not know; such classes can "
        "run any code, so trust the checkpoint's author",
    )
    kind.add_argument(
        "--test",
        action="store_true",
        help="train two batches, validate once, write a checkpoint and load it again",
    )
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        help="directory of this run; if DIR has a checkpoint, the run resumes from the newest checkpoint",
    )
    parser.add_argument(
        "--debug",
        action="store_true",
        help="train on one rank in this process, without a master, so that breakpoint() can use the terminal",
    )
    add_host_arguments(parser)
    slurm_job.add_slurm_arguments(parser)


def main(args: argparse.Namespace) -> int:
    slurm_job.require_slurm_flags(args)
    allocation = allocation_of(os.environ) if args.slurm and not args.print_sbatch else None
    hosts, slots = _hosts_and_slots(args, allocation)
    request = _read_request(args, slots)
    own = request.known_run or run_directory_of(args)
    own_path = None if own is None else own.path
    if args.slurm and allocation is None:
        inner = command_line(args, slots=request.num_slots)
        return slurm_job.run_as_job(args, request.experiment, inner, own_path)
    if hosts:
        _check_hosts(
            request, hosts, allocation, own_path.parent if own_path else default_runs_dir(args.runs_dir)
        )
    run_directory = request.known_run or RunDirectory.create(
        default_runs_dir(args.runs_dir),
        name=f"{request.experiment.name}-test" if args.test else request.experiment.name,
        context_dir=request.experiment.context_dir,
        command=request.command,
        config=request.experiment.raw,
        path=own_path,
    )
    with run_directory.lock(), _record_end_on_error(run_directory):
        if args.debug:
            return _debug(request, run_directory)
        return _train(request, run_directory, allocation)


def _hosts_and_slots(
    args: argparse.Namespace, allocation: Allocation | None
) -> tuple[tuple[Host, ...], int | None]:
    """Return (hosts to train on, number of slots).

    With a hostfile or Slurm allocation, the number is ``--slots``, else the config's ``slots_per_trial``, else all slots of the
    hosts. ConfigError is raised if the hosts have fewer. Otherwise there are no hosts; the number is 1 with ``--debug``, else
    ``--slots``. None then stands for the config's number.
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


def _check_hosts(
    request: RunRequest, hosts: tuple[Host, ...], allocation: Allocation | None, shared_directory: Path
) -> None:
    from dstrial.hosts.preflight import check_hosts
    from dstrial.hosts.srun import transport_of

    if allocation is None:
        require_hosts(hosts)
    checked = check_hosts(
        hosts,
        python=python_of(request.args),
        shared_directory=shared_directory,
        environ={**os.environ, **request.experiment.environment_variables},
        transport=None if allocation is None else transport_of(allocation),
    )
    out = LossTolerantStream(sys.stdout)
    out.write("".join(f"{'host:':<15}{line}\n" for line in placement_lines(checked)))


def _read_request(args: argparse.Namespace, slots: int | None) -> RunRequest:
    """Validate the command line and config, print warnings, and return the request.

    Raises DstrialError if they are invalid. No files are created.
    """
    point = resume_point_of(args)
    load = functools.partial(
        load_experiment,
        args.experiment,
        args.context_dir,
        _overrides(args, point),
        require_entrypoint=True,
        slots=slots,
        resumed=None if point is None else point.saved_run(),
    )
    experiment = load(require_concrete=False)
    is_search = experiment.raw["searcher"]["name"] != "single"
    if not is_search:
        experiment = load()
    entrypoint = parse_entrypoint(experiment.entrypoint, str(experiment.path))
    _require_trainable(args, experiment, entrypoint, is_search=is_search)
    context = list_context(experiment.context_dir)
    context.require_packable()
    _show_warnings(args, experiment, point)
    known_run = None if point is None else point.run_directory
    own = run_directory_of(args)
    if known_run is None and own is not None and own.record_path.is_file():
        known_run = RunDirectory.open(own.path)
    return RunRequest(
        args,
        experiment,
        entrypoint,
        context,
        num_slots=slots if slots is not None else experiment.slots_per_trial,
        max_restarts=_max_restarts(args, experiment),
        is_search=is_search,
        point=point,
        known_run=known_run,
    )


def _overrides(args: argparse.Namespace, point: ResumePoint | None) -> list[str]:
    """Return the config overrides ``key=value`` of ``--config`` and ``--trust-code``.

    The override of ``--trust-code`` has the SHA-256 of the manifest at ``point``. ConfigError is raised if there is no
    manifest.
    """
    if not args.trust_code:
        return list(args.config)
    manifest = None if point is None else point.checkpoint / MANIFEST_NAME
    if manifest is None or not manifest.is_file():
        got = "given without --resume"
        if point is not None:
            got = f"given for {point.checkpoint}, which has no {MANIFEST_NAME}"
        fix = "Name it with --resume, or leave --trust-code out."
        raise ConfigError([ConfigProblem("--trust-code", got, "a checkpoint that dstrial wrote", fix)])
    # Only these files are trusted: checkpoints that the run writes later are not.
    return [*args.config, f"data.dstrial.trust_checkpoint_code='{hash_file(manifest).sha256}'"]


def _require_trainable(
    args: argparse.Namespace, experiment: ExperimentConfig, entrypoint: Entrypoint, *, is_search: bool
) -> None:
    given = {"--slurm": args.slurm, "--test": args.test, "--debug": args.debug, "--resume": args.resume}
    flags = [flag for flag, value in given.items() if value]
    is_script = entrypoint.trial is None
    if is_search and flags:
        where, got = "searcher.name", f"{experiment.raw['searcher']['name']!r} with {flags[0]}"
        expected = "'single', one trial"
        fix = "Add --config searcher.name=single and concrete hyperparameters; `det e activate` continues a paused search."
    elif is_script and (args.test or args.debug):
        where, got = "entrypoint", f"{experiment.entrypoint!r} with {flags[-1]}"
        expected = "a trial class"
        fix = "Write entrypoint: model_def:MyTrial, or run the script itself (python -m pdb SCRIPT)."
    elif args.debug and (args.slurm or args.hostfile is not None or (args.slots or 1) > 1):
        where, got = "resources", "several ranks with --debug"
        expected, fix = "one rank in this process", "Leave --slurm, --hostfile and --slots out."
    else:
        if not is_script and not args.test:
            experiment.require_max_length()
        return
    raise ConfigError([ConfigProblem(f"{experiment.path}: {where}", got, expected, fix)])


def _show_warnings(args: argparse.Namespace, experiment: ExperimentConfig, point: ResumePoint | None) -> None:
    """Print warnings, and the settings that come from the checkpoint at ``point``."""
    warnings = list(experiment.warnings)
    if not args.slurm and (hint := slurm_job.unused_nodes_hint()) is not None:
        warnings.insert(0, hint)
    if experiment.raw["checkpoint_storage"]["host_path"] is not None:
        warnings.append(
            f"{experiment.path}: `dstrial run` does not use checkpoint_storage.host_path: checkpoints are in the run directory"
        )
    kept = []
    if point is not None:
        warnings += [] if point.note is None else [point.note]
        kept = [note for note in experiment.notes if f"checkpoint {point.checkpoint.name}: " in note]
    lines = [f"warning: {warning}" for warning in warnings] + kept
    LossTolerantStream(sys.stderr).write("".join(f"{line}\n" for line in lines))


def _max_restarts(args: argparse.Namespace, experiment: ExperimentConfig) -> int:
    """Return ``max_restarts`` of the user's config; 0 if unset, or with ``--test``.

    Determined's default would restart a failed trial several times before the user sees the failure.
    """
    if args.test:
        return 0
    is_given = "max_restarts" in (read_yaml(experiment.path, str(experiment.path)).value or {})
    is_given = is_given or any(override.startswith("max_restarts=") for override in args.config)
    return experiment.max_restarts if is_given else 0


@contextlib.contextmanager
def _record_end_on_error(run_directory: RunDirectory) -> Iterator[None]:
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


def _debug(request: RunRequest, run_directory: RunDirectory) -> int:
    """Train on one rank in this process, for a debugger; return the exit status."""
    from dstrial import determined_imports
    from dstrial.launch import rank_main

    experiment = request.experiment
    assert request.entrypoint.trial is not None
    if request.known_run is not None:
        run_directory.begin_attempt(request.command)
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
        overrides=tuple(_overrides(request.args, request.point)),
        run_dir=run_directory.path,
        resume=None if request.checkpoint is None else str(request.checkpoint),
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


def _train(request: RunRequest, run_directory: RunDirectory, allocation: Allocation | None) -> int:
    """Submit the run to a master and follow it to its end; return the exit status."""
    out, err = LossTolerantStream(sys.stdout), LossTolerantStream(sys.stderr)
    job = None if allocation is None else slurm_job.BatchJob(allocation, run_directory)
    with (
        noted_signals(*([] if job is None else [signal.SIGUSR1])) as signals,
        _master_of(request, run_directory, out, is_in_job=job is not None) as master,
    ):
        if job is not None:
            job.watch(signals)
        exit_code = _Attempt(request, run_directory, master, out, err).follow(signals, job)
    if request.args.test and exit_code == 0:
        shutil.rmtree(run_directory.path)
        with contextlib.suppress(OSError):
            run_directory.path.parent.rmdir()
    if job is not None:
        job.requeue(out)
    return exit_code


@contextlib.contextmanager
def _master_of(
    request: RunRequest, run_directory: RunDirectory, out: LossTolerantStream, *, is_in_job: bool
) -> Iterator[Master]:
    """Yield the master for a run: the user's master, which is started if none runs.

    If ``is_in_job`` (in a Slurm job), yield a new master that serves only this run.
    """
    args = request.args
    if is_in_job:
        options = daemon.MasterOptions(num_slots=request.num_slots, python=args.python, is_under_slurm=True)
        with own_master(run_directory, options) as master:
            yield master
        return
    on_hosts = None
    if args.hostfile is not None:
        on_hosts = daemon.MasterOptions(
            hostfile=str(args.hostfile.absolute()),
            include=args.include,
            exclude=args.exclude,
            python=args.python,
        )
    master, is_new = find_or_start_master(request.num_slots, on_hosts)
    if is_new:
        out.write(f"started a master at {master.record.address}, which `{command_of('dstrial')} down` ends\n")
    yield master


class _Attempt:
    """Submits an attempt at a run to a master, shows the progress, records the end."""

    def __init__(
        self,
        request: RunRequest,
        run_directory: RunDirectory,
        master: Master,
        out: LossTolerantStream,
        err: LossTolerantStream,
    ) -> None:
        self._request, self._run_directory, self._master = request, run_directory, master
        self._out, self._err = out, err
        num_ranks = 1 if request.entrypoint.starts_ranks else max(request.num_slots, 1)
        metric = request.experiment.metric
        self._monitor = RunMonitor(run_directory, since=utc_now())
        has_bar = not request.args.no_progress and not request.is_search and out.isatty()
        kind = display.BarDisplay if has_bar else display.Display
        self._display = kind(out, err, num_ranks=num_ranks, metric=metric)
        self._progress = ""
        self._view = RunView()

    def follow(self, signals: list[signal.Signals], job: slurm_job.BatchJob | None) -> int:
        """Submit the run, show it until it ends, and return the exit status."""
        request, master, print_line = self._request, self._master, self._display.line
        with contextlib.closing(self._display):
            print_line(f"run directory: {shown_path(self._run_directory.path)}")
            if request.checkpoint is not None:
                print_line(f"resuming from checkpoint {request.checkpoint}")
            print_line(f"context:       {context_text(request.context)}")
            experiment_id, known = submit(request, master, self._run_directory)
            if not master.is_own:
                address = master.record.address
                print_line(
                    f"experiment:    {experiment_id} ({det_for(address)} experiment describe {experiment_id})"
                )
                print_line(f"page:          {page_of(address, experiment_id)}")
            log = LogTail(master, self._display.line, known)
            followed = follow(
                master,
                experiment_id,
                signals,
                on_poll=self._show_search if request.is_search else functools.partial(self._show, log),
                on_stop=lambda: print_line(self._stop_text()),
            )
            self._poll_run()
        verdict, lines, failure = self._end(followed, job)
        if followed.is_detached and master.is_own:
            daemon.request_stop(master.record, is_kill=True)
        elif followed.is_detached:
            command = f"{det_for(master.record.address)} experiment kill {experiment_id}"
            lines += display.row_lines([("kill with", command)])
        text = visible("\n".join(lines)) + "\n"
        self._out.write(text)
        if self._out.is_lost and self._err.isatty():
            self._err.write(text)
        self._err.write(visible(failure))
        return verdict.exit_code

    def _poll_run(self) -> None:
        self._view = self._monitor.poll()
        self._display.view(self._view)

    def _show(self, log: LogTail, view: ExperimentView) -> None:
        """Show a trial's new log lines and reports."""
        for trial in view.trials:
            log.poll(trial.id)
        self._poll_run()

    def _show_search(self, view: ExperimentView) -> None:
        line = display.progress_line(view, self._request.experiment)
        if line != self._progress:
            self._progress = line
            self._display.line(line)

    def _stop_text(self) -> str:
        request = self._request
        what = "stopping all ranks"
        if request.is_search:
            what = "pausing all trials with a checkpoint"
        elif self._view.batches_trained is not None:
            what = "stopping all ranks at the same batch, saving a checkpoint"
        limit_s = request.experiment.preemption_timeout_s
        again = "kills them now" if self._master.is_own else "to leave that to the master"
        return f"{what}; ranks that have not ended after {limit_s} s (preemption_timeout) are killed (Ctrl-C again {again})"

    def _end(self, followed: FollowResult, job: slurm_job.BatchJob | None) -> tuple[Verdict, list[str], str]:
        """Record the attempt's end; return (verdict, lines for stdout, text for stderr).

        The text is on killed ranks and the first failed rank; "" if there are none.
        """
        request, run_directory, master = self._request, self._run_directory, self._master
        outcome = outcome_of(run_directory, followed)
        status = read_json(run_directory.status_path) or {}
        verdict_on_ranks = judge_search(followed) if request.is_search else judge(outcome, status)
        verdict = judge_experiment(followed, verdict_on_ranks, has_own_master=master.is_own)
        if job is not None:
            verdict = job.decide_requeue(verdict, outcome.stopped_by, run_directory)
        failure = outcome.first_failure.in_one_line if outcome.first_failure is not None else verdict.reason
        run_directory.end_attempt(verdict.state, failure if verdict.state is RunState.FAILED else None)
        if request.args.test:
            verdict, line = _judge_test(run_directory, verdict, outcome)
            return verdict, [line], outcome.describe()
        resume: list[str] = []
        if job is None or not job.will_requeue:  # Slurm resumes a job that is requeued
            resume = [command_of("dstrial"), *command_line(request.args, resume=self._resume_value(verdict))]
        lines = self._summary(followed.view, verdict, resume)
        return verdict, lines + self._continuation(followed, verdict), outcome.describe()

    def _summary(self, view: ExperimentView | None, verdict: Verdict, resume: list[str]) -> list[str]:
        """Link the best checkpoint; return the lines of the summary."""
        experiment, run_directory = self._request.experiment, self._run_directory
        if self._request.is_search:
            trial = None if view is None else display.best_trial(view, experiment)
            best = None if trial is None else trial.best_checkpoint
            lines = display.row_lines([("run directory", shown_path(run_directory.path))])
            if view is not None:
                lines = display.search_summary(view, experiment, verdict, run_directory)
        else:
            stored = display.best_stored(run_directory, experiment.metric, experiment.smaller_is_better)
            best = None if stored is None else stored[0].uuid
            point = self._request.point
            lines = display.summary(
                run_directory,
                verdict,
                self._view,
                metric=experiment.metric,
                smaller_is_better=experiment.smaller_is_better,
                best=stored,
                steps_before=None if point is None else point.steps_completed,
                resume_command=resume,
            )
        if best is not None:
            with contextlib.suppress(OSError):  # a file system without symbolic links
                run_directory.link_best(best)
        return lines

    def _continuation(self, followed: FollowResult, verdict: Verdict) -> list[str]:
        """Return a line on how to continue the experiment at the master.

        [] is returned if the experiment cannot continue there.
        """
        view, master = followed.view, self._master
        if view is None or master.is_own or verdict.state is RunState.COMPLETED:
            return []
        if followed.is_master_gone:
            ended = f"has ended; experiment {view.id} continues after the next `{command_of('dstrial')} up`"
            return display.row_lines([("master", ended)])
        if view.state != "PAUSED":
            return []
        command = f"{det_for(master.record.address)} experiment activate {view.id}"
        return display.row_lines([("resume with" if self._request.is_search else "or with", command)])

    def _resume_value(self, verdict: Verdict) -> str:
        """Return the value of ``--resume`` that selects this run.

        This is ``latest`` if ``latest`` selects this run and the run has not completed. Otherwise it is the path of the run
        directory.
        """
        experiment = self._request.experiment
        runs = find_runs(
            default_runs_dir(self._request.args.runs_dir), experiment.name, experiment.context_dir
        )
        latest = None if verdict.state is RunState.COMPLETED else newest_resumable(runs)
        is_latest = latest is not None and latest[0] == self._run_directory
        return "latest" if is_latest else str(self._run_directory.path)


def _judge_test(run_directory: RunDirectory, verdict: Verdict, outcome: LaunchOutcome) -> tuple[Verdict, str]:
    checkpoint = newest_checkpoint(run_directory.checkpoints_path)
    if verdict.state is RunState.COMPLETED and checkpoint is not None:
        batches = checkpoint.steps_completed
        passed = f"test passed: {batches} batches, one validation, one checkpoint written and loaded again"
        return verdict, passed
    if verdict.state is RunState.STOPPED and outcome.stopped_by is not None:
        ending = f"test stopped by {outcome.stopped_by}"
    else:
        ending = f"test failed: {verdict.reason or 'no checkpoint was written'}"
    failed = dataclasses.replace(verdict, exit_code=verdict.exit_code or 1)
    return failed, f"{ending}; its files are in {run_directory.path}"
