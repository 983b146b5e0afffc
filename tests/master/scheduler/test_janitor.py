"""Old logs are deleted by the clock, also by a master that is never idle."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from stored import store_experiment
from waiting import wait_for

from dstrial.master.pubsub import PubSub
from dstrial.master.scheduler.janitor import Janitor
from dstrial.master.scheduler.retries import Retries
from dstrial.master.store import background_jobs
from dstrial.master.store.database import Database, Transaction
from dstrial.master.store.reports.logs import add_master_line
from dstrial.master.store.sqlite_file import list_copies

STORAGE = {"type": "shared_fs", "host_path": "/ck"}


def test_old_logs_are_deleted_while_there_is_always_something_to_do(tmp_path: Path) -> None:
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
        janitor = Janitor(database, changes, log_retention_days=1, period_s=0.3)
        janitor.start()
        try:
            time.sleep(0.1)
            database.write(end_long_ago)
            assert num_lines() == 1

            def are_deleted() -> bool:
                changes.publish({"scheduler"})
                return not num_lines()

            wait_for(are_deleted)
        finally:
            janitor.stop()


def test_the_database_is_copied_once_a_day_unless_it_is_damaged(tmp_path: Path) -> None:
    changes = PubSub()
    path = tmp_path / "master.db"
    with contextlib.closing(Database(path, changes.publish)) as database:
        janitor = Janitor(database, changes, log_retention_days=None, period_s=0.1)
        janitor.start()
        try:
            time.sleep(0.3)
            assert list_copies(path) == [], "there is nothing worth a copy"
            store_experiment(database, tmp_path, STORAGE)
            wait_for(lambda: list_copies(path))
            (copy,) = list_copies(path)
            time.sleep(0.3)
            assert list_copies(path) == [copy]

            database._note_damage("page 3 is not what was written")
            copy.path.unlink()
            time.sleep(0.3)
            assert list_copies(path) == []
        finally:
            janitor.stop()


def test_job_that_always_fails_is_abandoned(tmp_path: Path) -> None:
    changes = PubSub()
    with contextlib.closing(Database(tmp_path / "master.db", changes.publish)) as database:
        store_experiment(database, tmp_path, STORAGE)
        payload = {"uuids": 5, "allocation_id": "1.a.1"}
        database.write(lambda tx: background_jobs.request(tx, "sweep", 1, payload))

        def is_pending() -> bool:
            with database.read() as connection:
                return background_jobs.next_pending(connection, {}) is not None

        assert is_pending()
        janitor = Janitor(database, changes, log_retention_days=None, retries=Retries(first_s=0.01))
        janitor.start()
        try:
            wait_for(lambda: not is_pending(), deadline_s=20)
        finally:
            janitor.stop()
