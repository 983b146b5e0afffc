"""Locate a parameter's elements in ranks' partitions, for resharding.

A shard is a flattened parameter's part in one replica's partition of a flat buffer; without a buffer, the whole parameter.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator

from dstrial.checkpoint.layout import FlatBuffer, Layout, ParameterPlace


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive elements of a flattened parameter in one replica's partition.

    Attributes:
        begin: index of the first element in the partition of the flat buffer; without a buffer 0.
        parameter_begin: index of the first element in the flattened parameter.
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
            assert place.partition_numel is not None
            return list(_cut_shards(numel, place.partition_numel, buffer.num_partitions, place.offset))
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
        """Return parameter name -> the whole parameter's shard in a momentum buffer.

        Muon's momentum buffer has, one after the other, all whole parameters with an element in the replica's partition.
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

    Each item is (shard, offset in the shard, offset in the interval, number of common elements).
    """
    end = begin + numel
    for piece in pieces:
        low, high = max(piece.parameter_begin, begin), min(piece.parameter_end, end)
        if low < high:
            yield piece, low - piece.parameter_begin, low - begin, high - low


def _cut_shards(numel: int, partition_numel: int, num_partitions: int, offset: int) -> Iterator[Shard]:
    for replica in range(num_partitions):
        begin = replica * partition_numel
        length = min(partition_numel, numel - begin)
        if length > 0:
            yield Shard(replica, offset, begin, length)


def _flat_shards(numel: int, offset: int, buffer: FlatBuffer) -> Iterator[Shard]:
    done = 0
    while done < numel:
        at = offset + done
        replica, begin = divmod(at, buffer.partition_numel)
        length = min(buffer.partition_numel - begin, numel - done)
        yield Shard(replica, begin, done, length)
        done += length
