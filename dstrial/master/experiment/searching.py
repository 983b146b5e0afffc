"""The searcher of an experiment: an event goes in, and what it asks for is done in the same transaction."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from typing import Any

from dstrial.errors import SearchError
from dstrial.master.clock import now_us
from dstrial.master.experiment import ending
from dstrial.master.experiment.states import STOPPING, TERMINAL
from dstrial.master.store import experiments as experiment_rows
from dstrial.master.store import trials as trial_rows
from dstrial.master.store.database import Transaction
from dstrial.search import Action, Create, ExitReason, Searcher, Shutdown


def begin(tx: Transaction, experiment_id: int) -> None:
    """Start the search: the first trials exist when this returns."""
    row = experiment_rows.require(tx.connection, experiment_id)
    config = json.loads(row["config"])
    searcher = Searcher.new(config, int(config["reproducibility"]["experiment_seed"]))
    _perform(tx, row, searcher, searcher.initial_trials())


def validation_completed(tx: Transaction, trial: sqlite3.Row, metrics: dict[str, Any]) -> None:
    """Tell the searcher of a validation; a metric that it misses ends the experiment."""
    feed(tx, trial["experiment_id"], lambda s: s.validation_completed(trial["request_id"], metrics))


def trial_closed(tx: Transaction, trial: sqlite3.Row, reason: ExitReason | None) -> None:
    """Tell the searcher that a trial has ended, and why if it was early."""

    def event(searcher: Searcher) -> list[Action]:
        actions: list[Action] = []
        if reason is not None:
            actions += searcher.trial_exited_early(trial["request_id"], reason)
        return actions + searcher.trial_exited(trial["request_id"])

    feed(tx, trial["experiment_id"], event)


def feed(tx: Transaction, experiment_id: int, event: Callable[[Searcher], list[Action]]) -> None:
    """Let the searcher take an event; nothing happens once the experiment stops, and for unmanaged ones."""
    row = experiment_rows.require(tx.connection, experiment_id)
    if row["searcher_snapshot"] is None or row["state"] in STOPPING or row["state"] in TERMINAL:
        return
    searcher = Searcher.restore(json.loads(row["config"]), json.loads(row["searcher_snapshot"]))
    try:
        actions = event(searcher)
    except SearchError as error:
        ending.fail_experiment(tx, experiment_id, str(error))
        return
    _perform(tx, row, searcher, actions)


def update_progress(tx: Transaction, experiment_id: int) -> None:
    """Compute the experiment's progress from its trials'."""
    row = experiment_rows.require(tx.connection, experiment_id)
    if row["unmanaged"]:
        tx.execute(
            "UPDATE experiments SET progress = (SELECT AVG(progress) FROM trials WHERE experiment_id = ?) WHERE id = ?",
            (experiment_id, experiment_id),
        )
    if row["searcher_snapshot"] is None or row["state"] in TERMINAL:
        return
    searcher = Searcher.restore(json.loads(row["config"]), json.loads(row["searcher_snapshot"]))
    _store_progress(tx, experiment_id, searcher)


def _store_progress(tx: Transaction, experiment_id: int, searcher: Searcher) -> None:
    shares = {
        trial["request_id"]: float(trial["progress"])
        for trial in tx.execute(
            "SELECT request_id, progress FROM trials WHERE experiment_id = ?", (experiment_id,)
        )
    }
    tx.execute("UPDATE experiments SET progress = ? WHERE id = ?", (searcher.progress(shares), experiment_id))


def _perform(tx: Transaction, row: sqlite3.Row, searcher: Searcher, actions: list[Action]) -> None:
    experiment_id = row["id"]
    for action in actions:
        if isinstance(action, Create):
            trial_rows.insert(tx, row, action, now_us())
    tx.execute(
        "UPDATE experiments SET searcher_snapshot = ? WHERE id = ?",
        (json.dumps(searcher.snapshot()), experiment_id),
    )
    _store_progress(tx, experiment_id, searcher)
    tx.publish("scheduler", f"experiment:{experiment_id}")
    for action in actions:
        if isinstance(action, Shutdown):
            state = "ERROR" if action.failure else "CANCELED" if action.cancel else "COMPLETED"
            reason = "every trial failed" if action.failure else None
            ending.finish_experiment(tx, experiment_id, state, reason)
        elif not isinstance(action, Create):
            trial = trial_rows.by_request(tx.connection, experiment_id, action.request_id)
            if trial is not None and trial["state"] not in TERMINAL:
                tx.execute("UPDATE trials SET is_stopped_by_searcher = 1 WHERE id = ?", (trial["id"],))
                ending.stop_trial(tx, trial["id"], "STOPPING_COMPLETED", ending.STOPPED_BY_SEARCHER)
