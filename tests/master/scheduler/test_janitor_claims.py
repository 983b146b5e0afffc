"""A checkpoint that comes into use before its turn to be deleted is kept, and one whose turn it is cannot come into use."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from stored import num_pending, store_checkpoints, store_experiment
from waiting import wait_for

from dstrial.master.pubsub import PubSub
from dstrial.master.scheduler.janitor import Janitor
from dstrial.master.store import background_jobs, checkpoints, models
from dstrial.master.store.database import Database, Transaction
from dstrial.master.store.errors import InvalidError

A, B = (f"0f4f1f9e-8f0a-4c3e-9a53-00000000000{letter}" for letter in "ab")


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """Experiment 1 has the checkpoints A and B, with their files, and the model 1."""
    storage = {"type": "directory", "container_path": str(tmp_path)}

    def make_model(tx: Transaction) -> None:
        models.create(
            tx, name="net", owner_id=1, workspace_id=1, description="", notes="", metadata={}, labels=[]
        )

    changes = PubSub()
    with contextlib.closing(Database(tmp_path / "master.db", changes.publish)) as opened:
        store_experiment(opened, tmp_path, storage)
        store_checkpoints(opened, tmp_path, A, B)
        opened.write(make_model)
        yield opened


def states(database: Database) -> dict[str, str]:
    with database.read() as connection:
        return {
            row["uuid"]: row["state"] for row in connection.execute("SELECT uuid, state FROM checkpoints")
        }


def do_work(database: Database) -> None:
    """Let a janitor do all of the work that there is."""
    janitor = Janitor(database, PubSub(), None)

    janitor.start()
    try:
        wait_for(lambda: num_pending(database) == 0, "the work")
    finally:
        janitor.stop()


def test_what_is_registered_after_its_deletion_was_asked_for_is_kept(
    database: Database, tmp_path: Path
) -> None:
    payload = {"uuids": [A, B], "globs": ["**/*"]}
    database.write(lambda tx: background_jobs.request(tx, "delete_checkpoints", 1, payload))
    database.write(lambda tx: models.add_version(tx, 1, A, 1))

    do_work(database)

    assert states(database) == {A: "COMPLETED", B: "DELETED"}
    assert ((tmp_path / A / "file").exists(), (tmp_path / B).exists()) == (True, False)


def test_what_is_being_deleted_cannot_come_into_use_until_a_restart_says_otherwise(
    database: Database,
) -> None:
    assert database.write(lambda tx: checkpoints.claim(tx, A)) is None

    def take(tx: Transaction) -> None:
        checkpoints.refuse_deleting(tx.connection, checkpoints.require_checkpoint(tx.connection, A))

    with pytest.raises(InvalidError, match="is being deleted"):
        database.write(take)
    do_work(database)
    database.write(take)


def test_a_checkpoint_in_use_cannot_be_claimed(database: Database) -> None:
    database.write(lambda tx: models.add_version(tx, 1, A, 1))
    assert database.write(lambda tx: checkpoints.claim(tx, A)) == "version 1 of model 'net'"
    with database.read() as connection:
        row = checkpoints.require_checkpoint(connection, A)
    assert (row.deleting_us, json.loads(row.resources)) == (None, {"file": 1})
