"""Progress reports of a ``Reporter`` loop, tested without ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from dstrial.integrations.accelerate.trial_run import TrialRun


@pytest.mark.parametrize(
    ("reports", "total", "expected"), [(False, 8, [0.25]), (True, 8, []), (False, None, [])]
)
def test_sync_point_without_report_sends_progress(
    reports: bool, total: int | None, expected: list[float]
) -> None:
    """With a report, the progress is sent with the metrics instead."""
    sent: list[float] = []
    exchange = SimpleNamespace(
        has_unreported=True,
        begin=lambda *, reports: None,
        end=lambda: None,
        writer=SimpleNamespace(submit=lambda job: job()),
    )
    run = SimpleNamespace(
        _tracker=SimpleNamespace(
            is_report_due=reports, is_at_end=False, batches_trained=2, batches_total=total
        ),
        _reports=exchange,
        _is_chief=True,
        _core=SimpleNamespace(train=SimpleNamespace(report_progress=sent.append)),
    )
    TrialRun._exchange(cast(Any, run))
    assert sent == expected
