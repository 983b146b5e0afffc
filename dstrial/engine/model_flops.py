"""Count the FLOPs of torch operations, and those of recomputation separately.

Counting does not change training results. The count is marked as unknown if an operation has no formula. A compiler or fused
kernel hides operations from torch's dispatcher, so that they cannot be counted (``why_uncountable``). Only activation
checkpointing counts as recomputation; recomputation in a custom ``autograd.Function.backward`` counts as the model's FLOPs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from dstrial.engine.deepspeed_internals import engines as engines_of_deepspeed

ResultT = TypeVar("ResultT")

_KNOWN_NAMESPACES = frozenset(
    {
        "aten",
        "prim",
        "prims",
        "profiler",
        "c10d",
        "_c10d_functional",
        "c10d_functional",
        "_dtensor",
        "debugprims",
    }
)
"""Namespaces whose relevant operations have torch formulas; the FLOPs of their other operations are negligible."""

_BACKENDS = ("CPU", "CUDA", "XPU", "HPU", "PrivateUse1")
"""Dispatch keys under which torch registers the kernels of devices."""


@dataclasses.dataclass(frozen=True, slots=True)
class FlopCount:
    """The FLOPs of counted operations on this rank.

    Attributes:
        total: FLOPs of matrix products, convolutions and attention; a multiply-add counts as two.
        recomputed: FLOPs in ``total`` that activation checkpointing recomputed in backward passes.
        unknown: why the numbers are invalid; None if the numbers are valid.
    """

    total: float
    recomputed: float = 0.0
    unknown: str | None = None

    @property
    def model(self) -> float:
        return self.total - self.recomputed


def _grouped_product_flops(left: torch.Tensor, right: torch.Tensor, *_args: Any, **_kwargs: Any) -> int:
    num = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return int(2 * num * left.shape[-2] * left.shape[-1] * right.shape[-1])


def flop_formulas() -> dict[Any, Callable[..., Any]]:
    """Return torch operation -> FLOP formula: torch's own, and some that torch lacks."""
    aten, attention = torch.ops.aten, "_scaled_dot_product_flash_attention"
    lacking = {
        f"{attention}_for_cpu": flop_registry[getattr(aten, attention)],
        f"{attention}_for_cpu_backward": flop_registry[getattr(aten, f"{attention}_backward")],
        "_grouped_mm": _grouped_product_flops,
    }
    return {
        getattr(aten, name): formula for name, formula in lacking.items() if hasattr(aten, name)
    } | flop_registry


class _Formulas(dict[Any, Callable[..., Any]]):
    """Operation -> FLOP formula. ``operation in self`` is True if it has a kernel."""

    # ``FlopCounterMode`` decomposes operations that are not in its formulas. The parts of an operation such as the
    # backward of SiLU round differently than its kernel, so counting would change what a batch trains.

    def __contains__(self, operation: Any) -> bool:
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        return any(has_kernel(operation.name(), backend) for backend in _BACKENDS)


class FlopCounter(FlopCounterMode):
    """Context manager that counts the FLOPs of torch operations.

    An operation without a formula raises no error; it makes the count unknown.

    Attributes:
        on_result: if not None, ``on_result(result, (args, kwargs))`` is called after each operation, also while paused.
    """

    def __init__(self) -> None:
        super().__init__(display=False)
        self.flop_registry = _Formulas(flop_formulas())
        # Torch's module tracker hooks module inputs, which breaks `torch.autograd.grad` of a leaf.
        self.mod_tracker = contextlib.nullcontext()  # type: ignore[assignment]  # entered and exited, but not used
        self.total = 0.0
        self.recomputed = 0.0
        self._unknown: dict[str, None] = {}
        self._is_paused = False
        self.on_result: Callable[[Any, Any], None] | None = None

    def __enter__(self) -> FlopCounter:
        super().__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self

    def paused(self, call: Callable[[], ResultT]) -> ResultT:
        """Execute ``call()`` without counting its operations; return its result."""
        before, self._is_paused = self._is_paused, True
        try:
            return call()
        finally:
            self._is_paused = before

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        if self.on_result is not None:
            self.on_result(out, (args, kwargs))
        if self._is_paused:
            return out
        formula = self.flop_registry.get(func_packet)
        if formula is None:
            namespace = str(getattr(func_packet, "_qualified_op_name", "kernel::")).partition("::")[0]
            if namespace not in _KNOWN_NAMESPACES:
                self._unknown[f"{func_packet} has no formula"] = None
            return out
        try:
            flops = float(formula(*args, **kwargs, out_val=out))
        except Exception as error:  # noqa: BLE001  # a failing formula must not end training
            self._unknown[f"{func_packet} cannot be counted ({type(error).__name__})"] = None
            return out
        self.total += flops
        if torch._C._current_graph_task_id() != -1 and is_recomputed():
            self.recomputed += flops
        return out

    @property
    def count(self) -> FlopCount:
        return FlopCount(self.total, self.recomputed, "; ".join(self._unknown) or None)


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether ``torch.compile`` was applied to a module."""
    if getattr(module, "_compiled_call_impl", None) is not None:
        return True
    # Importing torch's compiler is slower than the rest of torch. If the compiler is not imported, nothing has been compiled.
    loaded = sys.modules.get("torch._dynamo.eval_frame")
    return loaded is not None and isinstance(module, loaded.OptimizedModule)


def why_uncountable(engines: Iterable[Any]) -> str | None:
    """Return why the engines' FLOPs cannot be counted; None if they can."""
    for engine in engines:
        for module in engine.module.modules():
            if is_compiled(module):
                return f"{type(module).__name__} is compiled, which hides its operations"
            if engines_of_deepspeed.is_fused(module):
                return f"{type(module).__name__} is a fused kernel, which hides its operations"
    return None


_CHECKPOINTS = frozenset(
    {
        ("torch.utils.checkpoint", "unpack_hook"),
        ("torch.utils.checkpoint", "backward"),
        (engines_of_deepspeed.CHECKPOINT_MODULE, "checkpoint_unpack"),
        (engines_of_deepspeed.CHECKPOINT_MODULE, "backward"),
    }
)
"""(Module, function) pairs that recompute checkpointed activations.

After recomputing, ``backward`` of reentrant checkpoints also computes gradients (``torch/utils/checkpoint.py:278``), which do
not count as recomputation.
"""


def is_recomputed() -> bool:
    """Return whether the running operation recomputes a checkpointed activation.

    Call only during a backward pass. A call takes some microseconds, because it inspects all frames of this thread's stack.
    """
    frame: FrameType | None = sys._getframe(1)
    called = ""  # module of the function that this frame called
    while frame is not None:
        module, name = str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
        if (module, name) in _CHECKPOINTS and not (name == "backward" and called == torch.autograd.__name__):
            return True
        called, frame = module, frame.f_back
    return False
