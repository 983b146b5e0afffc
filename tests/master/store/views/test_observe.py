"""Read-only views of the database for ``dstrial`` commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from rows import add

from dstrial.master.state_directory import StateDirectory
from dstrial.master.store.database import Database, Transaction
from dstrial.master.store.views.observe import Stalled, experiment_view, last_log_id, new_log_rows, stalled


@pytest.fixture
def state(tmp_path: Path) -> StateDirectory:
    state = StateDirectory(tmp_path)
    database = Database(state.database_path)
    database.write(fill)
    database.close()
    return state


def fill(tx: Transaction) -> None:
    add(tx, "users", id=1, username="determined")
    add(tx, "experiments", id=3, state="PAUSED", progress=0.5)
    add(tx, "trials", id=5, experiment_id=3, state="PAUSED", searcher_metric_value=0.25)
    of_trial = {"task_id": "t", "trial_id": 5}
    for run_id, state, exit_code in ((1, "TERMINATED", 7), (2, "TERMINATED", 0), (3, "RUNNING", None)):
        columns = {"id": f"t.{run_id}", "run_id": run_id, "state": state, "exit_code": exit_code}
        add(tx, "allocations", **of_trial, experiment_id=3, **columns)
    for rank, source, text in ((None, "master", "m"), (1, "task", "one"), (None, "task", "two")):
        add(tx, "logs", **of_trial, rank=rank, source=source, log=f"{text}\n")


def test_paused_experiment_settles_when_processes_end(state: StateDirectory) -> None:
    view = experiment_view(state, 3)
    assert view is not None
    (trial,) = view.trials
    assert (trial.is_running, trial.num_allocations, trial.exit_code, trial.best_metric) == (True, 3, 0, 0.25)
    assert not view.is_settled
    database = Database(state.database_path)
    database.write(
        lambda tx: tx.execute("UPDATE allocations SET state = 'TERMINATED', exit_code = 9 WHERE run_id = 3")
    )
    database.close()
    view = experiment_view(state, 3)
    assert view is not None
    assert view.is_settled
    assert view.trials[0].exit_code == 9


def test_view_of_unknown_experiment_is_none(state: StateDirectory) -> None:
    assert experiment_view(state, 4) is None


def test_log_rows_are_returned_once_in_order(state: StateDirectory) -> None:
    rows = new_log_rows(state, 5, 0)
    assert [(row.rank, row.source, row.text) for row in rows] == [
        (None, "master", "m"),
        (1, "task", "one"),
        (None, "task", "two"),
    ]
    assert new_log_rows(state, 5, rows[-1].id) == []
    assert last_log_id(state, 5) == rows[-1].id
    assert last_log_id(state, 6) == 0


def test_stalled_trial_is_reported_with_cause(state: StateDirectory, tmp_path: Path) -> None:
    """The cause comes from stalled.json and is stripped of escape sequences."""
    directory = tmp_path / "allocation"
    directory.mkdir()
    database = Database(state.database_path)
    database.write(
        lambda tx: tx.execute("UPDATE allocations SET directory = ? WHERE run_id = 3", (str(directory),))
    )
    database.close()
    assert stalled(state) == []
    (directory / "stalled.json").write_text('{"text": "rank 1 is stopped\\u001b[2J", "since_s": 12.5}')
    (found,) = stalled(state)
    assert found == Stalled(5, 3, found.text, 12.5)
    assert found.text.startswith("rank 1 is stopped")
    assert "\x1b" not in found.text
    (directory / "stalled.json").write_text("{")
    assert stalled(state) == []
