"""Parameter shards: every element is in exactly one shard of any partitioning."""

from __future__ import annotations

import dataclasses
import math

from hypothesis import given
from hypothesis import strategies as st
from sample_layouts import PLACE, PLAIN_LAYOUT

from dstrial.checkpoint.layout import FlatBuffer, Layout, ParameterPlace, ShardMap, overlaps, own_shard


def place(name: str, numel: int, **where: object) -> ParameterPlace:
    changes = {"name": name, "shape": (numel,), "buffer_idx": 0, **where}
    return dataclasses.replace(PLACE, **changes)  # type: ignore[arg-type]


def layout(stage: int, buffer: FlatBuffer | None, places: list[ParameterPlace]) -> Layout:
    return dataclasses.replace(
        PLAIN_LAYOUT, zero_stage=stage, buffers=() if buffer is None else (buffer,), parameters=tuple(places)
    )


@given(
    numels=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    num_partitions=st.integers(1, 7),
    begin=st.integers(0, 39),
    length=st.integers(1, 40),
)
def test_flat_buffer_shards_cover_each_element_once(
    numels: list[int], num_partitions: int, begin: int, length: int
) -> None:
    partition_numel = math.ceil(sum(numels) / num_partitions)
    offsets = [sum(numels[:idx]) for idx in range(len(numels))]
    places = [place(str(idx), numel, offset=offsets[idx]) for idx, numel in enumerate(numels)]
    buffer = FlatBuffer(0, 0, 0, partition_numel * num_partitions, partition_numel, num_partitions)
    pieces = ShardMap(layout(1, buffer, places))

    for one, offset, numel in zip(places, offsets, numels, strict=True):
        found = pieces.of(one)
        assert [piece.parameter_begin for piece in found] == [
            sum(before.numel for before in found[:idx]) for idx in range(len(found))
        ]
        assert found[-1].parameter_end == numel
        for piece in found:
            assert piece.replica * partition_numel + piece.begin == offset + piece.parameter_begin
            assert piece.begin + piece.numel <= partition_numel
        assert sum(len(pieces.on(one, replica)) for replica in range(num_partitions)) == (
            len(found) if num_partitions > 1 else len(found) * num_partitions
        )
        low, high = min(begin, numel - 1), min(min(begin, numel - 1) + length, numel)
        covered = [
            (piece.parameter_begin + inside, at, count)
            for piece, inside, at, count in overlaps(found, low, high - low)
        ]
        assert sum(count for _, _, count in covered) == high - low
        assert all(element - at == low for element, at, _ in covered)


@given(numel=st.integers(1, 50), num_partitions=st.integers(1, 8), offset=st.integers(0, 9))
def test_partitioned_parameter_shards_cover_each_element_once(
    numel: int, num_partitions: int, offset: int
) -> None:
    partition_numel = math.ceil(numel / num_partitions)
    one = place("w", numel, is_cut=True, offset=offset, partition_numel=partition_numel)
    buffer = FlatBuffer(0, 0, 0, 0, 0, num_partitions)

    found = ShardMap(layout(3, buffer, [one])).of(one)

    elements = [e for piece in found for e in range(piece.parameter_begin, piece.parameter_end)]
    assert elements == list(range(numel))
    assert {piece.begin for piece in found} == {offset}
    for piece in found:
        own = own_shard(one, piece.replica)
        assert own is not None
        assert (own.begin, own.parameter_begin, own.numel) == (0, piece.parameter_begin, piece.numel)
    assert all(own_shard(one, replica) is None for replica in range(len(found), num_partitions))


def test_parameter_without_buffer_has_single_shard() -> None:
    one = place("w", 7, buffer_idx=None)

    (piece,) = ShardMap(layout(0, None, [one])).of(one)

    assert (piece.begin, piece.parameter_begin, piece.numel) == (0, 0, 7)
