"""Find out how many ranks a launcher starts, and its index among other launchers.

All commands import this module for ``--slots``, so slow imports are inside functions.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dstrial.errors import LaunchError
from dstrial.local.script_variables import HPARAMS_VARIABLE
from dstrial.ranks.identity import RankIdentity, identify, may_have_accelerator

if TYPE_CHECKING:
    from determined import ClusterInfo

    from dstrial.launch.local_ranks import Placement

# Determined's master reserves the port in this variable for the allocation; its launcher defaults to 29400.
_CLUSTER_PORT_VARIABLE = "C10D_PORT"
_CLUSTER_PORT = 29400
_CLUSTER_VARIABLES = ("DET_ALLOCATION_ID", "DET_CLUSTER_ID", "DET_TRIAL_ID")
_RANK_VARIABLES = ("RANK", "WORLD_SIZE")


def slots_argument(text: str) -> int:
    """Convert the value of ``--slots`` to an integer, as ``type=`` of argparse."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(
            f"the value is {text!r}; expected an integer of at least 1. Leave --slots out to take the config's."
        )
    return value


def is_on_cluster(environ: Mapping[str, str]) -> bool:
    """Return whether ``environ`` belongs to a task of Determined or dstrial's master.

    False for ranks that a dsat search measures: they belong to the search, even if the search runs in such a task.
    """
    return HPARAMS_VARIABLE not in environ and any(name in environ for name in _CLUSTER_VARIABLES)


def threads_per_rank(num_ranks: int) -> int:
    """Return the default ``OMP_NUM_THREADS`` of ``num_ranks`` ranks on one machine.

    Ranks with an accelerator divide the processor cores, because the optimizer of offloaded state (DeepSpeed's CPUAdam) uses
    OpenMP. Ranks on the CPU get one thread each, as under torchrun and in a master's slot.
    """
    return max(len(os.sched_getaffinity(0)) // num_ranks, 1) if may_have_accelerator() else 1


def num_accelerators() -> int:
    """Return the number of accelerators; 0 if DeepSpeed will train on the CPU.

    Imports torch if there may be an accelerator.
    """
    if not may_have_accelerator():
        return 0
    from dstrial.ranks.process_group import has_accelerator, num_torch_accelerators

    return num_torch_accelerators() if has_accelerator() else 0


def num_slots(asked: int | None, configured: int | None) -> int:
    """Return the number of ranks that a launcher starts outside a cluster.

    The number is ``asked`` (``--slots``) if not None, else ``configured`` (``slots_per_trial``; 0 means one rank on the CPU),
    else the number of accelerators, but at least 1. Each rank checks whether there are enough accelerators.
    """
    wanted = asked if asked is not None else configured
    return max(num_accelerators() if wanted is None else wanted, 1)


def cluster_info() -> ClusterInfo | None:
    """Return Determined's cluster info if this process belongs to a trial, else None."""
    if not is_on_cluster(os.environ):
        return None
    import determined

    info = determined.get_cluster_info()
    return info if info is not None and info.task_type == "TRIAL" else None


def cluster_placement(info: ClusterInfo) -> Placement:
    """Return this container's index among its trial's containers, with their ranks."""
    from dstrial.launch.local_ranks import Placement

    addresses = info.container_addrs
    ranks_by_node = tuple(max(count, 1) for count in info.container_slot_counts)
    if len(addresses) == 1:
        return Placement(ranks_by_node)
    port = int(os.environ.get(_CLUSTER_PORT_VARIABLE) or _CLUSTER_PORT)
    return Placement(ranks_by_node, info.container_rank, addresses[0], port)


@dataclasses.dataclass(frozen=True, slots=True)
class SlurmStep:
    """A Slurm step (one ``srun``), as seen by one launcher in it.

    With one task per node (``srun python -m dstrial.launch``), each launcher starts the ranks of its node. With several tasks
    per node, each launcher starts one rank, and Slurm determines the number and placement of ranks.
    """

    task: RankIdentity  # the launcher's number among the step's tasks, and the step's first node
    num_ranks: int  # number of ranks that this launcher starts
    num_ranks_of_all: int  # number of ranks that all launchers of the step start

    @property
    def has_rank_per_task(self) -> bool:
        return self.task.world_size > self.task.num_nodes

    @property
    def variables(self) -> dict[str, str]:
        """Return the rank's environment variables if each task is a rank; else {}."""
        task = self.task
        if not self.has_rank_per_task:
            return {}
        return {
            "LOCAL_RANK": str(task.local_rank),
            "LOCAL_WORLD_SIZE": str(task.local_world_size),
            "GROUP_RANK": str(task.node_rank),
            "GROUP_WORLD_SIZE": str(task.num_nodes),
            "LOCAL_SIZE": str(task.local_world_size),
            "CROSS_RANK": str(task.node_rank),
            "CROSS_SIZE": str(task.num_nodes),
        }

    def placement(self) -> Placement:
        """Return this launcher's index among the step's launchers, with their ranks."""
        from dstrial.launch.local_ranks import Placement

        task = self.task
        ranks_by_node = (self.num_ranks,) * task.world_size
        return Placement(ranks_by_node, task.rank, task.master_addr, task.master_port)


def slurm_task(environ: Mapping[str, str]) -> RankIdentity | None:
    """Return this process's identity in a Slurm step of several tasks, else None."""
    if "SLURM_PROCID" not in environ:
        return None
    task = identify({name: value for name, value in environ.items() if name not in _RANK_VARIABLES})
    return task if task.launcher == "slurm" and task.world_size > 1 else None


def step_of(task: RankIdentity, wanted: int | None, num_accelerators: int) -> SlurmStep:
    """Return the Slurm step of ``task``, with the number of ranks to start.

    ``wanted`` is the number of ranks on all nodes. If None, each task is a rank if a node has several tasks; otherwise each
    accelerator has a rank.

    Raises:
        LaunchError: the ranks cannot be divided evenly.
    """
    num_nodes, num_tasks = task.num_nodes, task.world_size
    if num_tasks > num_nodes:
        if wanted not in (None, num_tasks):
            raise LaunchError(
                f"{wanted} ranks are asked for in a step of Slurm with {num_tasks} tasks on {num_nodes} node(s), each of "
                f"which is a rank; expected as many. Start {wanted} tasks (srun --ntasks {wanted}), or one a node "
                "(srun --ntasks-per-node 1)."
            )
        return SlurmStep(task, 1, num_tasks)
    if wanted is None:
        here = max(num_accelerators, 1)
        return SlurmStep(task, here, here * num_nodes)
    if wanted % num_nodes:
        raise LaunchError(
            f"{wanted} ranks are asked for in a step of Slurm with one task on each of {num_nodes} nodes; expected a multiple of "
            f"{num_nodes}. Ask for as many on each node, or start a task for each rank (srun --ntasks {wanted})."
        )
    return SlurmStep(task, wanted // num_nodes, wanted)
