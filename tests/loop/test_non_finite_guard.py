"""Detection of non-finite losses and of skipped optimizer steps."""

import math

import torch

from dstrial.errors import NonFiniteError
from dstrial.loop.metrics import MetricWindow
from dstrial.loop.non_finite import (
    NonFiniteGuard,
    StateEvidence,
    StepCounts,
    lost_weight,
    unsafe_to_save_reason,
)

NAN = float("nan")
GOOD, BAD = True, False


def guard(mode="fail", patience=3, **options):
    return NonFiniteGuard(
        mode, patience, is_chief=True, counts=[StepCounts(0, 0, 1.0)], is_resumed=False, **options
    )


def judge(watch, *reports, scale=lambda _idx: 1.0, skips=lambda _idx: False):
    """Return the batch at which the guard fails, or None; a report has two batches."""
    num_skipped = 0
    for idx, finite in enumerate(reports):
        num_skipped += 2 * skips(idx)
        counts = [StepCounts(2 * (idx + 1), num_skipped, scale(idx))]
        try:
            watch.judge(finite, {"loss": NAN}, counts, 2 * idx, is_last=False)
        except NonFiniteError:
            return 2 * idx + 2
    return None


def test_guard_fails_after_consecutive_non_finite_reports():
    one, none = [{"loss": GOOD}], [{"loss": BAD}]
    assert judge(guard(), none, none, none) == 6
    assert judge(guard(), none, none, one, none, none, one) is None
    assert judge(guard(patience=1), one, none) == 4
    assert judge(guard("warn"), *[none] * 9) is None


def test_guard_warns_about_non_finite_last_reports(caplog):
    watch = guard()
    for idx, finite in enumerate([[{"loss": GOOD}], [{"loss": BAD}], [{"loss": BAD}]]):
        watch.judge(finite, {"loss": NAN}, [StepCounts(2 * (idx + 1), 0, 1.0)], 2 * idx, is_last=idx == 2)
    assert "no finite loss (loss is nan) since batch 3: 2 reports in a row" in caplog.text


def test_guard_accepts_one_finite_loss():
    assert judge(guard(), *[[{"loss": BAD}, {"loss": GOOD}]] * 5) is None
    assert judge(guard(), *[[{"d_loss": BAD, "g_loss": GOOD}]] * 5) is None
    assert judge(guard(), *[[{"d_loss": BAD, "g_loss": BAD}]] * 3) == 6


def test_decreasing_loss_scale_is_not_failure():
    one = [{"loss": GOOD}]
    assert judge(guard(), *[one] * 9, skips=lambda _: True, scale=lambda idx: 2.0 ** -(idx + 1)) is None
    assert judge(guard(), *[one] * 9, skips=lambda _: True) == 6
    assert judge(guard(), *[one] * 9, skips=lambda idx: idx % 3 != 0) is None


def test_metric_window_tracks_newest_losses():
    window = MetricWindow("train_batch", watches_losses=True)
    for value, is_finite in ((NAN, False), (2.0, True), (math.inf, True)):
        window.add({"loss": torch.tensor(value), "lr": 0.1})
        assert window.totals().finite == {"loss": is_finite}
    assert window.newest_is_finite() is False
    window.reset()
    assert window.newest_is_finite() is False
    window.add({"nll": NAN, "lr": 0.1})  # if no name contains "loss", all metrics count
    assert window.totals().finite == {"nll": False, "lr": True}
    large = torch.zeros(10_000, device="meta")
    window.add({"nll": large[0], "lr": 0.1})
    assert window._newest_losses["nll"].untyped_storage().nbytes() < 100


def test_unsafe_to_save_reason_and_lost_weight():
    good, no_loss, lost = StateEvidence(None, True), StateEvidence(None, False), StateEvidence("w", True)
    silent = StateEvidence(None, None)
    assert unsafe_to_save_reason([good, no_loss]) is None
    assert unsafe_to_save_reason([silent, no_loss]) == "no loss is finite"
    assert unsafe_to_save_reason([silent, silent]) is None
    assert lost_weight([silent, no_loss]) is None
    assert lost_weight([good, lost]) == "the weights are not finite (w on rank 1)"
