"""Undocumented parts of DeepSpeed's engines and pipelines that dstrial uses."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed import DeepSpeedEngine, PipelineEngine, PipelineModule, comm, load_ds_config
from deepspeed.checkpoint import constants
from deepspeed.moe.utils import is_moe_param
from deepspeed.pipe import TiedLayerSpec
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine as TorchCheckpointEngine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo as CheckpointCommitInfo
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine as CheckpointEngine
from deepspeed.runtime.config_utils import (
    dict_raise_error_on_duplicate_keys as dict_raise_error_on_duplicate_keys,
)
from deepspeed.runtime.pipe import schedule
from deepspeed.utils import groups


def config_of(engine: DeepSpeedEngine) -> Mapping[str, Any]:
    """Return the DeepSpeed config with which an engine was created, as a mapping.

    Source: ``DeepSpeedConfig._param_dict``, ``runtime/config.py:433``.
    """
    config: Mapping[str, Any] = engine._config._param_dict
    return config


def set_batch_sizes(
    engine: DeepSpeedEngine, train_batch_size: int, micro_batch_size: int, accumulation_steps: int
) -> None:
    """Set an engine's batch sizes in its parsed config and in its throughput timer.

    Source: ``DeepSpeedEngine.set_train_batch_size``, ``runtime/engine.py:637``, which leaves ``tput_timer`` unchanged.
    """
    engine._config.train_batch_size = train_batch_size
    engine._config.train_micro_batch_size_per_gpu = micro_batch_size
    engine._config.gradient_accumulation_steps = accumulation_steps
    engine.tput_timer.batch_size = engine.train_batch_size()


@contextlib.contextmanager
def ignoring_load_universal(loaded: Sequence[DeepSpeedEngine]) -> Iterator[None]:
    """Make engines ignore the config's ``checkpoint.load_universal`` inside the block.

    Source: ``runtime/config.py:549``; the engine reads the setting at each load.
    """
    before = [engine._config.load_universal_checkpoint for engine in loaded]
    for engine in loaded:
        engine._config.load_universal_checkpoint = False
    try:
        yield
    finally:
        for engine, is_universal in zip(loaded, before, strict=True):
            engine._config.load_universal_checkpoint = is_universal


def load_config_file(path: str) -> dict[str, Any]:
    """Read a config file with DeepSpeed's own function.

    Source: ``runtime/tensor_parallel/init_utils.py:19``.
    """
    config: dict[str, Any] = load_ds_config(path)
    return config


def basic_optimizer(engine: DeepSpeedEngine) -> Any:
    """Return the optimizer inside DeepSpeed's wrapper; None without an optimizer."""
    return getattr(engine, "basic_optimizer", None)


def replica(engine: DeepSpeedEngine) -> int:
    """Return this rank's index among the ranks that partition the optimizer's state.

    These are the data-parallel and sequence-parallel ranks together.
    """
    return int(comm.get_rank(group=engine.seq_data_parallel_group))


def checkpoint_part(engine: DeepSpeedEngine) -> int:
    """Return this rank's model-parallel index, which is in names of checkpoint files.

    Source: ``DeepSpeedEngine.checkpoint_mp_rank``, ``runtime/engine.py:2167``; in 0.19.0 ``mpu.get_model_parallel_rank()``.
    """
    if hasattr(engine, "checkpoint_mp_rank"):
        return int(engine.checkpoint_mp_rank)
    return 0 if engine.mpu is None else int(engine.mpu.get_model_parallel_rank())


def expert_parallel_size(engine: DeepSpeedEngine) -> int:
    """Return the number of ranks over which a layer's experts are divided.

    0 without experts; the largest number if layers differ.
    """
    return max(expert_parameters(engine), default=0)


def expert_parameters(engine: DeepSpeedEngine) -> dict[int, int]:
    """Return expert-parallel size -> this rank's number of trained expert parameters.

    Source: ``group_name`` of experts' parameters, ``moe/experts.py:26`` and ``module_inject/auto_ep_layer.py:674``.
    """
    counts: dict[int, int] = {}
    for parameter in filter(is_moe_param, engine.module.parameters()):
        size = groups._get_expert_parallel_world_size(parameter.group_name)
        counts[size] = counts.get(size, 0) + parameter.numel() * parameter.requires_grad
    return counts


def tensor_dim(parameter: torch.nn.Parameter) -> int | None:
    """Return the dimension along which AutoTP slices a parameter.

    None if each rank has the whole parameter; -1 if a slice is not one contiguous interval, as in fused weights.
    Source: ``_set_param_uc_meta`` and ``_build_param_uc_conversion_meta`` of ``module_inject/layers.py``.
    """
    found = getattr(
        parameter, getattr(constants, "DS_AUTOTP_UC_META", ""), None
    )  # 0.19.0 has no such constant
    if not found or found["replicated"]:
        return None
    details = found["conversion"]
    is_fused = any(
        details.get(key, True)  # earlier releases of 0.19 lack the keys: assume fused weights
        for key in ("sub_param_shape", "sub_param_shard_widths", "unsupported_reason")
    )
    return -1 if is_fused or found["partition_dim"] is None else int(found["partition_dim"])


def tied_layers_with_file(module: PipelineModule) -> set[str]:
    """Return the keys of tied layers for which DeepSpeed writes a checkpoint file.

    These are the tied layers without a ``forward_fn``.
    """
    return {
        spec.key
        for spec in module._layer_specs
        if isinstance(spec, TiedLayerSpec) and spec.forward_fn is None
    }


def averages_sequence_gradients(engine: DeepSpeedEngine) -> bool:
    """Return whether ZeRO averages gradients over sequence-parallel ranks.

    If False, ZeRO sums the gradients. Source: DeepSpeed 0.19.8 ``runtime/zero/stage3.py``, ``__avg_scatter_grads``, which
    divides by the number of all ranks.
    """
    return engine.zero_optimization_stage() == 3 and bool(engine.zero_reduce_scatter())


def replace_forward(engine: DeepSpeedEngine, forward: Callable[..., Any] | None) -> None:
    """Replace an engine's ``forward``; None restores the original method."""
    if forward is None:
        del engine.forward
    else:
        engine.forward = forward


def layers_sharing_across_stages(module: PipelineModule) -> dict[int, int]:
    """Find two layers on different stages that share a trained parameter.

    Returns {layer index: stage} of both layers; empty if there are none. Only ``TiedLayerSpec`` keeps shared parameters equal:
    if plain modules share a trained parameter, each stage trains its own copy.
    """
    first: dict[int, int] = {}
    for idx, layer in enumerate(module._layer_specs):
        for parameter in layer.parameters() if isinstance(layer, torch.nn.Module) else ():
            if not parameter.requires_grad:
                continue
            other = first.setdefault(id(parameter), idx)
            if module.stage_owner(other) != module.stage_owner(idx):
                return {one: int(module.stage_owner(one)) for one in (other, idx)}
    return {}


def set_global_grad_norm(engine: DeepSpeedEngine, norm: float | None) -> None:
    """Set the value that ``get_global_grad_norm`` returns until the next step."""
    engine._global_grad_norm = norm


def load_zero_states(engine: DeepSpeedEngine, load_dir: str, tag: str | None) -> None:
    """Load the optimizer state with ZeRO's loader, which reads one file per replica.

    Ranks: all, collectively.
    """
    engine._load_zero_checkpoint(load_dir, tag, load_optimizer_states=True)


def random_ltd_scheduler(engine: DeepSpeedEngine) -> Any:
    """Return the scheduler of random layer-token dropping (random-LTD).

    Call only if ``engine.random_ltd_enabled()``.
    """
    return engine.random_ltd_scheduler


def gradient_scaler(engine: DeepSpeedEngine) -> Any:
    """Return autocast's ``GradScaler`` of an engine without ZeRO; None if unused."""
    return getattr(engine, "torch_autocast_z0_gradscaler", None)


def bind_output_reduction(engine: PipelineEngine, function: Callable[..., Any]) -> None:
    """Make a pipeline reduce the losses of micro batches with ``function``.

    ``function`` has the arguments of ``reduce_outputs`` without ``engine``.
    """
    engine._reduce_outputs = function


def reduce_outputs(
    engine: PipelineEngine, outputs: list[Any], reduce: str | None, reduce_dp: bool, micro_batches: int | None
) -> Any:
    """Reduce micro batch losses with DeepSpeed's ``_reduce_outputs``.

    Source: ``runtime/pipe/engine.py:527``.

    Ranks: the last stage of every replica, collectively.
    """
    return type(engine)._reduce_outputs(engine, outputs, reduce, reduce_dp, micro_batches)


def forget_losses(engine: PipelineEngine) -> None:
    """Reset a pipeline's sum of losses.

    DeepSpeed would otherwise add the losses of an evaluation to those of training.

    Source: ``runtime/pipe/engine.py`` of 0.19.0 and 0.19.8.
    """
    engine.total_loss = None
    engine.total_additional_losses = None


INSTRUCTIONS: Mapping[type, str] = {
    schedule.ForwardPass: "forward",
    schedule.BackwardPass: "backward",
    schedule.ReduceGrads: "backward",
    schedule.ReduceTiedGrads: "backward",
    schedule.OptimizerStep: "step",
    schedule.SendActivation: "stages",
    schedule.RecvActivation: "stages",
    schedule.SendGrad: "stages",
    schedule.RecvGrad: "stages",
}
"""Class of pipeline instructions -> part of a step; ``stages`` is communication with neighbouring stages, waits included.

``backward`` includes the reduction of gradients, as in other engines. ``LoadMicroBatch`` is not measured.
"""


def observe_instructions(
    engine: PipelineEngine, around: Callable[[str, Callable[[], None]], None]
) -> Callable[[], None]:
    """Make a pipeline call ``around(part, instruction)`` instead of each instruction.

    ``part`` is a value of ``INSTRUCTIONS``; ``around`` must call ``instruction()``, which executes the instruction. Classes
    that are not in ``INSTRUCTIONS`` are not changed. Returns a function that undoes the replacement.

    Source: ``PipelineEngine._INSTRUCTION_MAP``, which ``_exec_schedule`` binds as methods, ``runtime/pipe/engine.py:1360``.
    """

    def wrapped(part: str, instruction: Callable[..., None]) -> Callable[..., None]:
        def call(self: Any, **kwargs: Any) -> None:
            around(part, lambda: instruction(self, **kwargs))

        return call

    engine._INSTRUCTION_MAP = {
        kind: wrapped(INSTRUCTIONS[kind], instruction) if kind in INSTRUCTIONS else instruction
        for kind, instruction in type(engine)._INSTRUCTION_MAP.items()
    }

    def put_back() -> None:
        vars(engine).pop("_INSTRUCTION_MAP", None)

    return put_back


FUSED_KERNELS = "deepspeed.ops.transformer"
"""Package of DeepSpeed whose kernels bypass torch's dispatcher."""


def is_fused(module: torch.nn.Module) -> bool:
    return type(module).__module__.startswith(FUSED_KERNELS)


CHECKPOINT_MODULE = "deepspeed.runtime.activation_checkpointing.checkpointing"
"""DeepSpeed's module that recomputes checkpointed activations.

The recomputation is in ``CheckpointFunction.backward`` and ``checkpoint_unpack`` (lines 667 and 877).
"""


def compute_dtype(engine: DeepSpeedEngine) -> torch.dtype:
    """Return the dtype of an engine's matrix products.

    With torch autocast this is autocast's dtype, otherwise the dtype of the weights.

    Source: ``torch_autocast_enabled`` and ``torch_autocast_dtype``, ``runtime/engine.py:1687``; 0.19.0 has both.
    """
    if engine.torch_autocast_enabled():
        dtype: torch.dtype = engine.torch_autocast_dtype()
        return dtype
    parameter = next(iter(engine.module.parameters()), None)
    return torch.float32 if parameter is None else parameter.dtype


PIPELINE_BUFFERS = ("pipe_recv_buf", "grad_layer", "_grad_layer_buf", "meta_buffer")
"""Attributes of a pipeline engine with persistent communication buffers (``runtime/pipe/engine.py:181``)."""


def pipeline_buffers(engine: DeepSpeedEngine) -> list[Any]:
    """Return a pipeline engine's persistent communication buffers.

    An entry is None if the buffer is not allocated. The list is empty for other engines. ``pipe_buffers`` are left out, because
    they hold activations.
    """
    if not isinstance(engine, PipelineEngine):
        return []
    return [getattr(engine, name, None) for name in PIPELINE_BUFFERS]


def steps_next(engine: DeepSpeedEngine) -> bool:
    """Return whether the engine's next ``step`` call runs the optimizer.

    Always True for a pipeline, whose ``is_gradient_accumulation_boundary`` is valid only during a step
    (``_force_grad_boundary``, ``runtime/pipe/engine.py:659``).
    """
    return isinstance(engine, PipelineEngine) or bool(engine.is_gradient_accumulation_boundary())


def leave_out_shapes(engine: PipelineEngine, received: Callable[[], Any]) -> None:
    """Make a pipeline stage run alone: no exchange of activation shapes with others.

    ``received()`` is called instead of receiving from the previous stage. It must return a meta tensor, or a tuple of meta
    tensors, with the shapes and dtypes of that stage's activations.

    Source: ``PipelineEngine._send_tensor_meta``, ``_recv_tensor_meta`` and ``_allocate_or_extend_buffers``,
    ``runtime/pipe/engine.py:933``.
    """

    def receive(_stage: int) -> Any:
        found = received()
        if isinstance(found, torch.Tensor):
            return engine._allocate_or_extend_buffers(0, list(found.shape), found.dtype)
        return tuple(
            engine._allocate_or_extend_buffers(idx, list(one.shape), one.dtype)
            for idx, one in enumerate(found)
        )

    engine._recv_tensor_meta = receive
    engine._send_tensor_meta = lambda *_args: None


def earlier_layers(module: PipelineModule) -> list[Callable[..., Any]]:
    """Build the layers of all earlier pipeline stages; return their forward functions.

    Weights of tied layers are not shared, which does not change shapes.
    """
    built: list[Callable[..., Any]] = []
    for spec in module._layer_specs[: module._local_start]:
        layer = spec.build() if hasattr(spec, "build") else spec
        forward = getattr(spec, "forward_fn", None)
        built.append(layer if forward is None else functools.partial(forward, layer))
    return built


REMEDIES: Mapping[str, str] = {
    # deepspeed 0.19.8 __init__.py:530
    "we were given deepspeed configs in the deepspeed arguments and deepspeed.initialize()": (
        "Leave args out of the call of deepspeed.initialize(), whose args.deepspeed_config is a second config beside config=."
    ),
    # deepspeed 0.19.8 runtime/engine.py:3130
    "Direct calls to tensor.backward() are not supported in this configuration": (
        "If this loss went through a second engine, compute it with that engine's module, engine.module(...), between "
        "engine.module.requires_grad_(False) and engine.module.requires_grad_(True); or set zero_optimization.stage to 1."
    ),
    # deepspeed 0.19.8 runtime/config.py, _batch_assertion
    "Check batch related parameters": (
        "dstrial solved the sizes that the config leaves open, for the replicas that the config names: set "
        "data.dstrial.pipeline_stages or model_parallel_size if the trial's ranks share a model, and take the config from "
        "context.get_deepspeed_config()."
    ),
}
"""Fragment of a DeepSpeed 0.19 error message -> remedy."""

_MISSING_ATTRIBUTE = "deepscale_config"
AUTOTP_REMEDY = (
    "AutoTP does not train adapters (LoRA) inside the layers that it cuts: remove tensor_parallel.autotp_size, or train the "
    "layers themselves."
)


def append_remedy(error: BaseException) -> None:
    """Append a remedy to the message of a known DeepSpeed error, in place.

    A no-op for other errors.
    """
    text = str(error.args[0]) if error.args else ""
    for fragment, remedy in REMEDIES.items():
        if fragment in text and remedy not in text:
            error.args = (f"{text.rstrip('. ')}. {remedy}", *error.args[1:])
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], torch.nn.Parameter):
        # `_create_param_mapping` of runtime/zero/stage_1_and_2.py: the optimizer has a parameter that is not in the model.
        error.args = (f"a parameter of the optimizer is not in the model. With AutoTP: {AUTOTP_REMEDY}",)
    if isinstance(error, TypeError) and "_CanRecordRegistry" in text:
        # `_install_instance_transformers_output_recorders` of module_inject/auto_ep_presets/base.py takes it for a dict.
        error.args = (
            f"{text}. AutoEP cannot divide models of Transformers 5.23 or newer: install transformers<5.23.",
        )
    if isinstance(error, KeyError) and text == _MISSING_ATTRIBUTE:
        # DeepSpeed calls hasattr() on a user's object that raises KeyError for missing attributes.
        error.args = (
            f"{text}: args of deepspeed.initialize() has attributes that raise KeyError. Leave args out of the call.",
        )
