"""Sampling of step times: warm-up, medians, intervals and stopping."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrial.dsat.rank.statistics import Sampling, SamplingLimits, median_of, warm_from
from dstrial.dsat.report import format_duration


def test_warm_up_ends_at_level_change() -> None:
    assert warm_from([9.0, 5.0, 1.0, 1.01, 0.99, 1.0, 1.02]) == 2
    assert warm_from([1.0, 1.01, 0.99, 1.0]) == 0


def test_late_outlier_changes_neither_warm_up_nor_median() -> None:
    # Five steps of 145 ms and one of 881 ms: DeepSpeed's own autotuner rated this as a slow configuration.
    times = [0.145, 0.146, 0.144, 0.145, 0.147, 0.881]

    assert warm_from(times) == 0
    assert median_of(times)[0] == pytest.approx(0.145, rel=0.02)


def test_mean_counts_all_steps_after_warm_up() -> None:
    sampling = Sampling(SamplingLimits())
    for num_steps, seconds in ((1, 9.0), (1, 5.0), (2, 2.0), (2, 2.0), (1, 1.0), (1, 4.0), (2, 2.0)):
        sampling.add(num_steps, seconds)

    assert sampling.median()[0] == 1.0
    assert sampling.mean_s() == pytest.approx(11.0 / 8)


@given(st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=60))
def test_warm_up_ends_in_first_half(times: list[float]) -> None:
    assert 0 <= warm_from(times) <= len(times) // 2


def _play(times: np.ndarray, limits: SamplingLimits) -> Sampling:
    sampling = Sampling(limits)
    for time_s in times:
        steps = sampling.next_steps()
        if not steps:
            break
        sampling.add(steps, steps * float(time_s))
    return sampling


def test_noisy_times_need_more_windows_up_to_bound() -> None:
    random = np.random.RandomState(0)
    limits = SamplingLimits(window_s=0.0, min_s=0.0, max_s=1e9)
    quiet = _play(random.normal(0.2, 0.0005, 200), limits)
    noisy = _play(random.lognormal(np.log(0.2), 0.06, 200), limits)
    hopeless = _play(random.lognormal(np.log(0.2), 1.5, 200), limits)

    assert quiet.num_steps == limits.min_windows
    assert quiet.median()[1] <= limits.target_half_width
    assert quiet.num_steps < noisy.num_steps <= hopeless.num_steps == limits.max_windows


def test_sampling_bounds_time_and_takes_wanted_steps() -> None:
    assert _play(np.full(100, 1.0), SamplingLimits(min_steps=20, window_s=0.0)).num_steps >= 20
    slow = _play(np.full(100, 30.0), SamplingLimits(max_s=60.0))
    fast = _play(np.full(100, 0.001), SamplingLimits(window_s=0.1))

    assert slow.num_steps == 3
    assert fast.num_steps > 100


def test_timed_windows_fill_least_time() -> None:
    sampling = _play(np.full(200, 0.2), SamplingLimits(window_s=0.2, min_s=3.0))

    assert sampling.num_steps * 0.2 == pytest.approx(3.0, abs=0.21)


def test_expected_range_has_windows_and_five_percent() -> None:
    random = np.random.RandomState(0)
    limits = SamplingLimits(window_s=0.0, max_s=1e9)
    quiet = _play(random.normal(0.2, 0.0005, 200), limits)
    noisy = _play(random.lognormal(np.log(0.2), 0.1, 200), limits)

    assert quiet.range_s() == pytest.approx((0.2 / 1.05, 0.2 / 0.95), rel=0.01)
    low, high = noisy.range_s()
    assert low < 0.2 * 0.87
    assert 0.2 * 1.15 < high < 0.2 * 1.4


def test_median_intervals_cover_true_median() -> None:
    random = np.random.RandomState(1)
    found = [median_of(random.lognormal(0.0, 0.05, 25), seed) for seed in range(200)]

    covered = sum(abs(median - 1.0) <= half_width * median for median, half_width in found)
    assert covered >= 0.88 * len(found)


def test_format_duration_shows_at_most_two_units() -> None:
    assert [format_duration(value) for value in (12, 200, 3900)] == ["12s", "3m20s", "1h05m"]


def test_steps_before_first_step_count_as_warm_up() -> None:
    # Step 1 is untimed; windows of 1 and 7 steps up to step 10 are 1 % slower, too little to detect as warm-up.
    times = np.concatenate([np.full(2, 1.01), np.full(200, 1.0)])

    late = _play(times, SamplingLimits(first_step=10, window_s=0.0, max_s=1e9))
    ended = _play(times[:2], SamplingLimits(first_step=10, window_s=0.0, max_s=1e9))

    assert late.median() == (1.0, 0.0)
    assert late.mean_s() == 1.0
    assert ended.median()[0] == pytest.approx(1.01)
