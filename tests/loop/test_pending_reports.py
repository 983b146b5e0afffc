"""What the wait for metric reports relies on in Determined's client, which has no public way to wait for them.

``PendingReports`` counts posts by replacing ``_post_metrics`` of the client's thread and reads the thread's queue. Another
release of determined must fail here, not lose metrics in a crash.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest
from determined import core
from determined.core import _metrics

from dstrial.errors import DstrialError
from dstrial.loop.background_save import PendingReports


def public(kind: type[Any]) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def test_the_client_posts_each_report_once_in_order_through_what_can_be_replaced() -> None:
    context = _metrics._MetricsContext(None, 1, 1)
    shipper = context._shipper
    posted: list[Any] = []
    may_go_on = threading.Event()

    def post(**kwargs: Any) -> None:
        may_go_on.wait(60)
        posted.append(kwargs["steps_completed"])

    shipper._post_metrics = post
    context.start()
    for step in range(5):
        context.report("training", {"loss": 1.0}, step)

    # The thread holds the first; that it is not in the queue any more does not mean that the master has it.
    assert isinstance(shipper._queue, queue.Queue)
    assert shipper._queue.unfinished_tasks == 5
    assert posted == []
    may_go_on.set()
    context.close()
    assert not shipper.is_alive()
    assert posted == list(range(5))
    # It marks nothing as done, so this counts what was ever put in: five reports and the end.
    assert shipper._queue.unfinished_tasks == 6


def test_a_report_that_fails_ends_the_thread_and_the_next_one_says_why() -> None:
    context = _metrics._MetricsContext(None, 1, 1)

    def post(**_kwargs: Any) -> None:
        raise ValueError("refused")

    context._shipper._post_metrics = post
    context.start()
    context.report("training", {}, 1)
    context._shipper.join(60)

    assert not context._shipper.is_alive()
    with pytest.raises(ValueError, match="refused"):
        context.report("training", {}, 2)


def train_context(metrics: Any) -> core.TrainContext:
    return core.TrainContext(
        session=None, trial_id=1, exp_id=1, metrics=metrics, distributed=core.DummyDistributedContext(),
        tensorboard_mode=core.TensorboardMode.MANUAL, tensorboard_manager=None, tbd_writer=None,
    )  # fmt: skip


def test_a_train_context_on_a_cluster_has_that_client() -> None:
    context = _metrics._MetricsContext(None, 1, 1)
    assert train_context(context)._metrics is context
    assert PendingReports(train_context(context)).wait()


def test_a_client_of_another_kind_is_refused() -> None:
    with pytest.raises(DstrialError, match=r"metrics client of determined .* is unknown"):
        PendingReports(train_context(metrics=object()))


def test_off_a_cluster_nothing_is_awaited() -> None:
    assert PendingReports(core.DummyTrainContext()).wait()


def test_there_is_still_no_public_way_to_wait() -> None:
    assert public(_metrics._MetricsContext) == {"report", "start", "close"}
    assert public(core.TrainContext) == {
        "get_experiment_best_validation", "get_metadata", "get_tensorboard_path", "report_early_exit", "report_metrics",
        "report_training_metrics", "report_validation_metrics", "set_metadata", "set_status", "report_progress",
        "upload_tensorboard_files",
    }  # fmt: skip
