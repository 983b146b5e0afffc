"""An engine's traits, which prove a knob's effect, and first micro batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from deepspeed import PipelineEngine
from torch.utils._python_dispatch import TorchDispatchMode

from dstrial.engine.deepspeed_internals import optimizers
from dstrial.engine.model_flops import counted_flops, is_compiled


class OperationCount(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Counts, while entered, operations that reach torch's dispatcher."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operations += 1
        return func(*args, **(kwargs or {}))


def engine_features(engines: list[Any]) -> dict[str, float]:
    """Return the traits of a rank's engines, summed; see ``knob_effects.PROBES``."""
    modules = [module for engine in engines for module in engine.module.modules()]
    return {
        "probe_modules": float(len(modules)),
        "probe_compiled": float(sum(map(is_compiled, modules))),
        "probe_pipeline_stages": float(
            sum(engine.num_stages if isinstance(engine, PipelineEngine) else 1 for engine in engines)
        ),
        "probe_nvme": float(
            sum(optimizers.swaps_to_nvme(getattr(engine, "optimizer", None)) for engine in engines)
        ),
    }


class FirstMicroBatch:
    """Counts over the calls of the first micro batch of every engine."""

    def __init__(self) -> None:
        self.flops = 0.0
        self.flops_recomputed = 0.0
        self.activation_bytes = 0.0
        self.num_operations = 0.0
        self._seen: set[tuple[str, int]] = set()

    def run(self, phase: str, engine: Any, call: Callable[[], Any], *, is_outermost: bool) -> Any:
        """Make a call of an engine, counted if it is the first of its phase.

        ``is_outermost`` is false for calls inside of another one, as those of a pipeline's ``train_batch`` are.
        """
        key = phase, id(engine)
        if key in self._seen:
            return call()
        self._seen.add(key)
        kept: dict[int, int] = {}
        weights = {param.untyped_storage().data_ptr() for param in engine.module.parameters()}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, torch.nn.Parameter):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in weights:
                    kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        hooks: Any = contextlib.nullcontext()
        if phase == "forward":
            hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        operations = OperationCount()
        with operations, hooks:
            result, flops, recomputed = counted_flops(call)
        if phase == "forward":
            self.activation_bytes += sum(kept.values())
        if is_outermost:
            num_micro_batches = max(int(engine.micro_batches), 1) if phase == "train_batch" else 1
            self.flops += flops / num_micro_batches
            self.flops_recomputed += recomputed / num_micro_batches
            self.num_operations += operations.num_operations / num_micro_batches
        return result
