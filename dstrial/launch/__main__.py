"""``python -m dstrial.launch``: start one rank per slot, here or on a cluster."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrial import collector, determined_imports
from dstrial.config.dotted_keys import dstrial_section
from dstrial.config.schema import DEFAULT_PREEMPTION_TIMEOUT_S
from dstrial.errors import ConfigError, DstrialError, LaunchError
from dstrial.file_writes import replace_file
from dstrial.harness_paths import ALLOCATION_DIR_VARIABLE, ENDING_NAME
from dstrial.hosts.hostfile import given_slots
from dstrial.launch.accelerate_environment import accelerate_variables
from dstrial.launch.failures import TRACEBACKS_DIR_VARIABLE
from dstrial.launch.output import Stream
from dstrial.launch.rank_main import script_command, trial_command
from dstrial.launch.slots import (
    SlurmStep,
    cluster_info,
    cluster_placement,
    is_on_cluster,
    num_accelerators,
    num_slots,
    slots_argument,
    slurm_task,
    step_of,
)
from dstrial.local.json_files import write_json_atomically
from dstrial.local.run_directory import (
    RUN_DIR_VARIABLE,
    RUNS_DIR_VARIABLE,
    RunDirectory,
    default_runs_dir,
    utc_stamp,
)
from dstrial.local.script_variables import EXPERIMENT_VARIABLE, write_experiment
from dstrial.process_state import open_closed_streams
from dstrial.resume.locate import resumption_problems, saved_run_of_trial, saved_run_to_resume
from dstrial.scratch import scratch_directory

if TYPE_CHECKING:
    from determined import ClusterInfo

    from dstrial.config.experiment_config.config import ExperimentConfig
    from dstrial.launch.failures import LaunchOutcome

_USAGE = """python -m dstrial.launch [--slots N] [--config EXP.yaml] [--context-dir DIR]
                                (--trial model_def:MyTrial | SCRIPT ARGS... | -m MODULE ARGS...)"""


_CONFIG_IS_MISSING = (
    "--config is missing off a cluster; expected the experiment config, which says how long to train. "
    "Add --config EXP.yaml."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks, wait for them, and report the first failure.

    Returns:
        0 only if every rank exited 0; the first failing rank's exit code otherwise (128 + n for signal n);
        130 after a second Ctrl-C; 2 for a wrong command line or config.
    """
    open_closed_streams()
    options = _parse(arguments)
    try:
        outcome = _launch(options)
    except DstrialError as error:
        print(f"dstrial.launch: {error}", file=sys.stderr)  # noqa: T201  # a command prints
        return 2
    if outcome.killed_text:
        _warn(outcome.killed_text)
    if outcome.first_failure is not None:
        with contextlib.suppress(OSError):  # the terminal may be closed
            print(outcome.first_failure.describe(), file=sys.stderr, flush=True)  # noqa: T201  # a command prints
    return outcome.exit_code


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dstrial.launch",
        usage=_USAGE,
        description="Run one training process per slot on this machine, or per slot of a Determined trial.",
    )
    parser.add_argument("--slots", type=slots_argument, metavar="N", help="number of ranks to start")
    parser.add_argument(
        "--config", type=Path, metavar="EXP.yaml", help="experiment config, if not on a cluster"
    )
    parser.add_argument(
        "--context-dir", type=Path, metavar="DIR", default=Path(), help="directory of the model definition"
    )
    parser.add_argument("--trial", metavar="model_def:MyTrial", help="trial class to train")
    parser.add_argument("--hostfile", help=argparse.SUPPRESS)
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, default=[], help="run a module instead of --trial"
    )
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS...", help="run a script instead of --trial"
    )
    options = parser.parse_args(arguments)
    if options.script[:1] == ["--"]:
        options.script = options.script[1:]
    if options.module:
        options.script = ["-m", *options.module]
    if options.hostfile:
        parser.exit(
            2, "dstrial.launch: --hostfile is not its option; use `dstrial run EXP.yaml --hostfile FILE`\n"
        )
    if bool(options.trial) == bool(options.script):
        parser.error("expected either --trial model_def:MyTrial or a script to run")
    return options


def _launch(options: argparse.Namespace) -> LaunchOutcome:
    if is_on_cluster(os.environ):
        with collector.paused_for_good():
            info = cluster_info()  # imports Determined's package
        if info is not None:
            return _launch_on_cluster(options, info)
    task = slurm_task(os.environ)
    step: SlurmStep | None = None
    if task is not None:
        wanted = options.slots or (given_slots(options.config) if options.config else None)
        step = step_of(task, wanted, num_accelerators() if wanted is None else 0)
    return _launch_off_cluster(options, _load(options, None if step is None else step.num_ranks_of_all), step)


def _variables(experiment: ExperimentConfig | None) -> dict[str, str]:
    # Ranks change to the context directory before they resolve relative paths.
    env = {RUNS_DIR_VARIABLE: str(default_runs_dir())}
    if experiment is not None:
        env |= experiment.environment_variables
    # Only off a cluster: a Determined process needs Determined's own modules, and dstrial's master has set the variables.
    return env | determined_imports.variables(
        {**os.environ, **env}, None if experiment is None else experiment.raw
    )


def _launch_off_cluster(
    options: argparse.Namespace, experiment: ExperimentConfig | None, step: SlurmStep | None
) -> LaunchOutcome:
    if options.trial and experiment is None:
        raise LaunchError(_CONFIG_IS_MISSING)
    configured = experiment.slots_per_trial if experiment is not None else None
    env = _variables(experiment)
    num_ranks = num_slots(options.slots, configured) if step is None else step.num_ranks
    num_of_all = num_ranks if step is None else step.num_ranks_of_all
    placement = None
    if step is not None:
        env |= step.variables
        placement = step.placement()
    with scratch_directory("dstrial-script-") as directory:
        if experiment is not None and not options.trial:
            env |= _script_variables(experiment, num_of_all, directory, env)
        return _run_ranks(
            options,
            None if experiment is None else experiment.raw,
            DEFAULT_PREEMPTION_TIMEOUT_S if experiment is None else experiment.preemption_timeout_s,
            num_ranks=num_ranks,
            env=env,
            on_start=_warn if placement is None else _warn_by_host,
            placement=placement,
            tracebacks_dir=default_runs_dir() / "tracebacks" / f"{utc_stamp()}-{os.getpid()}",
        )


def _run_ranks(
    options: argparse.Namespace, config: Mapping[str, Any] | None, timeout_s: float, **arguments: Any
) -> LaunchOutcome:
    from dstrial.launch.local_ranks import run_ranks
    from dstrial.launch.stalls.diagnosis import StallSettings

    if options.trial:
        command = trial_command(options.trial, context_dir=options.context_dir, config=options.config)
    else:
        command = script_command(options.script, directory=Path())
    return run_ranks(
        command,
        shutdown_timeout_s=timeout_s,
        on_stop=functools.partial(_print_stopping, timeout_s),
        serves_store=not options.trial,
        stalls=StallSettings.from_config(config),
        **arguments,
    )


def _script_variables(
    experiment: ExperimentConfig, num_ranks: int, directory: Path, env: Mapping[str, str]
) -> dict[str, str]:
    path = directory / "experiment.json"
    write_experiment(path, experiment.raw, experiment.hyperparameters)
    accelerate = accelerate_variables(
        experiment.hyperparameters,
        num_ranks=num_ranks,
        directory=directory,
        environ={**os.environ, **env},
        context_dir=experiment.context_dir,
        extents=dstrial_section(experiment.raw),
        resumed=saved_run_to_resume(),
    )
    return {EXPERIMENT_VARIABLE: str(path), **accelerate}


def _launch_on_cluster(options: argparse.Namespace, info: ClusterInfo) -> LaunchOutcome:
    """Start this container's ranks of a trial, and wait for them."""
    directory_of_run = os.environ.get(RUN_DIR_VARIABLE)
    run = RunDirectory.open(directory_of_run) if directory_of_run else None
    kept_tracebacks = os.environ.get(TRACEBACKS_DIR_VARIABLE)
    for name, value in (("--slots", options.slots), ("--config", options.config)):
        if value is not None:
            _warn(f"{name} {value} is ignored on a cluster, which has its own experiment config")
    options.config = None
    if problems := resumption_problems(info):
        raise ConfigError(problems)
    placement = cluster_placement(info)
    timeout_s = info.trial._config.get("preemption_timeout") or DEFAULT_PREEMPTION_TIMEOUT_S
    env = {"DET_CHIEF_IP": placement.master_addr}
    with scratch_directory("dstrial-script-") as directory:
        if not options.trial:
            env |= accelerate_variables(
                info.trial.hparams,
                num_ranks=max(sum(info.container_slot_counts), 1),
                directory=directory,
                environ=os.environ,
                extents=dstrial_section(info.trial._config),
                resumed=saved_run_of_trial(info),
            )
        outcome = _run_ranks(
            options,
            info.trial._config,
            float(timeout_s),
            num_ranks=max(len(info.slot_ids), 1),
            env=env,
            log_dir=None if run is None else run.begin_logs(info.allocation_id),
            on_line=_print_for_cluster,
            on_start=_warn if len(info.container_addrs) == 1 else _warn_by_host,
            placement=placement,
            tracebacks_dir=None if run is not None or not kept_tracebacks else Path(kept_tracebacks),
        )
    allocation_dir = os.environ.get(ALLOCATION_DIR_VARIABLE)
    if allocation_dir and outcome.first_failure is not None:
        record = {"is_consequence": outcome.is_consequence}
        with contextlib.suppress(OSError):
            replace_file(Path(allocation_dir, ENDING_NAME), json.dumps(record), sync=False)
    if run is not None:
        write_json_atomically(run.outcome_path(info.container_rank), outcome.to_json())
    return outcome


def _load(options: argparse.Namespace, num_slots: int | None = None) -> ExperimentConfig | None:
    if options.config is None:
        return None
    from dstrial.config.experiment_config.config import load_experiment

    return load_experiment(
        options.config,
        options.context_dir,
        (),
        slots=num_slots or options.slots,
        resumed=saved_run_to_resume(),
    )


def _print_for_cluster(rank: int, stream: Stream, line: str) -> None:
    target = sys.stdout if stream == "stdout" else sys.stderr
    target.write(f"[rank={rank}] {line}\n")
    target.flush()


def _print_stopping(timeout_s: float, signal_name: str) -> None:
    _warn(
        f"{signal_name} received: the ranks were asked to stop, and are killed after {timeout_s:g} s (preemption_timeout); "
        "Ctrl-C ends them at once"
    )


def _warn_by_host(text: str) -> None:
    _warn(f"{socket.gethostname()}: {text}")


def _warn(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be closed while the ranks still save
        print(f"dstrial.launch: {text}", file=sys.stderr, flush=True)  # noqa: T201  # a command prints


if __name__ == "__main__":
    sys.exit(main())
