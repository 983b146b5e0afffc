"""Access weights and settings in DeepSpeed's optimizers, and partitions of ZeRO 3.

Source: ``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py``, ``runtime/bf16_optimizer.py``,
``runtime/fp16/fused_optimizer.py``, ``runtime/fp16/unfused_optimizer.py``, ``runtime/zero/partition_parameters.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler as DynamicLossScaler
from deepspeed.runtime.fp16.loss_scaler import LossScaler as LossScaler
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.config import ZeroStageEnum as ZeroStageEnum
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.tensor_fragment import fragment_address as fragment_address


@dataclasses.dataclass(frozen=True, slots=True)
class FlatGroups:
    """Parameter groups of an optimizer with one flat buffer per group.

    Attributes:
        groups: parameters of each group in buffer order.
        offsets: index of each parameter's first element in the group's buffer; None if parameters follow without gaps.
        numels: number of elements of each buffer, with all partitions and padding.
        num_partitions: number of partitions of each buffer.
    """

    groups: Sequence[Sequence[torch.nn.Parameter]]
    offsets: Sequence[Sequence[int]] | None
    numels: Sequence[int]
    num_partitions: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True)
class SubGroup:
    """Parameters of ZeRO 3 that share one flat buffer, partitioned over the replicas.

    ``group_idx`` is the index of the parameter group in the optimizer to which they belong.
    """

    parameters: Sequence[Any]
    group_idx: int
    num_partitions: int


def sub_groups(optimizer: Any) -> list[SubGroup] | None:
    """Return the sub groups of ZeRO 3, one per flat buffer; None for other optimizers.

    Source: ``runtime/zero/stage3.py:431`` and following; 0.19.0 has one ``partition_count`` for all sub groups.
    """
    if not isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return None
    counts = getattr(optimizer, "sub_group_partition_counts", None)
    if counts is None:
        counts = [optimizer.partition_count] * len(optimizer.fp16_groups)
    return [
        SubGroup(parameters, int(optimizer.sub_group_to_group_id[idx]), int(counts[idx]))
        for idx, parameters in enumerate(optimizer.fp16_groups)
    ]


def flat_groups(optimizer: Any) -> FlatGroups | None:
    """Return the groups of an optimizer with one flat buffer per group.

    Such optimizers are those of ZeRO 1 and 2, ``BF16_Optimizer`` and ``FP16_Optimizer``; None for other optimizers.
    Source: ``runtime/zero/stage_1_and_2.py:413`` and following; 0.19.0 has no gaps between parameters
        (``parameter_alignment``).
    """
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        groups = optimizer.round_robin_bit16_groups
        offsets = getattr(optimizer, "round_robin_bit16_offsets", None)
        return FlatGroups(groups, offsets, _numels(optimizer.bit16_groups_flat), optimizer.partition_count)
    if isinstance(optimizer, BF16_Optimizer):
        groups, numels = optimizer.bf16_groups, _numels(optimizer.bf16_groups_flat)
        return FlatGroups(groups, None, numels, optimizer.partition_count)
    if isinstance(optimizer, FP16_Optimizer):
        groups = optimizer.fp16_groups
        return FlatGroups(groups, None, _numels(optimizer.fp16_groups_flat), [1] * len(groups))
    return None


def _numels(flat: Sequence[torch.Tensor]) -> list[int]:
    return [buffer.numel() for buffer in flat]


def plain_groups(optimizer: Any) -> list[list[torch.nn.Parameter]]:
    """Return each group's parameters in an optimizer without flat buffers.

    Empty if ``optimizer`` is None.
    """
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        return list(optimizer.fp16_groups)
    return [] if optimizer is None else [group["params"] for group in optimizer.param_groups]


def flat_masters(optimizer: Any) -> list[torch.Tensor] | None:
    """Return this rank's partitions of the master weights, one per flat buffer.

    None for an optimizer without flat buffers.
    """
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        masters: list[torch.Tensor] = optimizer.fp32_partitioned_groups_flat
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        masters = optimizer.single_partition_of_fp32_groups
    elif isinstance(optimizer, BF16_Optimizer):
        masters = optimizer.fp32_groups_flat_partition
    elif isinstance(optimizer, FP16_Optimizer):
        masters = optimizer.fp32_groups_flat
    else:
        return None
    return masters


def own_masters(optimizer: Any) -> list[list[torch.Tensor]] | None:
    """Return ``FP16_UnfusedOptimizer``'s master weights, a list per parameter group.

    None for other optimizers: their master weights are in flat buffers, or are the module's weights.
    """
    return optimizer.fp32_groups if isinstance(optimizer, FP16_UnfusedOptimizer) else None


GRADIENTS: Mapping[type, tuple[str, ...]] = {
    DeepSpeedZeroOptimizer: (
        "averaged_gradients",
        "all_grad_tensors",
        "accumulated_grads_in_cpu",
        "grads_in_partition",
    ),
    DeepSpeedZeroOptimizer_Stage3: ("averaged_gradients", "grad_partitions_flat_buffer"),
    BF16_Optimizer: ("fp32_groups_gradients_flat", "fp32_groups_gradient_flat_partition"),
}
"""Optimizer class -> its attributes with gradient buffers, nested in lists and dicts, besides the parameters' ``grad``.

Source: ``runtime/zero/stage_1_and_2.py:687``, ``runtime/zero/stage3.py:786``, ``runtime/bf16_optimizer.py:112``.
``accumulated_grads_in_cpu`` exists only with ``offload_optimizer``. ``grads_in_partition`` has the rank's partition with ZeRO 2
(line 2184). ``grad_partitions_flat_buffer`` exists if any parameter is trained.
"""


def held_gradients(optimizer: Any) -> list[Any]:
    """Return an optimizer's gradient buffers other than the parameters' ``grad``.

    Entries are tensors, nested containers of tensors, or None for missing attributes.
    """
    names = next((names for kind, names in GRADIENTS.items() if isinstance(optimizer, kind)), ())
    return [getattr(optimizer, name, None) for name in names]


def reduction_buckets(optimizer: Any) -> list[Any]:
    """Return ZeRO's buckets for gradient reduction.

    During the reduction, the parameters' gradients are views of the buckets.

    Source: ``ipg_buckets``, ``runtime/zero/stage_1_and_2.py:616`` and ``runtime/zero/stage3.py:477``.
    """
    return [bucket.buffer for bucket in getattr(optimizer, "ipg_buckets", {}).values()]


def accumulated_gradient(parameter: Any) -> torch.Tensor | None:
    """Return the gradient that ZeRO accumulates in another dtype; None if unused.

    Source: ``use_grad_accum_attribute``, ``runtime/zero/stage_1_and_2.py:398``.
    """
    found: torch.Tensor | None = getattr(parameter, "grad_accum", None)
    return found


def base_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside DeepSpeed's wrapper, or ``optimizer`` itself."""
    is_wrapper = isinstance(optimizer, FP16_UnfusedOptimizer) or flat_masters(optimizer) is not None
    return optimizer.optimizer if is_wrapper else optimizer


def keeps_momentum_beside(optimizer: Any) -> bool:
    """Return whether ZeRO 3 stores Muon's momentum outside of the optimizer's state.

    This is the case with ``save_muon_momentum_buffer_in_memory``.
    """
    return bool(getattr(optimizer, "muon_momentum_buffer_partitioned_groups_flat", None))


def has_file_per_replica(optimizer: Any) -> bool:
    """Return whether each replica saves an optimizer file even without ZeRO."""
    return isinstance(optimizer, BF16_Optimizer)


def restore_masters_from_weights(optimizer: Any) -> None:
    """Overwrite the master weights with the module's weights."""
    optimizer._restore_from_bit16_weights()


def gather_persistent(optimizer: Any) -> None:
    """Gather ZeRO 3's persistent (small, never released) parameters after a load.

    Their full copies still have the values from before the load. A no-op for other optimizers. Source:
    ``DeepSpeedZeroOptimizer_Stage3.load_state_dict``.

    Ranks: all, collectively.
    """
    if not isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return
    # The secondary partition within a machine (hpZ) still has the weights from before the load.
    optimizer.invalidate_secondary_tensor()
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def overwriting_stage(optimizer: Any) -> int:
    """Return 2 or 3 if repeated ``backward`` calls may drop gradients, otherwise 0.

    2 means ZeRO stage 1 or 2: at an accumulation boundary, only the gradients of the last ``backward`` remain
    (``averaged_gradients``, ``runtime/zero/stage_1_and_2.py:1047``). 3 means stage 3: after a step, each ``backward``
    overwrites the gradients of the previous one, until a forward follows a ``backward`` (``micro_step_id``,
    ``runtime/zero/stage3.py:2024``).
    """
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return 3
    return 2 if isinstance(optimizer, DeepSpeedZeroOptimizer) else 0


def set_accumulation(optimizer: Any, micro_batches_per_batch: int) -> None:
    """Set the accumulation steps that a ZeRO optimizer stores.

    A no-op for optimizers that store none.
    """
    if hasattr(optimizer, "gradient_accumulation_steps"):
        optimizer.gradient_accumulation_steps = micro_batches_per_batch


def loss_scale_holder(optimizer: Any) -> Any:
    """Return the object that holds a dynamic loss scale; None for a static scale.

    The object has attributes such as ``cur_scale``, ``cur_iter``, ``last_overflow_iter`` and ``cur_hysteresis``.
    """
    holder = getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)
    is_dynamic = getattr(holder, "dynamic", False) or getattr(holder, "dynamic_loss_scale", False)
    return holder if is_dynamic else None


def gradient_scaler(optimizer: Any) -> Any:
    """Return torch autocast's ``GradScaler`` of a ZeRO optimizer; None if unused."""
    return getattr(optimizer, "torch_autocast_gradscaler", None)


def is_cut(parameter: Any) -> bool:
    """Return whether ZeRO 3 partitions a parameter (``_convert_to_deepspeed_param``)."""
    return hasattr(parameter, "ds_id")


def full_shape(parameter: Any) -> tuple[int, ...]:
    return tuple(parameter.ds_shape if is_cut(parameter) else parameter.shape)


def full_numel(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def cut_part(parameter: Any) -> torch.Tensor:
    """Return this rank's flat, padded partition (``ds_tensor``) of a ZeRO 3 parameter."""
    part: torch.Tensor = parameter.ds_tensor
    return part


def cut_numel(parameter: Any) -> int:
    """Return the number of elements in a rank's partition, padding included."""
    return int(parameter.partition_numel())


def held_part(parameter: Any) -> torch.Tensor | None:
    """Return this rank's partition of a ZeRO 3 parameter, if it is in memory.

    None while the partition is in transfer or on disk (NVMe), and for an unpartitioned parameter.
    """
    held = getattr(parameter, "ds_tensor", None)
    if held is None or getattr(held, "status", None) is not PartitionedParamStatus.AVAILABLE:
        return None
    part: torch.Tensor = held
    return part
