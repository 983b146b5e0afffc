"""Train a workload at two micro batch sizes, and return the result of the dry run."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from deepspeed import PipelineEngine
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from dstrial.engine.deepspeed_internals.engines import observe_instructions
from dstrial.engine.deepspeed_internals.optimizers import full_numel
from dstrial.engine.dryrun.fake_world import DEVICE_NAME, FakeWorld, ScalarReads
from dstrial.engine.dryrun.linear_peaks import line_through, memory_forms, same_before_update
from dstrial.engine.dryrun.tracker import Tracker
from dstrial.engine.dryrun.values import PHASES, DryRunRequest, DryRunResult, Flops
from dstrial.engine.memory import MemorySplit


class Workload(Protocol):
    """Builds engines and trains with them in a ``FakeWorld``.

    ``workload(world, **shared_options)`` imports the user's code. Requests that differ only in options of ``prepare`` and in
    the engine share this import: they run in forks of one process.
    """

    def prepare(self, **options: Any) -> None:
        """Run the steps before :meth:`build`, with the request's ``options``."""
        ...

    def build(self, deepspeed_config: Mapping[str, Any], device: torch.device) -> Sequence[Any]:
        """Return the engines for a merged DeepSpeed config; do not modify the config."""
        ...

    def train_micro_batch(self, micro_batch_size: int) -> Any:
        """Train on a micro batch of this many records, and return the micro batch.

        Training is forward, backward and step. A pipeline trains all micro batches of a step in one call.
        """
        ...


def measure(request: DryRunRequest) -> DryRunResult:
    """Build the engines and train one step at each of the two micro batch sizes.

    Raises what the workload, torch or DeepSpeed raises; fake tensors do not support all code.
    """
    with begun(request) as measure_begun:
        return measure_begun(request)


@contextlib.contextmanager
def begun(request: DryRunRequest) -> Iterator[Callable[[DryRunRequest], DryRunResult]]:
    """Patch the process and import user code; yield a function that runs a request.

    The function may be called with ``request``, or with any request for which ``request.is_begun_like`` is true.
    """
    reads = ScalarReads()
    tracker = Tracker(_host_test(request.target, request.is_real), None if request.is_real else reads)
    world = FakeWorld(
        tracker,
        world_size=request.world_size,
        target=request.target,
        is_fake=not request.is_real,
        device_bytes=request.device_bytes,
        rank=request.rank,
    )
    with world, _collector_disabled():
        module, _, name = request.workload.partition(":")
        make: Callable[..., Workload] = getattr(importlib.import_module(module), name)
        workload = make(world, **request.shared_options)
        yield functools.partial(_measure, workload, tracker, reads)


def _measure(
    workload: Workload, tracker: Tracker, reads: ScalarReads, request: DryRunRequest
) -> DryRunResult:
    with contextlib.ExitStack() as stack:
        workload.prepare(**request.options)
        num_stages = int(getattr(workload, "num_stages", 1))
        config, accumulation = _config(request, num_stages)
        device = torch.device("cpu")
        if not request.is_real:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            device = torch.device(DEVICE_NAME if request.target == "cuda" else "cpu")
        stack.enter_context(tracker)
        engines = workload.build(config, device)
        for engine in engines:
            if isinstance(engine, PipelineEngine):
                observe_instructions(engine, functools.partial(_in_phase, tracker))
        low, high = request.micro_batch_sizes
        split = MemorySplit(engines, _host_test(request.target, request.is_real))
        tokens, activations = _train(workload, tracker, split, [low, high], accumulation)
        parameters = [parameter for engine in engines for parameter in engine.module.parameters()]
        num_parameters = sum(map(full_numel, parameters))
        num_trainable = sum(full_numel(one) for one in parameters if one.requires_grad)
    memory = memory_forms(tracker.trace, low, high)
    steady, last = len(tokens) // accumulation - 1, accumulation - 1
    totals = tracker.totals()
    return DryRunResult(
        device=memory.device,
        host=memory.host,
        parameters=num_parameters,
        trainable_parameters=num_trainable,
        inner_collectives=totals.get((steady, 0), ()) if accumulation > 1 else (),
        last_collectives=totals.get((steady, last), ()),
        flops=_flops(tracker, (0, last), (1, last), low, high),
        tokens=line_through(tokens[0], tokens[accumulation], low, high) if tokens[0] else None,
        is_fake=not request.is_real,
        is_linear=memory.is_linear,
        bypasses=tuple(reads.bypasses.values()),
        notes=tuple(getattr(workload, "notes", ())),
        inner_operations=tracker.operations.get((steady, 0), 0) if accumulation > 1 else 0,
        last_operations=tracker.operations.get((steady, last), 0),
        num_records=int(getattr(workload, "num_records", 0)),
        device_parts=split.device,
        host_parts=split.host,
        activations=line_through(activations[0], activations[1], low, high),
    )


def _train(
    workload: Workload, tracker: Tracker, split: MemorySplit, sizes: list[int], accumulation: int
) -> tuple[list[int], list[int]]:
    """Train one step per size; return (tokens per micro batch, activations per step).

    Activations are in bytes. If the first two steps allocate differently, a third step at the first size follows, and
    ``sizes`` is extended.
    """
    tokens: list[int] = []
    activations: list[int] = []
    tracker.on_result = split.operation
    tracker.on_phase = lambda phase: split.begin_step() if phase == "step" else None
    for step_idx, size in enumerate(sizes):
        gc.collect()
        for micro_batch_idx in range(accumulation):
            tracker.begin_micro_batch(step_idx, micro_batch_idx)
            tokens.append(_num_tokens(workload.train_micro_batch(size)))
        tracker.end_step()
        split.end_step()
        activations.append(split.take_activations())
        # ZeRO 3 learns the order of modules in its first step, and prefetches parameters from the second step on.
        if step_idx == 1 and not same_before_update(tracker.trace):
            sizes.append(sizes[0])
    split.close()
    return tokens, activations


def _in_phase(tracker: Tracker, part: str, instruction: Callable[[], None]) -> None:
    """Run a pipeline instruction in its phase; communication keeps the current phase."""
    if part in PHASES:
        tracker.enter_phase(part)
    instruction()


def _config(request: DryRunRequest, num_stages: int) -> tuple[dict[str, Any], int]:
    """Return (config for the first size, number of training calls per step).

    Gradient accumulation is limited to ``max(2, num_stages)`` micro batches. A pipeline trains all of these in one call.
    """
    config = copy.deepcopy(dict(request.deepspeed_config))
    wanted = int(config.get("gradient_accumulation_steps") or 1)
    accumulation = min(wanted, max(2, num_stages))
    config["train_micro_batch_size_per_gpu"] = request.micro_batch_sizes[0]
    config["gradient_accumulation_steps"] = accumulation
    config.pop("train_batch_size", None)
    config.setdefault("steps_per_print", 1_000_000_000)
    return config, accumulation if num_stages == 1 else 1


def _host_test(target: str, is_real: bool) -> Any:
    if target == "cpu":
        return lambda _device: False
    if is_real:
        return lambda device: device.type == "cpu"
    name = torch.device(DEVICE_NAME)
    return lambda device: device != name


@contextlib.contextmanager
def _collector_disabled() -> Iterator[None]:
    """Disable garbage collection, so that both sizes free tensors at the same places."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _num_tokens(batch: Any) -> int:
    """Return the size (numel) of a batch's largest integer tensor; 0 without one."""
    return max(
        (
            leaf.numel()
            for leaf in tree_leaves(batch)
            if isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.int64, torch.int32)
        ),
        default=0,
    )


def _flops(tracker: Tracker, first: tuple[int, int], second: tuple[int, int], low: int, high: int) -> Flops:
    at_low, at_high = tracker.flops.get(first, [0, 0]), tracker.flops.get(second, [0, 0])
    return Flops(
        model=line_through(at_low[0], at_high[0], low, high),
        hardware=line_through(at_low[1], at_high[1], low, high),
    )
