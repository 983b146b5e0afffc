"""System metrics: what Determined's profiler reports is found again by Determined's generated client."""

from __future__ import annotations

import queue
import threading
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from determined import core
from determined.common import api
from determined.common.api import bindings
from determined.common.api.errors import APIException
from serving import Master
from waiting import wait_for

from dstrial import runtime
from dstrial.local.profiler import NodeProfiler
from dstrial.master.store.database import Transaction

pytestmark = pytest.mark.process

KINDS = bindings.TrialProfilerMetricLabelsProfilerMetricType


@pytest.fixture
def session(fresh_master: Master) -> api.Session:
    return api.Session(fresh_master.address, "determined", fresh_master.tokens["trial-1-user"], None)


def report(session: api.Session, group: str, metrics: dict[str, Any], time: str, trial_id: int = 1) -> None:
    """Report as the profiler of Determined's harness does: of no batch."""
    body = bindings.v1ReportTrialMetricsRequest(
        group=group,
        metrics=bindings.v1TrialMetrics(
            metrics=bindings.v1Metrics(avgMetrics=metrics), trialId=trial_id, trialRunId=1, reportTime=time
        ),
    )
    bindings.post_ReportTrialMetrics(session, body=body, metrics_trialId=trial_id)


def report_two_nodes(session: api.Session) -> None:
    for second, util in ((1, 25.0), (2, 75.0)):
        time = f"2026-01-02T00:00:0{second}+00:00"
        gpus = {f"GPU-{number}": {"gpu_util": util + number, "gpu_free_memory": 100.0} for number in (0, 1)}
        report(session, "gpu", {"node-a": gpus}, time)
        report(session, "cpu", {"node-a": {"cpu_util_simple": util}}, time)
        report(session, "cpu", {"node-b": {"cpu_util_simple": util + 0.5}}, time)
        report(session, "memory", {"node-a": {"memory_free": 5.0}}, time)
        disk = {"disk_iops": 1.5, "disk_throughput_read": 2.0, "/": {"disk_util": 40.0}}
        report(session, "disk", {"node-a": disk}, time)
    report(session, "mine", {"node-a": {"cpu_util_simple": 1.0}}, "2026-01-02T00:00:03+00:00")


def series(
    answers: Iterable[bindings.v1GetTrialProfilerAvailableSeriesResponse],
) -> list[tuple[str, str, str]]:
    (answer,) = answers
    assert {label.metricType for label in answer.labels} <= {KINDS.SYSTEM}
    assert {label.trialId for label in answer.labels} <= {1}
    return [(label.name, label.agentId or "", label.gpuUuid or "") for label in answer.labels]


def read(session: api.Session, **wanted: Any) -> dict[tuple[str, str, str], list[float]]:
    found: dict[tuple[str, str, str], list[float]] = {}
    for answer in bindings.get_GetTrialProfilerMetrics(session, labels_trialId=1, **wanted):
        batch = answer.batch
        assert len(batch.timestamps) == len(batch.values)
        assert batch.timestamps == sorted(batch.timestamps)
        key = (batch.labels.name, batch.labels.agentId or "", batch.labels.gpuUuid or "")
        found.setdefault(key, []).extend(batch.values)
    return found


def test_series_of_all_nodes_and_devices_are_told_by_their_labels(session: api.Session) -> None:
    assert series(bindings.get_GetTrialProfilerAvailableSeries(session, trialId=1)) == []
    report_two_nodes(session)

    assert series(bindings.get_GetTrialProfilerAvailableSeries(session, trialId=1)) == [
        ("cpu_util_simple", "node-a", ""),
        ("cpu_util_simple", "node-b", ""),
        ("disk_iops", "node-a", ""),
        ("disk_throughput_read", "node-a", ""),
        ("gpu_free_memory", "node-a", "GPU-0"),
        ("gpu_free_memory", "node-a", "GPU-1"),
        ("gpu_util", "node-a", "GPU-0"),
        ("gpu_util", "node-a", "GPU-1"),
        ("memory_free", "node-a", ""),
    ]


def test_labels_choose_the_readings(session: api.Session) -> None:
    report_two_nodes(session)

    assert read(session, labels_name="cpu_util_simple", labels_agentId="node-b") == {
        ("cpu_util_simple", "node-b", ""): [25.5, 75.5]
    }
    assert read(session, labels_gpuUuid="GPU-1", labels_name="gpu_util", labels_metricType=KINDS.SYSTEM) == {
        ("gpu_util", "node-a", "GPU-1"): [26.0, 76.0]
    }
    assert read(session, labels_name="memory_free") == {("memory_free", "node-a", ""): [5.0, 5.0]}
    assert len(read(session)) == 9
    assert read(session, labels_metricType=KINDS.TIMING) == {}
    assert read(session, labels_name="cpu_util_simple", labels_agentId="node-c") == {}


def test_the_answers_are_determineds(session: api.Session, fresh_master: Master) -> None:
    report(session, "gpu", {"node-a": {"GPU-0": {"gpu_util": 25.0}}}, "2026-01-02T00:00:01+00:00")

    labels = {
        "agentId": "node-a",
        "gpuUuid": "GPU-0",
        "metricType": "PROFILER_METRIC_TYPE_SYSTEM",
        "name": "gpu_util",
        "trialId": 1,
    }
    answer = fresh_master.get("/api/v1/trials/1/profiler/available_series").json
    assert answer == {"result": {"labels": [labels]}}
    answer = fresh_master.get("/api/v1/trials/1/profiler/metrics?labels.name=gpu_util").json
    assert answer == {
        "result": {
            "batch": {
                "labels": labels,
                "timestamps": ["2026-01-02T00:00:01.000000Z"],
                "values": [25.0],
                "batches": [],
            }
        }
    }


def test_who_follows_gets_what_comes_until_the_trial_has_ended(
    session: api.Session, fresh_master: Master
) -> None:
    user = api.Session(fresh_master.address, "determined", fresh_master.tokens["determined"], None)
    told: queue.Queue[Any] = queue.Queue()

    def follow() -> None:
        for answer in bindings.get_GetTrialProfilerAvailableSeries(user, trialId=1, follow=True):
            told.put(len(answer.labels))
        told.put("end of series")

    def follow_metrics() -> None:
        for answer in bindings.get_GetTrialProfilerMetrics(user, labels_trialId=1, follow=True):
            told.put((answer.batch.labels.name, *answer.batch.values))
        told.put("end of metrics")

    report(session, "cpu", {"node-a": {"cpu_util_simple": 1.0}}, "2026-01-02T00:00:01+00:00")
    threads = [threading.Thread(target=one, daemon=True) for one in (follow, follow_metrics)]
    for thread in threads:
        thread.start()
    assert {told.get(timeout=60), told.get(timeout=60)} == {1, ("cpu_util_simple", 1.0)}

    report(session, "memory", {"node-a": {"memory_free": 2.0}}, "2026-01-02T00:00:02+00:00")
    assert {told.get(timeout=60), told.get(timeout=60)} == {2, ("memory_free", 2.0)}
    report(session, "cpu", {"node-a": {"cpu_util_simple": 3.0}}, "2026-01-02T00:00:03+00:00")
    assert told.get(timeout=60) == ("cpu_util_simple", 3.0), "and no series, since none is new"

    def end(tx: Transaction) -> None:
        tx.execute("UPDATE tasks SET end_us = 1 WHERE trial_id = 1")
        tx.execute("UPDATE allocations SET state = 'TERMINATED' WHERE trial_id = 1")
        tx.publish("trial:1")

    fresh_master.services.database.write(end)
    assert {told.get(timeout=60), told.get(timeout=60)} == {"end of series", "end of metrics"}
    for thread in threads:
        thread.join(60)
    assert told.empty()


def test_long_series_come_in_parts_and_whole(session: api.Session, fresh_master: Master) -> None:
    def store(tx: Transaction) -> None:
        tx.executemany(
            "INSERT INTO metrics (trial_id, run_id, group_name, steps, end_us, metrics) VALUES (1, 1, 'cpu', -1, ?, ?)",
            [(second, f'{{"n": {{"cpu_util_simple": {second}}}}}') for second in range(2500)],
        )

    fresh_master.services.database.write(store)

    answers = list(bindings.get_GetTrialProfilerMetrics(session, labels_trialId=1))
    assert [len(answer.batch.values) for answer in answers] == [1000, 1000, 500]
    assert [value for answer in answers for value in answer.batch.values] == list(range(2500))


def test_a_trial_that_is_not_there_or_anothers_is_refused(session: api.Session, fresh_master: Master) -> None:
    user = api.Session(fresh_master.address, "determined", fresh_master.tokens["determined"], None)
    with pytest.raises(APIException, match="trial 99 is not found"):
        list(bindings.get_GetTrialProfilerMetrics(user, labels_trialId=99))
    with pytest.raises(APIException, match="trial 99 is not found"):
        list(bindings.get_GetTrialProfilerAvailableSeries(user, trialId=99))
    for path in ("metrics", "available_series"):
        assert fresh_master.get(f"/api/v1/trials/2/profiler/{path}", "trial-1").status == 403
    answer = fresh_master.get("/api/v1/trials/1/profiler/metrics?labels.metricType=none")
    assert answer.status == 400
    assert "labels.metricType is 'none'" in answer.error


def test_determineds_own_profiler_reports_what_is_served(session: api.Session) -> None:
    metrics = core._MetricsContext(session, 1, 1)
    metrics.start()
    profiler = core.ProfilerContext("this-node", metrics, core.DummyDistributedContext())
    profiler.on(sampling_interval=0.1, samples_per_report=2)

    def names() -> set[str]:
        return {name for name, *_ in series(bindings.get_GetTrialProfilerAvailableSeries(session, trialId=1))}

    wait_for(lambda: len(names()) >= 7, deadline_s=60)
    profiler.off()
    collector = profiler._collector
    assert collector is not None
    collector.join(60)
    metrics.close()
    expected = {"cpu_util_simple", "memory_free", "net_throughput_sent", "net_throughput_recv"}
    assert expected | {"disk_iops", "disk_throughput_read", "disk_throughput_write"} <= names()
    found = read(session, labels_name="memory_free", labels_agentId="this-node")
    assert all(value > 0 for value in found["memory_free", "this-node", ""])


def test_system_metrics_are_sent_and_an_error_of_training_is_left_to_training(
    session: api.Session, tmp_path: Path
) -> None:
    core_context = core.init(checkpoint_storage=str(tmp_path))
    core_context._session = session
    core_context._metrics = core._MetricsContext(session, 1, 1)
    core_context._metrics._error_queue.put(RuntimeError("a report of training was refused"))
    info = types.SimpleNamespace(trial=types.SimpleNamespace(trial_id=1, _trial_run_id=1))
    sink = runtime._ClusterSystemMetrics(core_context, info, 0)

    profiler = NodeProfiler("node", core_context.distributed, sink)
    profiler.on()
    profiler.off()
    assert {name for name, *_ in series(bindings.get_GetTrialProfilerAvailableSeries(session, trialId=1))} == {
        "cpu_util_simple", "memory_free", "disk_iops", "disk_throughput_read", "disk_throughput_write",
        "net_throughput_recv", "net_throughput_sent",
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="a report of training was refused"):
        core_context._metrics.report("training", {"loss": 1.0}, 1)
