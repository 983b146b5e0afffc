"""Record tensor operations: bytes allocated and freed, and FLOPs.

Memory is counted from the outputs of operations that reach torch's dispatcher; scratch memory inside kernels is missed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dstrial.engine.dryrun.linear_peaks import Trace
from dstrial.engine.dryrun.values import PHASES
from dstrial.engine.model_flops import flop_formulas

_ATEN = torch.ops.aten


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Records torch operations; enter after ``FakeTensorMode`` to see fake tensors.

    Args:
        read_scalar: returns the value for ``.item()`` of a fake scalar; if None, torch raises an error.

    Attributes:
        trace: all allocations and frees of memory.
        flops: [FLOPs without recomputation, FLOPs with recomputation], first before all steps, then of each step.
        operations: phase -> number of operations that reached the dispatcher (views included); entries as in ``flops``.

    Source: storages are tracked as in torch's ``distributed/_tools/mem_tracker.py``.
    """

    def __init__(self, read_scalar: Callable[[torch.Tensor], object] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.trace = Trace()
        self.flops: list[list[int]] = [[0, 0]]
        self.operations: list[dict[str, int]] = [{}]
        self._read_scalar = read_scalar
        self._formulas = flop_formulas()
        self._alive: dict[int, tuple[int, Any]] = {}
        self._phase = PHASES.index("init")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch's wrapper that disables dynamo would slow each operation."""
        return False

    @property
    def phase(self) -> str:
        return PHASES[self._phase]

    def enter_phase(self, phase: str) -> None:
        """Begin ``phase``, which lasts until the next phase begins."""
        self._phase = PHASES.index(phase)

    def begin_step(self) -> None:
        self.flops.append([0, 0])
        self.operations.append({})
        if not self.trace.marks:
            self.trace.marks.append(len(self.trace.events))
        self.enter_phase("forward")

    def end_step(self) -> None:
        self.trace.marks.append(len(self.trace.events))

    def mark_gradient(self, parameter: torch.Tensor) -> None:
        """Mark the allocation of ``parameter.grad`` as a gradient in the trace.

        A no-op without a gradient.
        """
        if parameter.grad is not None and parameter.grad.layout == torch.strided:
            found = self._alive.get(parameter.grad.untyped_storage()._cdata)
            if found is not None:
                self.trace.is_gradient[found[0] - 1] = 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _ATEN._local_scalar_dense.default and self._read_scalar is not None:
            return self._read_scalar(args[0])
        result = func(*args, **kwargs)
        operations = self.operations[-1]
        operations[self.phase] = operations.get(self.phase, 0) + 1
        if (formula := self._formulas.get(func.overloadpacket)) is not None:
            self._count_flops(int(formula(*args, **kwargs, out_val=result)))
        if isinstance(result, torch.Tensor):
            self._track(result)
        elif isinstance(result, (list, tuple)):
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._track(leaf)
        return result

    def _track(self, tensor: torch.Tensor) -> None:
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        number = self.trace.allocate(storage.nbytes(), self._phase)
        self._alive[key] = (number, weakref.ref(storage, functools.partial(self._free, key)))

    def _free(self, key: int, _reference: object) -> None:
        number, _ = self._alive.pop(key)
        self.trace.free(number, self._phase)

    def _count_flops(self, flops: int) -> None:
        counted = self.flops[-1]
        counted[1] += flops
        # Within the backward pass, gradients are enabled only while a forward pass is recomputed.
        if not (self.phase == "backward" and torch.is_grad_enabled()):
            counted[0] += flops
