"""Measure memory of engines by part: parameters, gradients, optimizer, buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch

from dstrial.engine.deepspeed_internals import engines as engines_of_deepspeed
from dstrial.engine.deepspeed_internals import optimizers

PARTS = ("parameters", "gradients", "optimizer", "buffers")

_OF_DEEPSPEED = "deepspeed."
_MAX_OBJECTS = 1_000_000


def memory_parts(
    engines: Sequence[Any], is_host: Callable[[torch.device], bool], seen: set[int] | None = None
) -> tuple[dict[str, int], dict[str, int]]:
    """Return bytes by part, on the device and on the host.

    Each storage counts once, in the first part in which it is found. Master weights count as optimizer state. Buffers are module
    buffers, weights that ZeRO 3 has gathered, and other tensors of DeepSpeed's objects, such as communication buckets.
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
    """Yield (part, tensor) of engines; tensors may share a storage."""
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
        # ZeRO 3 gives them to the optimizer only during a step.
        yield from optimizers.flat_masters(engine.optimizer) or ()


def _buckets(engines: Sequence[Any]) -> Iterator[torch.Tensor]:
    for engine in engines:
        yield from _tensors(optimizers.reduction_buckets(engine.optimizer))


def _gradients(engines: Sequence[Any]) -> Iterator[torch.Tensor]:
    for one in _trained(engines):
        yield from (each for each in (one.grad, optimizers.accumulated_gradient(one)) if each is not None)
    for engine in engines:
        yield from _tensors(optimizers.held_gradients(engine.optimizer))


def _optimizer_state(engines: Sequence[Any]) -> Iterator[torch.Tensor]:
    # Parameters of the module are counted already or gathered by ZeRO 3, which also marks its master weights as partitioned.
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
    """Yield tensors inside containers and DeepSpeed's objects, except modules."""
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
        elif type(one).__module__.startswith(_OF_DEEPSPEED) and hasattr(one, "__dict__"):
            waiting += vars(one).values()


def _base(engine: Any) -> Any:
    return optimizers.base_optimizer(engine.optimizer)
