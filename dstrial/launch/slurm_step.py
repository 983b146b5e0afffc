"""Launchers in one Slurm step: ``srun python -m dstrial.launch``.

With one task per node, each launcher starts the ranks of its node. With several tasks per node, Slurm determines the number
and placement of ranks: each launcher starts one rank in place of its task.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dstrial.errors import LaunchError
from dstrial.ranks.identity import RankIdentity, identify

if TYPE_CHECKING:
    from dstrial.launch.local_ranks import Placement

_RANK_VARIABLES = ("RANK", "WORLD_SIZE")


@dataclasses.dataclass(frozen=True, slots=True)
class SlurmStep:
    """The part of a Slurm step that one launcher starts; ``task`` is its Slurm task."""

    task: RankIdentity
    num_ranks: int
    num_ranks_of_all: int

    @property
    def has_a_rank_a_task(self) -> bool:
        """Whether each Slurm task is one rank."""
        return self.task.world_size > self.task.num_nodes

    @property
    def variables(self) -> dict[str, str]:
        """Return rank variables of the whole step, in place of those of a single launcher."""
        task = self.task
        if not self.has_a_rank_a_task:
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

    def placement(self, timeout_s: float) -> Placement:
        """Return this launcher's placement, after the first launcher is found."""
        from dstrial.launch.local_ranks import Placement
        from dstrial.ranks.rendezvous_store import located

        task = located(self.task, timeout_s=timeout_s)
        ranks_by_node = (self.num_ranks,) * task.world_size
        return Placement(ranks_by_node, task.rank, task.master_addr, task.master_port)


def slurm_task(environ: Mapping[str, str]) -> RankIdentity | None:
    """Return this process's identity in a step of several tasks; None elsewhere."""
    if "SLURM_PROCID" not in environ:
        return None
    task = identify({name: value for name, value in environ.items() if name not in _RANK_VARIABLES})
    return task if task.launcher == "slurm" and task.world_size > 1 else None


def step_of(task: RankIdentity, wanted: int | None, num_accelerators: int) -> SlurmStep:
    """Divide the ranks among the launchers of a step. Pure.

    ``wanted`` is the number of ranks on all nodes; None for one per accelerator or task.

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
