"""RunLoggers: order, failures and lost reports of loggers in their threads."""

from __future__ import annotations

import logging
import random
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import wait_for

from dstrial.loggers import run_loggers
from dstrial.loggers.logger import FinalState, LoggedRun, Report
from dstrial.loggers.run_loggers import RunLoggers

RUN = LoggedRun("0" * 16, "run", "group", "project", {}, {}, Path("run"), Path("runs"))


@pytest.fixture(autouse=True)
def _short_poll_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_loggers, "POLL_S", 0.02)


class FakeLogger:
    """Logger that stores rows in memory; calls ``on_begin`` and ``on_log`` first."""

    def __init__(
        self,
        on_log: Callable[[Sequence[Report]], Any] = lambda _: None,
        on_begin: Callable[[], Any] = lambda: None,
    ) -> None:
        self.on_log, self.on_begin = on_log, on_begin
        self.rows: list[tuple[str, int, dict[str, Any]]] = []
        self.states: list[FinalState] = []
        self.threads: set[str] = set()

    def begin(self, run: LoggedRun) -> str:
        self.threads.add(threading.current_thread().name)
        self.on_begin()
        return "memory"

    def log(self, reports: Sequence[Report]) -> None:
        self.threads.add(threading.current_thread().name)
        self.on_log(reports)
        self.rows += [(report.group, report.batches_trained, dict(report.numbers)) for report in reports]

    def end(self, state: FinalState) -> None:
        self.states.append(state)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_reports_arrive_in_order_on_logger_thread() -> None:
    first, second = FakeLogger(), FakeLogger()
    with RunLoggers([("wandb", first), ("mlflow", second)]) as loggers:
        loggers.begin(RUN)
        for batch in range(1, 200):
            loggers.report("training", batch, {"loss": 1 / batch})
        loggers.report("validation", 199, {"loss": 0.5})
    expected = [("training", batch, {"loss": 1 / batch}) for batch in range(1, 200)]
    assert first.rows == second.rows == [*expected, ("validation", 199, {"loss": 0.5})]
    assert (first.threads, second.threads) == ({"dstrial-wandb"}, {"dstrial-mlflow"})
    assert first.states == second.states == ["completed"]


def test_loggers_receive_final_state() -> None:
    stopped, failed, left = FakeLogger(), FakeLogger(), FakeLogger()
    with RunLoggers([("wandb", stopped)]) as loggers:
        loggers.begin(RUN)
        loggers.note_stop()
    with pytest.raises(OSError), RunLoggers([("wandb", failed)]) as loggers:
        loggers.begin(RUN)
        raise OSError
    with pytest.raises(SystemExit), RunLoggers([("wandb", left)]) as loggers:
        loggers.begin(RUN)
        raise SystemExit(0)
    assert (stopped.states, failed.states, left.states) == (["stopped"], ["failed"], ["completed"])


def test_failing_logger_warns_once_and_counts_losses(caplog: pytest.LogCaptureFixture) -> None:
    has_kept_one = threading.Event()

    def fail_on_odd(reports: Sequence[Report]) -> None:
        if any(report.batches_trained % 2 for report in reports):
            raise OSError(28, "No space left on device")

    bad, good = FakeLogger(fail_on_odd), FakeLogger(lambda _: has_kept_one.set())
    with caplog.at_level("INFO"), RunLoggers([("mlflow", bad), ("wandb", good)]) as loggers:
        loggers.begin(RUN)
        for batch in (1, 3, 4):
            has_kept_one.clear()
            loggers.report("training", batch, {"loss": 1.0})
            assert has_kept_one.wait(60)
    assert [row[1] for row in good.rows] == [1, 3, 4]
    assert [row[1] for row in bad.rows] in ([4], [])  # batches 3 and 4 may come in one call, which then fails
    lost = 3 - len(bad.rows)
    first, last = warnings(caplog)
    assert re.fullmatch(
        r"logger mlflow: reports from batch \d on are lost: OSError: \[Errno 28\] No space left on device; training continues",
        first,
    )
    assert last == f"logger mlflow: {lost} of 3 reports are lost"
    assert bad.states == ["completed"]


def test_logger_begin_failure_loses_all_reports(caplog: pytest.LogCaptureFixture) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'wandb'", name="wandb")

    bad = FakeLogger(on_begin=missing)
    with RunLoggers([("wandb", bad)]) as loggers:
        loggers.begin(RUN)
        loggers.report("training", 1, {"loss": 1.0})
        loggers.report("training", 2, {"loss": 1.0})
    assert bad.rows == []
    assert bad.states == []
    assert warnings(caplog) == [
        "logger wandb: it cannot start: wandb is not installed. Run: pip install 'DSTRIAL_CHECKOUT_OR_WHEEL[wandb]'. "
        "No report of this run is stored there; training continues.",
        "logger wandb: 2 of 2 reports are lost",
    ]


def test_warning_omits_password_in_url(caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> None:
        raise OSError("https://me:hidden@tracking:5000/api does not answer")

    with RunLoggers([("mlflow", FakeLogger(on_begin=refuse))]) as loggers:
        loggers.begin(RUN)
    (warning,) = warnings(caplog)
    assert "OSError: https://tracking:5000/api does not answer" in warning


def test_hanging_logger_blocks_neither_training_nor_others(caplog: pytest.LogCaptureFixture) -> None:
    is_released = threading.Event()
    hanging, good = FakeLogger(lambda _: is_released.wait()), FakeLogger()
    loggers = RunLoggers([("mlflow", hanging), ("wandb", good)], end_s=0.3, capacity=1000)
    try:
        with loggers:
            loggers.begin(RUN)
            for batch in range(1, 2501):  # exceeds the queue's capacity
                loggers.report("training", batch, {"loss": 1.0})
                wait_for(lambda batch=batch: len(good.rows) > batch - 500)
            wait_for(lambda: len(good.rows) == 2500)
        wait_for(lambda: good.states == ["completed"])
        assert [text for text in warnings(caplog) if "logger mlflow" in text] == [
            "logger mlflow: it has not ended and is left behind",
            "logger mlflow: 2500 of 2500 reports are lost",
        ]
    finally:
        is_released.set()


def test_slow_logger_receives_queued_reports(caplog: pytest.LogCaptureFixture) -> None:
    may_begin = threading.Event()
    late = FakeLogger(on_begin=may_begin.wait)
    with RunLoggers([("wandb", late)], begin_s=0.05) as loggers:
        loggers.begin(RUN)
        loggers.report("training", 1, {"loss": 1.0})
        assert late.rows == []
        may_begin.set()
    assert late.rows == [("training", 1, {"loss": 1.0})]
    (warning,) = warnings(caplog)
    assert "logger wandb: it has not started yet; training continues" in warning


def test_logger_begin_preserves_random_state() -> None:
    def draw() -> None:
        random.seed(9)
        np.random.seed(9)

    random.seed(1)
    np.random.seed(1)
    expected = random.random(), float(np.random.rand())
    random.seed(1)
    np.random.seed(1)
    with RunLoggers([("wandb", FakeLogger(on_begin=draw))]) as loggers:
        loggers.begin(RUN)
        assert (random.random(), float(np.random.rand())) == expected
