"""Measure engines' memory by part: parameters, gradients, optimizer, buffers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from dstrial.engine.deepspeed_internals import engines as engines_of_deepspeed
from dstrial.engine.deepspeed_internals import optimizers

PARTS = ("parameters", "gradients", "optimizer", "buffers")
"""Parts of an engine's memory that can be measured at any time, see ``memory_parts``."""

ACTIVATIONS = "activations"
ALL_PARTS = ("parameters", "gradients", "optimizer", ACTIVATIONS, "buffers")
"""All parts of an engine's memory, in the order in which they are shown."""

_MAX_OBJECTS = 1_000_000  # maximum number of objects that ``_tensors`` inspects

_NOTABLE_GROWTH = 1.05
"""If memory grows by this factor during a backward pass, parts are measured again, because gradients may have been allocated."""


def memory_parts(
    engines: Sequence[Any], is_host: Callable[[torch.device], bool], seen: set[int] | None = None
) -> tuple[dict[str, int], dict[str, int]]:
    """Return (part -> bytes on the device, part -> bytes on the host) of the engines.

    The parts are ``PARTS``. Each storage counts once, in the first part that ``part_tensors`` yields for it. Storages whose ids
    are in ``seen`` are skipped; ids of counted storages are added to ``seen``. ``is_host(device)`` returns whether a device is
    host memory. Master weights count as ``optimizer``. ``buffers`` are module buffers, weights that ZeRO 3 has gathered, and
    DeepSpeed's other tensors, such as communication buckets.
    """
    on_device, on_host = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0)
    seen = set() if seen is None else seen
    for part, tensor in part_tensors(engines):
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            (on_host if is_host(tensor.device) else on_device)[part] += storage.nbytes()
    return on_device, on_host


def part_tensors(engines: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (part, tensor) for all tensors of the engines.

    A storage may occur several times, also in different parts.
    """
    for part, find in (
        ("parameters", _parameters),
        ("buffers", _buckets),
        ("gradients", _gradients),
        ("optimizer", _optimizer_state),
        ("buffers", _buffers),
    ):
        for tensor in find(engines):
            if tensor.layout == torch.strided and not tensor.is_meta:
                yield part, tensor


def _parameters(engines: Sequence[Any]) -> Iterator[torch.Tensor]:
    for engine in engines:
        for parameter in engine.module.parameters():
            if not optimizers.is_cut(parameter):
                yield parameter.data
            elif (part := optimizers.held_part(parameter)) is not None:
                yield part


def _trained(engines: Sequence[Any]) -> Iterator[torch.Tensor]:
    for engine in engines:
        yield from engine.module.parameters()
        for group in _base(engine).param_groups if engine.optimizer is not None else ():
            yield from group["params"]
        # Outside a step, ZeRO 3's base optimizer has no references to the master weights.
        yield from optimizers.flat_masters(engine.optimizer) or ()


def _buckets(engines: Sequence[Any]) -> Iterator[torch.Tensor]:
    return _tensors([optimizers.reduction_buckets(engine.optimizer) for engine in engines])


def _gradients(engines: Sequence[Any]) -> Iterator[torch.Tensor]:
    for one in _trained(engines):
        yield from (each for each in (one.grad, optimizers.accumulated_gradient(one)) if each is not None)
    for engine in engines:
        yield from _tensors(optimizers.held_gradients(engine.optimizer))


def _optimizer_state(engines: Sequence[Any]) -> Iterator[torch.Tensor]:
    # The module's parameters are excluded: they count as parameters, or as buffers if ZeRO 3 has gathered them.
    of_modules = {id(one) for engine in engines for one in engine.module.parameters()}
    yield from (one.data for one in _trained(engines) if id(one) not in of_modules)
    for engine in engines:
        if engine.optimizer is None:
            continue
        for state in _base(engine).state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _buffers(engines: Sequence[Any]) -> Iterator[torch.Tensor]:
    for engine in engines:
        yield from engine.module.buffers()
        yield from (one.data for one in engine.module.parameters() if optimizers.is_cut(one))
        yield from _tensors([engine.optimizer, engines_of_deepspeed.pipeline_buffers(engine)])


def _tensors(holders: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers and in attributes of DeepSpeed's objects.

    Modules are not searched.
    """
    waiting = list(holders)
    seen: set[int] = set()
    while waiting and len(seen) < _MAX_OBJECTS:
        one = waiting.pop()
        if isinstance(one, torch.Tensor):
            yield one
        if id(one) in seen or isinstance(one, (torch.Tensor, torch.nn.Module, str, bytes, int, float)):
            continue
        seen.add(id(one))
        if isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, (Sequence, Set)):
            waiting += one
        elif type(one).__module__.startswith("deepspeed.") and hasattr(one, "__dict__"):
            waiting += vars(one).values()


def _base(engine: Any) -> Any:
    return optimizers.base_optimizer(engine.optimizer)


class MemorySplit:
    """Measures the engines' peak memory by part while a batch is trained.

    Call ``begin_step`` before and ``end_step`` after each optimizer step, and ``operation`` after each torch operation.
    ``operation`` may be left out; then activations and ``peak_bytes`` are not measured.

    Attributes:
        device: part -> peak bytes on the device; the parts are ``PARTS`` and, if measured, ``activations``.
        host: part -> peak bytes on the host, without activations.
        peak_bytes: peak of all parts together on the device.
    """

    def __init__(self, engines: Sequence[Any], is_host: Callable[[torch.device], bool]) -> None:
        self._engines = engines
        self._is_host = is_host
        self.device: dict[str, int] = {}
        self.host: dict[str, int] = {}
        self._alive: dict[int, tuple[int, Any]] = {}
        self._now_bytes = self.peak_bytes = 0
        self._before_step = (0, 0)
        self._is_in_backward = False
        self._most_before_backward = -1
        self._check_above: float | None = None  # bytes; set at the next result
        for _, tensor in part_tensors(engines):
            self._follow(tensor)
        self._has_operations = False

    def operation(self, result: Any, args: Any) -> None:
        """Record the result and arguments of one torch operation; both may be nested.

        Runs after every torch operation, so that it must take microseconds only. Activations are measured at the first
        operation of a backward pass. All other parts are measured at the first operation after the backward pass, when all
        gradients exist, and earlier if memory grows by ``_NOTABLE_GROWTH``.
        """
        is_in_backward = torch._C._current_graph_task_id() != -1
        if is_in_backward and not self._is_in_backward:
            self._end_forward()
            self._check_above = None
        elif self._is_in_backward and (not is_in_backward or self._now_bytes > (self._check_above or 0.0)):
            self._record()
            self._check_above = None
        self._is_in_backward, self._has_operations = is_in_backward, True
        for tensor in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            # A view of an existing tensor, for example of a data set, allocates nothing.
            if (
                isinstance(tensor, torch.Tensor)
                and not self._is_followed(tensor)
                and not _shares(tensor, args)
            ):
                self._follow(tensor)
        if self._check_above is None:
            self._check_above = _NOTABLE_GROWTH * self._now_bytes

    def begin_step(self) -> None:
        self._record()
        self._before_step = (self.peak_bytes, self.device["optimizer"])

    def end_step(self) -> None:
        self._record()
        # Optimizer state created by the first step adds to the peak of all later forward and backward passes.
        peak_bytes, optimizer_bytes = self._before_step
        if self._has_operations:
            self.peak_bytes = max(self.peak_bytes, peak_bytes + self.device["optimizer"] - optimizer_bytes)

    def close(self) -> None:
        self._alive.clear()

    # ---- measuring -----------------------------------------------------------------------------------

    def _end_forward(self) -> None:
        """Measure activations: at the begin of backward, live tensors of no other part."""
        if (
            self._now_bytes <= self._most_before_backward
        ):  # activations are no larger than before; inspecting all engines is slow
            return
        self._most_before_backward = self._now_bytes
        known: set[int] = set()
        memory_parts(self._engines, self._is_host, known)
        left = sum(size for key, (size, _) in list(self._alive.items()) if key not in known)
        self.device[ACTIVATIONS] = max(left, self.device.get(ACTIVATIONS, 0))

    def _record(self) -> None:
        found = memory_parts(self._engines, self._is_host)
        for kept, now in zip((self.device, self.host), found, strict=True):
            for part in PARTS:
                kept[part] = max(now[part], kept.get(part, 0))

    # ---- live storages ---------------------------------------------------------------------------------

    def _is_followed(self, tensor: torch.Tensor) -> bool:
        is_other = tensor.layout != torch.strided or tensor.is_meta or self._is_host(tensor.device)
        return is_other or tensor.untyped_storage()._cdata in self._alive

    def _follow(self, tensor: torch.Tensor) -> None:
        if self._is_followed(tensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        self._alive[key] = (size, weakref.ref(storage, functools.partial(self._free, key)))
        self._now_bytes += size
        self.peak_bytes = max(self.peak_bytes, self._now_bytes)

    def _free(self, key: int, _reference: object) -> None:
        self._now_bytes -= self._alive.pop(key)[0]


def _shares(tensor: torch.Tensor, args: Any) -> bool:
    key = tensor.untyped_storage()._cdata
    return any(
        leaf.untyped_storage()._cdata == key
        for leaf in tree_leaves(args)
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
    )
