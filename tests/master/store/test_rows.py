"""Mapping of SQL rows to dataclasses."""

import contextlib
import dataclasses
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dstrial.master.store import (
    allocations,
    background_jobs,
    checkpoints,
    commands,
    experiments,
    jobs,
    models,
    projects,
    tasks,
    tokens,
    trials,
    users,
    webhooks,
    workspaces,
)
from dstrial.master.store.database import Database, fetch_all, fetch_one
from dstrial.master.store.reports import logs, metrics
from dstrial.master.store.views import listings

TABLES = {
    "allocations": allocations.Allocation,
    "checkpoints": checkpoints.Checkpoint,
    "commands": commands.Command,
    "experiments": experiments.Experiment,
    "metrics": metrics.Report,
    "model_versions": models.Version,
    "models": models.Model,
    "projects": projects.Project,
    "tasks": tasks.Task,
    "templates": workspaces.Template,
    "trials": trials.Trial,
    "users": users.StoredUser,
    "work": background_jobs.BackgroundJob,
    "workspaces": workspaces.Workspace,
}

READS: list[Callable[[sqlite3.Connection], object]] = [
    lambda c: allocations.last_runs(c, 1, 1, 1),
    lambda c: checkpoints.get_checkpoint(c, "a"),
    lambda c: checkpoints.latest_completed(c, 1),
    lambda c: checkpoints.by_batch(c, 1),
    lambda c: commands.get(c, "a"),
    lambda c: commands.queued(c),
    lambda c: jobs.queued_experiments(c),
    lambda c: jobs.waiting_trials(c),
    lambda c: jobs.command_of(c, "a"),
    lambda c: listings.list_experiments(c, listings.ExperimentFilter()),
    lambda c: listings.list_trials(c, now_us=0, experiment_id=1),
    lambda c: logs.query(c, logs.LogFilter(trial_id=1)),
    lambda c: list(metrics.every_report(c, 1, "training")),
    lambda c: models.list_models(c, models.ModelFilter()),
    lambda c: models.list_versions(c, 1),
    lambda c: projects.require(c, 1),
    lambda c: jobs.resizable_trials(c),
    lambda c: tokens.list_access_tokens(c, None),
    lambda c: tasks.active(c),
    lambda c: tasks.active_of(c, "a"),
    lambda c: webhooks.triggered(c, "CUSTOM"),
    lambda c: webhooks.triggered_by_line(c, "a", 1),
    lambda c: webhooks.notified_experiment(c, 1),
    lambda c: webhooks.next_events(c),
    lambda c: workspaces.require(c, 1),
]


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(Database(tmp_path / "master.db")) as database, database.read() as found:
        yield found


def test_tables_match_their_dataclasses(connection: sqlite3.Connection) -> None:
    for table, kind in TABLES.items():
        fetch_all(kind, connection, f"SELECT * FROM {table}")  # type: ignore[var-annotated]


def test_statements_match_their_dataclasses(connection: sqlite3.Connection) -> None:
    for read in READS:
        read(connection)


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    name: str
    is_on: "bool | None"


def _pair(connection: sqlite3.Connection, sql: str) -> Any:
    return fetch_one(Pair, connection, sql)


def test_row_mapping_is_by_name_and_converts_booleans(connection: sqlite3.Connection) -> None:
    assert _pair(connection, "SELECT 1 AS is_on, 'a' AS name") == Pair("a", True)
    assert _pair(connection, "SELECT 0 AS is_on, 'a' AS name").is_on is False
    assert _pair(connection, "SELECT NULL AS is_on, 'a' AS name").is_on is None
    assert _pair(connection, "SELECT 1 AS is_on, 'a' AS name WHERE 0") is None


@pytest.mark.parametrize(
    "columns", ["'a' AS name", "'a' AS name, 1 AS is_on, 2 AS more", "'a' AS name, 1 AS other"]
)
def test_statement_with_wrong_columns_raises_without_rows(
    connection: sqlite3.Connection, columns: str
) -> None:
    with pytest.raises(TypeError, match="expected those of Pair"):
        fetch_all(Pair, connection, f"SELECT {columns} WHERE 0")


def test_repr_hides_password_hash_and_webhook_url() -> None:
    hidden = {
        (kind.__name__, field.name)
        for kind in (users.StoredUser, webhooks.DueEvent)
        for field in dataclasses.fields(kind)
        if not field.repr
    }
    assert hidden == {("StoredUser", "password_hash"), ("DueEvent", "url")}
