"""DeepSpeed's global state in a process: communication, kernels, module globals.

The functions import DeepSpeed when called, because some importers of this module must not import DeepSpeed yet.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from packaging.version import Version

COMPATIBLE_OPS = "__compatible_ops__"
"""Attribute of ``deepspeed.ops``: operator name -> whether this machine can compile the operator."""

SHARED_MEMORY_OP = ("deepspeed.comm.torch", "build_shm_op")
"""Module and name of the function that compiles shared-memory collectives for CPUs."""

FUSED_ADAM_KERNEL = ("deepspeed.ops.adam.fused_adam", "multi_tensor_applier")
"""Module and name of the object that calls ``FusedAdam``'s kernel; missing without CUDA."""

MODULES_OF_ENGINES = ("deepspeed.module_inject.auto_ep_config", "deepspeed.moe.ep_repack")
"""Modules that DeepSpeed 0.19.8 imports when it creates a process's first engine, in 40 ms."""

COMPILER = "torch._dynamo"
"""Module that torch's optimizers import at their first step, in 1.3 s of CPU time; the import compiles nothing."""
COMPILER_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable that the import of ``COMPILER`` sets to a directory that it creates (torch 2.13)."""

GATHERS_AWAITED_SINCE = "0.19.8"
"""First tested DeepSpeed release in which ZeRO 3 waits for all parameters that it gathers."""

ENGINE_PHASES = (("forward", "forward"), ("backward", "backward"), ("_take_model_step", "step"))
"""(engine method, training phase that begins with the method)."""


def torch_backend() -> Any:
    """Return DeepSpeed's class ``TorchBackend``: collectives, ``send`` and ``recv``."""
    # Not `import deepspeed.comm.torch as`, which would return the `torch` that deepspeed.comm imports.
    return importlib.import_module("deepspeed.comm.torch").TorchBackend


def import_modules_of_engines() -> None:
    """Import the modules that the first engine and the first step would import later.

    Modules that the installed releases of DeepSpeed and torch do not have are skipped.
    """
    cache = os.environ.get(COMPILER_CACHE_VARIABLE)
    for name in (*MODULES_OF_ENGINES, COMPILER):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    if cache is None and (made := os.environ.pop(COMPILER_CACHE_VARIABLE, None)):
        with contextlib.suppress(OSError):  # another process has files in the directory
            os.rmdir(made)  # noqa: PTH106  # each fork creates its own cache directory


@contextlib.contextmanager
def no_compatible_ops() -> Iterator[None]:
    """Make DeepSpeed treat all operators as not compilable inside the block.

    Source: ``ops/__init__.py:31``; DeepSpeed probes all operators when ``deepspeed.ops.__compatible_ops__`` is first
    read; release 0.19.0 does so at import.
    """
    from deepspeed import ops

    probed = vars(ops).get(COMPATIBLE_OPS)
    # The mapping has every name, because 0.19.0 reads it without a default (comm/torch.py:33).
    vars(ops)[COMPATIBLE_OPS] = collections.defaultdict(bool)
    try:
        yield
    finally:
        # If nothing was probed yet, restore DeepSpeed's lazy attribute.
        del vars(ops)[COMPATIBLE_OPS]
        if probed is not None:
            vars(ops)[COMPATIBLE_OPS] = probed


def replace_available_memory(function: Callable[..., int]) -> None:
    """Replace ``CUDA_Accelerator.available_memory(device_index)`` by ``function``.

    Source: ``accelerator/cuda_accelerator.py:188``, which parses ``CUDA_VISIBLE_DEVICES`` as integers.
    """
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    CUDA_Accelerator.available_memory = function


def op_builder() -> Any:
    """Return DeepSpeed's ``OpBuilder``; its ``load`` compiles and imports an operator."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    return OpBuilder


def release_groups() -> None:
    """Clear DeepSpeed's references to process groups, without destroying the groups.

    Source: ``utils/groups.py:89``, ``_release_process_group_references``; 0.19.0 has the same globals without the function.
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
    """Make ZeRO 3 gather small parameters one by one, and wait for each.

    Returns the replaced attributes as (owner, name, old value); empty if the installed release needs no replacement.

    Releases before ``GATHERS_AWAITED_SINCE`` wait only for the last of several parameters; with gloo, earlier ones may still
    be incomplete.

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


def cuda_mismatch() -> str | None:
    """Return why DeepSpeed rejects this machine's ``nvcc``; None if accepted.

    DeepSpeed compares the CUDA versions of ``nvcc`` and torch.
    """
    from deepspeed.ops.op_builder import builder

    try:
        builder.assert_no_cuda_mismatch()
    except Exception as error:  # noqa: BLE001 - its own errors, and any error from parsing nvcc's output
        return " ".join(str(error).split())
    return None
