"""Predicted memory peaks: parts, quantiles, and learning from results."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from predicted import dry_run

from dstrial.dsat.predictor.features import PeakParts, StepParts, ZeroFeatures, peak_parts
from dstrial.dsat.predictor.models import DeviceMemory, MemoryModel, MemoryPrediction, Point
from dstrial.engine.dryrun.values import Line, MemoryForm, PhaseMemory

GIB = 2.0**30
FORM = MemoryForm(
    (
        PhaseMemory("backward", (Line(2 * GIB, 1.0 * GIB),)),
        PhaseMemory("step", (Line(8 * GIB, 0.0),)),
    ),
    settled=2 * GIB,
)
DEVICE = DeviceMemory(40 * GIB, context_bytes=GIB, context_std_bytes=0.2 * GIB, waste=0.04, log_std=0.05)
SETUP = ZeroFeatures(2, 8, 1e8, 1e8, False, 0.0, False, 2)


def point(micro: float, group: int = 1, state: float = 4.0) -> Point:
    """Forward and backward of a model whose records need 1 and 1.2 GiB."""
    backward = (state * GIB, GIB, 0.0, 0.0, 0.0, 1.2 * micro * GIB, 0.0, 0.0, 0.0)
    forward = (state * GIB, GIB, 0.0, 0.0, micro * GIB, 0.0, 0.0, 0.0, 0.0)
    peaks = (PeakParts("backward", backward), PeakParts("forward", forward))
    return Point(StepParts(()), peaks, (group, False, False, ()), (), int(micro))


def add_measurement(learner: MemoryModel, micro: float, *, grown: float = 1.0, error: float = 0.0) -> None:
    truths = {
        peak.phase: (peak.total_bytes + (grown - 1) * (peak.num_bytes[4] + peak.num_bytes[5]))
        * math.exp(error)
        for peak in point(micro).peaks
    }
    learner.measured(point(micro), truths | {"all": max(truths.values())}, max(truths.values()) * 1.05)


# ---- parts of peaks ----------------------------------------------------------------------------


def test_peak_parts_sum_for_any_bucket_size() -> None:
    width, old = 2, 2e8
    phases = (
        PhaseMemory("forward", (Line(3e9, 1e9),)),
        PhaseMemory("backward", (Line(3e9 + width * 1e8, 1.1e9),)),
    )
    run = dry_run(device=MemoryForm(phases, 3e9))

    same = {one.phase: one for one in peak_parts(run, SETUP, SETUP, 4)}
    larger = {
        one.phase: one for one in peak_parts(run, dataclasses.replace(SETUP, reduce_elements=old), SETUP, 4)
    }

    assert same["backward"].total_bytes == pytest.approx(3e9 + width * 1e8 + 4.4e9)
    assert same["forward"].total_bytes == pytest.approx(7e9)
    assert larger["backward"].total_bytes - same["backward"].total_bytes == pytest.approx(width * 1e8)
    assert larger["forward"].total_bytes == same["forward"].total_bytes


# ---- before anything is measured ---------------------------------------------------------------


def test_unmeasured_peak_adds_context_and_allocator_waste() -> None:
    (found,) = MemoryModel(DEVICE).predict([point(4)])

    assert found is not None
    assert found.median_bytes == pytest.approx(9.8 * GIB * math.exp(0.04) + GIB)


@given(st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_memory_quantile_inverts_probability(one: float, other: float) -> None:
    prediction = MemoryPrediction(10e9, 0.1)
    less, more = sorted((one, other))

    # Neighbouring floats have the same quantile.
    assert prediction.quantile(less) <= prediction.quantile(more)
    assert prediction.quantile(less) < prediction.quantile(more) or more - less < 1e-9
    assert prediction.probability_to_fit(prediction.quantile(one)) == pytest.approx(one, abs=1e-6)


# ---- learning ----------------------------------------------------------------------------------


def predicted(learner: MemoryModel, micro: float, group: int = 1) -> tuple[float, float]:
    (found,) = learner.predict([point(micro, group)])
    assert found is not None
    return found.median_bytes, found.log_std


def test_memory_model_separates_state_from_growth() -> None:
    learner = MemoryModel(DEVICE)
    before, spread_before = predicted(learner, 16)

    add_measurement(learner, 8, grown=1.2)

    truth = (5 + 1.2 * 1.2 * 16) * GIB * 1.05 + GIB
    after, spread_after = predicted(learner, 16)
    assert abs(after - truth) < 0.4 * abs(before - truth)
    assert spread_after < spread_before
    assert abs(after - truth) < 3 * spread_after * after


def test_memory_model_learns_most_in_same_group() -> None:
    learner = MemoryModel(DEVICE)
    add_measurement(learner, 8, error=0.08)

    own, other = predicted(learner, 8), predicted(learner, 8, group=2)

    assert predicted(MemoryModel(DEVICE), 8)[0] < other[0] < own[0]
    assert own[1] < other[1] < predicted(MemoryModel(DEVICE), 8)[1]


def test_out_of_memory_below_prediction_raises_it() -> None:
    before = predicted(MemoryModel(DEVICE), 8)
    surprised, warned = (
        MemoryModel(dataclasses.replace(DEVICE, capacity_bytes=share * before[0])) for share in (1.2, 0.5)
    )

    surprised.ran_out(point(8), "backward")
    warned.ran_out(point(8), "backward")

    assert predicted(surprised, 8)[0] > 1.1 * before[0]
    assert predicted(warned, 8) == before


def test_measured_candidate_fits_beside_out_of_memory() -> None:
    learner = MemoryModel(DEVICE)
    add_measurement(learner, 16)
    add_measurement(learner, 20)
    learner.ran_out(point(21), "backward")

    ran, failed = learner.predict([point(20), point(21)])

    assert ran is not None
    assert failed is not None
    capacity = DEVICE.capacity_bytes or 0.0
    assert ran.probability_to_fit(capacity) > 0.5 > failed.probability_to_fit(capacity)


def test_memory_quantile_covers_hidden_errors() -> None:
    generator = random.Random(7)
    kept = 0
    for _ in range(200):
        grown, error = math.exp(generator.gauss(0, 0.1)), generator.gauss(0, 0.03)
        learner = MemoryModel(DEVICE)
        add_measurement(learner, 8, grown=grown, error=error)
        needed = (5 + 1.2 * 16 * grown) * GIB * math.exp(error) * 1.05 + GIB
        (found,) = learner.predict([point(16)])
        assert found is not None
        kept += needed <= found.quantile(0.98)
    assert kept / 200 >= 0.96
