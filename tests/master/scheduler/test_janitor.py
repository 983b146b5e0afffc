"""Background jobs of the janitor: deletions, log retention, database copies."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from stored import num_pending, store_checkpoints, store_experiment
from stubborn_trees import make_deep
from waiting import wait_for

from dstrial.checkpoint.completion_marker import MARKER_NAME
from dstrial.errors import CheckpointError
from dstrial.file_writes import remove_tree
from dstrial.master.lifecycle import checkpoint_gc
from dstrial.master.lifecycle.storages import Storages
from dstrial.master.pubsub import PubSub
from dstrial.master.scheduler.janitor import Janitor
from dstrial.master.store import background_jobs, checkpoints, models
from dstrial.master.store.database import Database, Transaction
from dstrial.master.store.errors import InvalidError
from dstrial.master.store.reports.logs import add_master_line
from dstrial.master.store.sqlite_file import list_copies

UUIDS = [f"0f4f1f9e-8f0a-4c3e-9a53-00000000000{letter}" for letter in "abc"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "nfs" / "storage"


@pytest.fixture
def database(tmp_path: Path, root: Path) -> Iterator[Database]:
    """A database whose experiment 1 has three checkpoints in a used storage."""
    storage = {"type": "directory", "container_path": str(root)}
    with contextlib.closing(Database(tmp_path / "master.db")) as opened:
        store_experiment(opened, tmp_path, storage)
        store_checkpoints(opened, root, *UUIDS)
        assert Storages(opened).secure(storage) is not None
        yield opened


@pytest.fixture
def away(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the storage vanish after one deletion; return the path it is moved to."""
    place = tmp_path / "away"

    def unmount_after(path: Path) -> None:
        remove_tree(path)
        if path.parent == root:
            root.rename(place)

    monkeypatch.setattr(checkpoint_gc, "remove_tree", unmount_after)
    return place


@contextlib.contextmanager
def working(
    database: Database,
    changes: PubSub | None = None,
    log_retention_days: int | None = None,
    period_s: float = 3600,
) -> Iterator[None]:
    janitor = Janitor(
        database,
        changes or PubSub(),
        Storages(database),
        database.path.with_name("venvs"),
        log_retention_days,
        period_s=period_s,
    )
    janitor.start()
    try:
        yield
    finally:
        janitor.stop()


def states(database: Database) -> list[str]:
    with database.read() as connection:
        return [row["state"] for row in connection.execute("SELECT state FROM checkpoints ORDER BY uuid")]


def test_deletion_interrupted_by_storage_loss_is_postponed(
    database: Database, root: Path, away: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = {"uuids": UUIDS, "globs": ["**/*"]}
    database.write(lambda tx: background_jobs.request(tx, "delete_checkpoints", 1, payload))

    with working(database):
        wait_for(away.exists)
        wait_for(lambda: is_claimed(database) == [] and num_pending(database) == 1)
    assert states(database) == ["COMPLETED"] * 3
    assert sorted(path.name for path in away.iterdir() if path.is_dir()) == UUIDS[1:]

    monkeypatch.undo()
    away.rename(root)
    with working(database):
        wait_for(lambda: num_pending(database) == 0)
    assert states(database) == ["DELETED"] * 3
    assert [path.name for path in root.iterdir() if path.is_dir()] == []


@pytest.mark.process
def test_deep_checkpoint_does_not_block_other_deletions(database: Database, root: Path) -> None:
    make_deep(root / UUIDS[0] / "deep")
    for uuid in UUIDS:
        database.write(lambda tx, uuid=uuid: request_deletion(tx, uuid, "**/*"))  # type: ignore[misc]

    with working(database):
        wait_for(lambda: num_pending(database) == 0)

    assert states(database) == ["DELETED"] * 3
    assert [path.name for path in root.iterdir() if path.is_dir()] == []


def request_deletion(tx: Transaction, uuid: str, pattern: str) -> None:
    background_jobs.request(tx, "delete_checkpoints", 1, {"uuids": [uuid], "globs": [pattern]})


def test_failing_job_is_abandoned(database: Database) -> None:
    nonsense = {"uuids": None, "globs": []}
    database.write(lambda tx: background_jobs.request(tx, "delete_checkpoints", 1, nonsense))
    database.write(lambda tx: request_deletion(tx, UUIDS[0], "**/*"))

    with working(database):
        wait_for(lambda: num_pending(database) == 0)

    assert states(database) == ["DELETED", "COMPLETED", "COMPLETED"]


def experiment_row(database: Database) -> sqlite3.Row:
    with database.read() as connection:
        return connection.execute("SELECT state, end_reason FROM experiments").fetchone()


def is_claimed(database: Database) -> list[str]:
    with database.read() as connection:
        return [
            row["uuid"]
            for row in connection.execute("SELECT uuid FROM checkpoints WHERE deleting_us IS NOT NULL")
        ]


def test_experiment_deletion_fails_if_storage_is_gone(database: Database, away: Path) -> None:
    database.write(lambda tx: background_jobs.request(tx, "delete_experiment", 1, {}))

    with working(database):
        wait_for(lambda: num_pending(database) == 0)

    row = experiment_row(database)
    assert row["state"] == "DELETE_FAILED"
    assert "is gone: no directory" in row["end_reason"]
    assert len(states(database)) == 3


def register(tx: Transaction) -> None:
    models.create(
        tx, name="net", owner_id=1, workspace_id=1, description="", notes="", metadata={}, labels=[]
    )
    models.add_version(tx, 1, UUIDS[0], 1)


def test_checkpoint_registered_before_deletion_is_kept(database: Database, root: Path) -> None:
    payload = {"uuids": UUIDS[:2], "globs": ["**/*"]}
    database.write(lambda tx: background_jobs.request(tx, "delete_checkpoints", 1, payload))
    database.write(register)
    assert database.write(lambda tx: checkpoints.claim(tx, UUIDS[0])) == "version 1 of model 'net'"

    with working(database):
        wait_for(lambda: num_pending(database) == 0)

    assert states(database) == ["COMPLETED", "DELETED", "COMPLETED"]
    assert ((root / UUIDS[0] / "file").exists(), (root / UUIDS[1]).exists()) == (True, False)
    assert is_claimed(database) == []


def test_checkpoint_being_deleted_is_unusable_until_restart(
    database: Database,
) -> None:
    assert database.write(lambda tx: checkpoints.claim(tx, UUIDS[0])) is None

    def take(tx: Transaction) -> None:
        row = checkpoints.require_checkpoint(tx.connection, UUIDS[0])
        checkpoints.refuse_deleting(tx.connection, row)

    with pytest.raises(InvalidError, match="is being deleted"):
        database.write(take)
    with working(database):
        pass
    database.write(take)


@pytest.mark.parametrize(
    ("kind", "said"), [("delete_experiment", "abandoned"), ("delete_tensorboard", "postponed")]
)
def test_bucket_refusal_fails_or_postpones_deletion(
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    said: str,
) -> None:
    def refuse(*_arguments: object) -> None:
        raise CheckpointError("the delete of s3://b/tensorboard failed: AccessDenied")

    monkeypatch.setattr(checkpoint_gc, "delete_tensorboard_files", refuse)
    database.write(
        lambda tx: tx.execute("INSERT OR REPLACE INTO cluster (key, value) VALUES ('cluster_id', 'c')")
    )
    database.write(lambda tx: background_jobs.request(tx, kind, 1, {}))

    with working(database):
        wait_for(lambda: f"{kind} of experiment 1 is {said}" in caplog.text)

    assert "AccessDenied" in caplog.text
    is_abandoned = said == "abandoned"
    assert num_pending(database) == (not is_abandoned)
    assert (experiment_row(database)["state"] == "DELETE_FAILED") == is_abandoned


def test_sweep_deletes_record_of_unreported_checkpoint(
    database: Database, root: Path, tmp_path: Path
) -> None:
    """The trial ended after completing the record and before reporting it."""
    unknown = UUIDS[0].replace("000a", "000d")
    record = tmp_path / "run" / "checkpoints" / unknown
    for path in (root / unknown, record):
        path.mkdir(parents=True)
    (root / unknown / "file").write_text("x")
    (record / MARKER_NAME).write_text("{}")
    variables = json.dumps([f"DSTRIAL_RUN_DIR={tmp_path / 'run'}"])
    sql = (
        "UPDATE experiments SET config = json_set(config, '$.environment.environment_variables.cpu', json(?))"
    )
    database.write(lambda tx: tx.execute(sql, (variables,)))
    payload = {"uuids": [unknown], "allocation_id": "1.request.1"}
    database.write(lambda tx: background_jobs.request(tx, "sweep", 1, payload))

    with working(database):
        wait_for(lambda: num_pending(database) == 0)

    assert not (root / unknown).exists()
    assert not record.exists()


STORAGE = {"type": "shared_fs", "host_path": "/ck"}


def test_old_logs_are_deleted_despite_constant_wakeups(tmp_path: Path) -> None:
    changes = PubSub()
    with contextlib.closing(Database(tmp_path / "master.db", changes.publish)) as database:

        def end_long_ago(tx: Transaction) -> None:
            task_id = tx.execute("SELECT task_id FROM trials WHERE id = 1").fetchone()[0]
            add_master_line(tx, task_id, 1, "a line")
            tx.execute("UPDATE trials SET end_us = 1 WHERE id = 1")

        def num_lines() -> int:
            with database.read() as connection:
                return int(connection.execute("SELECT COUNT(*) FROM logs").fetchone()[0])

        store_experiment(database, tmp_path, STORAGE)
        with working(database, changes, 1, period_s=0.3):
            time.sleep(0.1)
            database.write(end_long_ago)
            assert num_lines() == 1

            def are_deleted() -> bool:
                changes.publish({"scheduler"})
                return not num_lines()

            wait_for(are_deleted)


def test_intact_database_is_copied_once_daily(tmp_path: Path) -> None:
    path = tmp_path / "master.db"
    with contextlib.closing(Database(path)) as database, working(database, period_s=0.1):
        time.sleep(0.3)
        assert list_copies(path) == [], "there is nothing worth a copy"
        store_experiment(database, tmp_path, STORAGE)
        wait_for(lambda: list_copies(path))
        (copy,) = list_copies(path)
        time.sleep(0.3)
        assert list_copies(path) == [copy]

        database._record_damage("page 3 is not what was written")
        copy.path.unlink()
        time.sleep(0.3)
        assert list_copies(path) == []
