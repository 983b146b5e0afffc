"""Batch scripts: readable, and complete in what they ask of Slurm."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrial.errors import ConfigError, ConfigProblem

LOG_NAME = "slurm.log"
SCRIPT_NAME = "sbatch.sh"
NODES_SUFFIX = ".nodes"
"""Of the file in which a holding job says which nodes it has."""
GIVEN_BACK_SUFFIX = ".given_back"
"""Of the file by which a holding job knows that its master ends it."""
ALIVE_NAME = "alive"
"""File that a master touches while it lives."""
LONELY_MINUTES = 60
"""After so long without its master a holding job ends by itself."""
LONELY_LOOKS = 5
"""So many looks in a row must find that, half a minute apart."""
NOTICE_S = (30, 120)
"""How long before its time limit a job is told at least and at most, seconds; Slurm may do it up to a minute earlier."""
OF_CLUSTERS = ("--clusters", "--cluster", "-M")
"""Options that give a job to another cluster, where no other command of ours looks for it."""
_DEVICES = (
    "--gres",
    "--gpus",
    "-G",
    "--gpus-per-node",
    "--gpus-per-task",
    "--gpus-per-socket",
    "--tres-per-task",
)
_SIZES = ("--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node", "--exclusive")


def sbatch_args(settings: Mapping[str, Any], more: Sequence[str], where: str) -> list[str]:
    """Return options of ``slurm.sbatch_args`` and of the command line. Pure.

    Each is a line of the script; an option whose value is a word of its own (``-p gpu``) is joined with it. ``settings`` is the
    top-level key ``slurm``, Determined's; ``more``, of the command line, comes last.

    Raises:
        ConfigError: with all that is wrong with them.
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
    """Return the last value that options give to one of these names, or None. Pure."""
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
    """Return the options that request a trial's slots, a task for each. Pure.

    The user's ``options`` may fix the number of nodes and tasks. ``slots_per_node`` and ``gpu_type`` of the key ``slurm`` are
    Determined's.

    Raises:
        ConfigError: the slots are no multiple of ``slots_per_node``.
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
    """Return a job's notice before its time limit: a tenth, within ``NOTICE_S``. Pure.

    ``limit`` is in sbatch's formats: ``MINUTES``, ``HOURS:MINUTES:SECONDS``, ``DAYS-HOURS`` and the like; None if unknown.
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
    """Return the script that begins a run, or continues it after a requeue. Pure.

    The user's ``options`` stand behind ours and so count.

    Raises:
        ConfigError: a directory has characters that Slurm cannot handle.
    """
    ours = [
        f"--job-name={name}",
        *request,
        f"--chdir={_quoted(str(working_directory))}",
        f"--output={_quoted(str(run_directory / LOG_NAME).replace('%', '%%'))}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{notice_s(value_of(options, '--time', '-t'))}",
    ]
    lines = [
        "#!/bin/bash",
        f"# Written by: {' '.join(submitted_by.splitlines())}",
        "# A task of Slurm's is a slot. The command starts a master, and an agent on each node by srun. It saves a",
        "# checkpoint when the job is preempted, cancelled or short of time; started again by Slurm it goes on from there.",
        *(f"#SBATCH {option}" for option in ours),
        *(f"#SBATCH {option}" for option in options),
        "set -u",
        f"mkdir -p {shlex.quote(str(run_directory))}",
        f"exec {shlex.join(command)}",
    ]
    return "\n".join(lines) + "\n"


def _quoted(path: str) -> str:
    # sbatch 22.05 splits a line at blanks, takes both quotes, and drops a backslash from --output whatever stands around it.
    if not path.isprintable() or "\\" in path:
        problem = ConfigProblem(
            "the run, working or state directory",
            repr(path),
            "a path of printable characters without a backslash, for Slurm",
            "Move it, or name another one with --runs-dir or --state-dir.",
        )
        raise ConfigError([problem])
    return path if re.fullmatch(r"[\w/.,:+@%=-]+", path) else '"' + path.replace('"', r"\"") + '"'


def holding_script(
    *, name: str, title: str, request: Sequence[str], options: Sequence[str], directory: Path, state_dir: Path
) -> str:
    """Return the script of a job that only holds nodes for a master. Pure.

    The user's ``options`` stand behind ours and so count. Master and nodes see ``directory``, where the output goes.

    Raises:
        ConfigError: a directory has characters that Slurm cannot handle.
    """
    ours = [
        f"--job-name={name}",
        *request,
        f"--chdir={_quoted(str(directory))}",
        f"--output={_quoted(str(directory).replace('%', '%%') + '/%j.log')}",
        "--open-mode=append",
        "--no-requeue",
    ]
    lines = [
        "#!/bin/bash",
        f"# For {' '.join(title.splitlines())}; written by the master of {state_dir}.",
        "# It only holds nodes, a task of Slurm's for each slot: the master starts the trial by srun, and cancels the job",
        "# when the trial has ended, paused, or saved a checkpoint because the job has to leave.",
        *(f"#SBATCH {option}" for option in ours),
        *(f"#SBATCH {option}" for option in options),
        "set -u",
        f"cd {shlex.quote(str(directory))} || exit 1",
        f'echo "$SLURM_JOB_NODELIST $SLURM_TASKS_PER_NODE" > "$SLURM_JOB_ID{NODES_SUFFIX}.new"',
        f'mv "$SLURM_JOB_ID{NODES_SUFFIX}.new" "$SLURM_JOB_ID{NODES_SUFFIX}"',
        "# A SIGTERM of Slurm's gives the trial time to save; one of the master's ends the job.",
        f"trap '[ -e \"$SLURM_JOB_ID{GIVEN_BACK_SUFFIX}\" ] && exit 0' TERM",
        "# Without its master it holds nodes for nobody. A look that fails, at a file system that is away, says nothing of that.",
        "lonely=0",
        f'while [ "$lonely" -lt {LONELY_LOOKS} ]; do',
        "    sleep 30 & wait $!",
        f'    if seen=$(find . -maxdepth 1 -name {ALIVE_NAME} -mmin -{LONELY_MINUTES}) && [ -z "$seen" ]; then',
        "        lonely=$((lonely + 1))",
        "    else",
        "        lonely=0",
        "    fi",
        "done",
        f'echo "nothing was heard of the master for {LONELY_MINUTES} minutes: the job ends"',
    ]
    return "\n".join(lines) + "\n"
