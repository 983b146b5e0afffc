"""What trials have measured on each number of slots: as their reports tell, and read for little."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrial.config.experiment_config.submission import MasterDefaults, check_submission
from dstrial.master.backends import SupervisorHandle
from dstrial.master.lifecycle import allocations, experiments, trials
from dstrial.master.scheduler import resizing
from dstrial.master.scheduler.resizing import Capacity, Resizing
from dstrial.master.store import allocations as allocation_rows
from dstrial.master.store import resizing as rows
from dstrial.master.store.database import Database, Transaction

CONFIG = """
entrypoint: python3 -m dstrial.launch train.py
searcher: {name: single, metric: loss, max_length: {batches: 1000}}
resources: {slots_per_trial: 2}
data: {dstrial: {min_slots: 1, max_slots: 4, resize_period: 10}}
hyperparameters: {deepspeed_config: {train_batch_size: 4}}
"""
CAPACITY = Capacity(frozenset({2, 3}), frozenset(range(4)), frozenset(), {1: 2}, is_settled=True)
SECOND = 1_000_000
SCHEMA = Path(rows.__file__).with_name("schema.sql").read_text(encoding="utf-8")

Run = tuple[int, int, list[int]]
"""Slots of a run, batches at its checkpoint, and batches at each of its training reports."""


def stored(runs: list[Run]) -> sqlite3.Connection:
    """Return a database with the runs of trial 1.

    Each batch takes a second, and each run begins 1,000 s after the one before.
    """
    connection = sqlite3.connect(":memory:")
    connection.row_factory = sqlite3.Row
    connection.executescript(SCHEMA)
    for run_id, (num_slots, start, batches) in enumerate(runs, 1):
        began_us = run_id * 1_000 * SECOND
        connection.execute(
            "INSERT INTO allocations (id, task_id, trial_id, experiment_id, run_id, state, slots, ports, "
            "resources_id, directory, steps_at_start, num_reports, start_us) "
            "VALUES (?, 't', 1, 1, ?, 'TERMINATED', ?, '{}', '', '', ?, ?, ?)",
            (f"t.{run_id}", run_id, json.dumps(list(range(num_slots))), start, len(batches), began_us),
        )
        connection.executemany(
            "INSERT INTO metrics (trial_id, run_id, group_name, steps, end_us, metrics) "
            "VALUES (?, ?, ?, ?, ?, '{}')",
            [
                (trial_id, run_id, group, batch, began_us + batch * SECOND)
                for batch in batches
                for trial_id, group in ((1, "training"), (1, "validation"), (2, "training"))
            ],
        )
    return connection


@st.composite
def of_runs(draw: st.DrawFn) -> list[Run]:
    starts = draw(st.lists(st.integers(0, 20), max_size=5))
    return [
        (draw(st.integers(1, 4)), start, sorted(draw(st.sets(st.integers(start, start + 12), max_size=6))))
        for start in starts
    ]


@given(of_runs(), st.integers(0, 4))
def test_a_run_reaches_from_its_first_report_to_its_last(runs: list[Run], after: int) -> None:
    with contextlib.closing(stored(runs)) as connection:
        found = rows.run_spans(connection, 1, count_to=3, after_run=after)
    expected = [
        (
            run_id,
            num_slots,
            start,
            run_id * 1_000 * SECOND,
            min(len(batches), 3),
            *((batches[0], batches[-1]) if batches else (None, None)),
            *(
                (run_id * 1_000 * SECOND + batch * SECOND for batch in (batches[0], batches[-1]))
                if batches
                else (None, None)
            ),
        )
        for run_id, (num_slots, start, batches) in enumerate(runs, 1)
        if run_id > after
    ]
    assert [
        (
            span.run_id,
            span.num_slots,
            span.steps_at_start,
            span.start_us,
            span.num_reports,
            span.first_steps,
            span.last_steps,
            span.first_us,
            span.last_us,
        )
        for span in found
    ] == expected


def work_of(connection: sqlite3.Connection, after_run: int) -> int:
    """Return how many steps of SQLite's machine it takes to read runs."""
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    connection.set_progress_handler(count, 1)
    rows.run_spans(connection, 1, count_to=3, after_run=after_run)
    connection.set_progress_handler(None, 1)
    return steps


def test_the_newest_run_is_read_for_as_much_however_many_reports_there_are() -> None:
    def of(num: int) -> list[Run]:
        return [(2, 0, list(range(1, num))), (1, num, []), (4, num, list(range(num + 1, 2 * num)))]

    with contextlib.closing(stored(of(10))) as few, contextlib.closing(stored(of(1000))) as many:
        assert work_of(many, after_run=2) < 1.2 * work_of(few, after_run=2)
        assert work_of(many, after_run=1) < 1.2 * work_of(few, after_run=1), "a run without reports"


class Elastic:
    """A database with a trial that runs with two slots, and how often its runs are read."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.database = Database(directory / "master.db")
        (directory / "train.py").touch()
        submission = check_submission(
            CONFIG, context_dir=directory, defaults=MasterDefaults({"type": "shared_fs", "host_path": "/ck"})
        )

        def begin(tx: Transaction) -> None:
            tx.execute("INSERT INTO users (id, username, modified_us) VALUES (1, 'determined', 0)")
            experiments.create(tx, submission=submission, tgz=b"", owner_id=1, activate=True)

        self.database.write(begin)
        self.read_after: list[int] = []
        self.now_s = 100.0
        self.resizing = Resizing(self.database)
        read = rows.run_spans

        def run_spans(connection: sqlite3.Connection, trial_id: int, **options: Any) -> list[rows.RunSpan]:
            self.read_after.append(options["after_run"])
            return read(connection, trial_id, **options)

        monkeypatch.setattr(rows, "run_spans", run_spans)
        monkeypatch.setattr(resizing, "time", types.SimpleNamespace(monotonic=lambda: self.now_s))

    def run(self, num_slots: int, start_s: int, batch_s: int, end_s: int | None = None) -> None:
        """Add a run with ten reports, which has been asked to stop two seconds before its end."""

        def perform(tx: Transaction) -> None:
            row = allocations.assign(
                tx,
                1,
                slots=list(range(num_slots)),
                ports={},
                resources_id="r",
                directory="/d",
                token_hashes={},
            )
            assert row is not None
            allocations.started(tx, row.id, SupervisorHandle(1, "x"))
            for batch in range(1, 11):
                at_us = (start_s + batch * batch_s) * SECOND
                steps = 10 * (row.run_id - 1) + batch
                trials.report_metrics(tx, 1, row.run_id, "training", steps, at_us, {"loss": 1.0})
            columns: dict[str, Any] = {"start_us": start_s * SECOND, "steps_at_start": 10 * (row.run_id - 1)}
            if end_s is not None:
                columns |= {
                    "preempt_us": (end_s - 2) * SECOND,
                    "end_us": end_s * SECOND,
                    "state": "TERMINATED",
                }
            allocation_rows.update(tx, row.id, **columns)

        self.database.write(perform)

    def look(self) -> list[int]:
        """Change sizes, and return after which runs was read."""
        self.read_after.clear()
        with self.database.read() as connection:
            self.resizing.change_sizes(connection, CAPACITY)
        return self.read_after[:]

    def given_back(self) -> bool:
        """Say whether the trial has more slots than are worth it."""
        with self.database.read() as connection:
            return not self.resizing.give_back(connection)


@pytest.fixture
def elastic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Elastic]:
    found = Elastic(tmp_path, monkeypatch)
    with contextlib.closing(found.database):
        yield found


def test_what_was_measured_is_read_every_few_seconds_and_of_ended_runs_once(elastic: Elastic) -> None:
    elastic.run(2, 0, 1, 20)
    elastic.run(2, 30, 1, 60)
    elastic.run(2, 70, 1)
    assert elastic.look() == [0]
    assert elastic.look() == []
    elastic.now_s += 4.0
    assert elastic.look() == []
    elastic.now_s += 2.0
    assert elastic.look() == [2]


def test_a_new_run_is_read_at_once(elastic: Elastic) -> None:
    elastic.run(2, 0, 1)
    assert elastic.look() == [0]
    elastic.database.write(
        lambda tx: allocation_rows.update(
            tx, tx.execute("SELECT id FROM allocations").fetchone()[0], state="TERMINATED", end_us=1
        )
    )
    elastic.run(2, 30, 1)
    assert elastic.look() == [0]
    elastic.now_s += 6.0
    assert elastic.look() == [1]


@pytest.mark.parametrize(("batch_s", "is_given_back"), [(1000, False), (2000, True)])
def test_a_pause_of_two_hours_takes_no_slots_from_a_trial_that_they_make_faster(
    elastic: Elastic, batch_s: int, is_given_back: bool
) -> None:
    elastic.run(1, 0, 2000, 20_002)
    elastic.run(2, (20_002 + 2 * 3600), batch_s)
    assert elastic.given_back() is is_given_back
