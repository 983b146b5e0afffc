"""A trial that follows the slots of four hosts: drained, cut off, healed, displaced by a higher priority, and alone again."""

from __future__ import annotations

import dataclasses
import itertools
import sqlite3
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from machines import Machines
from master_on_hosts import CONFIG, MasterOnHosts, wait_until

NUM_HOSTS = 4
_WITHIN_S = 150.0


@dataclasses.dataclass(frozen=True)
class Change:
    """One change of the number of slots.

    Attributes:
        waited_s: from its cause to the first report with the new number.
        lost_s: between the last report before it and the first behind it, less the batches between them.
        again: batches that were trained twice, for no checkpoint had them.
    """

    what: str
    before: int
    after: int
    waited_s: float
    lost_s: float
    again: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A whole run: its changes, and the batches and losses of reports that count."""

    changes: tuple[Change, ...]
    reported: tuple[int, ...]
    losses: dict[int, float]
    log: str


@dataclasses.dataclass(frozen=True)
class _Report:
    run_id: int
    batch: int
    time_s: float


class ElasticRun:
    """A master with four hosts of a slot each, and one trial that asks for all of them."""

    def __init__(self, made: Machines, place: Path, num_batches: int) -> None:
        self.machines, self.master, self._num_batches = made, MasterOnHosts(made, place), num_batches
        self._changes: list[Change] = []
        self._trial = 0

    def up(self) -> None:
        said = self.master.up()
        assert said.returncode == 0, said.stdout

    def begin(self, **section: Any) -> None:
        """Start the trial, and wait for its first checkpoints."""
        experiment = self._create(0.15, section)
        self._trial = self.master.wait_for_trials(experiment, 1)[0]["id"]
        wait_until(lambda: self._num_slots() == NUM_HOSTS and self._last() > 11, _WITHIN_S, self._log)

    def alone(self) -> dict[int, float]:
        """Train the same without anything that happens, and without pauses; return the losses by batch."""
        experiment = self._create(0.0, {})
        self.master.wait_for_state(experiment, ("COMPLETED",), within_s=300)
        return self._losses(self.master.trials(experiment)[0]["id"])

    def _create(self, pause_s: float, section: Mapping[str, Any]) -> int:
        return self.master.create(
            {
                "resources": {"slots_per_trial": NUM_HOSTS},
                "reproducibility": {"experiment_seed": 7},
                "searcher": {**CONFIG["searcher"], "max_length": {"batches": self._num_batches}},
                "hyperparameters": {"zero_stage": 1, "pause_s": pause_s, "micro_batch_size": 1},
                "scheduling_unit": 1,
                "min_checkpoint_period": {"batches": 5},
                "data": {"dstrial": dict(section)},
            }
        )

    def do(self, what: str, act: Any, after: int) -> None:
        """Do something, and wait until the trial trains on another number of slots."""
        before, runs = self._num_slots(), self._runs()
        began_s = time.time()
        act()

        def is_there() -> bool:
            return self._num_slots() == after and self._runs() > runs

        wait_until(is_there, _WITHIN_S, self._log)
        run_id = self._runs()
        first = next(one for one in self._reports() if one.run_id == run_id)
        earlier = [one for one in self._reports(is_all=True) if one.run_id < run_id]
        last = max(earlier, key=lambda one: one.time_s)
        batch_s = statistics.median(
            later.time_s - one.time_s
            for one, later in itertools.pairwise(earlier)
            if one.run_id == later.run_id and later.batch == one.batch + 1
        )
        again = max(last.batch - first.batch + 1, 0)
        lost_s = first.time_s - last.time_s - batch_s * max(first.batch - last.batch, 0)
        waited_s = first.time_s - began_s
        print(
            f"{what}: from {before} to {after} slots in {waited_s:.0f} s, at batch {first.batch}",
            file=sys.stderr,
        )
        self._changes.append(Change(what, before, after, waited_s, lost_s, again))

    def end(self) -> Outcome:
        """Wait for the end of the trial and return all of it."""
        self.master.wait_for_state(self._experiment, ("COMPLETED",), within_s=300)
        return Outcome(
            tuple(self._changes),
            tuple(one.batch for one in self._reports()),
            self._losses(self._trial),
            self.master.log(self._trial),
        )

    def _losses(self, trial_id: int) -> dict[int, float]:
        with self._database() as connection:
            rows = connection.execute(
                "SELECT steps, json_extract(metrics, '$.loss') FROM metrics WHERE trial_id = ? "
                "AND group_name = 'training' AND archived = 0 ORDER BY steps",
                (trial_id,),
            ).fetchall()
        return {int(batch): float(loss) for batch, loss in rows}

    @property
    def _experiment(self) -> int:
        return int(self._one("SELECT experiment_id FROM trials WHERE id = ?"))

    def _num_slots(self) -> int:
        """Return with how many slots the last report was made."""
        return int(
            self._one(
                "SELECT COALESCE((SELECT json_array_length(a.slots) FROM metrics m JOIN allocations a "
                "ON a.trial_id = m.trial_id AND a.run_id = m.run_id WHERE m.trial_id = ? AND m.group_name = 'training' "
                "ORDER BY m.run_id DESC LIMIT 1), 0)"
            )
        )

    def _runs(self) -> int:
        return int(
            self._one(
                "SELECT COALESCE(MAX(run_id), 0) FROM metrics WHERE trial_id = ? AND group_name = 'training'"
            )
        )

    def _last(self) -> int:
        reports = self._reports()
        return reports[-1].batch if reports else 0

    def _reports(self, *, is_all: bool = False) -> list[_Report]:
        with self._database() as connection:
            rows = connection.execute(
                "SELECT run_id, steps, end_us FROM metrics WHERE trial_id = ? AND group_name = 'training' "
                "AND (archived = 0 OR ?) ORDER BY run_id, steps",
                (self._trial, is_all),
            ).fetchall()
        return [_Report(run_id, steps, end_us / 1e6) for run_id, steps, end_us in rows]

    def _one(self, sql: str) -> Any:
        with self._database() as connection:
            return connection.execute(sql, (self._trial,)).fetchone()[0]

    def _database(self) -> sqlite3.Connection:
        (path,) = (self.master.place / "state").glob("*.db")
        return sqlite3.connect(f"file:{path}?mode=ro", uri=True)

    def _log(self) -> str:
        return f"{self._num_slots()} slots after run {self._runs()}:\n{self.master.log(self._trial)}"
