"""Which trials wait for their checkpoint storage; their logs say so once."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Mapping, Sequence

from dstrial.master.lifecycle.storages import Storages, root_of
from dstrial.master.store import experiments
from dstrial.master.store.database import Connection, Database
from dstrial.master.store.jobs import WaitingTrial
from dstrial.master.store.reports.logs import add_master_line

logger = logging.getLogger("dstrial.master.scheduler")


class StorageWait:
    """Holds trials back whose storage is away; for the scheduler's thread.

    Args:
        database: configs, and the logs of trials.
        storages: looks at storages.
    """

    def __init__(self, database: Database, storages: Storages) -> None:
        self._database = database
        self._storages = storages
        self._told: dict[int, str] = {}

    def trouble(self, experiment_id: int, *, is_fresh: bool = False) -> str | None:
        """Say why an experiment's storage cannot be used now; None if it can.

        Not inside another read.
        """
        return self._storages.trouble(self._storage(experiment_id), is_fresh=is_fresh)

    def ready(self, connection: Connection, rows: Sequence[WaitingTrial]) -> list[WaitingTrial]:
        """Leave out those that still wait for their storage: they hold up nobody else."""
        self._told = {row.id: self._told[row.id] for row in rows if row.id in self._told}
        waiting = {row.experiment_id for row in rows if row.id in self._told}
        storages = {one: _storage_of(connection, one) for one in waiting}
        troubles = {one: self._storages.trouble(storage) for one, storage in storages.items()}

        def still_waits(row: WaitingTrial) -> bool:
            one = row.experiment_id
            return row.id in self._told and self._note(row, storages[one], troubles[one])

        return [row for row in rows if not still_waits(row)]

    def holds_up(self, row: WaitingTrial) -> bool:
        """Say whether a trial that could start has to wait for its storage."""
        storage = self._storage(row.experiment_id)
        return self._note(row, storage, self._storages.trouble(storage))

    def is_waiting(self, trial_id: int) -> bool:
        """Say whether a trial was held back when it was looked at last."""
        return trial_id in self._told

    def _storage(self, experiment_id: int) -> dict[str, object]:
        with self._database.read() as connection:
            return _storage_of(connection, experiment_id)

    def _note(self, row: WaitingTrial, storage: Mapping[str, object], trouble: str | None) -> bool:
        told = self._told.get(row.id)
        if trouble is None:
            if told is not None:
                del self._told[row.id]
                self._say(row, "its checkpoint storage is back, and the trial goes on", "INFO")
            return False
        if told != trouble:
            self._told[row.id] = trouble
            logger.warning("trial %d waits: %s", row.id, trouble)
            command = shlex.join(["dstrial", "checkpoint", "audit", "--accept", str(root_of(storage))])
            otherwise = f"If it was moved, replaced or removed on purpose, say so with `{command}`."
            self._say(row, f"waiting for its checkpoint storage: {trouble} {otherwise}", "WARNING")
        return True

    def _say(self, row: WaitingTrial, text: str, level: str) -> None:
        self._database.write(lambda tx: add_master_line(tx, row.task_id, row.id, text, level=level))


def _storage_of(connection: Connection, experiment_id: int) -> dict[str, object]:
    config = json.loads(experiments.require(connection, experiment_id).config)
    storage: dict[str, object] = config["checkpoint_storage"]
    return storage
