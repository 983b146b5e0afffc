"""Reports, progress and rewinding of LocalTrainContext."""

from __future__ import annotations

import datetime
import json
import math
from typing import Any

import numpy as np
import pytest
from determined import core

from dstrial.errors import RankError, TrialContractError
from dstrial.local.json_files import read_json, read_json_lines
from dstrial.local.run_directory import RunDirectory
from dstrial.local.train_context import PROGRESS_PERIOD_S, LocalTrainContext, repair_reports


def opened(run_directory: RunDirectory, **options: Any) -> LocalTrainContext:
    options = {"is_chief": True, "metric": "accuracy", "smaller_is_better": False} | options
    repair_reports(run_directory, is_chief=options["is_chief"])
    return LocalTrainContext(run_directory, **options)


def steps(run_directory: RunDirectory) -> list[tuple[str, int | None]]:
    return [(row["group"], row["steps_completed"]) for row in read_json_lines(run_directory.metrics_path)]


def test_reports_are_written_in_call_order(run_directory: RunDirectory) -> None:
    train = opened(run_directory)
    train.report_training_metrics(10, {"loss": np.float32(0.5), "per_class": np.array([1, 2])})
    train.report_validation_metrics(10, {"accuracy": 0.9, "worst": math.nan})
    train.report_metrics("system", 10, {"free": 3})
    rows = read_json_lines(run_directory.metrics_path)
    assert [(row["group"], row["steps_completed"], row["metrics"]) for row in rows] == [
        ("training", 10, {"loss": 0.5, "per_class": [1, 2]}),
        ("validation", 10, {"accuracy": 0.9, "worst": "NaN"}),
        ("system", 10, {"free": 3}),
    ]
    assert all(row["time"].endswith("+00:00") for row in rows)


def test_rewind_keeps_system_metrics(run_directory: RunDirectory) -> None:
    train = opened(run_directory)
    now = datetime.datetime.now(datetime.timezone.utc)
    for batch in (1, 2, 3):
        train.report_training_metrics(batch, {"loss": 1.0})
        train.report_system_metrics("cpu", {"node": {"cpu_util_simple": float(batch)}}, now, 0)
    assert train.rewind_to(1) == 2
    assert steps(run_directory) == [("training", 1), ("cpu", None), ("cpu", None), ("cpu", None)]
    assert train.rewind_to(1) == 0


def test_invalid_reports_are_rejected(run_directory: RunDirectory) -> None:
    with pytest.raises(RankError, match="expected the chief"):
        opened(run_directory, is_chief=False).report_training_metrics(1, {"loss": 1.0})
    with pytest.raises(TrialContractError, match=r"metric group is 'a\.b'"):
        opened(run_directory).report_metrics("a.b", 1, {})
    with pytest.raises(TrialContractError, match=r"progress is 1\.5; expected a number from 0 to 1"):
        opened(run_directory).report_progress(1.5)


def test_validation_report_omits_bytes_without_mutation(run_directory: RunDirectory) -> None:
    metrics = {"image": b"png", "accuracy": 0.5, "b": 1}
    opened(run_directory).report_validation_metrics(1, metrics)
    assert metrics == {"image": b"png", "accuracy": 0.5, "b": 1}
    assert list(read_json_lines(run_directory.metrics_path)[0]["metrics"]) == ["accuracy", "b"]


class TestBestValidation:
    @pytest.mark.parametrize(("smaller_is_better", "best"), [(False, 0.9), (True, 0.2)])
    def test_best_follows_direction_and_skips_nan(
        self, run_directory: RunDirectory, smaller_is_better: bool, best: float
    ) -> None:
        train = opened(run_directory, smaller_is_better=smaller_is_better)
        assert train.get_experiment_best_validation() is None
        for step, value in enumerate([0.5, 0.9, math.nan, 0.2]):
            train.report_validation_metrics(step, {"accuracy": value, "other": -1.0})
            train.report_training_metrics(step, {"accuracy": 100.0})
        assert train.get_experiment_best_validation() == best

    def test_best_includes_earlier_attempts_on_every_rank(self, run_directory: RunDirectory) -> None:
        worker = opened(run_directory, is_chief=False)
        assert worker.get_experiment_best_validation() is None
        opened(run_directory).report_validation_metrics(10, {"accuracy": 0.9})
        again = opened(run_directory)
        again.report_validation_metrics(20, {"accuracy": 0.8})
        assert again.get_experiment_best_validation() == 0.9
        assert worker.get_experiment_best_validation() == 0.9

    def test_best_without_searcher_metric_is_none(self, run_directory: RunDirectory) -> None:
        train = opened(run_directory, metric=None)
        train.report_validation_metrics(10, {"accuracy": 0.9})
        assert train.get_experiment_best_validation() is None


class TestRewind:
    def test_rewind_moves_later_reports_to_superseded_file(self, run_directory: RunDirectory) -> None:
        train = opened(run_directory)
        for step in (10, 20, 30):
            train.report_training_metrics(step, {"loss": step})
            train.report_validation_metrics(step, {"accuracy": step})
        assert train.get_experiment_best_validation() == 30
        again = opened(run_directory)
        assert again.rewind_to(20) == 2
        assert steps(run_directory) == [
            (group, step) for step in (10, 20) for group in ("training", "validation")
        ]
        aside = read_json_lines(run_directory.superseded_metrics_path)
        assert [(row["group"], row["steps_completed"]) for row in aside] == [
            ("training", 30),
            ("validation", 30),
        ]
        assert again.get_experiment_best_validation() == 20

    def test_rewind_is_noop_without_later_reports_or_chief(self, run_directory: RunDirectory) -> None:
        train = opened(run_directory)
        train.report_training_metrics(10, {"loss": 1})
        assert train.rewind_to(10) == 0
        assert opened(run_directory, is_chief=False).rewind_to(0) == 0
        assert steps(run_directory) == [("training", 10)]
        assert not run_directory.superseded_metrics_path.exists()

    def test_torn_line_of_killed_attempt_is_removed(self, run_directory: RunDirectory) -> None:
        opened(run_directory).report_training_metrics(10, {"loss": 1})
        with run_directory.metrics_path.open("a") as file:
            file.write('{"group": "trai')
        train = opened(run_directory)
        train.report_training_metrics(20, {"loss": 1})
        assert steps(run_directory) == [("training", 10), ("training", 20)]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class TestProgress:
    def test_progress_is_throttled_and_written_at_end(self, run_directory: RunDirectory) -> None:
        clock = Clock()
        train = opened(run_directory, clock=clock)

        def written() -> Any:
            return (read_json(run_directory.progress_path) or {}).get("batches_trained")

        train.report_batches(1, 100)
        assert written() == 1
        clock.now_s = 0.9 * PROGRESS_PERIOD_S
        train.report_batches(2, 100)
        assert written() == 1
        clock.now_s = PROGRESS_PERIOD_S
        train.report_batches(3, 100)
        assert written() == 3
        train.report_batches(100, 100)
        assert read_json(run_directory.progress_path)["progress"] == 1.0
        assert written() == 100

    def test_progress_is_sent_once_per_period_and_at_end(self, run_directory: RunDirectory) -> None:
        class Cluster(core.DummyTrainContext):
            _exp_id = _trial_id = 1
            _metrics = None

            def report_progress(self, progress: float) -> None:
                sent.append(progress)

        sent: list[float] = []
        now_s = 0.0
        train = opened(run_directory, cluster=Cluster(), clock=lambda: now_s)
        for progress in (0.1, 0.2, 0.3, 1.0):
            train.report_progress(progress)
            now_s += 0.6 * PROGRESS_PERIOD_S

        assert sent == [0.1, 0.3, 1.0]

    def test_telemetry_is_sent_once_per_second_but_always_written(self, run_directory: RunDirectory) -> None:
        class Cluster(core.DummyTrainContext):
            _exp_id = _trial_id = 1
            _metrics = None

            def _report_trial_metrics(self, group: str, steps_completed: int, *_values: Any) -> None:
                sent.append((group, steps_completed))

        sent: list[tuple[str, int]] = []
        now_s = 0.0
        train = opened(run_directory, cluster=Cluster(), clock=lambda: now_s)
        for batch in (1, 2, 3):
            train.report_training_metrics(batch, {"loss": 1.0})
            train.report_metrics("telemetry", batch, {"batch_ms": 1.0})
            now_s += 0.6

        training = [("training", batch) for batch in (1, 2, 3)]
        assert [one for one in sent if one[0] == "training"] == training
        assert [one for one in sent if one[0] == "telemetry"] == [("telemetry", 1), ("telemetry", 3)]
        assert [batch for group, batch in steps(run_directory) if group == "telemetry"] == [1, 2, 3]

    def test_worker_writes_no_progress_or_status(self, run_directory: RunDirectory) -> None:
        worker = opened(run_directory, is_chief=False)
        worker.report_batches(1, 1)
        worker.set_status("x")
        worker.report_early_exit(core.EarlyExitReason.INVALID_HP)
        worker.flush_progress()
        assert not run_directory.progress_path.exists()
        assert not run_directory.status_path.exists()


def test_first_early_exit_is_kept_until_new_attempt(run_directory: RunDirectory) -> None:
    train = opened(run_directory)
    train.set_status("validating")
    train.report_early_exit(core.EarlyExitReason.INVALID_HP)
    train.report_early_exit(core.EarlyExitReason.USER_REQUESTED_STOP)
    assert train.get_early_exit() == "INVALID_HP"
    assert read_json(run_directory.status_path)["status"] == "validating"
    assert opened(run_directory).get_early_exit() is None


def test_set_metadata_replaces_all_metadata(run_directory: RunDirectory) -> None:
    train = opened(run_directory)
    assert train.get_metadata() is None
    assert train.set_metadata({"a": {"b": 1}}) == {"a": {"b": 1}}
    train.set_metadata({"c": np.int64(2)})
    assert json.loads(run_directory.metadata_path.read_text()) == {"c": 2} == train.get_metadata()
