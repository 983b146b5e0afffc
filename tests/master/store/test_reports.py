"""Reports of trials in a real database: recognised, merged, summarised, archived; and what follows from them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dstrial.config.experiment_config.submission import MasterDefaults, check_submission
from dstrial.master.backends import AllocationExit, SupervisorHandle
from dstrial.master.lifecycle import allocations, experiments, trials
from dstrial.master.store import logs, metrics
from dstrial.master.store import trials as trial_rows
from dstrial.master.store.database import Database, Transaction
from dstrial.master.store.errors import ConflictError, InvalidError

CONFIG = """
entrypoint: python3 train.py
searcher: {name: random, metric: score, max_trials: 2, max_concurrent_trials: 1}
max_restarts: 1
"""


class Store:
    """A database with one experiment and its first trial running."""

    def __init__(self, directory: Path) -> None:
        self.database = Database(directory / "master.db")
        (directory / "train.py").touch()
        submission = check_submission(
            CONFIG, context_dir=directory, defaults=MasterDefaults({"type": "shared_fs", "host_path": "/ck"})
        )

        def begin(tx: Transaction) -> int:
            tx.execute("INSERT INTO users (id, username, modified_us) VALUES (1, 'determined', 0)")
            return experiments.create(tx, submission=submission, tgz=b"", owner_id=1, activate=True)

        self.experiment_id = self.database.write(begin)
        self.assign()

    def assign(self) -> None:
        row = self.database.write(
            lambda tx: allocations.assign(
                tx, 1, slots=[0], ports={}, resources_id="r", directory="/d", token_hashes={}
            )
        )
        assert row is not None
        self.allocation_id = row.id
        self.run_id = row.run_id
        self.database.write(lambda tx: allocations.started(tx, self.allocation_id, SupervisorHandle(1, "x")))

    def end(self, exit_code: int = 0, traceback: str | None = None) -> None:
        exit_ = AllocationExit(exit_code, None, 1, None, False)
        self.database.write(
            lambda tx: allocations.allocation_exited(tx, self.allocation_id, exit_, traceback)
        )

    def report(
        self, steps: int, values: dict[str, Any], group: str = "training", run_id: int | None = None
    ) -> None:
        run = self.run_id if run_id is None else run_id
        self.database.write(lambda tx: trials.report_metrics(tx, 1, run, group, steps, 0, values))

    def checkpoint(self, steps: int) -> None:
        def perform(tx: Transaction) -> None:
            trial = trial_rows.require(tx.connection, 1)
            trials.report_checkpoint(
                tx, uuid=f"ck{steps}", trial=trial, allocation_id=self.allocation_id, storage_id=None,
                state="COMPLETED", resources={"a": 5}, metadata={"steps_completed": steps}, report_us=steps,
            )  # fmt: skip

        self.database.write(perform)

    def row(self, table: str, number: int = 1) -> sqlite3.Row:
        with self.database.read() as connection:
            found: sqlite3.Row = connection.execute(
                f"SELECT * FROM {table} WHERE id = ?", (number,)
            ).fetchone()
        return found

    def steps(self, group: str = "training") -> list[int]:
        with self.database.read() as connection:
            return [row.steps for row in metrics.reports(connection, [1], group)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path)
    yield made
    made.database.close()


def test_a_report_that_comes_twice_is_one(store: Store) -> None:
    store.report(1, {"loss": 2.0})
    store.report(1, {"loss": 2.0})

    assert store.steps() == [1]
    assert json.loads(store.row("trials")["summary_metrics"])["avg_metrics"]["loss"]["count"] == 1


def test_other_names_at_the_same_batch_are_added_and_other_values_refused(store: Store) -> None:
    store.report(1, {"loss": 2.0})
    store.report(1, {"accuracy": 0.5})

    with pytest.raises(ConflictError, match=r"expected 2\.0, which was reported before"):
        store.report(1, {"loss": 3.0})
    assert json.loads(store.row("metrics")["metrics"]) == {"loss": 2.0, "accuracy": 0.5}


def test_a_summary_of_numbers_words_and_nan(store: Store) -> None:
    store.report(1, {"loss": 4.0, "name": "x"})
    store.report(2, {"loss": 1.0, "name": "y"})
    store.report(3, {"loss": float("nan")})

    summary = json.loads(store.row("trials")["summary_metrics"])["avg_metrics"]
    assert (summary["loss"]["count"], summary["loss"]["min"], summary["loss"]["max"]) == (3, 1.0, 4.0)
    assert (summary["loss"]["last"], summary["loss"]["mean"]) == ("NaN", "NaN")
    assert summary["name"] == {"count": 2, "last": "y", "type": "string"}


def test_an_older_run_is_refused(store: Store) -> None:
    with pytest.raises(InvalidError, match="trialRunId is 7; expected 1"):
        store.report(1, {"loss": 1.0}, run_id=7)


def test_a_new_run_archives_what_lies_beyond_its_checkpoint(store: Store) -> None:
    for steps in (1, 2, 3, 4):
        store.report(steps, {"loss": float(steps)})
        store.report(steps, {"score": 10.0 - steps}, "validation")
    store.checkpoint(2)
    store.end(1, "Traceback")
    store.assign()
    assert store.row("trials")["best_validation_id"] is not None

    store.report(3, {"loss": 30.0})

    assert store.steps() == [1, 2, 3]
    trial = store.row("trials")
    assert trial["total_batches"] == 3
    assert trial["searcher_metric_value"] == 8.0
    assert json.loads(trial["summary_metrics"])["avg_metrics"]["loss"]["sum"] == 33.0
    assert store.row("experiments")["best_metric"] == 8.0


def test_the_best_checkpoint_is_that_of_the_best_validation(store: Store) -> None:
    for steps, score in ((1, 5.0), (2, 1.0), (3, 3.0)):
        store.report(steps, {"score": score}, "validation")
        store.checkpoint(steps)

    trial = store.row("trials")
    assert trial["best_checkpoint_uuid"] == "ck2"
    assert (trial["checkpoint_count"], trial["checkpoint_size"]) == (3, 15)


def test_a_trial_that_ends_makes_room_for_the_next_and_the_last_one_ends_the_experiment(store: Store) -> None:
    store.end()

    assert store.row("trials")["state"] == "COMPLETED"
    assert store.row("trials", 2)["state"] == "ACTIVE"
    assert store.row("experiments")["state"] == "ACTIVE"
    store.database.write(lambda tx: trials.kill_trial(tx, 2))
    assert store.row("trials", 2)["state"] == "CANCELED"
    assert store.row("experiments")["state"] == "COMPLETED"


def test_a_missing_metric_ends_the_experiment_with_its_reason(tmp_path: Path) -> None:
    config = CONFIG.replace(
        "name: random", "name: async_halving, num_rungs: 1, max_time: 5, time_metric: batches"
    )
    (tmp_path / "train.py").touch()
    database = Database(tmp_path / "master.db")
    submission = check_submission(
        config, context_dir=tmp_path, defaults=MasterDefaults({"type": "shared_fs", "host_path": "/ck"})
    )

    def perform(tx: Transaction) -> str:
        tx.execute("INSERT INTO users (id, username, modified_us) VALUES (1, 'determined', 0)")
        experiment_id = experiments.create(tx, submission=submission, tgz=b"", owner_id=1, activate=True)
        trials.report_metrics(tx, 1, 0, "validation", 1, 0, {"accuracy": 1.0})
        row = tx.execute(
            "SELECT state, end_reason FROM experiments WHERE id = ?", (experiment_id,)
        ).fetchone()
        return f"{row['state']}: {row['end_reason']}"

    assert "ERROR: the validation metric 'score' is missing" in database.write(perform)
    database.close()


def test_log_filters_choose_by_rank_level_source_and_text(store: Store) -> None:
    lines = [
        logs.LogLine(1, "stdout", "INFO", 0, "one\n"),
        logs.LogLine(2, "stderr", "ERROR", 1, "two\n"),
        logs.LogLine(3, "stdout", None, None, "three\n"),
    ]
    task_id = store.row("trials")["task_id"]
    store.database.write(lambda tx: logs.add_task_logs(tx, task_id, 1, store.allocation_id, lines))

    def found(**chosen: Any) -> list[str]:
        with store.database.read() as connection:
            rows = logs.query(connection, logs.LogFilter(trial_id=1, sources=("task",), **chosen))
        return [row.log.strip() for row in rows]

    assert found() == ["one", "two", "three"]
    assert found(rank_ids=(-1,)) == ["three"]
    assert found(rank_ids=(0, 1)) == ["one", "two"]
    assert found(levels=("ERROR",)) == ["two"]
    assert found(levels=("INFO",)) == ["one", "three"]
    assert found(stdtypes=("stderr",)) == ["two"]
    assert found(search_text="hre") == ["three"]
    assert found(is_descending=True, limit=1) == ["three"]
    assert found(agent_ids=("elsewhere",), agent_id="here") == []
    assert found(before_us=2) == ["one"]
