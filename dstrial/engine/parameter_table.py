"""Build the layout of a running engine: where each parameter's elements are."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from deepspeed import DeepSpeedEngine

from dstrial import __version__
from dstrial.checkpoint.layout import FlatBuffer, Layout, ParameterPlace
from dstrial.engine.adapters.batch_sizes import dims_of
from dstrial.engine.deepspeed_internals import engines, optimizers
from dstrial.engine.parameter_names import named_parameters
from dstrial.engine.peft_adapter import adapter_of


@dataclasses.dataclass(frozen=True, slots=True)
class _Slot:
    """Location of a parameter in the optimizer; fields as in ``ParameterPlace``."""

    group_idx: int
    buffer_idx: int | None
    offset: int | None


def collect_layout(engine: DeepSpeedEngine, allgather: Callable[[Any], list[Any]]) -> Layout:
    """Return how ``engine``'s state is split over all ranks; equal on every rank.

    ``allgather(value)`` returns the values of all ranks, in order of ranks.

    Ranks: all, collectively.
    """
    part = engines.checkpoint_part(engine)
    slots, buffers = _slots(engine, part)
    dims = dims_of(engine)
    places = _places(engine, part, slots, int(engine.stage_id) if dims.is_pipeline else 0)
    replica = engines.replica(engine)
    tables: dict[int, tuple[list[ParameterPlace], list[FlatBuffer]]] = {}
    for its_part, table in allgather((part, (places, buffers) if replica == 0 else None)):
        if table is not None:
            tables.setdefault(its_part, table)
    ordered = [tables[its_part] for its_part in sorted(tables)]

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    if engine.fp16_enabled():
        precision = "fp16"
    elif engine.bfloat16_enabled():
        precision = "bf16"
    optimizer = engines.basic_optimizer(engine)
    is_wrapped = optimizer is not None and optimizer is not engine.optimizer
    return Layout(
        engine_kind="pipeline" if dims.is_pipeline else "data_parallel",
        # Sequence-parallel ranks also partition the optimizer's state, if ``mpu`` puts them into the data-parallel group.
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
        expert_parallel_size=engines.expert_parallel_size(engine),
        versions={
            "dstrial": __version__,
            **{package: importlib.metadata.version(package) for package in ("deepspeed", "torch")},
            "python": platform.python_version(),
        },
        buffers=tuple(buffer for _, its_buffers in ordered for buffer in its_buffers),
        parameters=tuple(_tied_across_parts(place for its_places, _ in ordered for place in its_places)),
        adapter=adapter_of(engine.module),
    )


def _offload_device(offload: Any) -> str:
    return "none" if offload is None else str(getattr(offload.device, "value", offload.device))


def _slots(engine: DeepSpeedEngine, part: int) -> tuple[dict[int, _Slot], list[FlatBuffer]]:
    """Return (``id(parameter)`` -> its slot, the flat buffers of the optimizer)."""
    sub_groups = optimizers.sub_groups(engine.optimizer)
    flat = optimizers.flat_groups(engine.optimizer)
    groups: Iterable[Sequence[Any]]
    group_of_buffer: Sequence[int] | None = None
    offsets: Sequence[Sequence[int]] | None = None
    if sub_groups is not None:
        groups, group_of_buffer = (
            [one.parameters for one in sub_groups],
            [one.group_idx for one in sub_groups],
        )
    elif flat is not None:
        groups, offsets = flat.groups, flat.offsets
    else:
        groups = optimizers.plain_groups(engine.optimizer)
    has_buffers = sub_groups is not None or flat is not None
    slots: dict[int, _Slot] = {}
    buffers = []
    for idx, parameters in enumerate(groups):
        group_idx, end = idx if group_of_buffer is None else group_of_buffer[idx], 0
        for position, param in enumerate(parameters):
            offset = end if offsets is None else offsets[idx][position]
            slots[id(param)] = _Slot(group_idx, idx if has_buffers else None, offset)
            end = offset + (param.numel() if sub_groups is None else optimizers.cut_numel(param))
        if sub_groups is not None:
            num_partitions = sub_groups[idx].num_partitions
            buffers.append(FlatBuffer(part, idx, group_idx, end * num_partitions, end, num_partitions))
        elif flat is not None:
            numel, num_partitions = flat.numels[idx], flat.num_partitions[idx]
            buffers.append(FlatBuffer(part, idx, group_idx, numel, numel // num_partitions, num_partitions))
    return slots, buffers


def _places(engine: DeepSpeedEngine, part: int, slots: dict[int, _Slot], stage: int) -> list[ParameterPlace]:
    """Return the layout entries of this rank's parameters, in module order.

    A tied parameter has one entry per name.
    """
    first_names: dict[int, str] = {}
    places = []
    for name, param in named_parameters(engine.module):
        first = first_names.setdefault(id(param), name)
        slot = slots.get(id(param))
        is_cut = optimizers.is_cut(param)
        places.append(
            ParameterPlace(
                name=name,
                shape=optimizers.full_shape(param),
                dtype=str(param.dtype).removeprefix("torch."),
                trainable=param.requires_grad,
                group_idx=None if slot is None else slot.group_idx,
                tied_to=None if first == name else first,
                stage=stage,
                model_part=part,
                is_cut=is_cut,
                buffer_idx=None if slot is None else slot.buffer_idx,
                offset=None if slot is None else slot.offset,
                partition_numel=optimizers.cut_numel(param) if is_cut else None,
                tensor_dim=engines.tensor_dim(param),
            )
        )
    return places


def _tied_across_parts(places: Iterable[ParameterPlace]) -> Iterable[ParameterPlace]:
    """Yield ``places``, with ``tied_to`` set for tied layers' copies on later stages."""
    first_stages: dict[str, int] = {}
    for place in places:
        first = first_stages.setdefault(place.name, place.stage)
        yield place if place.stage == first else dataclasses.replace(place, tied_to=place.name)
