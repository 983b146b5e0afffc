"""A reduced series looks like the whole: its ends, extremes and accidents are there, and nothing is made up."""

from __future__ import annotations

import math

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
