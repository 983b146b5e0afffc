"""Series of metrics that Determined's charts ask for: reduced, filtered, of whom one may see."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from determined.common import api
from determined.common.api import bindings
from serving import Master

from dstrial.master.store.reports import metrics, series

pytestmark = pytest.mark.process
TRAINING, VALIDATION = bindings.v1MetricType.TRAINING, bindings.v1MetricType.VALIDATION


@pytest.fixture
def session(fresh_master: Master) -> api.Session:
    return api.Session(fresh_master.address, "determined", fresh_master.tokens["determined"], None)


def report(master: Master, trial_id: int, values: dict[int, dict[str, Any]], group: str = "training") -> None:
    """Have a trial report values by batch, through the protocol."""
    session = api.Session(master.address, "determined", master.tokens["determined"], None)
    for steps, one in values.items():
        reported = bindings.v1TrialMetrics(
            metrics=bindings.v1Metrics(avgMetrics=one, batchMetrics=[]),
            trialId=trial_id,
            trialRunId=1,
            stepsCompleted=steps,
            reportTime=f"2026-01-02T00:{steps // 60 % 60:02}:{steps % 60:02}Z",
        )
        body = bindings.v1ReportTrialMetricsRequest(group=group, metrics=reported)
        bindings.post_ReportTrialMetrics(session, body=body, metrics_trialId=trial_id)


def report_together(master: Master, losses: dict[int, float], steps: int) -> None:
    """Have several trials report a loss at a batch in one transaction, between two looks of a stream."""

    def write(tx: Any) -> None:
        for trial_id, loss in losses.items():
            metrics.add_report(
                tx,
                trial_id=trial_id,
                run_id=1,
                group="training",
                steps=steps,
                end_us=1,
                metrics={"loss": loss},
            )

    master.services.database.write(write)


def add_many(master: Master, trial_id: int, values: Sequence[float]) -> None:
    """Store reports of a loss, one a batch, faster than the protocol takes them."""

    def write(tx: Any) -> None:
        tx.executemany(
            "INSERT INTO metrics (trial_id, run_id, group_name, steps, end_us, metrics) VALUES (?, 1, 'training', ?, ?, ?)",
            [
                (trial_id, steps, steps * 10**6, json.dumps({"loss": value if value == value else "NaN"}))
                for steps, value in enumerate(values, start=1)
            ],
        )

    master.services.database.write(write)


def end(master: Master, experiment_id: int = 1) -> None:
    master.change("UPDATE experiments SET state = 'COMPLETED', end_us = 2 WHERE id = ?", experiment_id)


def drawn(points: Sequence[bindings.v1DataPoint], name: str = "loss") -> list[tuple[int, Any]]:
    return [(one.batches, one.values[name]) for one in points if one.values and name in one.values]


def test_trials_are_compared_by_metrics_of_several_groups(session: api.Session, fresh_master: Master) -> None:
    report(fresh_master, 1, {1: {"loss": 0.5, "lr": 1, "epoch": 0.5}, 2: {"loss": math.nan, "text": "x"}})
    report(fresh_master, 1, {2: {"a.b": 1.5}}, "validation")
    report(fresh_master, 2, {1: {"loss": -math.inf}})

    ids = ["training.loss", "training.lr", "validation.a.b", "training.text"]
    first, second = bindings.get_CompareTrials(session, trialIds=[1, 2, 1], metricIds=ids).trials
    assert (first.trial.id, first.trial.experimentId, second.trial.id) == (1, 1, 2)
    training, validation = first.metrics
    assert (training.group, training.type, validation.group, validation.type) == (
        *("training", TRAINING),
        *("validation", VALIDATION),
    )
    assert [one.to_json(omit_unset=True) for one in training.data] == [
        {
            "batches": 1,
            "time": "2026-01-02T00:00:01.000000Z",
            "epoch": 0.5,
            "values": {"loss": 0.5, "lr": 1.0},
        },
        {"batches": 2, "time": "2026-01-02T00:00:02.000000Z", "epoch": None, "values": {"loss": "NaN"}},
    ]
    assert drawn(validation.data, "a.b") == [(2, 1.5)]
    assert [drawn(one.data) for one in second.metrics] == [[(1, "-Infinity")]]


def test_older_clients_name_the_group_by_its_type(session: api.Session, fresh_master: Master) -> None:
    report(fresh_master, 1, {1: {"loss": 1}, 2: {"loss": 2}})
    (trial,) = bindings.get_CompareTrials(
        session, trialIds=[1], metricNames=["loss"], metricType=TRAINING
    ).trials
    assert drawn(trial.metrics[0].data) == [(1, 1.0), (2, 2.0)]


def test_a_long_series_has_so_many_points_its_ends_and_its_accidents(
    session: api.Session, fresh_master: Master
) -> None:
    values = [math.exp(-idx / 2000) for idx in range(10_000)]
    values[3210], values[7777] = 7.5, math.nan
    add_many(fresh_master, 1, values)

    def compared(max_points: int | None) -> list[tuple[int, Any]]:
        (trial,) = bindings.get_CompareTrials(
            session, trialIds=[1], metricIds=["training.loss"], maxDatapoints=max_points
        ).trials
        return drawn(trial.metrics[0].data)

    for asked, most in ((None, 200), (50, 50), (10**6, series.MAX_POINTS)):
        found = compared(asked)
        assert most * 0.9 < len(found) <= most
        assert {(1, 1.0), (3211, 7.5), (7778, "NaN"), (10_000, values[-1])} <= set(found)


def test_a_window_and_a_filter_choose_the_reports(session: api.Session, fresh_master: Master) -> None:
    report(
        fresh_master,
        1,
        {steps: {"loss": 1 / steps, "epoch": steps / 4, "odd": steps % 2} for steps in range(1, 9)},
    )

    def found(**chosen: Any) -> list[int]:
        (trial,) = bindings.get_CompareTrials(
            session, trialIds=[1], metricIds=["training.loss"], **chosen
        ).trials
        return [steps for metric in trial.metrics for steps, _ in drawn(metric.data)]

    assert found(startBatches=3, endBatches=5) == [3, 4, 5]
    assert found(timeSeriesFilter_name="batches", timeSeriesFilter_integerRange_gt=6) == [7, 8]
    assert found(timeSeriesFilter_name="batches", timeSeriesFilter_integerRange_incl=[2, 5, 99]) == [2, 5]
    assert found(
        timeSeriesFilter_name="batches", timeSeriesFilter_integerRange_notIn=[2, 3], endBatches=4
    ) == [
        1,
        4,
    ]
    assert found(timeSeriesFilter_name="epoch", timeSeriesFilter_doubleRange_lte=0.5) == [1, 2]
    assert found(timeSeriesFilter_name="odd", timeSeriesFilter_doubleRange_gte=1.0) == [1, 3, 5, 7]
    assert found(
        timeSeriesFilter_name="time",
        timeSeriesFilter_timeRange_gte="2026-01-02T00:00:03Z",
        timeSeriesFilter_timeRange_lt="2026-01-02T00:00:05Z",
    ) == [3, 4]


def test_what_was_archived_is_not_drawn(session: api.Session, fresh_master: Master) -> None:
    report(fresh_master, 1, {1: {"loss": 1}, 2: {"loss": 2}})
    fresh_master.change("UPDATE metrics SET archived = 1 WHERE steps = 2")
    (trial,) = bindings.get_CompareTrials(session, trialIds=[1], metricIds=["training.loss"]).trials
    assert drawn(trial.metrics[0].data) == [(1, 1.0)]


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("trialIds=x", "trialIds"),
        ("trialIds=1&metricIds=loss", "metricIds"),
        ("trialIds=1&metricIds=training.", "metricIds"),
        ("trialIds=1&metricNames=loss", "group"),
        ("trialIds=1&metricNames=loss&metricType=METRIC_TYPE_UNSPECIFIED", "group"),
        ("trialIds=1&metricNames=loss&metricType=OTHER", "metricType"),
        ("trialIds=1&metricIds=training.loss&maxDatapoints=-1", "maxDatapoints"),
        ("trialIds=1&startBatches=-1", "startBatches"),
        ("trialIds=1&timeSeriesFilter.integerRange.gt=1", "timeSeriesFilter.name"),
        ("trialIds=1&timeSeriesFilter.name=time&timeSeriesFilter.integerRange.gt=1", "timeSeriesFilter.name"),
        ("trialIds=1&timeSeriesFilter.name=time&timeSeriesFilter.timeRange.gt=noon", "timeRange.gt"),
        ("trialIds=1&timeSeriesFilter.name=epoch&timeSeriesFilter.doubleRange.gt=x", "doubleRange.gt"),
        ("&".join(["trialIds=1", *(f"metricIds=training.m{idx}" for idx in range(101))]), "101 metrics"),
        ("&".join(f"trialIds={idx}" for idx in range(1001)), "1001 trials"),
    ],
)
def test_a_comparison_that_makes_no_sense_is_refused(served: Master, query: str, text: str) -> None:
    answer = served.get(f"/api/v1/trials/time-series?{query}")
    assert answer.status == 400
    assert text in answer.error


def test_series_are_for_whom_the_trial_is(served: Master) -> None:
    path = "/api/v1/trials/time-series?metricIds=training.loss&trialIds="
    assert served.get(f"{path}1", None).status == 401
    assert served.get(f"{path}1", "other").status == 200
    assert served.get(f"{path}1", "trial-1").status == 200
    assert served.get(f"{path}1&trialIds=2", "trial-1").status == 403
    assert served.get(f"{path}99").status == 404
    for stream in ("batches", "trials-sample", "trials-snapshot"):
        path = (
            f"/api/v1/experiments/1/metrics-stream/{stream}?metricName=loss&group=training&batchesProcessed=1"
        )
        assert served.get(path, None).status == 401
        assert served.get(path, "trial-1").status == 403
        assert served.get(path.replace("experiments/1/", "experiments/99/")).status == 404


@pytest.mark.parametrize("stream", ["batches", "trials-sample", "trials-snapshot"])
@pytest.mark.parametrize(
    "query",
    [
        "metricName=loss",
        "group=training",
        "metricName=loss&metricType=NONE",
        "metricName=loss&group=training&periodSeconds=-1",
        "metricName=loss&group=training&periodSeconds=x",
    ],
)
def test_a_stream_of_nothing_is_refused(served: Master, stream: str, query: str) -> None:
    answer = served.get(f"/api/v1/experiments/1/metrics-stream/{stream}?batchesProcessed=1&{query}")
    assert answer.status == 400


def test_streams_refuse_what_is_negative(served: Master) -> None:
    start = "/api/v1/experiments/1/metrics-stream"
    for query in (
        "trials-sample?maxTrials=-1",
        "trials-sample?maxDatapoints=-1",
        "trials-snapshot?batchesProcessed=-1",
        "trials-snapshot?batchesMargin=-1&batchesProcessed=1",
        "trials-snapshot?a=1",
    ):
        assert served.get(f"{start}/{query}&metricName=loss&group=training").status == 400, query


def test_the_batches_of_a_metric_are_told_until_the_experiment_has_ended(
    session: api.Session, fresh_master: Master
) -> None:
    report(fresh_master, 1, {5: {"loss": 1}, 2: {"loss": 1}, 7: {"other": 1}})
    stream = bindings.get_MetricBatches(
        session, experimentId=1, metricName="loss", metricType=TRAINING, periodSeconds=1
    )
    assert next(iter(stream)).batches == [2, 5]
    report(fresh_master, 1, {9: {"loss": 1}, 5: {"late": 1}})
    assert next(iter(stream)).batches == [9]
    # It is added to a report that was seen without it.
    report(fresh_master, 1, {7: {"loss": 1}})
    end(fresh_master)
    assert [one.batches for one in stream] == [[7]]


def test_the_batches_of_an_experiment_without_the_metric_are_none(
    session: api.Session, fresh_master: Master
) -> None:
    end(fresh_master)
    stream = bindings.get_MetricBatches(session, experimentId=1, metricName="loss", group="validation")
    assert [one.batches for one in stream] == [[]]


def test_nothing_is_told_again_before_the_first_report(session: api.Session, fresh_master: Master) -> None:
    stream = bindings.get_MetricBatches(
        session, experimentId=1, metricName="loss", group="training", periodSeconds=1
    )
    assert next(iter(stream)).batches == []
    time.sleep(1.5)  # Long enough for another look; were it not, the test would only see less.
    report(fresh_master, 1, {3: {"loss": 1}})
    assert next(iter(stream)).batches == [3]


def more_trials(master: Master, count: int) -> None:
    """Give experiment 1 trials 11, 12 and so on."""

    def write(tx: Any) -> None:
        tx.executemany(
            "INSERT INTO trials (id, experiment_id, request_id, state, hparams, seed, task_id, run_id, start_us) "
            "VALUES (?, 1, ?, 'ACTIVE', ?, 1, ?, 1, 1)",
            [
                (11 + idx, f"r{idx}", json.dumps({"lr": idx, "api_key": "hunter2"}), f"1.r{idx}")
                for idx in range(count)
            ],
        )

    master.services.database.write(write)


def followed(stream: Iterator[bindings.v1TrialsSampleResponse]) -> list[dict[str, Any]]:
    return [
        {
            "promoted": one.promotedTrials,
            "demoted": one.demotedTrials,
            "data": {trial.trialId: drawn(trial.data) for trial in one.trials},
        }
        for one in stream
    ]


def test_the_best_trials_are_followed_and_others_take_their_place(
    session: api.Session, fresh_master: Master
) -> None:
    more_trials(fresh_master, 3)
    for trial_id, loss in ((11, 3.0), (12, 1.0), (13, 2.0)):
        report(fresh_master, trial_id, {1: {"loss": loss + 1}, 2: {"loss": loss}})
    stream = bindings.get_TrialsSample(
        session, experimentId=1, metricName="loss", group="training", maxTrials=2, periodSeconds=1
    )
    found = [next(iter(stream))]
    report_together(fresh_master, {12: 0.9, 11: 0.5}, steps=3)
    found.append(next(iter(stream)))
    end(fresh_master)
    found.extend(stream)

    assert followed(iter(found)) == [
        {
            "promoted": [12, 13],
            "demoted": [],
            "data": {12: [(1, 2.0), (2, 1.0)], 13: [(1, 3.0), (2, 2.0)]},
        },
        {"promoted": [11], "demoted": [13], "data": {11: [(1, 4.0), (2, 3.0), (3, 0.5)], 12: [(3, 0.9)]}},
    ]
    hparams = {trial.trialId: trial.hparams for one in found for trial in one.trials}
    assert hparams[11]["lr"] == 0
    assert "hunter2" not in str(hparams)
    # Whoever comes when it has ended gets the same at once.
    again = bindings.get_TrialsSample(
        session, experimentId=1, metricName="loss", group="training", maxTrials=2
    )
    assert [one["promoted"] for one in followed(again)] == [[11, 12]]


def test_a_search_that_stops_trials_early_shows_the_longest(
    session: api.Session, fresh_master: Master
) -> None:
    more_trials(fresh_master, 2)
    report(fresh_master, 11, {1: {"loss": 0.1}})
    report(fresh_master, 12, {1: {"loss": 2.0}, 9: {"loss": 1.0}})
    end(fresh_master)

    def best() -> list[int]:
        stream = bindings.get_TrialsSample(
            session, experimentId=1, metricName="loss", group="training", maxTrials=1
        )
        return [trial_id for one in stream for trial_id in one.promotedTrials]

    assert best() == [11]
    fresh_master.change("UPDATE experiments SET searcher_type = 'adaptive_asha'")
    assert best() == [12]


def test_a_snapshot_has_every_trial_near_a_batch_and_comes_again_when_it_changes(
    session: api.Session, fresh_master: Master
) -> None:
    more_trials(fresh_master, 3)
    report(fresh_master, 11, {8: {"loss": 3.0}, 10: {"loss": 2.0}, 11: {"loss": 1.0}})
    report(fresh_master, 12, {9: {"loss": math.nan}})
    report(fresh_master, 13, {99: {"loss": 1.0}})
    stream = bindings.get_TrialsSnapshot(
        session,
        experimentId=1,
        metricName="loss",
        metricType=TRAINING,
        batchesProcessed=10,
        batchesMargin=2,
        periodSeconds=1,
    )

    def seen(one: bindings.v1TrialsSnapshotResponse) -> list[tuple[int, int, str]]:
        assert "hunter2" not in str(one.to_json(omit_unset=True))
        return [(trial.trialId, trial.batchesProcessed, str(trial.metric)) for trial in one.trials]

    assert seen(next(iter(stream))) == [(11, 10, "2.0"), (12, 9, "nan")]
    report(fresh_master, 12, {10: {"loss": 4.0}})
    assert seen(next(iter(stream))) == [(11, 10, "2.0"), (12, 10, "4.0")]
    end(fresh_master)
    assert list(stream) == []


def test_a_stream_of_a_deleted_experiment_ends_with_an_error(
    session: api.Session, fresh_master: Master
) -> None:
    stream = bindings.get_MetricBatches(
        session, experimentId=1, metricName="loss", group="training", periodSeconds=1
    )
    next(iter(stream))
    fresh_master.change("DELETE FROM experiments WHERE id = 1")
    with pytest.raises(bindings.APIHttpStreamError, match="experiment 1 is not found"):
        list(stream)
