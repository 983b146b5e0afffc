"""Cost of listing pages, counted in steps of SQLite's virtual machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rows import add

from dstrial.master.store.database import Connection, Database, Transaction
from dstrial.master.store.reports import metrics
from dstrial.master.store.views import listings
from dstrial.master.store.views.listings import ExperimentFilter

NUM_FEW, NUM_MANY = 60, 3000
LIMIT = 20
PAGES: dict[str, Callable[[Connection], object]] = {
    "trials": lambda connection: listings.list_trials(connection, now_us=9, experiment_id=1, limit=LIMIT),
    "trials-newest": lambda connection: listings.list_trials(
        connection, now_us=9, experiment_id=1, is_descending=True, limit=LIMIT
    ),
    "trials-best": lambda connection: listings.list_trials(
        connection,
        now_us=9,
        experiment_id=1,
        sort_by="SORT_BY_BEST_VALIDATION_METRIC",
        is_descending=True,
        limit=LIMIT,
    ),
    "trials-count": lambda connection: listings.count_trials(connection, 1, ()),
    "trials-state": lambda connection: listings.list_trials(
        connection, now_us=9, experiment_id=1, states=["ACTIVE"], limit=LIMIT
    ),
    "experiments": lambda connection: listings.list_experiments(
        connection, ExperimentFilter(archived=False, with_parents=True, users=["determined"]), limit=LIMIT
    ),
    "experiments-newest": lambda connection: listings.list_experiments(
        connection, ExperimentFilter(), is_descending=True, limit=LIMIT
    ),
    "experiments-count": lambda connection: listings.count_experiments(connection, ExperimentFilter()),
    "experiment": lambda connection: listings.get_experiment(connection, 1),
}


def filled(path: Path, number: int) -> Database:
    """Return a database with ``number`` experiments; the first has ``number`` trials."""

    def fill(tx: Transaction) -> None:
        add(tx, "users", id=1, username="determined")
        for _ in range(number):
            add(tx, "experiments", searcher_type="random")
        for index in range(number):
            add(tx, "trials", experiment_id=1, searcher_metric_value=index)

    database = Database(path)
    database.write(fill)
    return database


@pytest.fixture(scope="module")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Database, Database]]:
    directory = tmp_path_factory.mktemp("listings")
    few, many = filled(directory / "few.db", NUM_FEW), filled(directory / "many.db", NUM_MANY)
    yield few, many
    few.close()
    many.close()


def num_steps(database: Database, run: Callable[[Transaction], object]) -> int:
    num = 0

    def count() -> int:
        nonlocal num
        num += 1
        return 0

    def counted(tx: Transaction) -> None:
        tx.connection.set_progress_handler(count, 1)
        run(tx)
        tx.connection.set_progress_handler(None, 0)

    database.write(counted)
    return num


@pytest.mark.parametrize("name", PAGES)
def test_page_cost_is_independent_of_table_size(databases: tuple[Database, Database], name: str) -> None:
    few, many = (num_steps(database, lambda tx: PAGES[name](tx.connection)) for database in databases)

    assert many < 1.1 * few + 50, f"{few} steps with {NUM_FEW} rows, {many} with {NUM_MANY}"


def test_best_trial_update_cost_is_independent_of_trials(databases: tuple[Database, Database]) -> None:
    few, many = (num_steps(one, lambda tx: metrics.update_best_of_experiment(tx, 1)) for one in databases)

    assert many < 1.1 * few + 50, f"{few} steps with {NUM_FEW} trials, {many} with {NUM_MANY}"


def test_experiment_counts_follow_trials_and_checkpoints(databases: tuple[Database, Database]) -> None:
    few, _ = databases
    for count, size in ((2, 20), (1, 15)):
        few.write(
            lambda tx, count=count, size=size: tx.execute(
                "UPDATE trials SET checkpoint_count = ?, checkpoint_size = ? WHERE id IN (1, 2)",
                (count, size),
            )
        )

        with few.read() as connection:
            row = listings.get_experiment(connection, 1)

        assert row is not None
        assert (row.num_trials, row.checkpoint_count, row.checkpoint_size) == (NUM_FEW, 2 * count, 2 * size)
