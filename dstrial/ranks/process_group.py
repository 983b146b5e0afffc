"""Create and end this rank's process group, on whatever accelerator DeepSpeed finds."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import importlib.util
import os
from typing import TYPE_CHECKING

import torch
import torch.distributed

from dstrial.errors import RankError, RankTimeoutError
from dstrial.ranks.device_memory import ask_torch_for_free_memory
from dstrial.ranks.identity import RankIdentity
from dstrial.ranks.meeting import as_init_method, open_store
from dstrial.ranks.sockets import free_port, loopback_only

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MANUAL_INIT_VARIABLE = "DET_MANUAL_INIT_DISTRIBUTED"

# Accelerators that DeepSpeed finds by their plug-in's module rather than through torch.accelerator.
_ACCELERATOR_PLUGINS = (
    "torch_npu",
    "torch_sdaa",
    "habana_frameworks",
    "torch_mlu",
    "torch_supa",
    "torch_xmlir",
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Created:
    """What ``init_process_group`` did to this process and ``shutdown`` has to undo."""

    variables_set: tuple[str, ...]
    made_group: bool


_created: _Created | None = None


def has_accelerator(environ: Mapping[str, str] | None = None) -> bool:
    """Say whether DeepSpeed will train on something other than the CPU, without importing it.

    Args:
        environ: ``os.environ`` if None; its ``DS_ACCELERATOR`` decides if set.

    Ranks: any; no communication.
    """
    chosen = (os.environ if environ is None else environ).get("DS_ACCELERATOR")
    if chosen:
        return chosen != "cpu"
    if torch.accelerator.is_available():
        return True
    return any(importlib.util.find_spec(name) is not None for name in _ACCELERATOR_PLUGINS)


def prepare_accelerator() -> None:
    """Choose DeepSpeed's CPU accelerator, in this process only, on a machine that has no other.

    Has to be called before deepspeed is first imported: DeepSpeed settles its accelerator then.

    Ranks: any; no communication.
    """
    if "DS_ACCELERATOR" not in os.environ and not has_accelerator():
        os.environ["DS_ACCELERATOR"] = "cpu"


def init_process_group(identity: RankIdentity, *, timeout_s: float) -> None:
    """Bring up torch's default process group through DeepSpeed, unless it is up already.

    Does nothing where torch.distributed is initialised or ``DET_MANUAL_INIT_DISTRIBUTED`` is set, as
    Determined documents for users who do it themselves. Otherwise the environment variables that torch
    and DeepSpeed read are set where missing (until ``shutdown``). The backend is that of DeepSpeed's
    accelerator, gloo on CPU.

    Ranks of ``dstrial.launch`` on one machine meet in a file of its own, a single rank nowhere. Else rank 0 serves
    the rendezvous at ``identity.master_port``, on loopback if the job is on one machine, unless torchrun serves it.
    If another program on the machine holds a port that was derived from the job's id, rank 0 fails at once with an
    error that names it, and setting ``MASTER_PORT`` chooses another. On one machine gloo and NCCL keep to loopback
    unless ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME`` say otherwise.

    Args:
        identity: who this process is, from ``identify(os.environ)``.
        timeout_s: deadline of the rendezvous and, on most backends, of each collective operation, seconds.

    Raises:
        RankTimeoutError: not all ranks came to the rendezvous in time.
        RankError: the rendezvous port is taken, or rank 0 cannot be reached.

    Ranks: all, collectively.
    """
    global _created
    prepare_accelerator()
    ask_torch_for_free_memory()
    if torch.distributed.is_initialized() or os.environ.get(MANUAL_INIT_VARIABLE):
        return
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    addr, port = identity.master_addr, identity.master_port or free_port()
    wanted = {
        "RANK": str(identity.rank),
        "WORLD_SIZE": str(identity.world_size),
        "LOCAL_RANK": str(identity.local_rank),
        "MASTER_ADDR": addr,
        "MASTER_PORT": str(port),
        # DeepSpeed's CPU accelerator counts its "devices" with it, and runs numactl if it is missing.
        "LOCAL_SIZE": str(identity.local_world_size),
        **(loopback_only(os.environ) if identity.num_nodes == 1 else {}),
    }
    missing = {name: value for name, value in wanted.items() if not os.environ.get(name)}
    os.environ.update(missing)
    _created = _Created(tuple(missing), made_group=False)
    accelerator = get_accelerator()
    device(identity)
    try:
        store = open_store(identity, timeout_s=timeout_s)
        with without_compiled_collectives(is_cpu=accelerator.device_name() == "cpu"):
            deepspeed.init_distributed(
                dist_backend=accelerator.communication_backend_name(),
                auto_mpi_discovery=False,
                timeout=datetime.timedelta(seconds=timeout_s),
                init_method=as_init_method(store, identity),
                verbose=False,
            )
    except RankError:
        shutdown()
        raise
    except torch.distributed.DistStoreError as error:
        raise RankTimeoutError(
            f"the rendezvous at {addr}:{port} has waited {timeout_s:g} s for all {identity.world_size} ranks "
            f"(this is rank {identity.rank}); expected every rank to arrive. "
            "Look at the output of the ranks that did not start."
        ) from error
    except torch.distributed.DistNetworkError as error:
        shutdown()
        raise RankError(
            f"the rendezvous address {addr}:{port} cannot be used: {error}; expected a port that rank 0 can serve and all "
            "ranks can reach. Set MASTER_PORT (and MASTER_ADDR for several machines), the same for all ranks."
        ) from error
    _created = _Created(tuple(missing), made_group=True)


def device(identity: RankIdentity) -> torch.device:
    """Make this rank's accelerator the current one and return it.

    Returns:
        For example ``cuda:1`` on local rank 1; ``cpu`` where there is no accelerator.

    Raises:
        RankError: there are more ranks on this machine than accelerators.

    Ranks: any; no communication.
    """
    prepare_accelerator()
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return torch.device("cpu")
    num_devices = int(accelerator.device_count())
    # A launcher that shows every rank only its own accelerator leaves one, with index 0.
    device_idx = 0 if num_devices == 1 and identity.local_world_size > 1 else identity.local_rank
    if device_idx >= num_devices:
        raise RankError(
            f"local rank is {identity.local_rank} on a machine with {num_devices} {accelerator.device_name()}"
            " devices; expected at most one rank per device. "
            f"Start {num_devices} ranks here, or set DS_ACCELERATOR=cpu."
        )
    accelerator.set_device(device_idx)
    return torch.device(accelerator.device_name(device_idx))


def shutdown() -> None:
    """End the process group and unset the variables that ``init_process_group`` made; a no-op otherwise.

    Safe to call more than once, and after an error.

    Ranks: each its own; no communication.
    """
    global _created
    created, _created = _created, None
    if created is None:
        return
    if created.made_group and torch.distributed.is_initialized():
        import deepspeed.comm

        deepspeed.comm.destroy_process_group()
    for name in created.variables_set:
        os.environ.pop(name, None)


def keep() -> None:
    """Leave the process group up for as long as the process lives: ``shutdown`` then does nothing.

    For a group that was made for a library, which goes on using it after everything of dstrial's has ended. It ends
    when the interpreter does, before torch's own threads are torn down under it.

    Ranks: each its own; no communication.
    """
    global _created
    _created = None
    atexit.register(_end_kept_group)


def _end_kept_group() -> None:
    import deepspeed.comm

    if torch.distributed.is_initialized() and deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()


@contextlib.contextmanager
def without_compiled_collectives(*, is_cpu: bool) -> Iterator[None]:
    """Keep DeepSpeed from compiling its shared-memory collective while it sets up a group on CPU.

    It serves inference only (``inference_all_reduce``; gloo does it otherwise), yet 0.19.8 builds it on
    every CPU rank: that needs a C++ compiler, takes most of a minute the first time, a rank killed
    meanwhile leaves a lock file on which all later runs wait for ever, and each rank leaves 67 MB in /dev/shm.

    Args:
        is_cpu: whether DeepSpeed trains on the CPU; nothing is done otherwise.

    Ranks: any; no communication.
    """
    from deepspeed import ops

    if not is_cpu:
        yield
        return
    name = "__compatible_ops__"
    probed = vars(ops).get(name)
    vars(ops)[name] = {}
    try:
        yield
    finally:
        # Where nothing was probed yet, the attribute is DeepSpeed's lazy one again.
        del vars(ops)[name]
        if probed is not None:
            vars(ops)[name] = probed
