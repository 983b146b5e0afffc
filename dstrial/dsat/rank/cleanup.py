"""Take engines out of a living process, as if the next were its first.

A step per thing that DeepSpeed 0.19.8 or torch leaves behind, each with its reason. ``leak_check`` beside it says what is
left all the same; a process to which memory does not return is ended by whoever started it, and another one takes its place.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import os
import random
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from deepspeed.accelerator import get_accelerator
from torch import nn

from dstrial.dsat.rank.leak_check import has_device, process_groups
from dstrial.engine.deepspeed_internals import process

# Where DeepSpeed puts functions of its own: ZeRO 3 replaces torch.nn.functional.linear and never puts it back.
_PATCHED = (torch, torch.nn.functional, torch.nn.init, nn.Module, nn.Linear, nn.Embedding, torch.Tensor)
_HOOKS = (
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
    "_global_forward_pre_hooks",
    "_global_parameter_registration_hooks",
    "_global_module_registration_hooks",
    "_global_buffer_registration_hooks",
)


class ProcessState:
    """The state of a process before its first engine; ``restore`` brings it back.

    It is made after the process group and everything that shall last; what the first ``restore`` leaves lasts too. Functions of
    the namespaces ``keeps`` are put back; by default of those that DeepSpeed is known to change.
    """

    def __init__(self, keeps: Iterable[Any] | None = None) -> None:
        self._is_warm = False
        self._groups = set(process_groups())
        self._namespaces = [
            (owner, {name: value for name, value in vars(owner).items() if callable(value)})
            for owner in (_PATCHED if keeps is None else keeps)
        ]
        self._environment = dict(os.environ)
        self._directory = Path.cwd()
        self._import_path = list(sys.path)
        self._dtype = torch.get_default_dtype()
        self._num_threads = torch.get_num_threads()
        self._numeric_flags = NumericFlags.read()
        self._gc_is_on = gc.isenabled()
        self._random = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        self._device_random = get_accelerator().get_rng_state() if has_device() else None

    def restore(self, engines: list[Any]) -> None:
        """Tear engines down, empty their list, and undo what they did to the process.

        The caller keeps no other reference to them, nor to what they trained.

        Ranks: all that trained with them; destroying groups is not collective with gloo, and is with NCCL.
        """
        while engines:
            _destroy(engines.pop())
        self._undo_patches()
        _reset_globals()
        # Modules, parameters, hooks and engines form cycles through closures: two passes, since finalizers make new ones.
        for _ in range(2):
            gc.collect()
        if not self._is_warm:
            # The million objects of torch's and DeepSpeed's modules never go; to look through them takes seconds.
            gc.freeze()
            self._is_warm = True
        if has_device():
            # NCCL's destroy_process_group frees what kernels of collectives still use (torch 2.13 ProcessGroupNCCL waits for
            # those that were enqueued with a work object only).
            get_accelerator().synchronize()
        self._end_groups()
        self._restore_settings()
        _empty_caches()

    def _undo_patches(self) -> None:
        for owner, before in self._namespaces:
            now = vars(owner)
            for name, value in before.items():
                if now.get(name, value) is not value:
                    setattr(owner, name, value)
        hooks = nn.modules.module
        for name in _HOOKS:
            vars(hooks).get(name, {}).clear()

    def _end_groups(self) -> None:
        """End groups made since: clones of the world's, and those of hpZ, MoE or tensors."""
        process.release_groups()
        # In the order in which they were made, which is the same on all ranks.
        for group in [group for group in process_groups() if group not in self._groups]:
            torch.distributed.destroy_process_group(group)

    def _restore_settings(self) -> None:
        if dict(os.environ) != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
        if Path.cwd() != self._directory:
            os.chdir(self._directory)
        sys.path[:] = self._import_path
        torch.set_default_dtype(self._dtype)
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        self._numeric_flags.restore()
        torch.set_grad_enabled(True)
        if self._gc_is_on:
            gc.enable()  # DeepSpeed's `disable_python_gc` turns it off
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])
        torch.set_rng_state(self._random[2])
        if self._device_random is not None:
            get_accelerator().set_rng_state(self._device_random)


def _destroy(engine: Any) -> None:
    # It removes hooks on gradients, ends offload buffers, DeepNVMe handles and the names kept for debugging.
    with contextlib.suppress(AttributeError):
        engine.destroy()
    loader = getattr(engine, "training_dataloader", None)
    if loader is not None:
        engine.training_dataloader = None
    # Optimizer and module refer to each other and to the engine through closures of hooks; the C++ side of an
    # autograd hook is not seen by Python's collector, so the cycles are cut here.
    module = getattr(engine, "module", None)
    for parameter in module.parameters() if module is not None else ():
        parameter.grad = None
        for name in [name for name in vars(parameter) if name.startswith(process.PARAMETER_ATTRIBUTES)]:
            with contextlib.suppress(AttributeError):
                delattr(parameter, name)
    optimizer = getattr(engine, "optimizer", None)
    for held in (optimizer, engine):
        for name in process.CONTAINERS:
            found = getattr(held, "__dict__", {}).get(name)
            if isinstance(found, (dict, list, set)):
                found.clear()
    for held in (optimizer, getattr(optimizer, "optimizer", None)):
        state = getattr(held, "__dict__", {}).get("state")
        if state is not None and hasattr(state, "clear"):
            state.clear()


def _reset_globals() -> None:
    process.reset_globals()
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and hasattr(dynamo, "reset"):
        dynamo.reset()  # compiled graphs hold the modules that they were compiled for


def _empty_caches() -> None:
    accelerator = get_accelerator()
    if has_device():
        accelerator.empty_cache()
        accelerator.reset_peak_memory_stats()
        empty_host_cache = getattr(torch._C, "_host_emptyCache", None)
        if empty_host_cache is not None:
            empty_host_cache()
    # glibc keeps what was freed in its arenas, and the next configuration's peak would count it.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


# torch 2.9 and later; what was set by these names cannot be asked for by the older ones (it raises RuntimeError).
_FP32_PRECISION = (
    "",
    "cuda.matmul",
    "cudnn",
    "cudnn.conv",
    "cudnn.rnn",
    "mkldnn",
    "mkldnn.matmul",
    "mkldnn.conv",
    "mkldnn.rnn",
)
_ATTRIBUTES = (
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.benchmark_limit",
    "cudnn.deterministic",
    "cudnn.allow_tf32",
    "cuda.matmul.allow_tf32",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_accumulation",
    *(f"{owner}.fp32_precision".lstrip(".") for owner in _FP32_PRECISION),
)
"""Attributes below ``torch.backends``, in the order in which they are put back: the older names change the newer ones."""

_ATTENTION_KERNELS = ("flash", "mem_efficient", "math", "cudnn")


@dataclasses.dataclass(frozen=True, slots=True)
class NumericFlags:
    """Numeric settings of torch."""

    matmul_precision: str | None  # None where older and newer names were mixed
    attributes: Mapping[str, Any]  # below ``torch.backends``, those of this build
    attention_kernels: Mapping[str, bool]  # which may be chosen
    is_deterministic: bool
    only_warns: bool  # nondeterministic algorithms warn instead of failing

    @classmethod
    def read(cls) -> NumericFlags:
        precision = None
        with contextlib.suppress(RuntimeError):
            precision = torch.get_float32_matmul_precision()
        attributes = {}
        for name in _ATTRIBUTES:
            owner, attribute = _owner(name)
            with contextlib.suppress(RuntimeError, AttributeError):
                attributes[name] = getattr(owner, attribute)
        kernels = {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _ATTENTION_KERNELS}
        return cls(
            precision,
            attributes,
            kernels,
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )

    def restore(self) -> None:
        if NumericFlags.read() == self:
            return
        if self.matmul_precision is not None:
            torch.set_float32_matmul_precision(self.matmul_precision)
        for name, value in self.attributes.items():
            owner, attribute = _owner(name)
            setattr(owner, attribute, value)
        for name, is_on in self.attention_kernels.items():
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(is_on)
        torch.use_deterministic_algorithms(self.is_deterministic, warn_only=self.only_warns)


def _owner(name: str) -> tuple[Any, str]:
    *path, attribute = name.split(".")
    owner: Any = torch.backends
    for part in path:
        owner = getattr(owner, part, None)
    return owner, attribute
