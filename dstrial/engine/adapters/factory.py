"""Choose the adapter for a wrapped engine."""

from __future__ import annotations

import sys

from deepspeed import DeepSpeedEngine, PipelineEngine

from dstrial.config.parallel_dims import config_sizes
from dstrial.engine.adapters.base import EngineAdapter
from dstrial.engine.adapters.batch_sizes import dims_of
from dstrial.engine.adapters.pipeline import PipelineAdapter
from dstrial.engine.deepspeed_internals import engines, optimizers
from dstrial.errors import TrialContractError


def adapt(
    engine: object, *, data_parallel_rank: int | None = None, data_parallel_world_size: int | None = None
) -> EngineAdapter:
    """Return the adapter through which the training loop uses an engine.

    The ``train_batch`` and ``eval_batch`` of a pipeline engine are replaced.

    Args:
        engine: the engine that the user's trial has wrapped.
        data_parallel_rank: the rank according to the user's model-parallel unit (``mpu``); None to ask the engine's groups.
        data_parallel_world_size: the number of replicas according to the ``mpu``; None to ask the engine's groups.

    Raises:
        TrialContractError: dstrial cannot train ``engine`` (see ``require_engine``), or two stages share a layer's parameter.
    """
    require_engine(engine)
    if isinstance(engine, PipelineEngine):
        return PipelineAdapter(engine, data_parallel_rank, data_parallel_world_size)
    return EngineAdapter(engine, data_parallel_rank, data_parallel_world_size)


def require_engine(engine: object) -> None:
    """Raise ``TrialContractError`` unless dstrial can train ``engine``.

    Objects that are not DeepSpeed engines are rejected, and engines that combine:

    - sequence parallelism without process groups;
    - AutoTP and layers with PEFT adapters;
    - ZeRO 3 and a model that ``torch.compile`` has wrapped, because DeepSpeed 0.19 fails at the wrapper.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise TrialContractError(
            f"wrap_model_engine(model_engine): model_engine is a {type(engine).__name__}; expected the engine "
            "that deepspeed.initialize returns first. Write: engine, *_ = deepspeed.initialize(...); "
            "self.model_engine = context.wrap_model_engine(engine)."
        )
    _require_sequence_groups(engine)
    _require_trained_in_model(engine)
    # This module is loaded only if something was compiled. Importing it here would take seconds.
    loaded = sys.modules.get("torch._dynamo.eval_frame")
    if loaded is None or not engine.zero_optimization_partition_weights():
        return
    if any(isinstance(module, loaded.OptimizedModule) for module in engine.module.modules()):
        raise TrialContractError(
            "the model was wrapped by torch.compile(...) before deepspeed.initialize under ZeRO 3; expected a model without such "
            "wrappers, which DeepSpeed cannot train. Call engine.compile() after deepspeed.initialize."
        )


def _require_trained_in_model(engine: DeepSpeedEngine) -> None:
    """Raise ``TrialContractError`` if AutoTP has replaced the optimizer's parameters.

    The optimizer would then update parameters that the model no longer uses.
    """
    # DeepSpeed 0.19.8 replaces PEFT's adapter layers as if they were plain linear layers.
    # ZeRO's optimizer has flat buffers instead of parameters; there DeepSpeed itself raises an error (``append_remedy``).
    if dims_of(engine).tp == 1 or engine.optimizer is not engines.basic_optimizer(engine):
        return
    held = {id(parameter) for parameter in engine.module.parameters()}
    trained = [parameter for group in optimizers.plain_groups(engine.optimizer) for parameter in group]
    lost = sum(id(parameter) not in held for parameter in trained)
    if lost:
        raise TrialContractError(
            f"{lost} of the optimizer's {len(trained)} parameters are not in the model, whose layers AutoTP has replaced. "
            f"{engines.AUTOTP_REMEDY}"
        )


def _require_sequence_groups(engine: DeepSpeedEngine) -> None:
    """Raise ``TrialContractError`` if sequence-parallel ranks do not reduce gradients.

    DeepSpeed 0.19.8 divides the batch by ``sequence_parallel_size`` even without process groups. With a device mesh,
    DeepSpeed reduces gradients over data-parallel ranks only (``utils/groups.py:911``), so that weights diverge.
    """
    dims = dims_of(engine)
    asked = config_sizes(engines.config_of(engine)).get("sequence_parallel_size", 1)
    found = None
    if dims.sp > 1 and int(engine.seq_dp_world_size) != dims.dp * dims.sp:
        found = f"{dims.sp} with a device mesh, with which DeepSpeed reduces no gradients over the ranks of a sequence"
    elif asked not in (1, dims.sp) and not dims.has_mpu:
        found = f"{asked}, but this engine has {dims.sp} {'rank' if dims.sp == 1 else 'ranks'} per sequence"
    if found is not None:
        raise TrialContractError(
            f"sequence_parallel_size is {found}; expected an engine with DeepSpeed's sequence-parallel groups. Call "
            f"initialize_sequence_parallel({max(asked, dims.sp)}) of deepspeed.runtime.sequence_parallel.parallel_state_sp, pass "
            "mpu=parallel_state_sp to deepspeed.initialize, and remove data_parallel_size and mesh_param."
        )
