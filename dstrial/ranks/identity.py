"""Find this process's rank, rendezvous and device, without importing torch.

Launchers' variables are tried in a fixed order: torchrun, DeepSpeed's launcher (both also under Determined's launch layers),
Slurm's ``srun``, then Open MPI's ``mpirun``. If none are set, the process is a single rank.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import zlib
from collections.abc import Callable, Mapping
from typing import Literal, NoReturn

from dstrial.errors import RankError, RankIdentityError
from dstrial.slurm.allocation import FIRST_OWN_STEP, expand_nodes

Launcher = Literal["torchrun", "deepspeed", "slurm", "openmpi", "none"]

LOOPBACK_ADDR = "127.0.0.1"

DEVICE_VARIABLE = "DSTRIAL_LOCAL_RANK"
"""Environment variable with the original ``LOCAL_RANK``, which ``init_process_group`` replaces by the rank's device index."""

SHARE_VARIABLE = "DSTRIAL_SHARE_DEVICE"
"""Environment variable: ``1`` allows several ranks on one accelerator, over gloo, for tests and small experiments."""

# Files in /dev of accelerators' drivers; without any of them, torch is not imported to count accelerators.
_DEVICE_FILES = ("nvidia*", "kfd", "dri/renderD*", "accel*", "davinci*", "hl[0-9]*", "xpu*", "neuron*", "dxg")

# Below Linux's default ephemeral range (32768-60999), so that no outgoing connection takes the port
# before rank 0 binds it. The default ports 29400 (torchrun) and 29500 (torch, DeepSpeed) are excluded.
_FIRST_DERIVED_PORT = 15_000
_NUM_DERIVED_PORTS = 14_000


@dataclasses.dataclass(frozen=True, slots=True)
class RankIdentity:
    """A rank's numbers in its job (rank, local rank, node) and the rendezvous address.

    Attributes:
        rank: global rank, from 0.
        world_size: number of ranks in the job.
        local_rank: rank on this machine, from 0; also the index of the rank's accelerator, if all are visible.
        local_world_size: number of ranks on this machine.
        node_rank: index of this machine, from 0 (the cross rank in Determined and DeepSpeed).
        num_nodes: number of machines (the cross size).
        master_addr: address at which rank 0 can be reached.
        master_port: TCP port on which rank 0 serves the rendezvous. 0 on a single rank without a given port;
        ``init_process_group`` then chooses a free port.
        launcher: the launcher whose variables were used.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int
    launcher: Launcher

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0


def identify(environ: Mapping[str, str]) -> RankIdentity:
    """Return this process's rank identity from environment variables.

    A job on one machine needs no master address: its rendezvous is a file (``dstrial.launch``), or a loopback port derived from
    the job's id. A job on several machines needs ``MASTER_ADDR`` or Determined's ``DET_CHIEF_IP``. A Slurm step needs neither
    if rank 0 is on the step's first node.

    Args:
        environ: usually ``os.environ``; not modified.

    Raises:
        RankIdentityError: variables are contradictory, incomplete or not integers, or there are several
        machines but no master address. The message lists the variables.

    Ranks: any; no communication.
    """
    view = _EnvView(environ)
    has_rank, has_world_size = view.has("RANK"), view.has("WORLD_SIZE")
    if has_rank and has_world_size:
        return _validated(_from_explicit_variables(view), view)
    foreign = _from_slurm(view) or _from_openmpi(view)
    if foreign is not None:
        foreign = _validated(foreign, view)
        if has_world_size and view.integer("WORLD_SIZE") != foreign.world_size:
            view.fail(
                f"WORLD_SIZE is {view.text('WORLD_SIZE')!r}; "
                f"expected {foreign.world_size}, as {foreign.launcher} says",
                "Unset WORLD_SIZE.",
            )
        return foreign
    if has_rank or has_world_size:
        missing, present = ("WORLD_SIZE", "RANK") if has_rank else ("RANK", "WORLD_SIZE")
        view.fail(
            f"{missing} is unset although {present} is set; expected both or neither",
            f"Set {missing} or unset {present}.",
        )
    if (
        view.has("MPI_LOCALRANKID") and view.first_integer("PMI_SIZE", default=1) > 1
    ):  # Hydra of MPICH and Intel MPI
        view.fail(
            f"PMI_SIZE is {view.text('PMI_SIZE')}, of an mpirun that dstrial does not know; expected Open MPI's",
            "Take srun or torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and MASTER_PORT for each rank.",
        )
    return RankIdentity(0, 1, 0, 1, 0, 1, LOOPBACK_ADDR, _master_port(view, 1), "none")


def device_variable(identity: RankIdentity, device_idx: int) -> str:
    """Return the value of ``DSTRIAL_LOCAL_RANK``: ``rank:device index:local rank``.

    The variable preserves the local rank when ``LOCAL_RANK`` is replaced by the device index.
    """
    return f"{identity.rank}:{device_idx}:{identity.local_rank}"


def may_share(environ: Mapping[str, str]) -> bool:
    """Return whether ``DSTRIAL_SHARE_DEVICE`` allows ranks to share an accelerator."""
    text = environ.get(SHARE_VARIABLE, "")
    if text not in ("", "0", "1"):
        raise RankError(
            f"{SHARE_VARIABLE} is {text!r}; expected 0 or 1. Set it to 1 to let several ranks share a device."
        )
    return text == "1"


def is_shared(identity: RankIdentity, num_devices: int, *, may_share: bool) -> bool:
    """Return whether ranks share an accelerator; the result is equal on all ranks.

    ``num_devices`` is the number of this machine's accelerators. On one machine, ranks share if ``may_share`` and there are
    more ranks than accelerators. On several machines the result is ``may_share``, because a rank does not know the devices of
    other machines.
    """
    return (
        may_share
        and identity.world_size > 1
        and (identity.num_nodes > 1 or identity.local_world_size > num_devices)
    )


def device_index(identity: RankIdentity, num_devices: int, kind: str, *, may_share: bool) -> int:
    """Return the index of this rank's accelerator among the visible accelerators.

    If ``may_share``, several ranks can have the same index. If only one accelerator is visible, the index is 0, because some
    launchers hide the others. ``kind`` names the accelerators in the error.

    Raises:
        RankError: there is no accelerator, or ``may_share`` is false and this rank's index is too large.
    """
    if num_devices and may_share:
        return identity.local_rank % num_devices
    # Some launchers make only one accelerator visible to each rank, with index 0.
    index = 0 if num_devices == 1 and identity.local_world_size > 1 else identity.local_rank
    if index >= num_devices:
        raise RankError(
            f"local rank is {identity.local_rank} on a machine with {num_devices} {kind} devices; "
            f"expected at most one rank per device. Start {num_devices} ranks here, set DS_ACCELERATOR=cpu, or set "
            f"{SHARE_VARIABLE}=1 to let ranks share a device."
        )
    return index


def _local_rank_before(view: _EnvView, rank: int) -> int | None:
    text = view.text(DEVICE_VARIABLE) or ""
    prefix = f"{rank}:{view.text('LOCAL_RANK')}:"
    rest = text.removeprefix(prefix)
    return int(rest) if text.startswith(prefix) and rest.isdecimal() else None


class _EnvView:
    """Environment that records the variables read, for error messages."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._asked: dict[str, str | None] = {}

    def text(self, name: str) -> str | None:
        value = self._environ.get(name)
        self._asked[name] = value
        return value.strip() if value is not None and value.strip() else None

    def has(self, name: str) -> bool:
        return self.text(name) is not None

    def integer(self, name: str) -> int:
        value = self.text(name)
        if value is None:
            self.fail(
                f"{name} is unset; expected an integer",
                f"Set {name}, or start the ranks with a launcher that does.",
            )
        try:
            return int(value)
        except ValueError:
            self.fail(f"{name} is {value!r}; expected an integer", f"Correct {name}.")

    def first_integer(self, *names: str, default: int | None = None) -> int:
        for name in names:
            if self.has(name):
                return self.integer(name)
        if default is not None:
            return default
        return self.integer(names[0])

    def fail(self, problem: str, fix: str) -> NoReturn:
        seen = ", ".join(
            f"{name}={value!r}" for name, value in sorted(self._asked.items()) if value is not None
        )
        raise RankIdentityError(f"{problem}. {fix} Seen in the environment: {seen or 'nothing'}.")


def _from_explicit_variables(view: _EnvView) -> RankIdentity:
    is_torchrun = view.has("LOCAL_WORLD_SIZE") or view.has("GROUP_RANK") or not view.has("LOCAL_SIZE")
    rank, world_size = view.integer("RANK"), view.integer("WORLD_SIZE")
    single = world_size == 1
    replaced = _local_rank_before(view, rank)
    local_rank = (
        replaced if replaced is not None else view.first_integer("LOCAL_RANK", default=0 if single else None)
    )
    if is_torchrun:
        local_world_size = view.first_integer("LOCAL_WORLD_SIZE", default=1 if single else None)
        node_name, count_name = "GROUP_RANK", "GROUP_WORLD_SIZE"
    else:
        local_world_size = view.integer("LOCAL_SIZE")
        node_name, count_name = "CROSS_RANK", "CROSS_SIZE"
    one_node = local_world_size == world_size
    num_nodes = view.first_integer(
        count_name, default=1 if one_node else _ceil_div(world_size, local_world_size)
    )
    node_rank = view.first_integer(node_name, default=0 if one_node else None)
    addr = _master_addr(view, num_nodes)
    port = _master_port(view, world_size)
    launcher: Launcher = "torchrun" if is_torchrun else "deepspeed"
    return RankIdentity(
        rank, world_size, local_rank, local_world_size, node_rank, num_nodes, addr, port, launcher
    )


def _from_slurm(view: _EnvView) -> RankIdentity | None:
    if not (view.has("SLURM_PROCID") and view.has("SLURM_STEP_ID")):
        return None
    if view.integer("SLURM_STEP_ID") % 2**32 >= FIRST_OWN_STEP:
        return None
    num_nodes = view.first_integer("SLURM_STEP_NUM_NODES", "SLURM_NNODES", default=1)
    world_size = view.first_integer("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    rank, addr = view.integer("SLURM_PROCID"), _master_addr(view, num_nodes, _slurm_first_node)
    own = view.text("SLURMD_NODENAME")
    if rank == 0 and num_nodes > 1 and own not in (None, addr) and not view.has("MASTER_ADDR"):
        view.fail(
            f"rank 0 is on {own}; expected the step's first node, {addr}",
            f"Set MASTER_ADDR={own} for all ranks, as the step is heterogeneous or places tasks by a hostfile.",
        )
    job_id = f"slurm.{view.text('SLURM_JOB_ID') or view.text('SLURM_JOBID')}.{view.text('SLURM_STEP_ID')}"
    return RankIdentity(
        rank=rank,
        world_size=world_size,
        local_rank=view.integer("SLURM_LOCALID"),
        # Not the nodes' task counts: in a heterogeneous step, their order differs from SLURM_NODEID's (Slurm 22.05).
        local_world_size=len((view.text("SLURM_GTIDS") or "").split(",")),
        node_rank=view.first_integer("SLURM_NODEID", default=0),
        num_nodes=num_nodes,
        master_addr=addr,
        master_port=_master_port(view, world_size, job_id),
        launcher="slurm",
    )


def _slurm_first_node(view: _EnvView) -> str | None:
    """Return the first node of the Slurm step, or None if the node list is invalid.

    Rank 0 runs on this node, unless the step is heterogeneous or places tasks by a hostfile.
    """
    try:
        text = view.text("SLURM_STEP_NODELIST") or view.text("SLURM_JOB_NODELIST") or ""
        return next(iter(expand_nodes(text)), None)
    except ValueError:
        return None


def _from_openmpi(view: _EnvView) -> RankIdentity | None:
    if not view.has("OMPI_COMM_WORLD_RANK"):
        return None
    world_size = view.integer("OMPI_COMM_WORLD_SIZE")
    local_world_size = view.integer("OMPI_COMM_WORLD_LOCAL_SIZE")
    rank = view.integer("OMPI_COMM_WORLD_RANK")
    # OMPI_COMM_WORLD_NODE_RANK is not the machine's index: it counts processes on the machine, over all jobs.
    num_nodes = _ceil_div(world_size, local_world_size)
    return RankIdentity(
        rank=rank,
        world_size=world_size,
        local_rank=view.integer("OMPI_COMM_WORLD_LOCAL_RANK"),
        local_world_size=local_world_size,
        node_rank=_ceil_div(rank + 1, local_world_size) - 1,
        num_nodes=num_nodes,
        master_addr=_master_addr(view, num_nodes),
        master_port=_master_port(
            view, world_size, view.text("PMIX_NAMESPACE") or view.text("OMPI_MCA_ess_base_jobid")
        ),
        launcher="openmpi",
    )


def _master_addr(
    view: _EnvView, num_nodes: int, find: Callable[[_EnvView], str | None] = lambda _: None
) -> str:
    addr = view.text("MASTER_ADDR") or view.text("DET_CHIEF_IP")
    if addr is None and num_nodes > 1:
        addr = find(view)
    if addr is None and num_nodes > 1:
        view.fail(
            f"MASTER_ADDR is unset; expected rank 0's address, for a job on {num_nodes} machines",
            "Set MASTER_ADDR to a host name or address that all of them can reach.",
        )
    return addr or LOOPBACK_ADDR


def _master_port(view: _EnvView, world_size: int, job_id: str | None = None) -> int:
    if view.has("MASTER_PORT"):
        port = view.integer("MASTER_PORT")
        if not 0 < port < 2**16:
            view.fail(
                f"MASTER_PORT is {port}; expected a TCP port between 1 and 65535", "Correct MASTER_PORT."
            )
        return port
    if world_size == 1:
        return 0
    if job_id is None:
        view.fail(
            "MASTER_PORT is unset; expected a TCP port, because no other variable identifies the job",
            "Set MASTER_PORT to the same free port for all ranks.",
        )
    return _FIRST_DERIVED_PORT + zlib.crc32(job_id.encode()) % _NUM_DERIVED_PORTS


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // max(divisor, 1))


def _validated(identity: RankIdentity, view: _EnvView) -> RankIdentity:
    for what, index, count in (
        ("rank", identity.rank, identity.world_size),
        ("local rank", identity.local_rank, identity.local_world_size),
        ("node rank", identity.node_rank, identity.num_nodes),
    ):
        if count < 1 or not 0 <= index < count:
            view.fail(
                f"the {what} is {index} of {count}; expected it to be at least 0 and below that count",
                "Correct the variables, or unset them all to run a single rank.",
            )
    if identity.local_world_size > identity.world_size or identity.num_nodes > identity.world_size:
        view.fail(
            f"the job has {identity.world_size} ranks on {identity.num_nodes} machines, "
            f"{identity.local_world_size} of them here; expected at most {identity.world_size} of either",
            "Correct the variables, or unset them all to run a single rank.",
        )
    return identity


def may_have_accelerator() -> bool:
    """Return False if DeepSpeed will certainly train on the CPU; import no torch."""
    chosen = os.environ.get("DS_ACCELERATOR")
    if chosen:
        return chosen != "cpu"
    return any(glob.glob(f"/dev/{name}") for name in _DEVICE_FILES)  # noqa: PTH207  # pathlib is slower
