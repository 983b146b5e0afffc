"""Write batch scripts for Slurm, and parse the user's sbatch options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrial.errors import ConfigError, ConfigProblem

LOG_NAME = "slurm.log"  # file in a run's directory with the output of its Slurm job
SCRIPT_NAME = "sbatch.sh"  # file in a run's directory: the batch script
NODES_SUFFIX = ".nodes"  # suffix of the file into which a job that holds nodes writes their names
CANCELLED_SUFFIX = ".cancelled"  # suffix of the file that the master creates before it cancels such a job
ALIVE_NAME = "alive"  # file that a running master touches
MASTER_TIMEOUT_MINUTES = 60  # time without a running master after which a job that holds nodes for it ends
NOTICE_S = (30, 120)  # range of the notice before a time limit; Slurm may signal up to a minute earlier
# Options that submit a job to another cluster, which the other commands do not query.
CLUSTER_OPTIONS = ("--clusters", "--cluster", "-M")
# Options that request devices.
_DEVICES = (
    "--gres",
    "--gpus",
    "-G",
    "--gpus-per-node",
    "--gpus-per-task",
    "--gpus-per-socket",
    "--tres-per-task",
)
# Options that request tasks or nodes.
_SIZES = ("--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node", "--exclusive")


def sbatch_args(settings: Mapping[str, Any], more: Sequence[str], where: str) -> list[str]:
    """Return the user's sbatch options, from the config and the command line.

    Each item of the result is an option with its value, such as ``--time=60`` or ``-p gpu``.

    Args:
        settings: value of the config's key ``slurm``, of which ``sbatch_args`` is read.
        more: words of ``--sbatch-arg`` on the command line, which come last.
        where: name of the config for messages.

    Raises:
        ConfigError: lists all invalid options.
    """
    given = settings.get("sbatch_args") or []
    problems = []
    if not isinstance(given, list) or not all(isinstance(word, (str, int)) for word in given):
        problems.append(
            ConfigProblem(
                f"{where}: slurm.sbatch_args",
                repr(given),
                "a list of options of sbatch",
                "Write sbatch_args: ['--partition=gpu', '--time=12:00:00'].",
            )
        )
        given = []
    options: list[str] = []
    for number, word in enumerate([*map(str, given), *more]):
        source = f"{where}: slurm.sbatch_args[{number}]" if number < len(given) else "--sbatch-arg"
        if "\n" in word or not word.strip() or (not word.startswith("-") and not options):
            problems.append(
                ConfigProblem(source, repr(word), "an option of sbatch", "Write it as '--name=value'.")
            )
        elif word.startswith("-"):
            options.append(word.strip())
        else:
            options[-1] += f" {word.strip()}"
    if problems:
        raise ConfigError(problems)
    return options


def value_of(options: Sequence[str], *names: str) -> str | None:
    """Return the value of the last sbatch option with one of ``names``; None without.

    The value is "" if the option has no value.
    """
    value = None
    for option in options:
        name, _, given = option.partition("=") if option.startswith("--") else (option[:2], "", option[2:])
        name, _, spaced = name.partition(" ")
        if name in names:
            value = (given or spaced).strip()
    return value


def asks_for_devices(options: Sequence[str]) -> bool:
    return value_of(options, *_DEVICES) is not None


def request_lines(
    settings: Mapping[str, Any], options: Sequence[str], num_slots: int, *, wants_devices: bool, where: str
) -> list[str]:
    """Return the sbatch options that request a trial's slots, one task per slot.

    Args:
        settings: value of the config's key ``slurm``, of which ``slots_per_node`` and ``gpu_type`` are read.
        options: the user's sbatch options. If they request tasks or nodes, the result requests none; likewise for devices.
        num_slots: number of slots of the trial.
        wants_devices: whether to request a GPU per task.
        where: name of the config for messages.

    Raises:
        ConfigError: ``slots_per_node`` is no positive integer, or ``num_slots`` is larger and not a multiple.
    """
    per_node = settings.get("slots_per_node")
    if per_node is not None and (
        not isinstance(per_node, int) or per_node < 1 or num_slots % min(per_node, num_slots)
    ):
        problem = ConfigProblem(
            f"{where}: slurm.slots_per_node",
            repr(per_node),
            f"a number of which {num_slots} slots are a multiple",
            "Correct it, or leave it out: Slurm then chooses the nodes.",
        )
        raise ConfigError([problem])
    lines = []
    if value_of(options, *_SIZES) is None:
        lines.append(f"--ntasks={num_slots}")
        if per_node is not None:
            on_one = min(per_node, num_slots)
            lines += [f"--nodes={num_slots // on_one}", f"--ntasks-per-node={on_one}"]
    if wants_devices and not asks_for_devices(options):
        kind = settings.get("gpu_type")
        lines.append(f"--gpus-per-task={f'{kind}:' if kind else ''}1")
    return lines


def notice_s(limit: str | None) -> int:
    """Return how many seconds before its time limit a job must begin to stop.

    The result is a tenth of the limit, within the range ``NOTICE_S``. ``limit`` is in one of sbatch's formats, for example
    ``MINUTES`` or ``DAYS-HOURS``. If it is None or another text, the result is the maximum of the range.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", (limit or "").strip())
    least_s, most_s = NOTICE_S
    if match is None:
        return most_s
    days, first, second, third = (int(part) if part else 0 for part in match.groups())
    if match[1] is not None:
        seconds = ((days * 24 + first) * 60 + second) * 60 + third
    elif match[4] is not None:
        seconds = (first * 60 + second) * 60 + third
    else:
        seconds = first * 60 + second
    return min(max(seconds // 10, least_s), most_s)


def refused_options(options: Sequence[str]) -> list[str]:
    """Return those ``options`` that users may not set for a job of ``holding_script``."""
    own = (
        "--job-name", "-J", "--array", "-a", "--wrap", "--chdir", "-D", "--output", "-o", "--requeue",
        "--wait", "-W", "--parsable", "--test-only", *CLUSTER_OPTIONS,
    )  # fmt: skip
    names = [option.partition("=")[0].partition(" ")[0] for option in options]
    return [
        option
        for option, name in zip(options, names, strict=True)
        if name in own or (not name.startswith("--") and name[:2] in own)
    ]


def batch_script(
    *,
    name: str,
    request: Sequence[str],
    options: Sequence[str],
    run_directory: Path,
    working_directory: Path,
    command: Sequence[str],
    submitted_by: str,
) -> str:
    """Return the batch script that starts a run, and resumes the run after a requeue.

    Args:
        name: name of the job.
        request: the sbatch options that request slots.
        options: the user's sbatch options, which come last and take precedence.
        run_directory: the run directory, which the script creates and which has the job's log.
        working_directory: the directory in which the script runs ``command``.
        command: the command of the script, which starts or resumes the run.
        submitted_by: the user's command, for a comment in the script.

    Raises:
        ConfigError: a directory has characters that Slurm cannot handle.
    """
    ours = ["--requeue", f"--signal=B:USR1@{notice_s(value_of(options, '--time', '-t'))}"]
    comments = [
        f"Written by: {' '.join(submitted_by.splitlines())}",
        "Each task is a slot. The command starts a master, and an agent on each node by srun. It saves a checkpoint",
        "when the job is preempted, cancelled or near its time limit; after a requeue it resumes from the checkpoint.",
    ]
    head = _header(name, comments, request, working_directory, run_directory / LOG_NAME, [*ours, *options])
    return f"{head}mkdir -p {shlex.quote(str(run_directory))}\nexec {shlex.join(command)}\n"


def holding_script(
    *, name: str, title: str, request: Sequence[str], options: Sequence[str], directory: Path
) -> str:
    """Return the batch script of a job that only reserves nodes for a master.

    Args:
        name: name of the job.
        title: description of the trial, for a comment in the script.
        request: the sbatch options that request slots.
        options: the user's sbatch options, which come last and take precedence.
        directory: directory for the job's files, on a file system that the master's machine and the nodes share.

    Raises:
        ConfigError: a directory has characters that Slurm cannot handle.
    """
    comments = [
        f"For {' '.join(title.splitlines())}; written by the master of {directory.parent}.",
        "It only holds nodes, with a task for each slot. The master starts the trial by srun, and cancels the job when",
        "the trial has ended, was paused, or has saved a checkpoint because Slurm reclaims the nodes.",
    ]
    head = _header(name, comments, request, directory, directory / "%j.log", ["--no-requeue", *options])
    lines = [
        f"cd {shlex.quote(str(directory))} || exit 1",
        f'echo "$SLURM_JOB_NODELIST $SLURM_TASKS_PER_NODE" > "$SLURM_JOB_ID{NODES_SUFFIX}.new"',
        f'mv "$SLURM_JOB_ID{NODES_SUFFIX}.new" "$SLURM_JOB_ID{NODES_SUFFIX}"',
        "# At Slurm's SIGTERM the job continues, so that the trial can save; at the master's SIGTERM it ends.",
        f"trap '[ -e \"$SLURM_JOB_ID{CANCELLED_SUFFIX}\" ] && exit 0' TERM",
        "# The job ends when the master no longer touches its file. A failed find (no file system) is ignored.",
        f'until seen=$(find . -maxdepth 1 -name {ALIVE_NAME} -mmin -{MASTER_TIMEOUT_MINUTES}) && [ -z "$seen" ]; do',
        "    sleep 30 & wait $!",
        "done",
        f'echo "the master was silent for {MASTER_TIMEOUT_MINUTES} minutes: the job ends"',
    ]
    return head + "\n".join(lines) + "\n"


def _header(
    name: str,
    comments: Sequence[str],
    request: Sequence[str],
    cwd: Path,
    output: Path,
    options: Sequence[str],
) -> str:
    log = str(output.parent).replace("%", "%%") + f"/{output.name}"
    sbatch = [
        f"--job-name={name}",
        *request,
        f"--chdir={_quoted(str(cwd))}",
        f"--output={_quoted(log)}",
        "--open-mode=append",
        *options,
    ]
    lines = ["#!/bin/bash", *(f"# {line}" for line in comments), *(f"#SBATCH {line}" for line in sbatch)]
    return "\n".join([*lines, "set -u"]) + "\n"


def _quoted(path: str) -> str:
    # sbatch 22.05 splits a line at blanks, accepts both quotes, and always drops a backslash from --output.
    if not path.isprintable() or "\\" in path:
        problem = ConfigProblem(
            "the run, working or state directory",
            repr(path),
            "a path of printable characters without a backslash, for Slurm",
            "Move it, or name another one with --runs-dir or --state-dir.",
        )
        raise ConfigError([problem])
    return path if re.fullmatch(r"[\w/.,:+@%=-]+", path) else '"' + path.replace('"', r"\"") + '"'
