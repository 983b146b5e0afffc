"""Count the FLOPs of a call by operation; recomputed FLOPs are counted separately.

Counting does not change training results. The count is marked as unknown if an operation has no formula, or if a compiler or
fused kernel hides operations from torch's dispatcher.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch.autograd.graph import _engine_run_backward
from torch.utils.flop_counter import FlopCounterMode

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


@dataclasses.dataclass(frozen=True, slots=True)
class FlopCount:
    """The FLOPs of a call on this rank.

    Attributes:
        total: FLOPs of matrix products, convolutions and attention; a multiply-add counts as two.
        recomputed: the part of ``total`` that backward passes recomputed (activation checkpointing).
        unknown: why the numbers are invalid; None if the numbers are valid.
    """

    total: float
    recomputed: float = 0.0
    unknown: str | None = None

    @property
    def model(self) -> float:
        return self.total - self.recomputed


class FlopCounter(FlopCounterMode):
    """Context manager that counts the FLOPs of torch operations.

    An operation without a formula raises no error; it makes the count unknown.

    Attributes:
        on_result: if set, called with each operation's result and arguments, also during an optimizer's step.
    """

    def __init__(self) -> None:
        super().__init__(display=False)
        # Torch's module tracker hooks module inputs, which breaks `torch.autograd.grad` of a leaf.
        self.mod_tracker = contextlib.nullcontext()  # type: ignore[assignment]  # entered and exited, but not used
        self.total = 0.0
        self._checkpointed = 0.0
        # By backward pass: whether the pass records gradients; FLOPs of foreign functions that recorded gradients in the pass.
        self._records: dict[int, bool] = {}
        self._by_code: dict[int, float] = {}
        self._code: dict[int, str] = {}
        self._unknown: dict[str, None] = {}
        self._is_paused = False
        self.on_result: Callable[[Any, Any], None] | None = None

    def __enter__(self) -> FlopCounter:
        super().__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self

    def paused(self, call: Callable[[], ResultT]) -> ResultT:
        """Execute a call without counting it, such as an optimizer's step."""
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
        backward_pass = torch._C._current_graph_task_id()
        formula = self.flop_registry.get(func_packet)
        asker, code = Origin.GRADIENT, ""
        if backward_pass != -1 and (formula is not None or backward_pass not in self._records):
            asker, code = origin()
            if asker is Origin.GRADIENT:
                self._records.setdefault(backward_pass, torch.is_grad_enabled())
        if formula is None:
            namespace = str(getattr(func_packet, "_qualified_op_name", "kernel::")).partition("::")[0]
            if namespace not in _KNOWN_NAMESPACES:
                self._unknown[f"{func_packet} has no formula"] = None
            return out
        try:
            flops = float(formula(*args, **kwargs, out_val=out))
        except Exception as error:  # noqa: BLE001  # a formula's assumptions are no reason to end a training
            self._unknown[f"{func_packet} cannot be counted ({type(error).__name__})"] = None
            return out
        self.total += flops
        if asker is Origin.CHECKPOINT:
            self._checkpointed += flops
        elif asker is Origin.CODE and torch.is_grad_enabled():
            self._by_code[backward_pass] = self._by_code.get(backward_pass, 0.0) + flops
            self._code[backward_pass] = code
        return out

    @property
    def recomputed(self) -> float:
        """FLOPs that backward passes recomputed so far.

        These are operations of checkpointed functions in a backward pass. If the pass itself records no gradients, operations
        of other functions that record gradients count too.
        """
        own = sum(flops for task, flops in self._by_code.items() if not self._records.get(task, False))
        return self._checkpointed + own

    @property
    def count(self) -> FlopCount:
        """The FLOPs counted so far.

        They are unknown if a backward pass records gradients (``create_graph=True``) and a foreign function computes in the pass,
        because the function's gradient and recomputation cannot be distinguished.
        """
        told = [
            f"{code}, called in a backward pass with create_graph=True, may compute gradients or recompute"
            for task, code in self._code.items()
            if self._records.get(task, True)
        ]
        unknown = "; ".join(dict.fromkeys([*self._unknown, *told])) or None
        return FlopCount(self.total, self.recomputed, unknown)


def counted_flops(call: Callable[[], ResultT]) -> tuple[ResultT, float, float]:
    """Execute a call; return (its result, all its FLOPs, those that are recomputed)."""
    with FlopCounter() as counter:
        result = call()
    return result, counter.total, counter.recomputed


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether ``torch.compile`` was applied, so that operations are not seen."""
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


class Origin(enum.Enum):
    """The kind of code that requests an operation within a backward pass.

    The kind is determined from the functions on the stack, because a backward pass may record gradients too
    (``create_graph=True``), like a forward pass. Nothing is patched or hooked.
    """

    GRADIENT = "torch's own formula of a gradient"
    CHECKPOINT = "a recomputed checkpointed function"
    CODE = "a foreign function, for a gradient or recomputation"


_CHECKPOINTS = frozenset(
    {
        ("torch.utils.checkpoint", "unpack_hook"),
        ("torch.utils.checkpoint", "backward"),
        (engines_of_deepspeed.CHECKPOINT_MODULE, "checkpoint_unpack"),
        (engines_of_deepspeed.CHECKPOINT_MODULE, "backward"),
    }
)
"""(Module, function) pairs that recompute checkpointed activations.

``backward`` of reentrant checkpoints then also computes gradients (``torch/utils/checkpoint.py:278``), which do not count.
"""

_TRANSPARENT = ("torch.", *engines_of_deepspeed.GRADIENT_MODULES, __name__)
"""Prefixes of modules that are ignored on the stack, because they only forward requests or compute gradients."""

_DISPATCHERS = ("__torch_dispatch__", "__torch_function__")
"""Methods of torch modes and tensor subclasses that only forward operations."""

_NEW_PASS: CodeType = _engine_run_backward.__code__


def origin() -> tuple[Origin, str]:
    """Return (kind of code that requests the current operation, function's name).

    Call it within a backward pass. The name is empty unless the kind is ``Origin.CODE``. Takes some microseconds: all
    functions on this thread's stack are inspected, because a differentiated function may be part of a recomputed one.
    """
    frame: FrameType | None = sys._getframe(1)
    called = ""  # module of the function that this frame called
    code: str | None = None
    is_in_pass = True
    while frame is not None:
        module, name = str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
        if (module, name) in _CHECKPOINTS and not (name == "backward" and called == torch.autograd.__name__):
            return Origin.CHECKPOINT, ""
        if frame.f_code is _NEW_PASS:
            is_in_pass = False
        elif is_in_pass and code is None and not (module.startswith(_TRANSPARENT) or name in _DISPATCHERS):
            code = f"{module}.{name}"
        called, frame = module, frame.f_back
    return (Origin.GRADIENT, "") if code is None else (Origin.CODE, code)
