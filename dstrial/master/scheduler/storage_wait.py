"""Which trials wait for their checkpoint storage; their logs say so once."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from dstrial.master.lifecycle.storages import Storages
from dstrial.master.store import experiments
from dstrial.master.store.database import Database
from dstrial.master.store.jobs import WaitingTrial
from dstrial.master.store.reports.logs import add_master_line

logger = logging.getLogger("dstrial.master.scheduler")


class StorageWait:
    """Holds trials back whose storage is away; for the scheduler's thread."""

    def __init__(self, database: Database, storages: Storages) -> None:
        self._database = database
        self._storages = storages
        self._told: dict[int, str] = {}

    def trouble(self, experiment_id: int) -> str | None:
        with self._database.read() as connection:
            config = json.loads(experiments.require(connection, experiment_id).config)
        return self._storages.trouble(config["checkpoint_storage"])

    def ready(self, rows: Sequence[WaitingTrial]) -> list[WaitingTrial]:
        """Leave out those that still wait for their storage: they hold up nobody else."""
        self._told = {row.id: self._told[row.id] for row in rows if row.id in self._told}
        return [row for row in rows if row.id not in self._told or not self.holds_up(row)]

    def holds_up(self, row: WaitingTrial) -> bool:
        """Say whether a trial that could start has to wait for its storage."""
        trouble = self.trouble(row.experiment_id)
        told = self._told.get(row.id)
        if trouble is None:
            if told is not None:
                del self._told[row.id]
                self._say(row, "its checkpoint storage is back, and the trial goes on", "INFO")
            return False
        if told != trouble:
            self._told[row.id] = trouble
            logger.warning("trial %d waits: %s", row.id, trouble)
            self._say(row, f"waiting for its checkpoint storage: {trouble}", "WARNING")
        return True

    def is_waiting(self, trial_id: int) -> bool:
        """Say whether a trial was held back when it was looked at last."""
        return trial_id in self._told

    def _say(self, row: WaitingTrial, text: str, level: str) -> None:
        self._database.write(lambda tx: add_master_line(tx, row.task_id, row.id, text, level=level))
