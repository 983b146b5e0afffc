"""Peaks as quantiles: what is known beforehand, what measurements change, and how outliers and out-of-memory errors count."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrial.dsat.buckets import Buckets, with_buckets
from dstrial.dsat.memory_model import DeviceMemory, MemoryModel, Observation
from dstrial.engine.dryrun.values import Line, MemoryForm, PhaseMemory

GIB = 2.0**30
FORM = MemoryForm(
    (
        PhaseMemory("backward", (Line(2 * GIB, 1.0 * GIB),)),
        PhaseMemory("step", (Line(8 * GIB, 0.0),)),
    ),
    settled=2 * GIB,
)
DEVICE = DeviceMemory(
    40 * GIB, context_bytes=GIB, context_spread_bytes=0.2 * GIB, waste=0.04, spread=0.05, noise=0.01
)


def learned(*observations: Observation) -> MemoryModel:
    model = MemoryModel(DEVICE)
    for observation in observations:
        model = model.observe(observation)
    return model


def seen(ratio: float, structure: str = "a", predicted: float = 10 * GIB) -> Observation:
    return Observation(structure, predicted, predicted * ratio + DEVICE.context_bytes)


def test_the_peak_is_that_of_the_greatest_phase() -> None:
    model = MemoryModel(DeviceMemory(None))

    small, large = model.predict(FORM, 2), model.predict(FORM, 10)

    assert (small.phase, small.tensor_bytes) == ("step", 8 * GIB)
    assert (large.phase, large.tensor_bytes) == ("backward", 12 * GIB)
    assert dict(large.phase_bytes) == {"backward": 12 * GIB, "step": 8 * GIB}


def test_context_and_waste_come_on_top() -> None:
    prediction = MemoryModel(DEVICE).predict(FORM, 2)

    assert prediction.median_bytes == pytest.approx(8 * GIB * math.exp(0.04) + GIB)


@given(st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_quantiles_grow_and_undo_probabilities(one: float, other: float) -> None:
    prediction = MemoryModel(DEVICE).predict(FORM, 4)

    assert (prediction.quantile(one) < prediction.quantile(other)) == (one < other)
    assert prediction.probability_to_fit(prediction.quantile(one)) == pytest.approx(one, abs=1e-6)


def test_the_largest_micro_batch_fits_and_the_next_does_not() -> None:
    model = MemoryModel(DEVICE)

    size = model.largest_micro_batch(FORM)

    assert model.margin_bytes(FORM, size) >= 0 > model.margin_bytes(FORM, size + 1)
    assert model.predict(FORM, size).probability_to_fit(40 * GIB) >= 0.98


def test_nothing_fits_where_the_state_alone_is_too_large() -> None:
    assert MemoryModel(DeviceMemory(7 * GIB)).largest_micro_batch(FORM) == 0


def test_without_a_limit_everything_fits() -> None:
    assert MemoryModel(DeviceMemory(None)).largest_micro_batch(FORM, limit=99) == 99


def test_measurements_move_and_narrow_the_prediction() -> None:
    before, after = (
        MemoryModel(DEVICE).predict(FORM, 4, "a"),
        learned(seen(1.10), seen(1.11)).predict(FORM, 4, "a"),
    )

    assert abs(after.median_bytes - (8 * GIB * 1.105 + GIB)) < abs(
        before.median_bytes - (8 * GIB * 1.105 + GIB)
    )
    assert after.spread < before.spread


def test_one_structure_teaches_another_less_than_itself() -> None:
    model = learned(seen(1.12, "a"), seen(1.12, "a"), seen(1.12, "a"))

    prior, other, own = (
        MemoryModel(DEVICE).correction("b")[0],
        model.correction("b")[0],
        model.correction("a")[0],
    )

    assert prior < other < own < math.log(1.121)
    assert model.correction("a")[1] < model.correction("b")[1]


def test_an_outlier_moves_little() -> None:
    steady = [seen(1.05)] * 6

    shift = learned(*steady).correction("a")[0]
    disturbed = learned(*steady, seen(2.0)).correction("a")[0]

    assert abs(disturbed - shift) < 0.01


def test_an_out_of_memory_error_below_the_prediction_raises_it_and_one_above_is_no_news() -> None:
    expected = MemoryModel(DEVICE).correction("a")[0]
    surprising = Observation("a", 20 * GIB, 20 * GIB * 1.2 + GIB, is_out_of_memory=True)
    unsurprising = Observation("a", 60 * GIB, 40 * GIB, is_out_of_memory=True)

    assert learned(surprising).correction("a")[0] > expected + 0.05
    assert learned(unsurprising).correction("a")[0] == pytest.approx(expected)


def test_the_quantile_keeps_its_promise_on_hidden_errors() -> None:
    generator = random.Random(7)
    kept = total = 0
    for _ in range(400):
        shift = generator.gauss(DEVICE.waste, DEVICE.spread)
        model = MemoryModel(DEVICE)
        for _ in range(3):
            ratio = math.exp(shift + generator.gauss(0, DEVICE.noise))
            if generator.random() < 0.02:
                ratio *= 1.3
            model = model.observe(seen(ratio))
        needed = 8 * GIB * math.exp(shift + generator.gauss(0, DEVICE.noise)) + GIB
        kept += needed <= model.predict(FORM, 4, "a").quantile(0.98)
        total += 1
    assert kept / total >= 0.97


def test_a_model_survives_json() -> None:
    model = learned(seen(1.1), Observation("b", 1.0, 2.0, is_out_of_memory=True))

    assert MemoryModel.from_json(json.loads(json.dumps(model.to_json()))) == model


def test_buckets_are_counted_as_the_engine_allocates_them() -> None:
    assert Buckets(0, 10, 2).num_bytes == 0
    assert Buckets(1, 10, 2).num_bytes == 20
    assert Buckets(2, 10, 2, is_overlapping=True).num_bytes == 40
    assert Buckets(3, 10, 2, is_overlapping=True).num_bytes == 20


def test_other_buckets_change_the_phases_that_hold_them() -> None:
    changed = with_buckets(FORM, Buckets(2, 0, 2), Buckets(2, 1000, 2, is_overlapping=True))

    assert changed.in_phase("backward", 5) - FORM.in_phase("backward", 5) == 4000
    assert changed.in_phase("step", 5) == FORM.in_phase("step", 5)
    assert with_buckets(FORM, Buckets(3, 0, 2), Buckets(3, 1000, 2)).settled == FORM.settled + 2000
