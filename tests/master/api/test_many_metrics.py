"""Pages of metrics and workloads of trials with many reports."""

from __future__ import annotations

from typing import Any

import pytest
from determined.common import api
from determined.common.api import bindings
from serving import Master

pytestmark = pytest.mark.process


def report(session: api.Session, steps: int, values: dict[str, Any], group: str = "training") -> None:
    body = bindings.v1ReportTrialMetricsRequest(
        group=group,
        metrics=bindings.v1TrialMetrics(
            metrics=bindings.v1Metrics(avgMetrics=values, batchMetrics=[]),
            trialId=1,
            trialRunId=1,
            stepsCompleted=steps,
        ),
    )
    bindings.post_ReportTrialMetrics(session, body=body, metrics_trialId=1)


def test_metrics_are_streamed_completely_in_order(trial_session: api.Session, fresh_master: Master) -> None:
    def store(tx: Any) -> None:
        tx.executemany(
            "INSERT INTO metrics (trial_id, run_id, group_name, steps, end_us, metrics) VALUES (1, 1, ?, ?, 1, ?)",
            [
                ("training" if steps % 2 else "validation", steps, f'{{"loss": {steps}}}')
                for steps in range(2500)
            ],
        )

    fresh_master.services.database.write(store)
    report(trial_session, 2500, {"text": "x" * 9_000_000})
    report(trial_session, 2501, {"text": "x" * 9_000_000})

    answers = list(bindings.get_GetMetrics(trial_session, group="", trialIds=[1]))
    assert [row.totalBatches for answer in answers for row in answer.metrics] == list(range(2502))
    assert [len(answer.metrics) for answer in answers] == [1000, 1000, 501, 1]
    answers = list(bindings.get_GetMetrics(trial_session, group="validation", trialIds=[1]))
    assert [row.totalBatches for answer in answers for row in answer.metrics] == list(range(0, 2500, 2))


@pytest.mark.parametrize("place", ["avgMetrics", "batchMetrics"])
def test_metric_name_too_long_is_rejected(fresh_master: Master, place: str) -> None:
    values = {"l" * 100_000: 1.0}
    metrics = {"avgMetrics": {}, "batchMetrics": [], place: values if place == "avgMetrics" else [values]}
    body = {"group": "training", "metrics": {"trialRunId": 1, "stepsCompleted": 1, "metrics": metrics}}

    answer = fresh_master.send("POST", "/api/v1/trials/1/metrics", body, token="trial-1")

    assert answer.status == 400
    assert "the name of a metric has 100,000 characters, 'lll" in answer.error
    assert "expected at most 256" in answer.error
    assert len(answer.error) < 500
    assert fresh_master.rows("SELECT * FROM metrics") == []
