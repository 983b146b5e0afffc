"""Runs: trials as a list of their own, across the experiments of a project."""

from __future__ import annotations

import dataclasses
import sqlite3

from dstrial.master.store.database import fetch_all, fetch_one
from dstrial.master.store.errors import NotFoundError
from dstrial.master.store.trials import Trial

_SELECT = (
    "SELECT t.*, e.name AS experiment_name, e.description AS experiment_description, e.state AS experiment_state, "
    "e.archived AS experiment_archived, e.labels, e.parent_id, e.progress AS experiment_progress, e.searcher_type, "
    "e.searcher_metric, e.unmanaged, e.external_id AS external_experiment_id, "
    "e.owner_id, u.username, e.project_id, p.name AS project_name, p.key AS project_key, "
    "p.workspace_id, w.name AS workspace_name, p.is_archived OR w.is_archived AS is_parent_archived, "
    "(SELECT COUNT(*) FROM trials o WHERE o.experiment_id = e.id) AS num_trials, "
    "CASE WHEN e.unmanaged THEN CASE WHEN t.run_id > 0 THEN 2 END "
    "ELSE (SELECT MAX(CASE WHEN a.state = 'RUNNING' THEN 2 ELSE 1 END) FROM allocations a "
    "WHERE a.trial_id = t.id AND a.state != 'TERMINATED') END AS advance "
    "FROM trials t JOIN experiments e ON e.id = t.experiment_id JOIN users u ON u.id = e.owner_id "
    "JOIN projects p ON p.id = e.project_id JOIN workspaces w ON w.id = p.workspace_id"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Run(Trial):
    """A trial with its experiment, owner, project and workspace."""

    experiment_name: str
    experiment_description: str
    experiment_state: str
    experiment_archived: bool
    labels: str
    parent_id: int | None
    experiment_progress: float
    searcher_type: str
    searcher_metric: str
    unmanaged: bool
    external_experiment_id: str | None
    owner_id: int
    username: str
    project_id: int
    project_name: str
    project_key: str
    workspace_id: int
    workspace_name: str
    is_parent_archived: bool
    num_trials: int
    advance: int | None


def list_runs(connection: sqlite3.Connection, project_id: int | None = None) -> list[Run]:
    """Return a project's runs, or all, by number, with where each belongs."""
    return fetch_all(
        Run,
        connection,
        f"{_SELECT} WHERE ? IS NULL OR e.project_id = ? ORDER BY t.id",
        (project_id, project_id),
    )


def require(connection: sqlite3.Connection, run_id: int) -> Run:
    """Return one run, as :func:`list_runs` does.

    Raises:
        NotFoundError: there is none.
    """
    row = fetch_one(Run, connection, f"{_SELECT} WHERE t.id = ?", (run_id,))
    if row is None:
        raise NotFoundError(f"run {run_id} is not found; expected the number of a trial. Name another.")
    return row
