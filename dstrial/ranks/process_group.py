"""Create and destroy this rank's process group, on DeepSpeed's accelerator."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import importlib
import importlib.util
import logging
import os
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed
from torch.distributed import distributed_c10d

from dstrial.engine.deepspeed_internals import process
from dstrial.errors import RankError, RankTimeoutError
from dstrial.fork_server import NVML_CHECK_VARIABLE
from dstrial.ranks.channel import TIMEOUT_VARIABLE
from dstrial.ranks.identity import (
    DEVICE_VARIABLE,
    SHARE_VARIABLE,
    RankIdentity,
    device_index,
    device_variable,
    is_shared,
    may_share,
)
from dstrial.ranks.rendezvous_store import as_init_method, open_store
from dstrial.ranks.sockets import free_port, loopback_only, raise_file_limit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

logger = logging.getLogger("dstrial.ranks")

_DEFAULT_TIMEOUT = "_get_default_timeout"  # torch's function that returns the default timeout of a new group
MANUAL_INIT_VARIABLE = "DET_MANUAL_INIT_DISTRIBUTED"
"""Environment variable of Determined: if it is set, user code creates the process group."""

# Accelerators that DeepSpeed detects by a plug-in module instead of torch.accelerator.
_ACCELERATOR_PLUGINS = (
    "torch_npu",
    "torch_sdaa",
    "habana_frameworks",
    "torch_mlu",
    "torch_supa",
    "torch_xmlir",
)


_Replaced: TypeAlias = "tuple[tuple[Any, str, Any], ...]"
"""Attributes that were replaced, as (owner, name, old value)."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Created:
    """What ``init_process_group`` changed in this process, for ``shutdown`` to undo."""

    variables_before: Mapping[str, str | None]
    made_group: bool
    replaced: _Replaced = ()


_created: _Created | None = None


def has_accelerator(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether DeepSpeed will use an accelerator, without importing DeepSpeed.

    If ``DS_ACCELERATOR`` is set in ``environ`` (None: ``os.environ``), the result is whether its value is not ``cpu``.
    """
    chosen = (os.environ if environ is None else environ).get("DS_ACCELERATOR")
    if chosen:
        return chosen != "cpu"
    if num_torch_accelerators():
        return True
    return any(importlib.util.find_spec(name) is not None for name in _ACCELERATOR_PLUGINS)


def num_torch_accelerators() -> int:
    """Return torch's number of accelerators, without breaking CUDA in later forks.

    By default, torch counts by initialising the CUDA driver, after which forks cannot use CUDA. So this function sets
    ``PYTORCH_NVML_BASED_CUDA_CHECK``, as DeepSpeed does later (deepspeed/__init__.py:14). In two cases torch ignores this
    variable, and forks cannot use CUDA: ``CUDA_VISIBLE_DEVICES`` lists MIG instances (2.13 cuda/__init__.py,
    ``_device_count_nvml``), or torch 2.6 counts by ``torch.accelerator``.

    Ranks: any; no communication.
    """
    os.environ.setdefault(NVML_CHECK_VARIABLE, "1")
    if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0
    return int(torch.accelerator.device_count()) if torch.accelerator.is_available() else 0


def prepare_accelerator() -> None:
    """Set ``DS_ACCELERATOR`` to ``cpu`` if the machine has no accelerator.

    A no-op if the variable is set. Call this before DeepSpeed is first imported, because the import reads the variable.
    """
    if "DS_ACCELERATOR" not in os.environ and not has_accelerator():
        os.environ["DS_ACCELERATOR"] = "cpu"


def init_process_group(identity: RankIdentity, *, timeout_s: float) -> None:
    """Create torch's default process group through DeepSpeed, unless the group exists.

    In any case, raise the limit of open files and select the accelerator. Create no group if torch.distributed is
    initialised, or if ``DET_MANUAL_INIT_DISTRIBUTED`` is set (Determined's variable for user code that creates the group).
    Otherwise missing environment variables of torch and DeepSpeed are set until ``shutdown``. The backend is that of
    DeepSpeed's accelerator, gloo on CPU.

    The rendezvous of ``dstrial.launch`` on one machine is a private file; a single rank needs no rendezvous. Otherwise rank 0
    or torchrun serves the rendezvous at ``identity.master_port``, on loopback if the job is on one machine. If another
    program has taken the port, rank 0 fails at once; ``MASTER_PORT`` sets another port. On one machine gloo and NCCL use
    loopback unless ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME`` are set.

    Args:
        identity: this process's identity, from ``identify(os.environ)``.
        timeout_s: timeout in seconds of the rendezvous and, on most backends, of each collective operation. It is also
            the default timeout of groups that are created later.

    Raises:
        RankTimeoutError: a rank did not reach the rendezvous in time.
        RankError: the rendezvous port is taken, or rank 0 cannot be reached.

    Ranks: all, collectively.
    """
    global _created
    raise_file_limit(identity.world_size)
    prepare_accelerator()
    ask_torch_for_free_memory()
    if torch.distributed.is_initialized() or os.environ.get(MANUAL_INIT_VARIABLE):
        return
    addr, port = identity.master_addr, identity.master_port or free_port()
    own_device = device(identity)
    changes = {
        **_missing_variables(identity, addr, port),
        **_variables_of_device(identity, own_device),
    }
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    _created = _Created(before, made_group=False)
    try:
        replaced = _create_group(identity, own_device, timeout_s)
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
    _created = _Created(before, made_group=True, replaced=replaced)


def _create_group(identity: RankIdentity, own_device: torch.device, timeout_s: float) -> _Replaced:
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    is_cpu = accelerator.device_name() == "cpu"
    num_devices = int(accelerator.device_count())
    shares = not is_cpu and is_shared(identity, num_devices, may_share=may_share(os.environ))
    timeout = datetime.timedelta(seconds=timeout_s)
    replaced: _Replaced = ()
    init_method = as_init_method(open_store(identity, timeout_s=timeout_s), identity)
    if shares:
        replaced = _share_device(identity, own_device, init_method, timeout)
    with without_compiled_collectives(is_cpu=is_cpu):
        deepspeed.init_distributed(
            dist_backend="gloo" if shares else accelerator.communication_backend_name(),
            auto_mpi_discovery=False,
            timeout=timeout,
            init_method=init_method,
            verbose=False,
        )
    if is_cpu or shares:  # the backend is gloo
        replaced = (*replaced, *process.gather_one_by_one())
    return (*replaced, *_share_timeout(timeout))


def _missing_variables(identity: RankIdentity, addr: str, port: int) -> dict[str, str]:
    wanted = {
        "RANK": str(identity.rank),
        "WORLD_SIZE": str(identity.world_size),
        "LOCAL_RANK": str(identity.local_rank),
        "MASTER_ADDR": addr,
        "MASTER_PORT": str(port),
        # DeepSpeed's CPU accelerator reads its device count from LOCAL_SIZE, and runs numactl if the variable is unset.
        "LOCAL_SIZE": str(identity.local_world_size),
        **(loopback_only(os.environ) if identity.num_nodes == 1 else {}),
    }
    return {name: value for name, value in wanted.items() if not os.environ.get(name)}


def _share_timeout(timeout: datetime.timedelta) -> _Replaced:
    """Make ``timeout`` the default of groups created later; return what was replaced.

    ``new_group`` does not inherit the default group's timeout, and DeepSpeed passes no timeout. DeepSpeed's groups would use
    torch's default of 30 minutes (10 with NCCL). So torch's function that returns the default is replaced (2.6 to 2.13
    distributed_c10d.py: ``new_group``, ``split_group``). If the user has set no timeout, the shorter of ``timeout`` and
    torch's default applies. Replace nothing and return () if this torch release has no such function.
    """
    theirs = getattr(distributed_c10d, _DEFAULT_TIMEOUT, None)
    if theirs is None:  # another torch release
        return ()
    is_asked_for = bool(os.environ.get(TIMEOUT_VARIABLE))

    def of_default_group(backend: Any) -> datetime.timedelta:
        return timeout if is_asked_for else min(timeout, theirs(backend))

    setattr(distributed_c10d, _DEFAULT_TIMEOUT, of_default_group)
    return ((distributed_c10d, _DEFAULT_TIMEOUT, theirs),)


def _variables_of_device(identity: RankIdentity, own_device: torch.device) -> dict[str, str]:
    """Return environment variables that make DeepSpeed use ``own_device``.

    DeepSpeed 0.19.8 uses ``LOCAL_RANK`` as the device's index (comm/torch.py:280, runtime/engine.py:1966,
    runtime/zero/partition_parameters.py:1138). Open MPI's variable must have the same value (runtime/engine.py:1962). A
    third variable stores the real local rank for ``identify``. Return {} if the index already is the local rank.
    """
    if own_device.index is None or own_device.index == identity.local_rank:
        return {}
    index = str(own_device.index)
    names = {"LOCAL_RANK", *({"OMPI_COMM_WORLD_LOCAL_RANK"} & os.environ.keys())}
    return {**dict.fromkeys(names, index), DEVICE_VARIABLE: device_variable(identity, own_device.index)}


def _share_device(
    identity: RankIdentity, own_device: torch.device, init_method: str, timeout: datetime.timedelta
) -> _Replaced:
    """Create a gloo group for ranks that share a device; return what was replaced.

    NCCL rejects two ranks on one device. DeepSpeed accepts an existing group with any backend (comm/comm.py:878). A group that
    DeepSpeed creates is bound to the device, for which gloo lacks ``perform_nocolor_split`` (torch 2.13
    distributed_c10d.py:2057). Gloo's collectives copy CUDA tensors through the host; reduce-scatter is an all-reduce of a copy
    (ProcessGroupGloo.cpp, ``_reduce_scatter_base``). Gloo's ``send`` and ``recv`` would pass the device address to the socket.
    So ``send`` and ``recv`` of DeepSpeed's backend are replaced by functions that copy through the host.

    DeepSpeed's ``stage_on_cpu`` (comm/torch.py:137) is not used: it also copies inputs back after ZeRO 3 has changed them, so
    that losses differ without an error.
    """
    if identity.rank == 0:
        logger.warning(
            "%s=1: %d ranks of this machine share %s over gloo, through host memory. That is for tests and small experiments: "
            "it is slow, and memory and timings say nothing about one rank per device.",
            SHARE_VARIABLE,
            identity.local_world_size,
            own_device,
        )
    torch.distributed.init_process_group("gloo", init_method=init_method, timeout=timeout)
    backend = process.torch_backend()
    replaced = tuple((backend, name, getattr(backend, name)) for name in ("send", "recv"))
    backend.send, backend.recv = _send_from_host, _receive_on_host
    return replaced


def _send_from_host(_self: Any, tensor: torch.Tensor, dst: int, group: Any = None, tag: int = 0) -> None:
    torch.distributed.send(tensor.detach().to("cpu"), dst, group=group, tag=tag)


def _receive_on_host(
    _self: Any, tensor: torch.Tensor, src: int | None = None, group: Any = None, tag: int = 0
) -> int:
    received = torch.empty(tensor.shape, dtype=tensor.dtype)
    sender = torch.distributed.recv(received, src, group=group, tag=tag)
    with torch.no_grad():
        tensor.copy_(received)
    return sender


def device(identity: RankIdentity) -> torch.device:
    """Make this rank's device current and return it, such as ``cuda:1`` or ``cpu``.

    Raises:
        RankError: this machine has more ranks than accelerators, and ``DSTRIAL_SHARE_DEVICE`` is not 1.
    """
    prepare_accelerator()
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return torch.device("cpu")
    index = device_index(
        identity,
        int(accelerator.device_count()),
        accelerator.device_name(),
        may_share=may_share(os.environ),
    )
    accelerator.set_device(index)
    return torch.device(accelerator.device_name(index))


def shutdown() -> None:
    """Undo ``init_process_group``: destroy the group and restore the variables.

    A no-op if ``init_process_group`` changed nothing, or after an earlier call. Can be called after an error.
    """
    global _created
    created, _created = _created, None
    if created is None:
        return
    if created.made_group and torch.distributed.is_initialized():
        import deepspeed.comm

        deepspeed.comm.destroy_process_group()
        process.release_groups()  # DeepSpeed 0.19.0 would reuse the destroyed groups for later engines
    for owner, name, theirs in created.replaced:
        setattr(owner, name, theirs)
    for name, value in created.variables_before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def keep() -> None:
    """Keep the process group until the process exits; ``shutdown`` becomes a no-op.

    For a library that needs the group after the end of dstrial's context. At interpreter exit the group is destroyed, before
    torch's threads end.

    Ranks: any; no communication.
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
    """Prevent DeepSpeed from compiling a shared-memory collective in the block.

    Only inference uses this collective (``inference_all_reduce``, with gloo as fallback). Yet DeepSpeed 0.19.8 compiles it on
    every CPU rank, for most of a minute. A rank killed during the build leaves a stale lock file that blocks all later runs.

    Args:
        is_cpu: whether DeepSpeed trains on the CPU; otherwise this is a no-op.

    Ranks: any; no communication.
    """
    with process.no_compatible_ops() if is_cpu else contextlib.nullcontext():
        yield


def ask_torch_for_free_memory() -> None:
    """Make DeepSpeed ask torch for free device memory if devices are listed by UUID.

    A no-op if ``CUDA_VISIBLE_DEVICES`` is unset or lists integers only. DeepSpeed 0.19.8 (``cuda_accelerator.py:188``) parses
    the variable as integers when ZeRO 1 and 2 read the free memory. MIG instances have only UUIDs, and users may list whole
    devices by UUID.

    Ranks: any; no communication.
    """
    words = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if all(word.strip().isdecimal() for word in words) or words == [""]:
        return
    process.replace_available_memory(_available_memory)


def _available_memory(_accelerator: Any, device_index: int | None = None) -> int:
    free_bytes, _ = torch.cuda.mem_get_info(device_index)
    return int(free_bytes)
