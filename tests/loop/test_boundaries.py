"""Batches at which reports, validations and checkpoints are due."""

import math

import pytest
from determined import pytorch
from hypothesis import given
from hypothesis import strategies as st

from dstrial.config.schema import Length
from dstrial.loop.boundaries import (
    Boundary,
    Period,
    asks_for_checkpoint,
    due,
    next_due,
    searcher_length,
    total_batches,
    train_unit,
)


def positions(period, total, epoch_length):
    return [n for n in range(1, total + 1) if Period.from_train_unit(period).is_due(n, epoch_length)]


@pytest.mark.parametrize(
    ("period", "total", "epoch_length", "expected"),
    [
        (pytorch.Batch(250), 1000, None, [250, 500, 750, 1000]),
        (pytorch.Batch([5, 30, 45]), 100, None, [5, 30, 45]),
        (pytorch.Epoch(2), 50, 10, [20, 40]),
        (pytorch.Epoch([1, 3]), 50, 10, [10, 30]),
        (pytorch.Epoch(1), 50, None, []),
    ],
)
def test_period_is_due(period, total, epoch_length, expected):
    assert positions(period, total, epoch_length) == expected


def test_period_without_unit_is_rejected():
    with pytest.raises(TypeError, match=r"expected Batch\(\.\.\.\) or Epoch"):
        Period.from_train_unit(100)
    with pytest.raises(TypeError, match="expected an int or a list"):
        Period.from_train_unit(pytorch.Batch("ten"))


@given(
    report=st.integers(1, 30),
    validate=st.sampled_from(["batches", "epochs"]),
    listed=st.lists(st.integers(1, 100), max_size=3),
    total=st.integers(1, 100),
    epoch_length=st.none() | st.integers(1, 20),
)
def test_nothing_is_due_before_next_due(report, validate, listed, total, epoch_length):
    periods = {
        Boundary.REPORT: Period("batches", every=report),
        Boundary.VALIDATE: Period(validate, every=3),
        Boundary.CHECKPOINT: Period("batches", positions=listed) if listed else None,
    }
    for batches in range(total):
        following = next_due(periods, batches, total, epoch_length)
        assert batches < following <= total
        assert not any(
            due(periods, before, total, epoch_length)
            or (epoch_length is not None and before % epoch_length == 0)
            for before in range(batches + 1, following)
        )


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 30), st.integers(1, 200))
def test_each_boundary_is_due_at_own_period(report, validate, checkpoint, total):
    periods = {
        Boundary.REPORT: Period("batches", every=report),
        Boundary.VALIDATE: Period("batches", every=validate),
        Boundary.CHECKPOINT: Period("batches", every=checkpoint),
    }
    fired = {boundary: [] for boundary in Boundary}
    for batches in range(1, total + 1):
        for boundary in due(periods, batches, total, None):
            fired[boundary].append(batches)
    assert fired[Boundary.REPORT] == list(range(report, total + 1, report))
    assert fired[Boundary.VALIDATE] == list(range(validate, total + 1, validate))
    assert fired[Boundary.CHECKPOINT] == list(range(checkpoint, total + 1, checkpoint))
    assert fired[Boundary.END] == [total]


def test_total_batches_converts_epochs():
    assert total_batches(pytorch.Batch(7), None) == 7
    assert total_batches(pytorch.Epoch(3), 40) == 120


@pytest.mark.parametrize(
    ("length", "epoch_length", "error"),
    [
        (pytorch.Batch(0), 10, "at least 1"),
        (pytorch.Epoch(1), None, "no length"),
        (pytorch.Batch([1, 2]), 10, r"Batch\(int\)"),
        (10, 10, r"Batch\(int\)"),
    ],
)
def test_total_batches_rejects_invalid_length(length, epoch_length, error):
    with pytest.raises((TypeError, ValueError), match=error):
        total_batches(length, epoch_length)


@pytest.mark.parametrize(
    ("policy", "now", "before", "smaller", "saves"),
    [
        ("all", None, None, True, True),
        ("none", 1.0, 2.0, True, False),
        ("best", 1.0, None, True, True),
        ("best", 1.0, math.nan, True, True),
        ("best", math.nan, None, True, False),
        ("best", 1.0, 2.0, True, True),
        ("best", 2.0, 2.0, True, False),
        ("best", 1.0, 2.0, False, False),
        ("best", 3.0, 2.0, False, True),
    ],
)
def test_asks_for_checkpoint_follows_policy(policy, now, before, smaller, saves):
    assert asks_for_checkpoint(policy, now, before, smaller_is_better=smaller) is saves


def test_record_lengths_round_to_at_least_one_batch():
    for length, batches in ((100, 3), (5, 1)):
        unit = train_unit(Length(length, "records"), 32)
        assert isinstance(unit, pytorch.Batch)
        assert unit.value == batches
    unit = searcher_length({"max_time": 7, "time_metric": "epochs"}, 32)
    assert isinstance(unit, pytorch.Epoch)
    assert unit.value == 7
    assert searcher_length({"max_time": 7, "time_metric": "seconds"}, 32) is None
    both = searcher_length({"max_length": 100, "max_time": 3, "time_metric": "epochs"}, 32)
    assert isinstance(both, pytorch.Batch)
    assert both.value == 100
