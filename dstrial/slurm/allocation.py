"""Parse a Slurm allocation's environment variables, node lists and task counts.

Source: "OUTPUT ENVIRONMENT VARIABLES" of sbatch(1).
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence

from dstrial.errors import LaunchError

# Lowest id of the steps that Slurm itself creates (batch script, interactive shell, extern). Such a step is one process,
# whatever SLURM_NTASKS says (slurm.h: SLURM_MAX_NORMAL_STEP_ID).
FIRST_OWN_STEP = 0xFFFFFFF0
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MAX_NAMES = 65_536  # MAX_RANGE of Slurm's own parser (src/common/hostlist.c)


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """A Slurm job's nodes, tasks and devices."""

    job_id: int
    nodes: tuple[str, ...]  # names, in Slurm's order
    num_tasks: tuple[int, ...]  # requested on each node; 1 by default
    # number of the job's accelerators on this node; 0 without accelerators, or if Slurm does not manage them
    num_devices: int = 0
    # whether the devices were requested per task or for the whole job; then each step must request devices
    divides_devices: bool = False


def allocation_of(environ: Mapping[str, str]) -> Allocation | None:
    """Return the Slurm allocation that ``environ`` describes; None outside of a job.

    Raises:
        LaunchError: the variables cannot be parsed, or this process is one of several tasks of a step.
    """
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if not job or "SLURM_JOB_NODELIST" not in environ:
        return None
    num_tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    step = environ.get("SLURM_STEP_ID", "")
    if step.isdecimal() and int(step) < FIRST_OWN_STEP and num_tasks not in ("", "1"):
        raise LaunchError(
            f"this is one of {num_tasks} tasks of srun; expected one command for the whole allocation, which starts the ranks "
            "on all nodes by itself. Leave srun out."
        )
    counts = expand_counts(environ.get("SLURM_TASKS_PER_NODE", ""))
    try:
        nodes = expand_nodes(environ["SLURM_JOB_NODELIST"])
        job_id = int(job)
    except ValueError as error:
        raise LaunchError(
            f"the variables of an allocation say SLURM_JOB_ID={job!r} and SLURM_JOB_NODELIST={environ['SLURM_JOB_NODELIST']!r}; "
            "expected those of Slurm. Start the command in an allocation (salloc, sbatch), or unset them."
        ) from error
    if len(counts) != len(nodes):
        counts = [1] * len(nodes)
    return Allocation(
        job_id,
        tuple(nodes),
        tuple(counts),
        num_devices=_num_devices(environ),
        divides_devices=_divides_devices(environ),
    )


def slots_of_nodes(allocation: Allocation, wanted: int | None) -> list[int]:
    """Return the number of slots (ranks) on each node, in the order of the nodes.

    If a node has several tasks, each task is a slot, and the first ``wanted`` slots are used (None: all). Otherwise the slots
    are divided equally; if there are fewer slots than nodes, each of the first nodes has one slot. If ``wanted`` is None,
    each node has ``allocation.num_devices`` slots, at least one.

    Raises:
        LaunchError: the allocation has too few tasks, or ``wanted`` is not a multiple of the number of nodes.
    """
    nodes, tasks = allocation.nodes, allocation.num_tasks
    if max(tasks) > 1:
        if wanted is not None and wanted > sum(tasks):
            raise LaunchError(
                f"{wanted} slots are asked for in job {allocation.job_id}, whose {len(nodes)} node(s) have {sum(tasks)} tasks; "
                f"expected as many tasks as slots. Ask Slurm for them (--ntasks={wanted}), or for fewer slots (--slots)."
            )
        return _fill_in_order(tasks, wanted)
    if wanted is None:
        return [max(allocation.num_devices, 1)] * len(nodes)
    if wanted <= len(nodes):
        return _fill_in_order(tasks, wanted)
    if wanted % len(nodes):
        raise LaunchError(
            f"{wanted} slots are asked for in job {allocation.job_id}, which has {len(nodes)} nodes and says nothing of tasks; "
            f"expected a multiple of {len(nodes)}. Ask Slurm for a task for each slot (--ntasks={wanted})."
        )
    return [wanted // len(nodes)] * len(nodes)


def _fill_in_order(tasks: Sequence[int], wanted: int | None) -> list[int]:
    left = sum(tasks) if wanted is None else wanted
    given = []
    for count in tasks:
        given.append(min(count, left))
        left -= given[-1]
    return given


def _num_devices(environ: Mapping[str, str]) -> int:
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        text = environ.get(name, "").rpartition(":")[2]
        if text.isdecimal():
            return int(text)
    listed = [part for part in environ.get("SLURM_JOB_GPUS", "").split(",") if part]
    return len(listed)


def _divides_devices(environ: Mapping[str, str]) -> bool:
    by_task = environ.get("SLURM_GPUS_PER_TASK") or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")
    return bool(by_task or environ.get("SLURM_GPUS"))


def expand_nodes(text: str) -> list[str]:
    """Return the names in Slurm's node list; ``gpu[01-03,7]-ib,login`` has five names.

    The result has the list's order and leading zeros. A name with several brackets means all combinations. Source: hostlist
    expressions in scontrol(1), "show hostnames".

    Raises:
        ValueError: the text is not a node list.
    """
    names: list[str] = []
    for word in _words(text):
        parts = re.split(r"\[([^\]]*)\]", word)
        choices = [_numbers(part, text) if number % 2 else [part] for number, part in enumerate(parts)]
        if any("[" in choice or "]" in choice for choice in itertools.chain(*choices)):
            raise _error(text)
        names += ["".join(chosen) for chosen in itertools.product(*choices)]
    if len(names) > _MAX_NAMES:
        raise _error(text)
    return names


def _words(text: str) -> list[str]:
    """Split a node list at the commas outside of brackets."""
    words = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if ",".join(words) != text:
        raise _error(text)
    return words


def _numbers(text: str, whole: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _error(whole)
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < _MAX_NAMES:
            raise _error(whole)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _error(text: str) -> ValueError:
    return ValueError(f"{text!r} is no list of Slurm's nodes; expected one like 'host[01-04],gpu7'")


def expand_counts(text: str) -> list[int]:
    """Expand Slurm's task counts ``4(x2),3`` to [4, 4, 3]; [] if they are invalid."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
