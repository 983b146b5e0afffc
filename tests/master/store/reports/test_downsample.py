"""A reduced series looks like the whole: its ends, extremes and accidents are there, and nothing is made up."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrial.master.store.reports.downsample import downsample

VALUES = st.lists(st.floats(), max_size=300)


def test_few_points_are_all_kept() -> None:
    assert downsample([0, 1, 2], [math.nan, 5.0, 1.0], 3) == [0, 1, 2]
    assert downsample([], [], 1) == []


@given(VALUES, st.integers(1, 60))
def test_what_is_kept_is_ascending_and_never_too_much(ys: list[float], max_points: int) -> None:
    kept = downsample(range(len(ys)), ys, max_points)
    assert kept == sorted(set(kept))
    assert len(kept) <= max_points
    assert set(kept) <= set(range(len(ys)))


@given(VALUES, st.integers(7, 60))
def test_ends_extremes_and_each_kind_of_accident_are_kept(ys: list[float], max_points: int) -> None:
    kept = downsample(range(len(ys)), ys, max_points)
    there = [ys[idx] for idx in kept]
    if ys:
        assert (kept[0], kept[-1]) == (0, len(ys) - 1)
    finite = [y for y in ys if math.isfinite(y)]
    if finite:
        assert {min(finite), max(finite)} <= set(there)
    for kind in ("nan", "inf", "-inf"):
        first = next((idx for idx, y in enumerate(ys) if str(y) == kind), None)
        assert first is None or first in kept


def by_definition(xs: list[int], ys: list[float], max_points: int) -> list[int]:
    """Keep the same points, every one looked at as the source says; slow."""

    def is_finite(idx: int) -> bool:
        return math.isfinite(ys[idx])

    everything = range(len(ys))
    if len(ys) <= max_points:
        return list(everything)
    finite = [idx for idx in everything if is_finite(idx)]
    always = [len(ys) - 1, 0]
    if finite:
        always += [min(finite, key=lambda idx: ys[idx]), max(finite, key=lambda idx: ys[idx])]
    for idx in everything:
        if not is_finite(idx) and str(ys[idx]) not in {str(ys[one]) for one in everything[:idx]}:
            always.append(idx)
    always = list(dict.fromkeys(always))[:max_points]
    num_buckets = max_points - len(always)
    found = set(always)
    if num_buckets:
        edges = [1 + int(bucket * ((len(ys) - 2) / num_buckets)) for bucket in range(num_buckets)]
        buckets = [
            *(range(*pair) for pair in zip(edges, [*edges[1:], len(ys) - 1], strict=True)),
            [len(ys) - 1],
        ]
        at = (xs[0], ys[0] if is_finite(0) else 0.0)
        for own, behind in zip(buckets, buckets[1:], strict=False):
            there = [ys[idx] for idx in behind if is_finite(idx)]
            mean = (xs[behind[0]], at[1])
            if there:
                mean = (sum(xs[idx] for idx in behind) / len(behind), sum(there) / len(there))
            areas = {
                idx: abs((at[0] - mean[0]) * (ys[idx] - at[1]) - (at[0] - xs[idx]) * (mean[1] - at[1]))
                for idx in own
                if is_finite(idx)
            }
            # What is too large for a number is less than any.
            best = max(areas, key=lambda idx: -1.0 if math.isnan(areas[idx]) else areas[idx], default=None)
            found.add(own[0] if best is None else best)
            at = at if best is None else (xs[best], ys[best])
    return sorted(found)


@given(st.integers(0, 300), st.integers(1, 60), st.integers(0, 3), st.randoms(use_true_random=False))
def test_exactly_the_points_of_the_definition_are_kept(
    length: int, max_points: int, apart: int, chance: random.Random
) -> None:
    kinds = [
        [chance.gauss(0, 3) for _ in range(9)],
        [0.0, -0.0, 1.0],
        [1e308, -1e308],
        [math.nan, math.inf, -math.inf],
    ]
    choices = [value for kind in chance.sample(kinds, chance.randint(1, 4)) for value in kind]
    ys = chance.choices(choices, k=length)
    xs = [apart * idx for idx in range(length)]
    assert downsample(xs, ys, max_points) == by_definition(xs, ys, max_points)


def test_a_spike_between_thousands_of_points_and_the_shape_around_it_are_kept() -> None:
    ys = [math.sin(idx / 500) for idx in range(10_000)]
    ys[1234], ys[7000] = 3.0, -0.99
    kept = downsample(range(len(ys)), ys, 100)
    assert {1234, 7000} <= set(kept)
    assert 90 <= len(kept) <= 100
    # Lines between what is kept are nowhere far from the series.
    for left, right in zip(kept, kept[1:], strict=False):
        for idx in set(range(left, right)) - {1234, 7000, left}:
            line = ys[left] + (ys[right] - ys[left]) * (idx - left) / (right - left)
            near_spike = any(abs(idx - spike) < 300 for spike in (1234, 7000))
            assert near_spike or abs(line - ys[idx]) < 0.1


def test_a_part_without_a_finite_value_is_a_gap_and_not_a_line() -> None:
    ys = [float(idx) for idx in range(1000)]
    ys[400:600] = [math.nan] * 200
    kept = downsample(range(1000), ys, 50)
    assert sum(math.isnan(ys[idx]) for idx in kept) > 5
    assert max(idx for idx in kept if idx < 400) >= 390


def test_with_room_for_few_the_last_and_the_first_are_kept() -> None:
    ys = [1.0, 9.0, -9.0, 2.0, 3.0]
    assert downsample(range(5), ys, 1) == [4]
    assert downsample(range(5), ys, 2) == [0, 4]
    assert downsample(range(5), ys, 4) == [0, 1, 2, 4]


def test_the_largest_finite_numbers_do_not_hide_the_others() -> None:
    ys = [1e308 if idx % 2 else -1e308 for idx in range(100)]
    assert len(downsample(range(100), ys, 20)) >= 18


@pytest.mark.parametrize(("xs", "ys", "most"), [([1], [1.0, 2.0], 5), ([1, 2], [1.0, 2.0], 0)])
def test_what_is_no_series_is_refused(xs: list[int], ys: list[float], most: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        downsample(xs, ys, most)
