"""``dstrial run --hostfile``: train on several machines, or on those left."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from dstrial.cli.run_display import Display
from dstrial.cli.run_entrypoint import Entrypoint
from dstrial.cli.run_site import RunSite
from dstrial.config import ExperimentConfig, load_experiment
from dstrial.errors import ConfigError, ConfigProblem, HostError, LaunchError
from dstrial.hosts.arguments import given_slots, hosts_of, placement_lines, port_of, python_of
from dstrial.hosts.hostfile import Host, first_slots
from dstrial.hosts.preflight import Preflight, check_hosts
from dstrial.hosts.srun import hosts_of_allocation
from dstrial.hosts.transport import Transport
from dstrial.launch.failures import LaunchOutcome
from dstrial.launch.over_hosts import Job, run_on_hosts
from dstrial.launch.rank_main import script_command, trial_command
from dstrial.local.checkpoint_directory import newest_checkpoint
from dstrial.local.json_files import write_json_atomically
from dstrial.local.run_directory import RUN_DIR_VARIABLE, RunDirectory
from dstrial.resume.locate import saved_run_to_resume
from dstrial.slurm.allocation import Allocation


def chosen_hosts(args: argparse.Namespace, allocation: Allocation | None) -> tuple[Host, ...]:
    """Return the hosts of ``--hostfile`` or an allocation; none for this machine.

    ``--slots``, or a ``slots_per_trial`` that the user has written, limits their slots.
    """
    if args.hostfile is None and allocation is None:
        return ()
    wanted = args.slots or given_slots(Path(args.experiment), args.config)
    return hosts_of(args, wanted) if allocation is None else hosts_of_allocation(allocation, wanted)


def require_trainable_on_hosts(
    experiment: ExperimentConfig, entrypoint: Entrypoint, *, is_search: bool
) -> None:
    """Refuse a search, or an entrypoint that starts ranks itself."""
    if is_search:
        problem = ConfigProblem(
            f"{experiment.path}: searcher.name",
            f"{experiment.raw['searcher']['name']!r} over several hosts",
            "'single', one trial",
            "Add --config searcher.name=single and concrete hyperparameters, or start a master over the hosts: dstrial up "
            "--hostfile, or --slurm in an allocation.",
        )
        raise ConfigError([problem])
    if entrypoint.starts_ranks or entrypoint.words[:2] == ("sh", "-c"):
        problem = ConfigProblem(
            f"{experiment.path}: entrypoint",
            f"{experiment.entrypoint!r} over several hosts",
            "a trial class or a script, of which dstrial starts a rank for each slot",
            "Write entrypoint: model_def:MyTrial, or name the script alone.",
        )
        raise ConfigError([problem])


def ready_hosts(
    args: argparse.Namespace,
    experiment: ExperimentConfig,
    hosts: Sequence[Host],
    shared_directory: Path,
    transport: Transport | None = None,
) -> Preflight:
    return check_hosts(
        hosts,
        python=python_of(args),
        shared_directory=shared_directory,
        local_paths=[experiment.context_dir.resolve(), Path(args.experiment).resolve()],
        interface=args.interface,
        port=port_of(args),
        environ={**os.environ, **experiment.environment_variables},
        transport=transport,
    )


class HostRun:
    """One run over hosts: attempts, until it ends or may not restart.

    Args:
        experiment: for all slots of ``hosts``.
        run_directory: on the file system that the hosts share.
        resume: checkpoint to go on from; None to begin anew.
        overrides: ``--config`` and what goes with it.
        max_restarts: of ranks that failed by themselves.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        experiment: ExperimentConfig,
        entrypoint: Entrypoint,
        hosts: Sequence[Host],
        run_directory: RunDirectory,
        *,
        resume: Path | None,
        overrides: Sequence[str],
        max_restarts: int,
        display: Display,
        site: RunSite,
    ) -> None:
        self._args, self._experiment, self._entrypoint = args, experiment, entrypoint
        self._hosts, self._run_directory, self._resume = tuple(hosts), run_directory, resume
        self._overrides, self._max_restarts, self._display = tuple(overrides), max_restarts, display
        self._site = site

    def train(self, preflight: Preflight) -> LaunchOutcome:
        """Train until the run has ended; return its last attempt's outcome.

        Raises:
            HostError: no host is left.
            ConfigError: the config fits no number of slots that is left.
        """
        restarts = 0
        while True:
            outcome = self._attempt(preflight)
            failure = outcome.first_failure
            if failure is None or outcome.stopped_by is not None or self._args.test:
                return outcome
            limit = self._experiment.max_restarts if failure.is_lost else self._max_restarts
            if restarts >= limit or self._site.is_ending:
                return outcome
            restarts += 1
            self._display.message(failure.in_one_line)
            preflight = self._left()
            self._go_on(preflight)
            where = "from its beginning" if self._resume is None else f"from checkpoint {self._resume.name}"
            names = ", ".join(host.name for host in self._hosts)
            self._display.message(f"restart {restarts} of {limit} on {names}, {where}")

    def _left(self) -> Preflight:
        """Reconnect to the hosts that can still train."""
        while True:
            try:
                shared = self._run_directory.path.parent
                return ready_hosts(self._args, self._experiment, self._hosts, shared, self._site.transport)
            except HostError as error:
                left = tuple(
                    host for host in self._hosts if host.name not in {one.host for one in error.problems}
                )
                if not left:
                    raise
                for problem in error.problems:
                    self._display.message(f"without {problem.host}, which is {problem.got}")
                self._hosts = left

    def _go_on(self, preflight: Preflight) -> None:
        """Take the newest checkpoint and as many slots as its batch fits."""
        newest = newest_checkpoint(self._run_directory.checkpoints_path)
        self._resume = self._resume if newest is None else newest.path
        present = sum(len(host.slots) for host in self._hosts)
        problem: ConfigError | None = None
        for num_slots in range(present, 0, -1):
            try:
                self._experiment = load_experiment(
                    self._args.experiment,
                    self._args.context_dir,
                    self._overrides,
                    require_entrypoint=True,
                    slots=num_slots,
                    resumed=None if self._resume is None else saved_run_to_resume(str(self._resume)),
                )
            except ConfigError as error:
                problem = problem or error
                continue
            self._hosts = first_slots(self._hosts, num_slots)
            preflight.keep(self._hosts)
            return
        preflight.close()
        assert problem is not None
        raise problem

    def _attempt(self, preflight: Preflight) -> LaunchOutcome:
        for line in placement_lines(preflight):
            self._display.message(line)
        outcome = run_on_hosts(
            self._job(self._command()),
            preflight,
            python=python_of(self._args),
            on_line=self._display.rank_line,
            on_note=self._display.message,
            on_stop=self._tell_stop,
            stop_signals=self._site.stop_signals,
        )
        write_json_atomically(self._run_directory.outcome_path, outcome.to_json())
        return outcome

    def _tell_stop(self, name: str) -> None:
        again = " (Ctrl-C again ends them at once)" if name == signal.SIGINT.name else ""
        limit = f"ranks that have not ended after {self._experiment.preemption_timeout_s} s are killed"
        self._display.message(f"{name}: stopping all ranks at the same batch; {limit}{again}")

    def _job(self, command: list[str]) -> Job:
        env = {**self._experiment.environment_variables, RUN_DIR_VARIABLE: str(self._run_directory.path)}
        return Job(
            command=command,
            env=env,
            is_trial=self._entrypoint.trial is not None,
            context_dir=self._experiment.context_dir,
            config_path=Path(self._args.experiment),
            config=self._experiment.raw,
            hyperparameters=self._experiment.hyperparameters,
            log_dir=self._run_directory.begin_logs() if command else None,
            shutdown_timeout_s=self._experiment.preemption_timeout_s,
        )

    def _command(self) -> list[str]:
        python = python_of(self._args)
        if self._entrypoint.trial is None:
            command = script_command(self._entrypoint.words, directory=self._experiment.context_dir)
            if len(command) < 2 or command[1] != "-m":
                raise LaunchError(
                    f"the entrypoint is {self._experiment.entrypoint!r}; expected a trial class or a Python script "
                    "over several hosts. Write a script in Python, or start the command on each host yourself."
                )
            return [python, *command[1:]]
        return trial_command(
            self._entrypoint.trial,
            context_dir=self._experiment.context_dir,
            config=Path(self._args.experiment),
            overrides=self._overrides,
            run_dir=self._run_directory.path,
            resume=None if self._resume is None else str(self._resume),
            test_mode=self._args.test,
            python=python,
        )
