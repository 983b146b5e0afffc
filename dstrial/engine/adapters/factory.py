"""Choose the adapter for a wrapped engine."""

from __future__ import annotations

import sys

from deepspeed import DeepSpeedEngine, PipelineEngine

from dstrial.engine.adapters.base import EngineAdapter
from dstrial.engine.adapters.pipeline import PipelineAdapter
from dstrial.errors import TrialContractError


def adapt(
    engine: object, *, data_parallel_rank: int | None = None, data_parallel_world_size: int | None = None
) -> EngineAdapter:
    """Return the adapter for ``engine``; a pipeline engine's methods are replaced.

    ``data_parallel_rank`` and ``data_parallel_world_size`` come from the user's model-parallel unit, if any; None means the
    engine's own groups.
    """
    require_engine(engine)
    if isinstance(engine, PipelineEngine):
        return PipelineAdapter(engine, data_parallel_rank, data_parallel_world_size)
    return EngineAdapter(engine, data_parallel_rank, data_parallel_world_size)


def require_engine(engine: object) -> None:
    """Reject an object that is no engine, and a compiled model under ZeRO 3.

    Under ZeRO 3, DeepSpeed 0.19 partitions the parameters of a module wrapped by ``torch.compile``, then fails at the wrapper.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise TrialContractError(
            f"wrap_model_engine(model_engine): model_engine is a {type(engine).__name__}; expected the engine "
            "that deepspeed.initialize returns first. Write: engine, *_ = deepspeed.initialize(...); "
            "self.model_engine = context.wrap_model_engine(engine)."
        )
    # This module is loaded only if something was compiled. Importing it here would take seconds.
    loaded = sys.modules.get("torch._dynamo.eval_frame")
    if loaded is None or not engine.zero_optimization_partition_weights():
        return
    if any(isinstance(module, loaded.OptimizedModule) for module in engine.module.modules()):
        raise TrialContractError(
            "the model was wrapped by torch.compile(...) before deepspeed.initialize under ZeRO 3; expected a model without such "
            "wrappers, which DeepSpeed cannot train. Call engine.compile() after deepspeed.initialize."
        )
