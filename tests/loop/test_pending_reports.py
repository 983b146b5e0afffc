"""PendingReports with the private API of Determined's metrics client.

The client has no public method to wait for its reports, so ``PendingReports`` replaces ``_post_metrics`` of the client's thread
and reads the thread's queue. If a release of Determined changes these, this test must fail.
"""

from __future__ import annotations

from typing import Any

from determined import core
from determined.core import _metrics

from dstrial.loop.background_save import PendingReports


def train_context(metrics: Any) -> core.TrainContext:
    return core.TrainContext(
        session=None, trial_id=1, exp_id=1, metrics=metrics, distributed=core.DummyDistributedContext(),
        tensorboard_mode=core.TensorboardMode.MANUAL, tensorboard_manager=None, tbd_writer=None,
    )  # fmt: skip


def test_cluster_train_context_has_known_metrics_client() -> None:
    context = _metrics._MetricsContext(None, 1, 1)
    assert train_context(context)._metrics is context
    assert PendingReports(train_context(context)).wait()


def test_wait_off_cluster_returns_immediately() -> None:
    assert PendingReports(core.DummyTrainContext()).wait()
