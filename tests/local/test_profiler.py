"""System metrics that NodeProfiler collects."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from determined import core
from determined.core import _profiler
from rank_processes import on_ranks
from waiting import wait_for

from dstrial.local.core_context import NodeProfiler, init
from dstrial.local.json_files import read_json_lines
from dstrial.local.run_directory import RunDirectory

GROUPS = {"cpu", "memory", "disk", "network"}


class FakeSink:
    """Records system metrics; raises ``failure`` in ``report`` if given."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.rows: list[tuple[str, Mapping[str, Any]]] = []
        self.num_closed = 0
        self._failure = failure

    def report(self, group: str, metrics: Mapping[str, Any], report_time: datetime.datetime) -> None:
        assert report_time.tzinfo is not None
        if self._failure is not None:
            raise self._failure
        self.rows.append((group, metrics))

    def close(self) -> None:
        self.num_closed += 1


def collectors() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, _profiler._Collector)]


@pytest.fixture
def run_directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, name="t", context_dir=tmp_path, command=["t"], config={})


def test_profiler_reports_samples_until_switched_off() -> None:
    sink = FakeSink()
    profiler = NodeProfiler("node", core.DummyDistributedContext(), sink)
    profiler.on(sampling_interval=0.1, samples_per_report=2)
    profiler.on()
    assert len(collectors()) == 1, "it was on"
    wait_for(lambda: len(sink.rows) >= 2 * len(GROUPS), "two windows")
    profiler.off()
    profiler.off()

    assert not collectors()
    num_rows = len(sink.rows)
    assert {group for group, _ in sink.rows} == GROUPS
    assert all(set(metrics) == {"node"} for _, metrics in sink.rows)
    assert sink.num_closed == 1
    profiler.on(sampling_interval=0.1, samples_per_report=1)
    wait_for(lambda: len(sink.rows) > num_rows, "a report after it is on again")
    profiler._close()
    assert not collectors()


def test_partial_samples_are_reported_at_training_end(run_directory: RunDirectory) -> None:
    with init(
        run_directory,
        distributed=core.DummyDistributedContext(),
    ) as context:
        context.profiler.on()
        context.train.report_training_metrics(1, {"loss": 1.0})

    assert not collectors()
    rows = read_json_lines(run_directory.metrics_path)
    of_machine = [row for row in rows if row["group"] != "training"]
    assert {row["group"] for row in of_machine} == GROUPS
    assert {row["steps_completed"] for row in of_machine} == {None}
    (memory,) = (row for row in of_machine if row["group"] == "memory")
    ((node, metrics),) = memory["metrics"].items()
    assert node
    assert metrics["memory_free"] > 0
    assert all(row["time"].endswith("+00:00") and len(row["time"]) == 32 for row in rows)


@pytest.mark.process
def test_only_first_rank_of_node_collects(run_directory: RunDirectory) -> None:
    def train(dist: core.DistributedContext, path: Path) -> int:
        with init(path, distributed=dist) as context:
            context.profiler.on(sampling_interval=0.1, samples_per_report=1)
            return len(collectors())

    assert on_ranks(2, train, run_directory.path) == [1, 0]
    groups = [row["group"] for row in read_json_lines(run_directory.metrics_path)]
    assert set(groups) == GROUPS
