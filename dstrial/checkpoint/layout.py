"""Describe how an engine's state is split over ranks.

A ``Layout`` locates every element of every parameter in any ZeRO stage, so that any number of ranks can read a checkpoint. A
``Shard`` is the part of a flattened parameter that one replica holds in its partition of a flat buffer. Without a flat buffer,
the shard is the whole parameter.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from dstrial.resume.metadata import EngineArrangement


@dataclasses.dataclass(frozen=True, slots=True)
class FlatBuffer:
    """A flat buffer of master weights and optimizer states, partitioned over ranks.

    Attributes:
        model_part: model-parallel rank that has the buffer, counted as in ``ParameterPlace.model_part``.
        index: position among the buffers of ``model_part``. There is one buffer per parameter group in ZeRO 1 and 2, and one
            per sub group in ZeRO 3.
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
        tied_to: name of the parameter that owns the shared storage; None if this parameter owns its storage. A layer tied
            across pipeline stages has the same name on all stages; on later stages ``tied_to`` is this name.
        stage: pipeline stage; 0 without a pipeline.
        model_part: model-parallel rank that has the parameter, as in DeepSpeed's file names (``mp_rank_XX``). In a pipeline,
            each stage counts as one such rank.
        is_cut: whether ZeRO 3 partitions the parameter itself over the replicas.
        buffer_idx: ``FlatBuffer.index`` of the parameter's buffer; None without a buffer (no ZeRO).
        offset: index of the parameter's first element. In ZeRO 1 and 2 this is an index in the whole buffer, of which
            partition p has elements ``[p * partition_numel, (p + 1) * partition_numel)`` (``FlatBuffer.partition_numel``).
            In ZeRO 3 it is an index in each rank's partition of the buffer. Without a buffer it only orders the parameters
            of the group. None if the optimizer does not own the parameter.
        partition_numel: elements of the parameter in one rank's partition, with padding (ZeRO 3); the partition of rank p
            begins at element ``p * partition_numel`` of the flattened parameter. None if the parameter is not partitioned.
        tensor_dim: dimension along which AutoTP splits the parameter over ranks; ``shape`` is then the shape of this
            ``model_part``'s slice. None if the parameter is not split, -1 if slices are not intervals of one dimension.
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
        precision: floating-point type in which the module computes.
        versions: versions of ``deepspeed``, ``torch``, ``dstrial`` and ``python``.
        buffers: flat buffers of all model-parallel ranks, sorted by ``model_part`` and ``index``.
        parameters: parameters of all model-parallel ranks, in the order of the module.
        folder: the engine's folder, relative to the checkpoint; "" for the folder that ``manifest.engine_folder`` returns.
        frozen_checksums: name -> checksum of each frozen parameter that is left out of the checkpoint.
        adapter: ``config`` and ``keys`` of PEFT's adapter (``engine.peft_adapter.adapter_of``); {} without an adapter.
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
        """Return a layout with only the buffers and parameters of one model-parallel rank."""
        return dataclasses.replace(
            self,
            buffers=tuple(one for one in self.buffers if one.model_part == model_part),
            parameters=tuple(one for one in self.parameters if one.model_part == model_part),
        )

    def slices(self) -> dict[str, list[ParameterPlace]]:
        """Return parameter name -> ``ParameterPlace`` in each ``model_part``, in order."""
        found: dict[str, list[ParameterPlace]] = {}
        for place in sorted(self.parameters, key=lambda place: place.model_part):
            found.setdefault(place.name, []).append(place)
        return found

    @staticmethod
    def whole_shape(slices: Sequence[ParameterPlace]) -> tuple[int, ...]:
        """Return the full shape of a parameter that AutoTP has split into ``slices``."""
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

    ``key`` is a name such as ``exp_avg``. The result is True only for Muon's momentum in ZeRO 1 and 2 without offload. All
    other states are partitioned like the weights. Source: DeepSpeed 0.19.8, ``runtime/zero/stage_1_and_2.py``,
    ``_muon_momentum_buffer``.
    """
    return (layout.optimizer, layout.wrapper, layout.offload_optimizer, key) == (
        "MuonWithAuxAdam", "DeepSpeedZeroOptimizer", "none", "momentum_buffer",
    )  # fmt: skip


# ---- shards ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive elements of a flattened parameter in one replica's partition.

    Attributes:
        replica: index of the rank among those that partition the optimizer's state.
        begin: index of the first element in the partition of the flat buffer; without a buffer 0.
        parameter_begin: index of the first element in the flattened parameter.
        numel: number of elements.
    """

    replica: int
    begin: int
    parameter_begin: int
    numel: int

    @property
    def parameter_end(self) -> int:
        """Index after the shard's last element, in the flattened parameter."""
        return self.parameter_begin + self.numel


class ShardMap:
    """Computes the shards of parameters in a layout of a checkpoint or engine."""

    def __init__(self, layout: Layout) -> None:
        self._buffers = {(buffer.model_part, buffer.index): buffer for buffer in layout.buffers}
        self._owned = [place for place in layout.parameters if place.tied_to in (None, place.name)]
        self.matrices = functools.cache(self._find_matrices)

    def buffer(self, place: ParameterPlace) -> FlatBuffer | None:
        if place.buffer_idx is None:
            return None
        return self._buffers[place.model_part, place.buffer_idx]

    def of(self, place: ParameterPlace) -> list[Shard]:
        """Return all shards of a parameter, in the order of its elements.

        ``place`` is a parameter that the optimizer owns.
        """
        numel = math.prod(place.shape)
        buffer = self.buffer(place)
        if buffer is None or place.offset is None:
            return [Shard(0, 0, 0, numel)] if numel else []
        if place.is_cut:
            shards = (own_shard(place, replica) for replica in range(buffer.num_partitions))
            return [dataclasses.replace(one, begin=place.offset) for one in shards if one is not None]
        return list(_flat_shards(numel, place.offset, buffer))

    def on(self, place: ParameterPlace, replica: int) -> list[Shard]:
        """Return a parameter's shards in a replica's partition.

        If the parameter's buffer is not partitioned, return all shards.
        """
        buffer = self.buffer(place)
        if buffer is None or buffer.num_partitions == 1:
            return self.of(place)
        return [piece for piece in self.of(place) if piece.replica == replica]

    def _find_matrices(self, model_part: int, buffer_idx: int, replica: int) -> dict[str, Shard]:
        """Return parameter name -> the whole parameter's position in a momentum buffer.

        Each position is a ``Shard`` with all elements. In a replica, Muon's momentum buffer concatenates all whole parameters
        of which an element is in the replica's partition.
        """
        found: dict[str, Shard] = {}
        begin = 0
        for place in sorted(self._owned, key=lambda place: place.offset or 0):
            if (place.model_part, place.buffer_idx) == (model_part, buffer_idx) and self.on(place, replica):
                numel = math.prod(place.shape)
                found[place.name] = Shard(replica, begin, 0, numel)
                begin += numel
        return found


def own_shard(place: ParameterPlace, replica: int) -> Shard | None:
    """Return a replica's shard of a ZeRO 3 parameter; None if the shard is empty."""
    assert place.partition_numel is not None
    begin = replica * place.partition_numel
    numel = min(place.partition_numel, math.prod(place.shape) - begin)
    return Shard(replica, 0, begin, numel) if numel > 0 else None


def positions_in_groups(places: Iterable[ParameterPlace]) -> dict[str, tuple[int, int]]:
    """Return parameter name -> (optimizer group's index, position in the group).

    For optimizers without flat buffers. ``places`` are the parameters of one model-parallel rank.
    """
    owned = [
        # Of parameters with the same offset, all but the last have no elements.
        (place.group_idx, place.offset, math.prod(place.shape) > 0, place.name)
        for place in places
        if place.group_idx is not None and place.offset is not None and place.tied_to in (None, place.name)
    ]
    positions: dict[str, tuple[int, int]] = {}
    num_of_group: dict[int, int] = {}
    for group_idx, _, _, name in sorted(owned):
        positions[name] = (group_idx, num_of_group.setdefault(group_idx, 0))
        num_of_group[group_idx] += 1
    return positions


def overlaps(pieces: Iterable[Shard], begin: int, numel: int) -> Iterator[tuple[Shard, int, int, int]]:
    """Yield the shards that overlap an interval of a flattened parameter.

    ``pieces`` are shards of the parameter. The interval has ``numel`` elements from element ``begin`` on. Each item is (shard,
    offset in the shard, offset in the interval, number of common elements).
    """
    end = begin + numel
    for piece in pieces:
        low, high = max(piece.parameter_begin, begin), min(piece.parameter_end, end)
        if low < high:
            yield piece, low - piece.parameter_begin, low - begin, high - low


def _flat_shards(numel: int, offset: int, buffer: FlatBuffer) -> Iterator[Shard]:
    done = 0
    while done < numel:
        at = offset + done
        replica, begin = divmod(at, buffer.partition_numel)
        length = min(buffer.partition_numel - begin, numel - done)
        yield Shard(replica, begin, done, length)
        done += length
