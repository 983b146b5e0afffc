"""Describe how an engine's state is split over ranks; compare two layouts. Pure.

The per-parameter table locates every element of every parameter in any ZeRO stage, so that another number of ranks can
read a checkpoint. ``parameter_table`` builds the table from an engine.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from dstrial.resume.metadata import EngineArrangement
from dstrial.resume.rules import KNOWN_WRAPPERS, STATE_KEYS


@dataclasses.dataclass(frozen=True, slots=True)
class FlatBuffer:
    """A flat buffer of master weights and optimizer states, partitioned over ranks.

    Attributes:
        model_part: see ``ParameterPlace.model_part``.
        index: position among the buffers of that part: the group of the optimizer for ZeRO 1 and 2, the
            sub group for ZeRO 3.
        group_idx: parameter group of the optimizer, 0-based.
        numel: elements of all partitions together, paddings included.
        partition_numel: elements of one rank's partition, paddings included; equal on all ranks.
        num_partitions: number of ranks that hold a partition.
    """

    model_part: int
    index: int
    group_idx: int
    numel: int
    partition_numel: int
    num_partitions: int


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterPlace:
    """One parameter and the location of its elements.

    Attributes:
        name: full name in the module; in a pipeline it begins with the global index of its layer.
        shape: full shape, before any partitioning.
        dtype: type of the module's copy, for example ``float32``.
        trainable: whether it requires a gradient.
        group_idx: parameter group of the optimizer, 0-based; None if the optimizer does not own the parameter.
        tied_to: name of the parameter that shares and owns the storage; None if it is this one. A layer tied
        across pipeline stages has one name: its copies on later stages are tied to the first one.
        stage: pipeline stage, 0 where there is no pipeline.
        model_part: model-parallel rank of its owner, as DeepSpeed counts in file names (``mp_rank_XX``);
            a pipeline's stages count as model-parallel ranks.
        is_cut: whether ZeRO 3 partitions the parameter itself over the replicas.
        buffer_idx: ``FlatBuffer.index`` of the parameter's buffer; None without a buffer (no ZeRO).
        offset: elements before the parameter: in the whole buffer for ZeRO 1 and 2, where partition p holds elements
            ``[p * partition_numel, (p + 1) * partition_numel)``; within every rank's partition for ZeRO 3; in its
            parameter group if there is no buffer, which gives the optimizer's order of parameters.
        partition_numel: elements of one rank's partition, padding included (ZeRO 3); rank p's partition begins
        at element ``p * partition_numel`` of the flattened parameter. None if the parameter is not partitioned.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    group_idx: int | None
    tied_to: str | None
    stage: int
    model_part: int
    is_cut: bool
    buffer_idx: int | None
    offset: int | None
    partition_numel: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Layout(EngineArrangement):
    """How the state of one engine is split over the ranks of a job.

    Attributes:
        precision: type in which the module computes.
        versions: release of ``deepspeed``, ``torch``, ``dstrial`` and ``python``.
        buffers: flat buffers of all parts of the model, by part and index.
        parameters: every parameter of every part, in the order of the module.
        folder: the engine's folder in the checkpoint, with ``/``; empty if the file names show it
            (``checkpoint.file_roles.engine_folder``).
    """

    precision: Literal["fp32", "bf16", "fp16"]
    versions: Mapping[str, str]
    buffers: tuple[FlatBuffer, ...]
    parameters: tuple[ParameterPlace, ...]
    folder: str = ""

    def to_json(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        if not self.folder:
            del values["folder"]
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Layout:
        """Build a layout from the result of ``to_json``.

        Raises:
            KeyError: a value is missing.
            TypeError: a field is unknown to this release.
        """
        rest = dict(values)
        buffers = tuple(FlatBuffer(**buffer) for buffer in rest.pop("buffers"))
        parameters = tuple(
            ParameterPlace(**{**place, "shape": tuple(place["shape"])}) for place in rest.pop("parameters")
        )
        return cls(**rest, buffers=buffers, parameters=parameters)


_COMPARED = (
    ("engine_kind", "kind of engine"),
    ("world_size", "number of ranks"),
    ("data_parallel_size", "number of data-parallel replicas"),
    ("pipeline_stages", "number of pipeline stages"),
    ("model_parallel_size", "model-parallel size"),
    ("expert_parallel_size", "expert-parallel size"),
    ("zero_stage", "ZeRO stage"),
    ("offload_optimizer", "optimizer offload"),
    ("offload_parameters", "parameter offload"),
    ("precision", "precision"),
    ("optimizer", "optimizer"),
    ("wrapper", "DeepSpeed's optimizer wrapper"),
    ("lr_scheduler", "learning-rate scheduler"),
)


def compatible(saved: Layout, now: Layout) -> list[str]:
    """Return why a layout cannot load a checkpoint unchanged; empty if it can.

    Batch sizes and versions are not compared: DeepSpeed loads across them.
    """
    differences = [
        f"{words} was {getattr(saved, field)!r}, is {getattr(now, field)!r}"
        for field, words in _COMPARED
        if getattr(saved, field) != getattr(now, field)
    ]
    return differences or _parameter_differences(saved, now) or _buffer_differences(saved, now)


def _parameter_differences(saved: Layout, now: Layout) -> list[str]:
    before = {(place.model_part, place.name): place for place in saved.parameters}
    after = {(place.model_part, place.name): place for place in now.parameters}
    differences = []
    for key in [*before, *(key for key in after if key not in before)]:
        was, is_ = before.get(key), after.get(key)
        if was is None:
            differences.append(f"parameter {key[1]} is new")
        elif is_ is None:
            differences.append(f"parameter {key[1]} is gone")
        else:
            differences += [
                f"parameter {key[1]}: {field} was {getattr(was, field)!r}, is {getattr(is_, field)!r}"
                for field in (item.name for item in dataclasses.fields(ParameterPlace))
                if getattr(was, field) != getattr(is_, field)
            ]
    return differences


def _buffer_differences(saved: Layout, now: Layout) -> list[str]:
    if saved.buffers == now.buffers:
        return []
    return ["the flat buffers are cut differently; the ZeRO settings for sub groups or alignment changed"]


# Implementations of one algorithm with equal state; DeepSpeed chooses by offload and device.
_SAME_OPTIMIZERS = (
    frozenset({"Adam", "FusedAdam", "DeepSpeedCPUAdam"}),
    frozenset({"AdamW", "FusedAdam", "DeepSpeedCPUAdam"}),
    frozenset({"FusedLion", "DeepSpeedCPULion"}),
)


def keeps_whole_matrices(layout: Layout, key: str) -> bool:
    """Return whether ranks keep state ``key`` by whole matrix, not by partition.

    Source: Muon of DeepSpeed 0.19.8, ``runtime/zero/stage_1_and_2.py`` ``_muon_momentum_buffer``; with the optimizer on the CPU,
    in ZeRO 3 and in ``BF16_Optimizer`` the momentum is partitioned like the weights.
    """
    return (layout.optimizer, layout.wrapper, layout.offload_optimizer, key) == (
        "MuonWithAuxAdam", "DeepSpeedZeroOptimizer", "none", "momentum_buffer",
    )  # fmt: skip


def reshape_problems(saved: Layout, now: Layout) -> list[str]:
    """Return why a checkpoint cannot be resharded to another layout; empty if it can."""
    problems = []
    if saved.model_parallel_size != now.model_parallel_size:
        problems.append(
            f"model-parallel size was {saved.model_parallel_size}, is {now.model_parallel_size}: set it back"
        )
    elif saved.model_parallel_size > 1:
        problems.append(
            f"layers are cut over {saved.model_parallel_size} model-parallel ranks: resume with the layout that wrote them"
        )
    if saved.expert_parallel_size or now.expert_parallel_size:
        problems.append("experts are spread over the ranks that wrote them: set the layout back")
    if saved.optimizer and saved.optimizer not in STATE_KEYS:
        problems.append(
            f"the layout of the state of optimizer {saved.optimizer} is not known: resume with the layout that wrote it"
        )
    for wrapper in sorted({saved.wrapper, now.wrapper} - KNOWN_WRAPPERS):
        problems.append(
            f"{wrapper} partitions its state in its own way: resume with the layout that wrote it"
        )
    for field, what in (("optimizer", "optimizer"), ("lr_scheduler", "learning-rate scheduler")):
        was, is_ = getattr(saved, field), getattr(now, field)
        if was != is_ and not any({was, is_} <= names for names in _SAME_OPTIMIZERS):
            problems.append(f"{what} was {was or 'none'}, is {is_ or 'none'}: set it back")
    if "nvme" in (
        saved.offload_optimizer,
        saved.offload_parameters,
        now.offload_optimizer,
        now.offload_parameters,
    ):
        problems.append("offload to NVMe: set the offload device to cpu or none on both sides")
    changed: dict[str, list[str]] = {"trained": [], "frozen": []}
    before, after = _by_name(saved), _by_name(now)
    for name in sorted(before.keys() | after.keys()):
        was_place, is_place = before.get(name), after.get(name)
        if was_place is None or is_place is None:
            problems.append(
                f"parameter {name} is {'new' if was_place is None else 'gone'}: use the same model"
            )
        elif was_place.shape != is_place.shape:
            problems.append(
                f"parameter {name} had shape {was_place.shape}, has {is_place.shape}: use the same model"
            )
        elif _is_trained(was_place) != _is_trained(is_place):
            changed["trained" if _is_trained(is_place) else "frozen"].append(name)
    problems += [
        f"{len(names)} parameters are {state} now and were not ({', '.join(names[:3])}{', …' if names[3:] else ''}): set their "
        "requires_grad as it was, or begin a new trial with the weights that `dstrial checkpoint export` writes"
        for state, names in changed.items()
        if names
    ]
    return problems


def _is_trained(place: ParameterPlace) -> bool:
    """Return whether the optimizer updates a parameter."""
    # Without a wrapper the optimizer may own frozen parameters, which it does not update.
    return place.group_idx is not None and place.trainable and math.prod(place.shape) > 0


def _by_name(layout: Layout) -> dict[str, ParameterPlace]:
    places: dict[str, ParameterPlace] = {}
    for place in layout.parameters:
        places.setdefault(place.name, place)
    return places
