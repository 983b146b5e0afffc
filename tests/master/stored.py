"""Helpers that store an experiment and checkpoints without a running master."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dstrial.config.experiment_config.submission import MasterDefaults, check_submission
from dstrial.master.lifecycle import experiments
from dstrial.master.store import checkpoints
from dstrial.master.store import trials as trial_rows
from dstrial.master.store.database import Database, Transaction

CONFIG = "entrypoint: 'true'\nsearcher: {name: single, metric: score}\n"


def store_experiment(database: Database, context_dir: Path, storage: dict[str, Any]) -> None:
    """Store user 1 and their experiment 1 with trial 1, which saves to ``storage``."""
    submission = check_submission(CONFIG, context_dir=context_dir, defaults=MasterDefaults(storage))

    def create(tx: Transaction) -> None:
        tx.execute("INSERT INTO users (id, username, modified_us) VALUES (1, 'determined', 0)")
        experiments.create(tx, submission=submission, tgz=b"", owner_id=1, activate=False)

    database.write(create)


def store_checkpoints(database: Database, root: Path, *uuids: str) -> None:
    """Store checkpoints of trial 1, each with a one-byte file below ``root``."""

    def add(tx: Transaction) -> None:
        for uuid in uuids:
            checkpoints.add_checkpoint(
                tx,
                uuid=uuid,
                trial=trial_rows.require(tx.connection, 1),
                allocation_id=None,
                state="COMPLETED",
                resources={"file": 1},
                metadata={"steps_completed": 1},
                report_us=1,
            )

    database.write(add)
    for uuid in uuids:
        (root / uuid).mkdir(parents=True)
        (root / uuid / "file").write_text("x")


def num_pending(database: Database) -> int:
    """Return the number of unfinished background jobs."""
    with database.read() as connection:
        return int(connection.execute("SELECT COUNT(*) FROM work").fetchone()[0])
