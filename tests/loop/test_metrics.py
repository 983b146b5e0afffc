"""Accumulation and reduction of metrics over batches and ranks."""

import math

import numpy as np
import pytest
import torch
from determined import pytorch

from dstrial.errors import TrialContractError
from dstrial.loop.metrics import MetricWindow, as_mapping, combine


def window_of(*sets, **options):
    window = MetricWindow("train_batch", **options)
    for metrics in sets:
        window.add(metrics)
    return window


def test_as_mapping_treats_tensor_as_loss():
    assert as_mapping(torch.tensor(2.0), "train_batch").keys() == {"loss"}


@pytest.mark.parametrize(
    "values",
    [
        (1.0, 5.0),
        (np.float32(1), np.float64(5)),
        (np.array(1.0), np.array([5.0])),
        (torch.tensor(1.0), torch.tensor([4.0, 6.0])),
        (torch.tensor([0.5, 1.5], dtype=torch.bfloat16), [[4, 5], [6, 5]]),
    ],
)
def test_mean_over_batches_or_ranks_is_3(values):
    in_batches = [window_of({"loss": values[0]}, {"loss": values[1]}).totals()]
    on_ranks = [window_of({"loss": value}).totals() for value in values]
    for totals in (in_batches, on_ranks):
        assert combine(totals, "train_batch") == {"loss": 3.0}


def test_metric_that_is_no_number_is_none():
    totals = window_of({"word": "x", "ragged": [[1], [2, 3]]}).totals()
    assert combine([totals], "train_batch") == {"word": None, "ragged": None}


def test_mean_with_nan_is_nan():
    totals = window_of({"loss": torch.tensor(1.0)}, {"loss": torch.tensor(math.nan)}).totals()
    assert math.isnan(combine([totals], "train_batch")["loss"])


def test_add_copies_tensor_values():
    loss = torch.tensor(1.0)
    window = window_of({"loss": loss})
    loss.fill_(100.0)
    window.add({"loss": torch.tensor(3.0)})
    assert combine([window.totals()], "train_batch") == {"loss": 2.0}


def test_add_does_not_synchronize_device_values():
    window = window_of(*[{"loss": torch.ones((), device="meta"), "map": torch.ones(2, device="meta")}] * 3)
    window.add({"loss": torch.ones((), device="meta"), "map": torch.ones(2, device="meta")}, weight=2)
    with pytest.raises(NotImplementedError):  # any read of a meta tensor raises this error
        window.totals()


@pytest.mark.parametrize("reducer", [pytorch.Reducer.MAX, pytorch.Reducer.MIN])
def test_max_and_min_propagate_nan(reducer):
    window = MetricWindow("evaluate_batch", lambda _name: reducer)
    for value in (1.0, math.nan, 2.0):
        window.add({"m": value})
    assert math.isnan(combine([window.totals()], "e", lambda _name: reducer)["m"])


def test_window_does_not_keep_autograd_graph():
    weight = torch.ones(1, requires_grad=True)
    window = window_of({"loss": (weight * 2).sum()})
    assert not any(getattr(total, "requires_grad", False) for total in window.state_dict()["totals"].values())


def test_low_precision_losses_are_summed_in_double():
    window = window_of(*[{"loss": torch.tensor(0.1, dtype=torch.bfloat16)}] * 1000)
    expected = float(torch.tensor(0.1, dtype=torch.bfloat16))
    assert combine([window.totals()], "train_batch")["loss"] == pytest.approx(expected, rel=1e-12)


def test_mean_is_weighted():
    window = MetricWindow("evaluate_batch")
    window.add({"loss": torch.tensor(1.0)}, weight=30)
    window.add({"loss": 5.0 * torch.ones(())}, weight=10)
    assert combine([window.totals()], "evaluate_batch") == {"loss": 2.0}


def test_non_mean_reducers_ignore_weights():
    chosen = {"s": pytorch.Reducer.SUM, "hi": pytorch.Reducer.MAX, "lo": pytorch.Reducer.MIN}
    windows = [MetricWindow("evaluate_batch", chosen.__getitem__) for _ in range(2)]
    for window, values in zip(windows, [(1.0, 4.0), (2.0, -3.0)], strict=True):
        for value in values:
            window.add({"s": value, "hi": torch.tensor(value), "lo": value}, weight=7)
    combined = combine([window.totals() for window in windows], "evaluate_batch", chosen.__getitem__)
    assert combined == {"s": 4.0, "hi": 4.0, "lo": -3.0}


def test_changed_metric_names_are_rejected():
    with pytest.raises(TrialContractError, match=r"returned the metrics \['accuracy'\]; expected \['loss'\]"):
        window_of({"loss": 1.0}, {"accuracy": 1.0})


def test_combine_rejects_different_names_between_ranks():
    totals = [window_of({"loss": 1.0}).totals(), None, window_of({"acc": 1.0}).totals()]
    with pytest.raises(TrialContractError, match=r"\['acc'\] on rank 2 and \['loss'\] on rank 0"):
        combine(totals, "train_batch")
    assert combine([None, totals[0]], "train_batch") == {"loss": 1.0}


def test_metric_window_survives_checkpoint():
    window = window_of({"loss": torch.tensor(1.0), "host": 2.0})
    restored = MetricWindow("train_batch")
    restored.load_state_dict(window.state_dict(), torch.device("cpu"))
    for held in (window, restored):
        held.add({"loss": torch.tensor(2.0), "host": 4.0})
    assert combine([window.totals()], "t") == combine([restored.totals()], "t") == {"loss": 1.5, "host": 3.0}


def test_batches_are_kept_only_on_request():
    assert window_of({"loss": 1.0}).batches() == []
    kept = window_of({"loss": torch.tensor(1.0)}, {"loss": torch.tensor(2.0)}, keep_batches=True)
    assert [float(batch["loss"]) for batch in kept.batches()] == [1.0, 2.0]
