"""Record tensor operations: bytes allocated and freed, collectives, FLOPs.

The tracker sees the outputs of operations that reach torch's dispatcher. It does not see scratch memory inside a kernel.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dstrial.engine.dryrun.linear_peaks import Trace
from dstrial.engine.dryrun.values import PHASES, Collective

_ATEN = torch.ops.aten
_forward_count: Callable[..., int] = flop_counter.sdpa_flop_count
_backward_count: Callable[..., int] = flop_counter.sdpa_backward_flop_count
_SDPA_CPU = "aten::_scaled_dot_product_flash_attention_for_cpu"
_SDPA_CPU_BACKWARD = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"

# c10d operation -> (kind of collective, index of the argument with the full data, index of the process group).
_COLLECTIVES = {
    "c10d::allreduce_": ("all_reduce", 0, 1),
    "c10d::allreduce_coalesced_": ("all_reduce", 0, 1),
    "c10d::broadcast_": ("broadcast", 0, 1),
    "c10d::reduce_": ("reduce", 0, 1),
    "c10d::allgather_": ("all_gather", 0, 2),
    "c10d::_allgather_base_": ("all_gather", 0, 2),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0, 2),
    "c10d::reduce_scatter_": ("reduce_scatter", 1, 2),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1, 2),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, 2),
    "c10d::alltoall_": ("all_to_all", 1, 2),
    "c10d::alltoall_base_": ("all_to_all", 1, 2),
    "c10d::gather_": ("gather", 0, 2),
    "c10d::scatter_": ("scatter", 1, 2),
    "c10d::send": ("send", 0, 1),
    "c10d::recv_": ("recv", 0, 1),
}


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Records operations; enter it after ``FakeTensorMode``, to see fake tensors.

    Keys (step, micro batch) are indices from 0.

    Args:
        is_host: returns whether a torch device is host memory.
        read_scalar: returns the value of a fake scalar; None lets torch raise an error.

    Attributes:
        device_bytes: bytes that are now allocated on the device.
        collectives: (step, micro batch) -> {(kind, group size, phase): [calls, bytes]}.
        flops: (step, micro batch) -> [FLOPs without recomputation, FLOPs with recomputation].
        operations: (step, micro batch) -> number of operations that reached the dispatcher, views included.
        on_result: called with each operation's result and arguments.
        on_phase: called with the name of each outermost phase that begins.

    Source: storages are tracked as in torch's ``distributed/_tools/mem_tracker.py``.
    """

    def __init__(
        self,
        is_host: Callable[[torch.device], bool],
        read_scalar: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.trace = Trace()
        self.device_bytes = 0
        self.collectives: dict[tuple[int, int], dict[tuple[str, int, str], list[int]]] = {}
        self.flops: dict[tuple[int, int], list[int]] = {}
        self.operations: dict[tuple[int, int], int] = {}
        self.on_result: Callable[[Any, Any], None] | None = None
        self.on_phase: Callable[[str], None] | None = None
        self._is_host = is_host
        self._read_scalar = read_scalar
        self._alive: dict[int, tuple[int, Any]] = {}
        self._phase = PHASES.index("init")
        self._place = (-1, 0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch's wrapper that disables dynamo would slow each operation."""
        return False

    @property
    def phase(self) -> str:
        return PHASES[self._phase]

    def enter_phase(self, phase: str) -> None:
        """Begin ``phase``; it lasts until the next phase begins."""
        self._phase = PHASES.index(phase)
        if self.on_phase is not None:
            self.on_phase(phase)

    @contextlib.contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Set ``phase`` inside the block, and restore the former phase after the block."""
        before, self._phase = self._phase, PHASES.index(phase)
        try:
            yield
        finally:
            self._phase = before

    def begin_micro_batch(self, step_idx: int, micro_batch_idx: int) -> None:
        self._place = (step_idx, micro_batch_idx)
        if not self.trace.marks:
            self.trace.marks.append(len(self.trace.events))
        self.enter_phase("forward")

    def end_step(self) -> None:
        self.trace.marks.append(len(self.trace.events))

    def totals(self) -> dict[tuple[int, int], tuple[Collective, ...]]:
        """Return (step index, micro batch index) -> the collectives of this micro batch."""
        return {
            place: tuple(
                Collective(*key, calls, num_bytes) for key, (calls, num_bytes) in sorted(found.items())
            )
            for place, found in self.collectives.items()
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _ATEN._local_scalar_dense.default and self._read_scalar is not None:
            return self._read_scalar(args[0])
        result = func(*args, **kwargs)
        if self.on_result is not None:
            self.on_result(result, (args, kwargs))
        name = func._schema.name
        self.operations[self._place] = self.operations.get(self._place, 0) + 1
        if name.startswith("c10d::"):
            self._count_collective(name, args)
        elif name in _FLOPS or func.overloadpacket in flop_counter.flop_registry:
            self._count_flops(func, name, args, kwargs, result)
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
        size = storage.nbytes()
        on_host = self._is_host(tensor.device)
        number = self.trace.allocate(size, on_host, self._phase)
        if not on_host:
            self.device_bytes += size
        self._alive[key] = (number, weakref.ref(storage, functools.partial(self._free, key)))

    def _free(self, key: int, _reference: object) -> None:
        number, _ = self._alive.pop(key)
        self.trace.free(number, self._phase)
        if not self.trace.on_host[number - 1]:
            self.device_bytes -= self.trace.sizes[number - 1]

    def _count_collective(self, name: str, args: tuple[Any, ...]) -> None:
        known = _COLLECTIVES.get(name)
        if known is None:
            return
        kind, data_idx, group_idx = known
        num_bytes = sum(
            leaf.numel() * leaf.element_size()
            for leaf in tree_leaves(args[data_idx])
            if isinstance(leaf, torch.Tensor)
        )
        group = torch.distributed.ProcessGroup.unbox(args[group_idx])
        key = (kind, group.size(), self.phase)
        count = self.collectives.setdefault(self._place, {}).setdefault(key, [0, 0])
        count[0] += 1
        count[1] += num_bytes

    def _count_flops(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        formula = _FLOPS.get(name)
        if formula is None:
            formula = functools.partial(
                flop_counter.flop_registry[func.overloadpacket], **kwargs, out_val=result
            )
        flops = formula(*args)
        counted = self.flops.setdefault(self._place, [0, 0])
        counted[1] += flops
        # Recomputation is a forward pass inside the backward pass. Only there the backward pass has gradients enabled.
        if not (self.phase == "backward" and torch.is_grad_enabled()):
            counted[0] += flops


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_rest: object) -> int:
    return int(_forward_count(query.shape, key.shape, value.shape))


def _attention_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_rest: object
) -> int:
    return int(_backward_count(grad.shape, query.shape, key.shape, value.shape))


# FLOP formulas of the CPU's fused attention, which torch's registry lacks.
_FLOPS: dict[str, Callable[..., int]] = {_SDPA_CPU: _attention, _SDPA_CPU_BACKWARD: _attention_backward}
