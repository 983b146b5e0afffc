"""A database of an older release is brought to this one's schema with everything in it, or left as it is."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from pathlib import Path

import pytest

from dstrial.errors import MasterError
from dstrial.master.store import background_jobs, experiments, projects
from dstrial.master.store.database import SCHEMA_VERSION, Database
from dstrial.master.store.file import copies
from dstrial.master.store.file.restoring import bring_back
from dstrial.master.store.views import listings

OLD = Path(__file__).with_name("schema_1.sql")
CONTENT = """
INSERT INTO users (id, username, modified_us) VALUES (1, 'admin', 0), (2, 'determined', 0);
INSERT INTO experiments (id, job_id, state, config, original_config, name, owner_id, searcher_type, searcher_metric,
    smaller_is_better, slots_per_trial, queue_position, start_us)
    VALUES (7, 'j', 'COMPLETED', '{}', 'name: x', 'x', 2, 'single', 'loss', 1, 1, 1, 1);
INSERT INTO trials (id, experiment_id, request_id, state, hparams, seed, task_id, start_us)
    VALUES (9, 7, 'r', 'COMPLETED', '{}', 1, '7.r', 1);
UPDATE trials SET summary_metrics = '{"avg_metrics": {"a.b": {"count": 2, "sum": 3.5}, "c": {"count": 1, "last": "NaN"}},
    "validation_metrics": {"a.b": {"count": 1}}, "own": {"x": {"count": 1, "last": [1, "y"]}}}' WHERE id = 9;
INSERT INTO trial_sources VALUES ('u', 9, 'T');
INSERT INTO work (id, kind, experiment_id, payload, created_us) VALUES (3, 'gc', 7, '{"a": 1}', 5);
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "master.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")  # As a master leaves it.
        connection.executescript(f"BEGIN; {OLD.read_text()} {CONTENT} PRAGMA user_version = 1; COMMIT;")
    return path


def schema(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Return every table's columns and every index's, whatever the text that made them."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        names = connection.execute(
            "SELECT type, name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'"
        ).fetchall()
        found = {
            f"{kind} {name}": connection.execute(f"PRAGMA {kind}_info('{name}')").fetchall()
            for kind, name in names
        }
        found["version"] = connection.execute("PRAGMA user_version").fetchall()
        found["keys"] = [
            (name, *row)
            for kind, name in names
            if kind == "table"
            for row in connection.execute(f"PRAGMA foreign_key_list('{name}')")
        ]
    return {name: sorted(rows, key=repr) for name, rows in found.items()}


def test_an_old_database_gets_the_schema_of_a_new_one(old: Path, tmp_path: Path) -> None:
    new = tmp_path / "new" / "master.db"
    new.parent.mkdir()
    Database(old).close()
    Database(new).close()

    assert schema(old) == schema(new)
    assert schema(old)["version"] == [(SCHEMA_VERSION,)]


def test_an_old_database_keeps_everything(old: Path) -> None:
    for _ in range(2):
        with contextlib.closing(Database(old)) as database, database.read() as connection:
            row = experiments.require(connection, 7)
            assert (row.name, row.project_id, row.template) == ("x", projects.DEFAULT_ID, None)
            assert projects.require(connection, row.project_id).num_runs == 1
            pending = background_jobs.next_pending(connection)
            assert pending is not None
            assert pending == background_jobs.BackgroundJob(3, "gc", 7, '{"a": 1}', 5, None)
            assert connection.execute("SELECT trial_id FROM trial_sources").fetchone()[0] == 9
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
            assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


def test_the_summaries_of_an_old_database_are_shown_as_they_were(old: Path) -> None:
    with contextlib.closing(Database(old)) as database, database.read() as connection:
        (row,) = listings.list_trials(connection, now_us=0, trial_id=9)
        groups = connection.execute("SELECT group_name, num_names FROM metric_groups").fetchall()
    assert json.loads(row.summary_metrics) == {
        "avg_metrics": {"a.b": {"count": 2, "sum": 3.5}, "c": {"count": 1, "last": "NaN"}},
        "validation_metrics": {"a.b": {"count": 1}},
        "own": {"x": {"count": 1, "last": [1, "y"]}},
    }
    assert {tuple(group) for group in groups} == {("training", 2), ("validation", 1), ("own", 1)}


def test_work_that_is_asked_for_afterwards_comes_after_the_old(old: Path) -> None:
    with contextlib.closing(Database(old)) as database:
        database.write(lambda tx: background_jobs.request(tx, "delete_project", 0, {"id": 2}))
        with database.read() as connection:
            rows = connection.execute("SELECT id, kind FROM work ORDER BY id").fetchall()
    assert [tuple(row) for row in rows] == [(3, "gc"), (4, "delete_project")]


def test_the_first_database_of_version_1_gets_what_later_ones_had(old: Path, tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(old)) as connection:
        connection.executescript("DROP TABLE trial_sources; ALTER TABLE metrics DROP COLUMN per_batch;")
    new = tmp_path / "new" / "master.db"
    new.parent.mkdir()
    Database(old).close()
    Database(new).close()

    found, wanted = (
        # By name, since what is added to a table comes last.
        {name: sorted(str(row[1:]) for row in rows) for name, rows in schema(path).items() if " " in name}
        for path in (old, new)
    )
    for kept in (found, wanted):
        for name in [name for name in kept if name.startswith("index ")]:
            del kept[name]
    assert found == wanted
    with contextlib.closing(Database(old)) as database, database.read() as connection:
        assert experiments.require(connection, 7).name == "x"


def test_a_copy_of_an_old_database_is_kept_as_it_was(old: Path) -> None:
    before = schema(old)

    with contextlib.closing(Database(old)) as database:
        (copy,) = copies.list_copies(old)
        assert any(str(copy.path) in note for note in database.notes)
    Database(old).close()

    assert copy.path.name.startswith("schema1-")
    assert schema(copy.path) == before
    assert len(copies.list_copies(old)) == 1


def test_an_upgrade_that_fails_again_and_again_leaves_one_copy(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(sqlite3.connect(old)) as connection:
        connection.execute("CREATE TABLE models (mine)")

    new_path, later = copies.new_path, time.time()
    # Names of copies tell whole seconds.
    monkeypatch.setattr(copies, "new_path", lambda database, _now_s, kind: new_path(database, later, kind))

    for _ in range(3):
        later += 2
        # As if it had last been written to after the copy before: what an opening does that fails.
        os.utime(old, (later, later))
        with pytest.raises(MasterError, match="cannot be used"):
            Database(old)

    assert len(copies.list_copies(old)) == 1


def test_a_copy_of_an_old_database_is_put_back_with_everything_in_it(old: Path) -> None:
    Database(old).close()
    (copy,) = copies.list_copies(old)

    bring_back(old, copy.path)

    with contextlib.closing(Database(old)) as database, database.read() as connection:
        assert connection.execute("SELECT id FROM experiments").fetchall()[0]["id"] == 7


def test_an_upgrade_that_fails_leaves_the_database_as_it_was(old: Path) -> None:
    with contextlib.closing(sqlite3.connect(old)) as connection:
        connection.execute("CREATE TABLE models (mine)")
    before = schema(old)

    with pytest.raises(MasterError, match="cannot be used"):
        Database(old)

    assert schema(old) == before
    assert before["version"] == [(1,)]
