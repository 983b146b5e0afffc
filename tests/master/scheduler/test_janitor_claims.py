"""A checkpoint that comes into use before its turn to be deleted is kept, and one whose turn it is cannot come into use."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_for

from dstrial.config.experiment_config.submission import MasterDefaults, check_submission
from dstrial.master.lifecycle import experiments
from dstrial.master.pubsub import PubSub
from dstrial.master.scheduler.janitor import Janitor
from dstrial.master.store import background_jobs, checkpoints, models
from dstrial.master.store import trials as trial_rows
from dstrial.master.store.database import Database, Transaction
from dstrial.master.store.errors import InvalidError

CONFIG = "entrypoint: 'true'\nsearcher: {name: single, metric: score}\n"


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """Experiment 1 has the checkpoints a and b, with their files, and the model 1."""
    storage = {"type": "directory", "container_path": str(tmp_path)}
    submission = check_submission(CONFIG, context_dir=tmp_path, defaults=MasterDefaults(storage))
    for uuid in ("a", "b"):
        (tmp_path / uuid).mkdir()
        (tmp_path / uuid / "file").write_text("x")

    def fill(tx: Transaction) -> None:
        tx.execute("INSERT INTO users (id, username, modified_us) VALUES (1, 'determined', 0)")
        experiments.create(tx, submission=submission, tgz=b"", owner_id=1, activate=False)
        for uuid in ("a", "b"):
            checkpoints.add_checkpoint(
                tx,
                uuid=uuid,
                trial=trial_rows.require(tx.connection, 1),
                allocation_id=None,
                storage_id=None,
                state="COMPLETED",
                resources={"file": 1},
                metadata={"steps_completed": 1},
                report_us=1,
            )
        models.create(
            tx, name="net", owner_id=1, workspace_id=1, description="", notes="", metadata={}, labels=[]
        )

    changes = PubSub()
    with contextlib.closing(Database(tmp_path / "master.db", changes.publish)) as opened:
        opened.write(fill)
        yield opened


def states(database: Database) -> dict[str, str]:
    with database.read() as connection:
        return {
            row["uuid"]: row["state"] for row in connection.execute("SELECT uuid, state FROM checkpoints")
        }


def do_work(database: Database) -> None:
    """Let a janitor do all of the work that there is."""
    janitor = Janitor(database, PubSub(), None)

    def num_left() -> int:
        with database.read() as connection:
            return int(connection.execute("SELECT COUNT(*) FROM work WHERE ended_us IS NULL").fetchone()[0])

    janitor.start()
    try:
        wait_for(lambda: num_left() == 0, "the work")
    finally:
        janitor.stop()


def test_what_is_registered_after_its_deletion_was_asked_for_is_kept(
    database: Database, tmp_path: Path
) -> None:
    payload = {"uuids": ["a", "b"], "globs": ["**/*"]}
    database.write(lambda tx: background_jobs.request(tx, "delete_checkpoints", 1, payload))
    database.write(lambda tx: models.add_version(tx, 1, "a", 1))

    do_work(database)

    assert states(database) == {"a": "COMPLETED", "b": "DELETED"}
    assert ((tmp_path / "a" / "file").exists(), (tmp_path / "b").exists()) == (True, False)


def test_what_is_being_deleted_cannot_come_into_use_until_a_restart_says_otherwise(
    database: Database,
) -> None:
    assert database.write(lambda tx: checkpoints.claim(tx, "a")) is None

    def take(tx: Transaction) -> None:
        checkpoints.refuse_deleting(tx.connection, checkpoints.require_checkpoint(tx.connection, "a"))

    with pytest.raises(InvalidError, match="is being deleted"):
        database.write(take)
    do_work(database)
    database.write(take)


def test_a_checkpoint_in_use_cannot_be_claimed(database: Database) -> None:
    database.write(lambda tx: models.add_version(tx, 1, "a", 1))
    assert database.write(lambda tx: checkpoints.claim(tx, "a")) == "version 1 of model 'net'"
    with database.read() as connection:
        row = checkpoints.require_checkpoint(connection, "a")
    assert (row.deleting_us, json.loads(row.resources)) == (None, {"file": 1})
