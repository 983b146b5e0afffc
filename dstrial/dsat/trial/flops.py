"""Count the FLOPs of a call, and those of it that are computed a second time for activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

ResultT = TypeVar("ResultT")


def counted_flops(call: Callable[[], ResultT]) -> tuple[ResultT, float, float]:
    """Make a call.

    Returns:
        Its result; all its FLOPs on this rank; those of them that were recomputation.

    Ranks: any; no communication.
    """
    recomputation = _Recomputation()
    with FlopCounterMode(display=False) as counter, recomputation:
        result = call()
    return result, float(counter.get_total_flops()), recomputation.flops


class _Recomputation(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Adds up the FLOPs of forward operations inside of a backward pass: only those record gradients there."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.flops = 0.0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(getattr(func, "overloadpacket", func))
        if formula is not None and torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
            self.flops += float(formula(*args, **(kwargs or {}), out_val=result))
        return result
