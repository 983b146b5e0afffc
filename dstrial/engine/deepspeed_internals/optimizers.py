"""How DeepSpeed's optimizers keep weights and settings, and how ZeRO 3 cuts them.

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
    """Parameter groups of an optimizer that keeps each in a flat buffer; by group.

    Attributes:
        groups: parameters in the order in which they lie in the buffer.
        offsets: element of the buffer at which each begins; None if there are no gaps.
        numels: elements of each buffer, all partitions and paddings included.
        num_partitions: over how many replicas each is cut.
    """

    groups: Sequence[Sequence[torch.nn.Parameter]]
    offsets: Sequence[Sequence[int]] | None
    numels: Sequence[int]
    num_partitions: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True)
class SubGroup:
    """Parameters in one flat buffer of ZeRO 3, each cut over the replicas."""

    parameters: Sequence[Any]
    group_idx: int
    num_partitions: int


def sub_groups(optimizer: Any) -> list[SubGroup] | None:
    """Return the sub groups of ZeRO 3; None for other optimizers.

    Source: ``runtime/zero/stage3.py:431`` and on; 0.19.0 has one ``partition_count`` for all.
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
    """Return groups of ZeRO 1, 2, ``BF16_Optimizer``, ``FP16_Optimizer``; else None.

    Source: ``runtime/zero/stage_1_and_2.py:413`` and on; 0.19.0 knows no gaps between parameters (``parameter_alignment``).
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
    """Return parameters by group where each is kept by itself; none without optimizer."""
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        return list(optimizer.fp16_groups)
    return [] if optimizer is None else [group["params"] for group in optimizer.param_groups]


def flat_masters(optimizer: Any) -> list[torch.Tensor] | None:
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
    """Return master weights kept one by one, by group and position; else None."""
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
"""Attributes in which an optimizer keeps gradients beside those of the parameters, nested in lists and dicts.

Source: ``runtime/zero/stage_1_and_2.py:687``, ``runtime/zero/stage3.py:786``, ``runtime/bf16_optimizer.py:112``. The third of
ZeRO 1 and 2 is there with ``offload_optimizer`` only, the fourth holds the rank's share with ZeRO 2 (line 2184), the second of
ZeRO 3 is there where anything is trained.
"""


def held_gradients(optimizer: Any) -> list[Any]:
    """Return what an optimizer keeps of gradients beside those of the parameters."""
    names = next((names for kind, names in GRADIENTS.items() if isinstance(optimizer, kind)), ())
    return [getattr(optimizer, name, None) for name in names]


def reduction_buckets(optimizer: Any) -> list[Any]:
    """Return the buffers of ZeRO from which gradients are reduced.

    The gradients of parameters are views into them meanwhile.

    Source: ``ipg_buckets``, ``runtime/zero/stage_1_and_2.py:616`` and ``runtime/zero/stage3.py:477``.
    """
    return [bucket.buffer for bucket in getattr(optimizer, "ipg_buckets", {}).values()]


def accumulated_gradient(parameter: Any) -> torch.Tensor | None:
    """Return a parameter's gradient in the accumulation's type, if that differs.

    Source: ``use_grad_accum_attribute``, ``runtime/zero/stage_1_and_2.py:398``.
    """
    found: torch.Tensor | None = getattr(parameter, "grad_accum", None)
    return found


def base_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside DeepSpeed's wrapper, or itself without one."""
    is_wrapper = isinstance(optimizer, FP16_UnfusedOptimizer) or flat_masters(optimizer) is not None
    return optimizer.optimizer if is_wrapper else optimizer


def keeps_momentum_beside(optimizer: Any) -> bool:
    """Whether ZeRO 3 has Muon's momentum beside the optimizer's state."""
    return bool(getattr(optimizer, "muon_momentum_buffer_partitioned_groups_flat", None))


def has_file_per_replica(optimizer: Any) -> bool:
    """Whether an optimizer is saved in a file of each replica though ZeRO is off."""
    return isinstance(optimizer, BF16_Optimizer)


def restore_masters_from_weights(optimizer: Any) -> None:
    """Make master weights from the module's, as a load without optimizer states does."""
    optimizer._restore_from_bit16_weights()


def gather_persistent(optimizer: Any) -> None:
    """Let ZeRO 3 reassemble the small parameters that it keeps whole. Ranks: all.

    Source: ``DeepSpeedZeroOptimizer_Stage3.load_state_dict``; does nothing for other optimizers.
    """
    if not isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return
    # The second copy within a machine (hpZ) is of the weights before.
    optimizer.invalidate_secondary_tensor()
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def overwriting_stage(optimizer: Any) -> int:
    """Return the ZeRO stage of a wrapper in which ``backward`` may drop gradients.

    0 for every other optimizer. 2 stands for stages 1 and 2: at a boundary of the accumulation they keep the last
    ``backward`` (``averaged_gradients``, ``runtime/zero/stage_1_and_2.py:1047``). Stage 3 copies instead of adding
    until the first forward after a ``backward`` (``micro_step_id``, ``runtime/zero/stage3.py:2024``).
    """
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return 3
    return 2 if isinstance(optimizer, DeepSpeedZeroOptimizer) else 0


def set_accumulation(optimizer: Any, micro_batches_per_batch: int) -> None:
    """Tell an optimizer that counts micro batches (ZeRO) how many are in a batch."""
    if hasattr(optimizer, "gradient_accumulation_steps"):
        optimizer.gradient_accumulation_steps = micro_batches_per_batch


def loss_scale_holder(optimizer: Any) -> Any:
    """Return the object with the dynamic loss scale; None without one.

    Its attributes are ``cur_scale``, ``cur_iter``, ``last_overflow_iter`` and ``cur_hysteresis``.
    """
    holder = getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)
    is_dynamic = getattr(holder, "dynamic", False) or getattr(holder, "dynamic_loss_scale", False)
    return holder if is_dynamic else None


def gradient_scaler(optimizer: Any) -> Any:
    """Return torch autocast's scaler in an optimizer of ZeRO; None without one."""
    return getattr(optimizer, "torch_autocast_gradscaler", None)


def swaps_to_nvme(optimizer: Any) -> int:
    """Return how many of optimizer states and parameters ZeRO 3 swaps to a file."""
    return sum(bool(getattr(optimizer, name, False)) for name in ("swap_optimizer", "params_in_nvme_and_cpu"))


def is_cut(parameter: Any) -> bool:
    """Whether ZeRO 3 has cut a parameter (``_convert_to_deepspeed_param``)."""
    return hasattr(parameter, "ds_id")


def full_shape(parameter: Any) -> tuple[int, ...]:
    return tuple(parameter.ds_shape if is_cut(parameter) else parameter.shape)


def full_numel(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def cut_part(parameter: Any) -> torch.Tensor:
    """Return this rank's flat, padded piece of a cut parameter, for ZeRO 3 to gather."""
    part: torch.Tensor = parameter.ds_tensor
    return part


def cut_numel(parameter: Any) -> int:
    """Return the elements of each rank's piece of a cut parameter, padding included."""
    return int(parameter.partition_numel())


def held_part(parameter: Any) -> torch.Tensor | None:
    """Return this rank's piece of a cut parameter; None while on its way or on disk."""
    held = getattr(parameter, "ds_tensor", None)
    if held is None or getattr(held, "status", None) is not PartitionedParamStatus.AVAILABLE:
        return None
    part: torch.Tensor = held
    return part
