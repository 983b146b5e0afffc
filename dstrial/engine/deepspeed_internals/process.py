"""DeepSpeed's state of the process: communication, kernels and globals.

DeepSpeed is imported by the functions, not by the module: some of them are called before anything of it may be.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from packaging.version import Version

COMPATIBLE_OPS = "__compatible_ops__"
"""In ``deepspeed.ops``: name of an operator -> whether it can be compiled here."""

SHARED_MEMORY_OP = ("deepspeed.comm.torch", "build_shm_op")
"""Module and name of what compiles shared-memory collectives for CPUs."""

FUSED_ADAM_KERNEL = ("deepspeed.ops.adam.fused_adam", "multi_tensor_applier")
"""Module and name of what calls the kernel of ``FusedAdam``; absent without CUDA."""

LIST_COMPARISONS = (
    "deepspeed.runtime.zero.utils.assert_lst_len_same_as_other_ranks",
    "deepspeed.runtime.zero.utils.get_lst_from_rank0",
)
"""Functions by which ZeRO 3 compares lists between ranks; the second returns rank 0's."""

LATE_MODULES = ("deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.runtime.zero.stage3")
"""Modules that DeepSpeed imports only when it is used, and that take long."""

MODULES_OF_ENGINES = ("deepspeed.module_inject.auto_ep_config", "deepspeed.moe.ep_repack")
"""Modules that DeepSpeed imports with the first engine, in 40 ms, whatever its model."""

COMPILER = "torch._dynamo"
"""Module that torch's optimizers import at their first step, in 1.3 s of processor time, and that compiles nothing by itself."""
COMPILER_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Set by the import of ``COMPILER``, which also makes the directory, and set again by whatever needs it (torch 2.13)."""

MODULES_OF_ENGINES_SINCE = "0.19.8"
"""The first release, of those that are tested, that has them."""

GATHERS_AWAITED_SINCE = "0.19.8"
"""The first release, of those that are tested, whose ZeRO 3 waits for all parameters that it gathers."""

ENGINE_PHASES = (("forward", "forward"), ("backward", "backward"), ("_take_model_step", "step"))
"""Methods of an engine with which a phase of training begins, and the phase."""

GLOBALS: Mapping[str, Mapping[str, Any]] = {
    # Contexts of ZeRO 3's construction hold modules; one that raised inside leaves itself on the list.
    "deepspeed.runtime.zero.partition_parameters": {
        "zero_init_context": [],
        "top_level_context": None,
        "temp_contiguous_tensor": None,
    },
    # Modules whose forward raised are still on it.
    "deepspeed.runtime.zero.parameter_offload": {"FWD_MODULE_STACK": []},
    # The last pipeline's grid: stages, groups and the ranks that talk to each other.
    "deepspeed.runtime.pipe.p2p": {"_groups": None, "_grid": None},
    # What `deepspeed.checkpointing.configure` was told, and buffers of contiguous checkpoints.
    "deepspeed.runtime.activation_checkpointing.checkpointing": {
        "mpu": None,
        "mp_rank": 0,
        "mp_size": 1,
        "mp_group": None,
        "num_layers": None,
        "deepspeed_checkpointing_enabled": False,
        "PARTITION_ACTIVATIONS": False,
        "CPU_CHECKPOINT": False,
        "CONTIGUOUS_CHECKPOINTING": False,
        "SYNCHRONIZE": False,
        "PROFILE_TIME": False,
        "contiguous_data_buffers": [],
        "data_offsets": [],
        "contiguous_size_buffers": [],
        "size_offsets": [],
        "timers": None,
        "_cpu_offload_engine": None,
    },
}
"""Module -> what its globals are before the first engine; a list is emptied in place."""

GLOBALS_SINCE = {"_cpu_offload_engine": "0.19.8"}
"""Those of ``GLOBALS`` that earlier releases do not have."""

METHOD_CACHES = {"deepspeed.runtime.zero.partitioned_param_coordinator": "PartitionedParameterCoordinator"}
"""Classes whose methods remember results by ``self``, which keeps ZeRO 3's coordinator, and by it the engine, for ever."""

PARAMETER_ATTRIBUTES = ("ds_", "_hp", "_z3", "grad_accum")
"""How attributes begin that DeepSpeed hangs on parameters."""

CONTAINERS = (
    "_grad_acc_hooks",
    "param_dict",
    "ipg_buckets",
    "averaged_gradients",
    "all_grad_tensors",
)
"""Containers of engines and optimizers that keep gradients and hooks alive."""


def torch_backend() -> Any:
    """Return the class of collectives, ``send`` and ``recv`` in ``deepspeed.comm``."""
    # Not `import deepspeed.comm.torch as`, which finds the `torch` that deepspeed.comm imports.
    return importlib.import_module("deepspeed.comm.torch").TorchBackend


def import_modules_of_engines() -> None:
    """Import what the first engine would, as far as this release has it."""
    cache = os.environ.get(COMPILER_CACHE_VARIABLE)
    for name in (*MODULES_OF_ENGINES, COMPILER):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    if cache is None and (made := os.environ.pop(COMPILER_CACHE_VARIABLE, None)):
        with contextlib.suppress(OSError):  # another process uses it
            os.rmdir(made)  # noqa: PTH106  # a fork has a temporary directory of its own


@contextlib.contextmanager
def no_compatible_ops() -> Iterator[None]:
    """Let DeepSpeed find that no operator can be compiled, while the block lasts.

    Source: ``ops/__init__.py:31``, an attribute that probes all operators when it is first asked for; 0.19.0 probes at import.
    """
    from deepspeed import ops

    probed = vars(ops).get(COMPATIBLE_OPS)
    # Has every name: 0.19.0 takes it by the operator's name without a default (comm/torch.py:33).
    vars(ops)[COMPATIBLE_OPS] = collections.defaultdict(bool)
    try:
        yield
    finally:
        # Where nothing was probed yet, the attribute is DeepSpeed's lazy one again.
        del vars(ops)[COMPATIBLE_OPS]
        if probed is not None:
            vars(ops)[COMPATIBLE_OPS] = probed


def replace_available_memory(function: Callable[..., int]) -> None:
    """Have CUDA's free bytes asked of ``function(accelerator, device_index=None)``.

    Source: ``accelerator/cuda_accelerator.py:188``, which takes words of ``CUDA_VISIBLE_DEVICES`` for integers.
    """
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    CUDA_Accelerator.available_memory = function


def op_builder() -> Any:
    """Return the base class of operators, whose ``load`` compiles and imports."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    return OpBuilder


def nested_phases() -> list[tuple[Any, str, str]]:
    """Return calls that communicate: class or module, name, ``reduce`` or ``gather``."""
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.runtime.zero import partitioned_param_coordinator, stage3, stage_1_and_2

    coordinator = partitioned_param_coordinator.PartitionedParameterCoordinator
    return [
        (DeepSpeedEngine, "allreduce_gradients", "reduce"),
        (stage_1_and_2.DeepSpeedZeroOptimizer, "reduce_ipg_grads", "reduce"),
        (
            stage3.DeepSpeedZeroOptimizer_Stage3,
            "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads",
            "reduce",
        ),
        (coordinator, "_PartitionedParameterCoordinator__all_gather_params", "gather"),
        (stage_1_and_2, "all_gather_dp_groups", "gather"),
        (bf16_optimizer, "all_gather_dp_groups", "gather"),
    ]


def reset_globals() -> None:
    """Reset the imported modules of ``GLOBALS``, and empty ``METHOD_CACHES``."""
    for name, values in GLOBALS.items():
        module = sys.modules.get(name)
        for attribute, value in values.items() if isinstance(module, ModuleType) else ():
            found = getattr(module, attribute, None)
            if isinstance(value, list) and isinstance(found, list):
                found.clear()  # in place, for other modules hold it by name
            elif hasattr(module, attribute):
                setattr(module, attribute, value)
    for name, owner in METHOD_CACHES.items():
        for method in list(vars(getattr(sys.modules.get(name), owner, object)).values()):
            # The cache is inside a decorator, which does not say what it decorates.
            inside = [cell.cell_contents for cell in getattr(method, "__closure__", None) or ()]
            for one in (method, *inside):
                if hasattr(one, "cache_clear"):
                    one.cache_clear()


def release_groups() -> None:
    """Let DeepSpeed forget all its process groups; the groups themselves stay.

    Source: ``utils/groups.py:89``, ``_release_process_group_references``; 0.19.0 has no such function, and the same globals.
    """
    from deepspeed.utils import groups

    release = getattr(groups, "_release_process_group_references", None)
    if release is not None:
        release(None)
        return
    for name, value in list(vars(groups).items()):
        if name.startswith("_") and name.removesuffix("_RANKS").endswith("_GROUP"):
            if isinstance(value, dict):
                value.clear()
            else:
                setattr(groups, name, None)
    groups._MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE = groups._MPU_TENSOR_MODEL_PARALLEL_RANK = None
    groups.expert_tensor_parallel_world_size = 1
    groups.mesh_device = groups.mpu = None


def gather_one_by_one() -> tuple[tuple[Any, str, Any], ...]:
    """Have ZeRO 3 wait for each small parameter that it gathers.

    Returns what was replaced: owner, name, value.

    Releases before ``GATHERS_AWAITED_SINCE`` wait for the last one only; with gloo the others may not be whole by then.

    Source: ``Init._allgather_params_coalesced``, ``runtime/zero/partition_parameters.py:2022``.
    """
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import Init

    if Version(deepspeed.__version__) >= Version(GATHERS_AWAITED_SINCE):
        return ()
    theirs = Init._allgather_params_coalesced

    def one_by_one(self: Any, param_list: Any, hierarchy: int = 0, quantize: bool = False) -> None:
        for param in param_list:
            theirs(self, [param], hierarchy, quantize)

    Init._allgather_params_coalesced = one_by_one
    return ((Init, "_allgather_params_coalesced", theirs),)


def operators() -> list[tuple[str, Any, bool]]:
    """Return DeepSpeed's operators: name, builder, whether the package compiled it."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    return [(name, builder, bool(installed_ops.get(name))) for name, builder in ALL_OPS.items()]


def can_compile(builder: Any) -> bool:
    """Say whether an operator can be compiled here; not if DeepSpeed's probe fails.

    Source: ``probe_is_compatible``, ``ops/op_builder/builder.py:64``, which 0.19.0 does not have.
    """
    from deepspeed.ops.op_builder import builder as builders

    probe = getattr(builders, "probe_is_compatible", None)
    if probe is not None:
        return bool(probe(builder, False))
    try:
        return bool(builder.is_compatible(False))
    except Exception:  # noqa: BLE001 - as 0.19.8 does: whatever a probe of another machine stumbles over
        return False


def cuda_mismatch() -> str | None:
    """Return why DeepSpeed refuses this nvcc for this torch; None if it does not."""
    from deepspeed.ops.op_builder import builder

    try:
        builder.assert_no_cuda_mismatch()
    except Exception as error:  # noqa: BLE001 - its own, and whatever an nvcc of another form makes it stumble over
        return " ".join(str(error).split())
    return None
