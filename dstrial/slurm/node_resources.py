"""Whether all nodes of a partition, down ones too, could hold a job; pure.

``sbatch --test-only`` gives the same answer for a job that no node could hold, and for one whose nodes will be back.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from dstrial.slurm.nodelist import expand_nodes
from dstrial.slurm.script import value_of
from dstrial.slurm.squeue import is_up, num_gpus

NODES = ("sinfo", "--noheader", "--Node", "--exact", "-o", "%N|%P|%T|%c|%m|%G")
"""The command that ``parse_node_resources`` reads."""
_UNITS_MIB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}
_PER_TASK = ("--gpus-per-task",)


@dataclasses.dataclass(frozen=True, slots=True)
class NodeResources:
    name: str
    cpus: int
    memory_mib: int
    gpus: int
    is_up: bool


def parse_node_resources(text: str, partitions: str | None) -> list[NodeResources]:
    """Parse the output of ``NODES`` for some partitions; None: for the default one."""
    wanted = None if partitions is None else partitions.split(",")
    found: dict[str, NodeResources] = {}
    for line in text.splitlines():
        name, partition, state, cpus, memory, gres, *_ = (word.strip() for word in f"{line}||||||".split("|"))
        numbers = re.match(r"\d+", cpus), re.match(r"\d+", memory)
        is_wanted = partition.endswith("*") if wanted is None else partition.rstrip("*") in wanted
        if is_wanted and numbers[0] is not None and numbers[1] is not None:
            responds = "*" not in state
            found[name] = NodeResources(
                name, int(numbers[0][0]), int(numbers[1][0]), num_gpus(gres), responds and is_up(state)
            )
    return list(found.values())


def missing_nodes(options: Sequence[str], nodes: Sequence[NodeResources]) -> list[str]:
    """Return the down or drained nodes, if a job waits for them alone.

    ``options`` are those of the script, ``nodes`` those of the job's partition.
    """
    if not _fits(options, nodes) or _fits(options, [node for node in nodes if node.is_up]):
        return []
    excluded = _names(value_of(options, "--exclude", "-x"))
    return sorted(node.name for node in nodes if not node.is_up and node.name not in excluded)


def _fits(options: Sequence[str], nodes: Sequence[NodeResources]) -> bool:
    """Return whether idle nodes could hold a job, by its known options."""
    excluded = _names(value_of(options, "--exclude", "-x"))
    there = {node.name: _num_tasks(options, node) for node in nodes if node.name not in excluded}
    most = {name: count for name, count in there.items() if count}
    named = _names(value_of(options, "--nodelist", "-w"))
    if not named <= most.keys():
        return False
    least, _, at_most = (value_of(options, "--nodes", "-N") or "").partition("-")
    num_least = int(least) if least.isdecimal() else 1
    num_most = int(at_most) if at_most.isdecimal() else num_least if least.isdecimal() else len(most)
    if len(most) < num_least or len(named) > num_most:
        return False
    tasks = value_of(options, "--ntasks", "-n") or ""
    per_node = _number(value_of(options, "--ntasks-per-node"), 1)
    num_tasks = int(tasks) if tasks.isdecimal() else num_least * per_node
    counts = [most[name] for name in named]
    counts += sorted((count for name, count in most.items() if name not in named), reverse=True)
    return sum(counts[:num_most]) >= num_tasks


def _num_tasks(options: Sequence[str], node: NodeResources) -> int:
    """Return how many tasks of a job a node could hold."""
    per_task = max(_number(value_of(options, "--cpus-per-task", "-c"), 1), 1)
    found = node.cpus // per_task
    memory_mib = _mib(value_of(options, "--mem"))
    if memory_mib > node.memory_mib:
        return 0
    each_mib = _mib(value_of(options, "--mem-per-cpu")) * per_task
    if each_mib:
        found = min(found, int(node.memory_mib / each_mib))
    of_node = (value_of(options, "--gpus-per-node"), value_of(options, "--gres"))
    if any(given and _gpus(given) > node.gpus for given in of_node):
        return 0
    gpus = _gpus(value_of(options, *_PER_TASK) or "0")
    if gpus:
        found = min(found, node.gpus // gpus)
    limit = value_of(options, "--ntasks-per-node")
    return min(found, _number(limit, found))


def _names(text: str | None) -> set[str]:
    try:
        return set(expand_nodes(text)) if text else set()
    except ValueError:
        return set()


def _number(text: str | None, otherwise: int) -> int:
    return int(text) if text is not None and text.isdecimal() else otherwise


def _gpus(text: str) -> int:
    """Parse ``4``, ``h100:4`` or ``gpu:h100:4``; 1 without a number."""
    last = text.rpartition(":")[2]
    return int(last) if last.isdecimal() else 1


def _mib(text: str | None) -> float:
    """Parse an amount of memory like sbatch, in MiB without a unit."""
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", (text or "").upper())
    return 0.0 if found is None else int(found[1]) * _UNITS_MIB[found[2] or "M"]
