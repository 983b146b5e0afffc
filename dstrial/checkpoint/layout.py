"""Describe how an engine's state is split over ranks. Pure.

The table of parameters locates every element of every parameter in any ZeRO stage, so that another number of ranks can
read a checkpoint. ``engine.parameter_table`` builds the table from an engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dstrial.resume.metadata import EngineArrangement


@dataclasses.dataclass(frozen=True, slots=True)
class FlatBuffer:
    """A flat buffer of master weights and optimizer states, partitioned over ranks.

    Attributes:
        model_part: see ``ParameterPlace.model_part``.
        index: position among the buffers of ``model_part``: the optimizer's group for ZeRO 1 and 2, the sub group
            for ZeRO 3.
        group_idx: parameter group of the optimizer, 0-based.
        numel: number of elements of all partitions, with padding.
        partition_numel: number of elements of one rank's partition, with padding; equal on all ranks.
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
    """One parameter and the location of its elements in an optimizer's buffers.

    Attributes:
        name: full name in the module; in a pipeline it begins with the global index of its layer.
        shape: full shape, before any partitioning.
        dtype: type of the module's weight, for example ``float32``.
        trainable: whether the parameter requires a gradient.
        group_idx: parameter group of the optimizer, 0-based; None if the optimizer does not own the parameter.
        tied_to: name of the other parameter that owns the shared storage; None if this parameter owns its storage.
        A layer tied across pipeline stages has one name: copies on later stages are tied to the first copy.
        stage: pipeline stage; 0 without a pipeline.
        model_part: model-parallel rank that has the parameter, as DeepSpeed counts in file names (``mp_rank_XX``);
            a pipeline's stages count as model-parallel ranks.
        is_cut: whether ZeRO 3 partitions the parameter itself over the replicas.
        buffer_idx: ``FlatBuffer.index`` of the parameter's buffer; None without a buffer (no ZeRO).
        offset: number of elements before the parameter: in the whole buffer for ZeRO 1 and 2, where partition p has elements
            ``[p * partition_numel, (p + 1) * partition_numel)``; within every rank's partition for ZeRO 3; in its
            parameter group if there is no buffer, which gives the optimizer's order of parameters.
        partition_numel: elements of one rank's partition, with padding (ZeRO 3); rank p's partition begins
        at element ``p * partition_numel`` of the flattened parameter. None if the parameter is not partitioned.
        tensor_dim: dimension along which the ranks of AutoTP share the parameter; ``shape`` is that of this part's slice.
            None if each rank has the whole parameter, -1 if a slice is not one interval of the dimension.
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
    tensor_dim: int | None = None


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
        frozen_checksums: frozen parameters that the checkpoint does not hold, each with a checksum of its bits
            (``engine.frozen_parameters``); empty if the checkpoint holds all weights.
        adapter: ``config`` and ``keys`` of PEFT's adapter (``engine.peft_adapter.adapter_of``); empty without one.
    """

    precision: Literal["fp32", "bf16", "fp16"]
    versions: Mapping[str, str]
    buffers: tuple[FlatBuffer, ...]
    parameters: tuple[ParameterPlace, ...]
    folder: str = ""
    frozen_checksums: Mapping[str, str] = dataclasses.field(default_factory=dict)
    adapter: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        for key in ("folder", "frozen_checksums", "adapter"):
            if not values[key]:
                del values[key]
        return values

    def of_part(self, model_part: int) -> Layout:
        """Return the layout of one model-parallel part, with the part's shapes."""
        return dataclasses.replace(
            self,
            buffers=tuple(one for one in self.buffers if one.model_part == model_part),
            parameters=tuple(one for one in self.parameters if one.model_part == model_part),
        )

    def slices(self) -> dict[str, list[ParameterPlace]]:
        """Return parameter name -> its places, by model-parallel part."""
        found: dict[str, list[ParameterPlace]] = {}
        for place in sorted(self.parameters, key=lambda place: place.model_part):
            found.setdefault(place.name, []).append(place)
        return found

    @staticmethod
    def whole_shape(slices: Sequence[ParameterPlace]) -> tuple[int, ...]:
        """Return the shape of a parameter that AutoTP has cut into ``slices``."""
        shape, dim = slices[0].shape, slices[0].tensor_dim
        if dim is None or dim < 0:
            return shape
        return (*shape[:dim], sum(one.shape[dim] for one in slices), *shape[dim + 1 :])

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


def keeps_whole_matrices(layout: Layout, key: str) -> bool:
    """Return whether ranks store optimizer state ``key`` as whole matrices.

    Otherwise state is partitioned like the weights. Only Muon's momentum in ZeRO 1 and 2 without offload is stored so.
    Source: DeepSpeed 0.19.8, ``runtime/zero/stage_1_and_2.py`` ``_muon_momentum_buffer``.
    """
    return (layout.optimizer, layout.wrapper, layout.offload_optimizer, key) == (
        "MuonWithAuxAdam", "DeepSpeedZeroOptimizer", "none", "momentum_buffer",
    )  # fmt: skip
