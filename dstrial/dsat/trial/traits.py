"""What an engine visibly is, as numbers: by these a search proves that a knob has changed something."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import PipelineEngine
from torch._dynamo.eval_frame import OptimizedModule
from torch.utils._python_dispatch import TorchDispatchMode

from dstrial.engine.deepspeed_internals import optimizers


class OperationCount(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Counts the operations of torch that reach its dispatcher while entered; what a compiled graph fuses is not seen."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operations += 1
        return func(*args, **(kwargs or {}))


def traits_of(engines: list[Any]) -> dict[str, float]:
    """Return the traits of a rank's engines, each summed over them.

    Returns:
        ``probe_modules``: modules; ``probe_compiled``: those that are called through a compiler;
        ``probe_pipeline_stages``; ``probe_nvme``: 1 for each of optimizer states and parameters that are swapped to a file.

    Ranks: any; no communication.
    """
    modules = [module for engine in engines for module in engine.module.modules()]
    return {
        "probe_modules": float(len(modules)),
        "probe_compiled": float(sum(map(_is_compiled, modules))),
        "probe_pipeline_stages": float(
            sum(engine.num_stages if isinstance(engine, PipelineEngine) else 1 for engine in engines)
        ),
        "probe_nvme": float(
            sum(optimizers.swaps_to_nvme(getattr(engine, "optimizer", None)) for engine in engines)
        ),
    }


def _is_compiled(module: torch.nn.Module) -> bool:
    return isinstance(module, OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None
