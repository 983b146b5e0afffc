"""Metric reports in a database: storing, merging, summaries and archiving."""

from __future__ import annotations

import json
import re
import sqlite3
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dstrial.config.experiment_config.submission import MasterDefaults, check_submission
from dstrial.master.backends.backend import AllocationExit, SupervisorHandle
from dstrial.master.lifecycle import allocations, experiments, trials
from dstrial.master.store import checkpoints as checkpoint_rows
from dstrial.master.store import experiments as experiment_rows
from dstrial.master.store import trials as trial_rows
from dstrial.master.store.database import Database, Transaction
from dstrial.master.store.errors import ConflictError, InvalidError
from dstrial.master.store.reports import logs, metric_summaries, metrics
from dstrial.master.store.views import listings

CONFIG = """
entrypoint: python3 train.py
searcher: {name: random, metric: score, max_trials: 2, max_concurrent_trials: 1}
max_restarts: 1
"""


class Store:
    """A database with one experiment and its first trial running."""

    def __init__(self, directory: Path, config: str = CONFIG) -> None:
        self.database = Database(directory / "master.db")
        (directory / "train.py").touch()
        submission = check_submission(
            config, context_dir=directory, defaults=MasterDefaults({"type": "shared_fs", "host_path": "/ck"})
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
        self, steps: int | None, values: dict[str, Any], group: str = "training", run_id: int | None = None
    ) -> None:
        run = self.run_id if run_id is None else run_id
        self.database.write(lambda tx: trials.report_metrics(tx, 1, run, group, steps, 0, values))

    def checkpoint(self, steps: int) -> None:
        def perform(tx: Transaction) -> None:
            trial = trial_rows.require(tx.connection, 1)
            trials.report_checkpoint(
                tx, uuid=f"ck{steps}", trial=trial, allocation_id=self.allocation_id,
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

    def summaries(self, group: str = "avg_metrics") -> dict[str, Any]:
        """Return the metric summaries of a group, as listings return them."""
        with self.database.read() as connection:
            (row,) = listings.list_trials(connection, now_us=0, trial_id=1)
        found: dict[str, Any] = json.loads(row.summary_metrics).get(group, {})
        return found

    def lines(self) -> list[str]:
        """Return the master's lines in the trial's log, each with its level."""
        with self.database.read() as connection:
            rows = logs.query(connection, logs.LogFilter(trial_id=1, sources=("master",)))
        return [f"{row.level}: {row.log.rstrip()}" for row in rows]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path)
    yield made
    made.database.close()


def test_duplicate_report_is_stored_once(store: Store) -> None:
    store.report(1, {"loss": 2.0})
    store.report(1, {"loss": 2.0})

    assert store.steps() == [1]
    assert store.summaries()["loss"]["count"] == 1


def test_report_at_same_batch_merges_or_conflicts(store: Store) -> None:
    store.report(1, {"loss": 2.0})
    store.report(1, {"accuracy": 0.5})

    with pytest.raises(ConflictError, match=r"expected 2\.0, which was reported before"):
        store.report(1, {"loss": 3.0})
    assert json.loads(store.row("metrics")["metrics"]) == {"loss": 2.0, "accuracy": 0.5}


def test_summary_covers_numbers_strings_and_nan(store: Store) -> None:
    store.report(1, {"loss": 4.0, "name": "x"})
    store.report(2, {"loss": 1.0, "name": "y"})
    store.report(3, {"loss": float("nan")})

    summary = store.summaries()
    assert (summary["loss"]["count"], summary["loss"]["min"], summary["loss"]["max"]) == (3, 1.0, 4.0)
    assert (summary["loss"]["last"], summary["loss"]["mean"]) == ("NaN", "NaN")
    assert summary["name"] == {"count": 2, "last": "y", "type": "string"}


def test_metric_names_beyond_limit_are_not_summarised(store: Store) -> None:
    """The limit applies to all groups of a trial together; one warning is logged."""
    names = [f"name{number}" for number in range(metric_summaries.MAX_NAMES + 5)]

    store.report(1, dict.fromkeys(names[:9000], 1.0))
    store.report(2, dict.fromkeys(names[9000:], 1.0))
    store.report(3, {"name0": 3.0, "another": 1.0})
    store.report(4, {"score": 0.5}, "validation")

    assert len(store.summaries()) == metric_summaries.MAX_NAMES
    assert store.summaries()["name0"]["count"] == 2
    assert json.loads(store.row("metrics", 3)["metrics"]) == {"name0": 3.0, "another": 1.0}
    assert store.row("trials")["searcher_metric_value"] == 0.5
    (line,) = [line for line in store.lines() if line.startswith("WARNING")]
    assert "the trial has 10,000 metric names, and the page shows no further ones" in line


@pytest.mark.parametrize("value", ["x" * 10**6, ["x" * 10**6], {"key": "x" * 10**6}])
def test_summary_of_long_text_is_truncated(store: Store, value: Any) -> None:
    store.report(1, {"text": value})

    assert len(store.summaries()["text"]["last"]) == 257
    assert json.loads(store.row("metrics", 1)["metrics"]) == {"text": value}


def test_report_cost_is_independent_of_metric_count(tmp_path: Path) -> None:
    def cost(num_before: int) -> tuple[int, int]:
        """Return the SQLite VM steps and the peak Python memory of storing a report."""
        directory = tmp_path / str(num_before)
        directory.mkdir()
        store = Store(directory)
        names = [f"name{number:05}" for number in range(num_before)]
        for steps in (1, 2):
            store.report(steps, dict.fromkeys(names, 1.0))
        num_steps = 0

        def count() -> int:
            nonlocal num_steps
            num_steps += 1
            return 0

        def report(tx: Transaction) -> int:
            tracemalloc.start()
            tx.connection.set_progress_handler(count, 1)
            trials.report_metrics(tx, 1, 1, "training", 3, 0, dict.fromkeys([*names[-10:], "new"], 3.0))
            tx.connection.set_progress_handler(None, 1)
            num_bytes = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            return num_bytes

        num_bytes = store.database.write(report)
        store.database.close()
        return num_steps, num_bytes

    many, few = cost(9_000), cost(10)
    assert many[0] <= 1.1 * few[0]
    assert many[1] <= 2 * few[1]


def full_table_scans(store: Store, perform: Callable[[Transaction], object]) -> list[str]:
    """Return the statements of a write that scan metrics, logs or trials fully."""
    statements: list[str] = []

    def write(tx: Transaction) -> list[str]:
        tx.connection.set_trace_callback(statements.append)
        perform(tx)
        tx.connection.set_trace_callback(None)
        found = []
        for sql in statements:
            if sql.split(" ")[0] in ("SELECT", "INSERT", "UPDATE", "DELETE"):
                plan = [str(row["detail"]) for row in tx.execute(f"EXPLAIN QUERY PLAN {sql}")]
                found += [
                    f"{sql}: {step}" for step in plan if re.match("SCAN (metrics|logs|trials|m|t|l)\\b", step)
                ]
        return found

    return store.database.write(write)


def test_report_scans_no_whole_table(store: Store) -> None:
    def report(group: str, steps: int) -> Callable[[Transaction], None]:
        return lambda tx: trials.report_metrics(
            tx, 1, store.run_id, group, steps, 0, {"score": 1.0, "x": 2.0}
        )

    store.report(1, {"score": 1.0}, "validation")
    store.checkpoint(1)
    assert full_table_scans(store, report("training", 2)) == []
    assert full_table_scans(store, report("validation", 2)) == []
    assert full_table_scans(store, report("validation", 1)) == [], "merged"
    store.end(1, "Traceback")
    store.assign()
    assert full_table_scans(store, report("training", 2)) == [], "archives"
    assert full_table_scans(store, lambda tx: metrics.last_validation(tx.connection, 1)) == []


def test_listings_scan_no_whole_table(store: Store) -> None:
    store.report(1, {"score": 1.0}, "validation")
    store.checkpoint(1)
    reads: list[Callable[[sqlite3.Connection], object]] = [
        lambda c: metrics.report_ids(c, 1, None),
        lambda c: metrics.report_ids(c, 1, "validation"),
        lambda c: metrics.report_keys(c, 1),
        lambda c: list(metrics.every_report(c, 1, "validation")),
        lambda c: listings.list_trials(c, now_us=0, experiment_id=1),
        lambda c: checkpoint_rows.list_checkpoints(c, experiment_id=1),
        lambda c: checkpoint_rows.latest_completed(c, 1),
    ]

    assert [full_table_scans(store, lambda tx, read=read: read(tx.connection)) for read in reads] == [[]] * 7  # type: ignore[misc]


def test_experiment_deletion_scans_no_whole_table(store: Store) -> None:
    store.report(1, {"score": 1.0}, "validation")

    assert full_table_scans(store, lambda tx: experiment_rows.forget(tx, store.experiment_id)) == []


def test_metric_names_with_any_character_are_summarised(store: Store) -> None:
    names = ["a\0b", "a", "", "\u2028", "x" * 1000, "'\";--", "é"]
    for steps in (1, 2):
        store.report(steps, dict.fromkeys(names, float(steps)))

    assert {name: one["count"] for name, one in store.summaries().items()} == dict.fromkeys(names, 2)


def test_report_stream_messages_are_bounded_in_size(store: Store) -> None:
    """Reports of 3 MB each are split over two messages of the stream."""
    for steps in range(1, 5):
        store.report(steps, {"text": "x" * 3_000_000})
    store.report(5, {"loss": 1.0})

    with store.database.read() as connection:
        ids = metrics.report_ids(connection, 1, "training")
        first = metrics.some_reports(connection, ids)
        rest = metrics.some_reports(connection, ids[2:])
        assert metrics.report_ids(connection, 1, None) == ids
    assert [row.steps for row in first] == [1, 2]
    assert [row.steps for row in rest] == [3, 4]


def test_report_of_other_run_is_rejected(store: Store) -> None:
    with pytest.raises(InvalidError, match="trialRunId is 7; expected 1"):
        store.report(1, {"loss": 1.0}, run_id=7)


def test_new_run_archives_reports_beyond_its_checkpoint(store: Store) -> None:
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
    assert store.summaries()["loss"]["sum"] == 33.0
    assert store.row("experiments")["best_metric"] == 8.0


def test_system_metrics_do_not_prevent_archiving_on_restart(store: Store) -> None:
    for steps in (2, 4, 6):
        store.report(steps, {"loss": float(steps)})
    store.checkpoint(2)
    store.end(exit_code=1, traceback="RuntimeError: away")
    store.assign()

    store.report(None, {"node": {"cpu_util_simple": 1.0}}, "cpu")
    store.report(3, {"loss": 3.0})
    assert store.steps() == [2, 3], "what lies beyond the checkpoint is archived all the same"


def test_system_metrics_alone_count_no_batches(store: Store) -> None:
    store.report(None, {"node": {"cpu_util_simple": 1.0}}, "cpu")
    assert store.row("trials")["total_batches"] == 0
    store.end(exit_code=1, traceback="RuntimeError: no data")

    assert store.row("trials")["last_failure"] is not None, "by which the same failure is known again"


def test_best_checkpoint_follows_best_validation(store: Store) -> None:
    for steps, score in ((1, 5.0), (2, 1.0), (3, 3.0)):
        store.report(steps, {"score": score}, "validation")
        store.checkpoint(steps)

    trial = store.row("trials")
    assert trial["best_checkpoint_uuid"] == "ck2"
    assert (trial["checkpoint_count"], trial["checkpoint_size"]) == (3, 15)


def test_trial_end_starts_next_or_completes_experiment(store: Store) -> None:
    store.end()

    assert store.row("trials")["state"] == "COMPLETED"
    assert store.row("trials", 2)["state"] == "ACTIVE"
    assert store.row("experiments")["state"] == "ACTIVE"
    store.database.write(lambda tx: trials.kill_trial(tx, 2))
    assert store.row("trials", 2)["state"] == "CANCELED"
    assert store.row("experiments")["state"] == "COMPLETED"


def test_missing_searcher_metric_ends_experiment_with_error(tmp_path: Path) -> None:
    config = CONFIG.replace(
        "name: random", "name: async_halving, num_rungs: 1, max_time: 5, time_metric: batches"
    )
    store = Store(tmp_path, config)
    store.report(1, {"accuracy": 1.0}, "validation")
    store.end(137)

    row = store.row("experiments")
    store.database.close()
    assert row["state"] == "ERROR"
    assert row["end_reason"].startswith("the validation metric 'score' is missing")


def test_log_filters_select_by_rank_level_source_text(store: Store) -> None:
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
