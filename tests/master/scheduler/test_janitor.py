"""Old logs are deleted by the clock, also by a master that is never idle."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from dstrial.config.experiment_config.submission import MasterDefaults, check_submission
from dstrial.master.lifecycle import experiments
from dstrial.master.pubsub import PubSub
from dstrial.master.scheduler.janitor import Janitor
from dstrial.master.store.database import Database, Transaction
from dstrial.master.store.logs import add_master_line

CONFIG = "entrypoint: 'true'\nsearcher: {name: single, metric: score}\n"


def test_old_logs_are_deleted_while_there_is_always_something_to_do(tmp_path: Path) -> None:
    changes = PubSub()
    with contextlib.closing(Database(tmp_path / "master.db", changes.publish)) as database:
        submission = check_submission(
            CONFIG, context_dir=tmp_path, defaults=MasterDefaults({"type": "shared_fs", "host_path": "/ck"})
        )

        def create(tx: Transaction) -> None:
            tx.execute("INSERT INTO users (id, username, modified_us) VALUES (1, 'determined', 0)")
            experiments.create(tx, submission=submission, tgz=b"", owner_id=1, activate=False)

        def end_long_ago(tx: Transaction) -> None:
            task_id = tx.execute("SELECT task_id FROM trials WHERE id = 1").fetchone()[0]
            add_master_line(tx, task_id, 1, "a line")
            tx.execute("UPDATE trials SET end_us = 1 WHERE id = 1")

        def num_lines() -> int:
            with database.read() as connection:
                return int(connection.execute("SELECT COUNT(*) FROM logs").fetchone()[0])

        database.write(create)
        janitor = Janitor(database, changes, log_retention_days=1, period_s=0.3)
        janitor.start()
        try:
            time.sleep(0.1)
            database.write(end_long_ago)
            assert num_lines() == 1
            give_up_at_s = time.monotonic() + 20
            while num_lines():
                assert time.monotonic() < give_up_at_s
                changes.publish({"scheduler"})
                time.sleep(0.02)
        finally:
            janitor.stop()
