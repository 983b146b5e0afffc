"""System metrics from Determined's profiler and from NodeProfiler."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
from determined import core
from determined.common import api
from determined.common.api import bindings
from waiting import wait_for

from dstrial import runtime
from dstrial.local.core_context import NodeProfiler

pytestmark = pytest.mark.process


def reported(session: api.Session) -> dict[str, list[float]]:
    """Return system metric name -> values of trial 1, from all nodes."""
    found: dict[str, list[float]] = {}
    for group in ("cpu", "memory", "disk", "network"):
        for answer in bindings.get_GetMetrics(session, trialIds=[1], group=group):
            for one in answer.metrics:
                for values in one.metrics["avg_metrics"].values():
                    for name, value in values.items():
                        found.setdefault(name, []).append(value)
    return found


def test_determined_profiler_metrics_are_served(trial_session: api.Session) -> None:
    metrics = core._MetricsContext(trial_session, 1, 1)
    metrics.start()
    profiler = core.ProfilerContext("this-node", metrics, core.DummyDistributedContext())
    profiler.on(sampling_interval=0.1, samples_per_report=2)

    wait_for(lambda: len(reported(trial_session)) >= 7, deadline_s=60)
    profiler.off()
    collector = profiler._collector
    assert collector is not None
    collector.join(60)
    metrics.close()
    expected = {"cpu_util_simple", "memory_free", "net_throughput_sent", "net_throughput_recv"}
    assert (
        expected | {"disk_iops", "disk_throughput_read", "disk_throughput_write"}
        <= reported(trial_session).keys()
    )
    assert all(value > 0 for value in reported(trial_session)["memory_free"])


def test_system_metrics_leave_training_error_to_training(trial_session: api.Session, tmp_path: Path) -> None:
    core_context = core.init(checkpoint_storage=str(tmp_path))
    core_context._session = trial_session
    core_context._metrics = core._MetricsContext(trial_session, 1, 1)
    core_context._metrics._error_queue.put(RuntimeError("a report of training was refused"))
    info = types.SimpleNamespace(trial=types.SimpleNamespace(trial_id=1, _trial_run_id=1))
    sink = runtime._ClusterSystemMetrics(core_context, info, 0)

    profiler = NodeProfiler("node", core_context.distributed, sink)
    profiler.on()
    profiler.off()
    assert {name for name in reported(trial_session) if not name.startswith("/")} >= {
        "cpu_util_simple", "memory_free", "disk_iops", "disk_throughput_read", "disk_throughput_write",
        "net_throughput_recv", "net_throughput_sent",
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="a report of training was refused"):
        core_context._metrics.report("training", {"loss": 1.0}, 1)
