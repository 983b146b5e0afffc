"""Execute a dry run: train a request's engines at two micro batch sizes."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from deepspeed import PipelineEngine
from torch.utils._pytree import tree_leaves

from dstrial.engine.deepspeed_internals.engines import expert_parameters, observe_instructions
from dstrial.engine.dryrun.fake_world import FakeWorld, ScalarReads
from dstrial.engine.dryrun.linear_peaks import line_through, memory_form, same_before_update
from dstrial.engine.dryrun.tracker import Tracker
from dstrial.engine.dryrun.values import PHASES, DryRunRequest, Flops, ModelTrace
from dstrial.engine.memory import memory_parts


class Workload(Protocol):
    """Engines in a ``FakeWorld``, and a method that trains them.

    ``DryRunRequest.workload`` names a callable that returns a workload: ``callable(world, **options)``. The callable builds the
    engines inside ``world.building``.
    """

    engines: Sequence[Any]

    def train_micro_batch(self, micro_batch_size: int) -> Any:
        """Run forward, backward and step on one micro batch, and return this batch.

        A pipeline trains all micro batches of a step in one call.
        """
        ...


def measure(request: DryRunRequest) -> ModelTrace:
    """Build a request's engines, and measure a step at each of its micro batch sizes.

    Errors of the workload, of torch and of DeepSpeed are not caught. They are common, because fake tensors do not support all
    code.
    """
    low, high = request.micro_batch_sizes
    reads = ScalarReads()
    tracker = Tracker(None if request.is_real else reads)
    world = FakeWorld(
        tracker,
        world_size=request.world_size,
        is_fake=not request.is_real,
        micro_batch_size=low,
        rank=request.rank,
    )
    with world, _collector_disabled():
        module, _, name = request.workload.partition(":")
        make: Callable[..., Workload] = getattr(importlib.import_module(module), name)
        workload = make(world, **request.options)
        for engine in workload.engines:
            if isinstance(engine, PipelineEngine):
                observe_instructions(engine, functools.partial(_in_phase, tracker))
        parameters = [parameter for engine in workload.engines for parameter in engine.module.parameters()]
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(tracker.mark_gradient)
        with world.running():
            tokens = _train(workload, tracker, [low, high])
            experts: Counter[int] = sum(
                (Counter(expert_parameters(each)) for each in workload.engines), Counter()
            )
        state, _ = memory_parts(workload.engines, lambda _device: False)
    memory, activations = memory_form(tracker.trace, low, high)
    operations = tracker.operations[-1]
    step_operations = operations.pop("step", 0)
    lines = [
        line_through(at_low, at_high, low, high)
        for at_low, at_high in zip(tracker.flops[1], tracker.flops[2], strict=True)
    ]
    return ModelTrace(
        memory=memory,
        activations=activations,
        state_bytes=state,
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable_parameters=sum(parameter.numel() for parameter in trained),
        expert_parameters=dict(experts),
        num_tensors=len(trained),
        largest_tensor=max((parameter.numel() for parameter in trained), default=0),
        flops=Flops(model=lines[0], hardware=lines[1]),
        tokens=line_through(tokens[0], tokens[1], low, high) if tokens[0] else None,
        pass_operations=sum(operations.values()),
        step_operations=step_operations,
        is_pipeline=any(isinstance(engine, PipelineEngine) for engine in workload.engines),
        bypasses=tuple(reads.bypasses),
        notes=tuple(getattr(workload, "notes", ())),
        num_records=int(getattr(workload, "num_records", 0)),
        epoch_records=int(getattr(workload, "epoch_records", 0)),
    )


def _train(workload: Workload, tracker: Tracker, sizes: list[int]) -> list[int]:
    """Train one step per micro batch size; return the tokens of each micro batch.

    If the first two steps allocate in different order, a third step at the first size follows, and this size is appended to
    ``sizes``. A model may, for example, cache tables in the first forward pass.
    """
    tokens: list[int] = []
    for step_idx, size in enumerate(sizes):
        gc.collect()
        tracker.begin_step()
        tokens.append(_num_tokens(workload.train_micro_batch(size)))
        tracker.end_step()
        if step_idx == 1 and not same_before_update(tracker.trace):
            sizes.append(sizes[0])
    return tokens


def _in_phase(tracker: Tracker, part: str, instruction: Callable[[], None]) -> None:
    """Run a pipeline instruction; record its operations in phase ``part``."""
    # ``stages`` (communication between stages) is not a phase: its operations count in the phase before.
    if part in PHASES:
        tracker.enter_phase(part)
    instruction()


@contextlib.contextmanager
def _collector_disabled() -> Iterator[None]:
    """Disable garbage collection, so that steps of both sizes free tensors alike."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _num_tokens(batch: Any) -> int:
    return max(
        (
            leaf.numel()
            for leaf in tree_leaves(batch)
            if isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.int64, torch.int32)
        ),
        default=0,
    )
