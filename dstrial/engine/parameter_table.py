"""Read from a live engine where every parameter's elements lie; the values are ``layout``'s."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from deepspeed import comm
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from dstrial import __version__
from dstrial.checkpoint.layout import FlatBuffer, Layout, ParameterPlace
from dstrial.engine.batch_sizes import dims_of


@dataclasses.dataclass(frozen=True, slots=True)
class _Slot:
    """Where the optimizer keeps one parameter; fields as in ``ParameterPlace``."""

    group_idx: int
    buffer_idx: int | None
    offset: int | None


def collect_layout(engine: DeepSpeedEngine, allgather: Callable[[Any], list[Any]]) -> Layout:
    """Describe how ``engine``'s state lies over all ranks.

    Args:
        engine: a data-parallel or pipeline engine.
        allgather: hands a picklable object to all ranks; returns those of all ranks, in rank order.

    Returns:
        The same layout on every rank.

    Ranks: all, collectively (one ``allgather``).
    Source: flat groups of DeepSpeed 0.19.8 ``runtime/zero/stage_1_and_2.py``, ``runtime/bf16_optimizer.py``
        and ``runtime/fp16/fused_optimizer.py``; sub groups of ``runtime/zero/stage3.py``.
    """
    part = int(engine.checkpoint_mp_rank)
    slots, buffers = _slots(engine, part)
    places = _places(engine, part, slots)
    replica = comm.get_rank(group=engine.seq_data_parallel_group)
    tables: dict[int, tuple[list[ParameterPlace], list[FlatBuffer]]] = {}
    for its_part, its_replica, its_places, its_buffers in allgather((part, replica, places, buffers)):
        if its_replica == 0:
            tables.setdefault(its_part, (its_places, its_buffers))
    ordered = [tables[its_part] for its_part in sorted(tables)]

    dims = dims_of(engine)
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    if engine.fp16_enabled():
        precision = "fp16"
    elif engine.bfloat16_enabled():
        precision = "bf16"
    optimizer = getattr(engine, "basic_optimizer", None)
    is_wrapped = optimizer is not None and optimizer is not engine.optimizer
    return Layout(
        engine_kind="pipeline" if dims.is_pipeline else "data_parallel",
        # Ranks that share a sequence share the optimizer's state, too, where an mpu puts both into one group.
        **{**dims.to_layout(), "data_parallel_size": int(engine.seq_dp_world_size)},
        zero_stage=int(engine.zero_optimization_stage()),
        offload_optimizer=_offload_device(engine.zero_offload_optimizer()),
        offload_parameters=_offload_device(engine.zero_offload_param()),
        precision=precision,
        optimizer="" if optimizer is None else type(optimizer).__name__,
        wrapper=type(engine.optimizer).__name__ if is_wrapped else "",
        lr_scheduler="" if engine.lr_scheduler is None else type(engine.lr_scheduler).__name__,
        train_batch_size=int(engine.train_batch_size()),
        micro_batch_size=int(engine.train_micro_batch_size_per_gpu()),
        micro_batches_per_batch=int(engine.gradient_accumulation_steps()),
        versions={
            "dstrial": __version__,
            **{package: importlib.metadata.version(package) for package in ("deepspeed", "torch")},
            "python": platform.python_version(),
        },
        buffers=tuple(buffer for _, its_buffers in ordered for buffer in its_buffers),
        parameters=tuple(_tied_across_parts(place for its_places, _ in ordered for place in its_places)),
    )


def _offload_device(offload: Any) -> str:
    return "none" if offload is None else str(getattr(offload.device, "value", offload.device))


def _slots(engine: DeepSpeedEngine, part: int) -> tuple[dict[int, _Slot], list[FlatBuffer]]:
    """Return the slot of each parameter that the optimizer owns, by ``id``, and the optimizer's buffers."""
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return _slots_of_sub_groups(optimizer, part)
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return _slots_of_flat_groups(
            part,
            optimizer.round_robin_bit16_groups,
            optimizer.round_robin_bit16_offsets,
            [flat.numel() for flat in optimizer.bit16_groups_flat],
            optimizer.partition_count,
        )
    if isinstance(optimizer, BF16_Optimizer):
        return _slots_of_flat_groups(
            part,
            optimizer.bf16_groups,
            None,
            [flat.numel() for flat in optimizer.bf16_groups_flat],
            optimizer.partition_count,
        )
    if isinstance(optimizer, FP16_Optimizer):
        groups = optimizer.fp16_groups
        numels = [flat.numel() for flat in optimizer.fp16_groups_flat]
        return _slots_of_flat_groups(part, groups, None, numels, [1] * len(groups))
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        groups = optimizer.fp16_groups
    else:
        groups = [group["params"] for group in optimizer.param_groups] if optimizer is not None else []
    slots = {}
    for idx, group in enumerate(groups):
        end = 0
        for param in group:
            slots[id(param)] = _Slot(group_idx=idx, buffer_idx=None, offset=end)
            end += param.numel()
    return slots, []


def _slots_of_flat_groups(
    part: int,
    groups: list[list[torch.nn.Parameter]],
    offsets: list[list[int]] | None,
    numels: list[int],
    num_partitions: list[int],
) -> tuple[dict[int, _Slot], list[FlatBuffer]]:
    slots: dict[int, _Slot] = {}
    buffers = []
    for idx, group in enumerate(groups):
        end = 0
        for position, param in enumerate(group):
            offset = end if offsets is None else offsets[idx][position]
            slots[id(param)] = _Slot(group_idx=idx, buffer_idx=idx, offset=offset)
            end = offset + param.numel()
        buffers.append(
            FlatBuffer(
                model_part=part,
                index=idx,
                group_idx=idx,
                numel=numels[idx],
                partition_numel=numels[idx] // num_partitions[idx],
                num_partitions=num_partitions[idx],
            )
        )
    return slots, buffers


def _slots_of_sub_groups(
    optimizer: DeepSpeedZeroOptimizer_Stage3, part: int
) -> tuple[dict[int, _Slot], list[FlatBuffer]]:
    slots: dict[int, _Slot] = {}
    buffers = []
    for idx, sub_group in enumerate(optimizer.fp16_groups):
        group_idx = int(optimizer.sub_group_to_group_id[idx])
        end = 0
        for param in sub_group:
            slots[id(param)] = _Slot(group_idx=group_idx, buffer_idx=idx, offset=end)
            end += param.partition_numel()
        num_partitions = int(optimizer.sub_group_partition_counts[idx])
        buffers.append(
            FlatBuffer(
                model_part=part,
                index=idx,
                group_idx=group_idx,
                numel=end * num_partitions,
                partition_numel=end,
                num_partitions=num_partitions,
            )
        )
    return slots, buffers


def _places(engine: DeepSpeedEngine, part: int, slots: dict[int, _Slot]) -> list[ParameterPlace]:
    """Return this rank's parameters in the order of the module, every name of a shared one included."""
    stage = engine.stage_id if isinstance(engine, PipelineEngine) else 0
    first_names: dict[int, str] = {}
    places = []
    for name, param in engine.module.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(param), name)
        slot = slots.get(id(param))
        is_cut = hasattr(param, "ds_id")
        places.append(
            ParameterPlace(
                name=name,
                shape=tuple(param.ds_shape if is_cut else param.shape),
                dtype=str(param.dtype).removeprefix("torch."),
                trainable=param.requires_grad,
                group_idx=None if slot is None else slot.group_idx,
                tied_to=None if first == name else first,
                stage=stage,
                model_part=part,
                is_cut=is_cut,
                buffer_idx=None if slot is None else slot.buffer_idx,
                offset=None if slot is None else slot.offset,
                partition_numel=int(param.partition_numel()) if is_cut else None,
            )
        )
    return places


def _tied_across_parts(places: Iterable[ParameterPlace]) -> Iterable[ParameterPlace]:
    """Mark the copies of layers that a pipeline ties across stages: they share one name."""
    first_stages: dict[str, int] = {}
    for place in places:
        first = first_stages.setdefault(place.name, place.stage)
        yield place if place.stage == first else dataclasses.replace(place, tied_to=place.name)
