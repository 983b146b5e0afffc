"""Queries on the database file that do not need a running master."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dstrial.master.state_directory import StateDirectory
from dstrial.master.store.database import fetch_all, fetch_value
from dstrial.master.store.sqlite_file import reading, unusable
from dstrial.master.trial_files import read_json
from dstrial.visible_text import visible_line

_MAX_ROWS = 5000  # log lines per query
TERMINAL_STATES = frozenset({"COMPLETED", "CANCELED", "ERROR"})


@dataclasses.dataclass(frozen=True, slots=True)
class TrialView:
    id: int
    state: str
    hparams: str  # JSON
    total_batches: int
    restarts: int
    best_metric: float | None  # searcher metric; None before the first validation
    is_running: bool
    exit_code: int | None  # of the last ended allocation, as in a shell
    exit_reason: str | None
    num_allocations: int
    batches_saved: int | None  # batches of the latest complete checkpoint
    best_checkpoint: str | None = None  # UUID of the checkpoint at the best validation


@dataclasses.dataclass(frozen=True, slots=True)
class ExperimentView:
    id: int
    state: str
    progress: float  # from 0 to 1
    end_reason: str | None
    trials: tuple[TrialView, ...]

    @property
    def is_settled(self) -> bool:
        """Return whether the experiment has ended or is paused, and no trial is running."""
        return (self.state in TERMINAL_STATES or self.state == "PAUSED") and not any(
            trial.is_running for trial in self.trials
        )


@dataclasses.dataclass(frozen=True, slots=True)
class LogRow:
    id: int
    rank: int | None  # None if the line has no rank
    source: str  # ``task`` or ``master``
    stdtype: str | None  # None for lines of the master
    level: str | None
    text: str  # without newline


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """Startup phase of a trial that has not trained yet, or why the trial is pending."""

    trial_id: int
    experiment_id: int
    text: str  # for example ``compiling operator cpu_adam``
    since_s: float  # epoch time


class Stalled(Start):
    """A trial whose ranks hang; ``text`` is like ``rank 1 is stopped at batch 81``."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """Number of slots in use, and number of experiments and of trials by state."""

    num_slots_used: int
    experiments: dict[str, int]
    trials: dict[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Supervisor:
    """Identity of the supervisor process of an allocation that has not ended."""

    allocation_id: str
    pid: int
    start_time: str  # detects a reused pid


@contextlib.contextmanager
def _connection(state: StateDirectory) -> Iterator[sqlite3.Connection]:
    try:
        with reading(state.database_path) as connection:
            yield connection
    except sqlite3.DatabaseError as error:
        raise unusable(state.database_path, error) from error


_TRIALS = """
SELECT trials.id, trials.state, hparams, total_batches, restarts, searcher_metric_value AS best_metric,
    best_checkpoint_uuid AS best_checkpoint,
    EXISTS (SELECT 1 FROM allocations WHERE trial_id = trials.id AND allocations.state != 'TERMINATED') AS is_running,
    (SELECT COUNT(*) FROM allocations WHERE trial_id = trials.id) AS num_allocations,
    (SELECT MAX(steps) FROM checkpoints WHERE trial_id = trials.id AND state = 'COMPLETED') AS batches_saved,
    last.exit_code, last.exit_reason
FROM trials LEFT JOIN allocations AS last ON last.id = (
    SELECT id FROM allocations WHERE trial_id = trials.id AND state = 'TERMINATED' ORDER BY run_id DESC LIMIT 1)
WHERE trials.experiment_id = ? ORDER BY trials.id
"""


def experiment_view(state: StateDirectory, experiment_id: int) -> ExperimentView | None:
    with _connection(state) as connection:
        row = connection.execute("SELECT * FROM experiments WHERE id = ?", (experiment_id,)).fetchone()
        if row is None:
            return None
        trials = tuple(fetch_all(TrialView, connection, _TRIALS, (experiment_id,)))
    return ExperimentView(experiment_id, row["state"], row["progress"], row["end_reason"], trials)


_LIVE = "SELECT trial_id, experiment_id, directory FROM allocations WHERE state != 'TERMINATED' AND trial_id > 0 ORDER BY id"
_WAITING = """
SELECT trials.id, trials.experiment_id, logs.log, logs.time_us FROM trials
JOIN experiments ON experiments.id = trials.experiment_id
JOIN logs ON logs.id = (SELECT MAX(id) FROM logs WHERE trial_id = trials.id AND source = 'master')
WHERE trials.state = 'ACTIVE' AND experiments.state = 'ACTIVE' AND logs.log LIKE 'waiting for %'
    AND NOT EXISTS (SELECT 1 FROM allocations WHERE trial_id = trials.id AND state != 'TERMINATED')
ORDER BY trials.id
"""


def starting(state: StateDirectory) -> list[Start]:
    """Return why trials are pending, and the startup phases of starting trials."""
    with _connection(state) as connection:
        waiting = connection.execute(_WAITING).fetchall()
        live = connection.execute(_LIVE).fetchall()
    found = [
        Start(trial_id, of_experiment, log.rstrip("\n"), time_us / 1e6)
        for trial_id, of_experiment, log, time_us in waiting
    ]
    for row in live:
        # dstrial.launch.start_watch writes this file.
        report = _report(Path(row["directory"]) / "starting.json", "phase")
        if report is not None:
            found.append(Start(row["trial_id"], row["experiment_id"], *report))
    return found


def stalled(state: StateDirectory) -> list[Stalled]:
    """Return the running trials whose ranks hang, with a description."""
    with _connection(state) as connection:
        live = connection.execute(_LIVE).fetchall()
    found = [(row, stall_in(Path(row["directory"]))) for row in live]
    return [Stalled(row["trial_id"], row["experiment_id"], *told) for row, told in found if told is not None]


def stall_in(directory: Path) -> tuple[str, float] | None:
    """Return (description, start as epoch time) of a stall in an allocation, or None.

    ``directory`` is the allocation's directory. In a stall, ranks hang.
    """
    return _report(directory / "stalled.json", "text")  # written by dstrial.launch.stalls.watch


def _report(path: Path, key: str) -> tuple[str, float] | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
        fields = read_json(path)
        text, since_s = visible_line(str(fields[key])), float(fields["since_s"])
        return (text, since_s) if math.isfinite(since_s) else None
    return None


def new_log_rows(state: StateDirectory, trial_id: int, after_id: int) -> list[LogRow]:
    """Return the next lines of a trial's log after a line id, at most ``_MAX_ROWS``."""
    sql = (
        "SELECT id, rank, source, stdtype, level, rtrim(log, char(10)) AS text FROM logs "
        "WHERE trial_id = ? AND id > ? ORDER BY id LIMIT ?"
    )
    with _connection(state) as connection:
        return fetch_all(LogRow, connection, sql, (trial_id, after_id, _MAX_ROWS))


def last_log_id(state: StateDirectory, trial_id: int) -> int:
    """Return the id of the last line of a trial's log; 0 if the log is empty."""
    with _connection(state) as connection:
        return fetch_value(int, connection, "SELECT MAX(id) FROM logs WHERE trial_id = ?", (trial_id,)) or 0


def num_live_allocations(state: StateDirectory) -> int:
    return _query_number(state, "SELECT COUNT(*) FROM allocations WHERE state != 'TERMINATED'")


def num_pending_jobs(state: StateDirectory) -> int:
    """Count pending background jobs of all kinds."""
    return _query_number(state, "SELECT COUNT(*) FROM work")


def supervisors(state: StateDirectory) -> list[Supervisor]:
    """Return the supervisor processes of active allocations, oldest first."""
    rows = _query(
        state,
        "SELECT id, supervisor_pid, supervisor_start FROM allocations "
        "WHERE state != 'TERMINATED' AND supervisor_pid IS NOT NULL ORDER BY start_us",
    )
    return [Supervisor(str(row[0]), int(row[1]), str(row[2])) for row in rows]


def usage(state: StateDirectory) -> Usage:
    used = "SELECT COALESCE(SUM(json_array_length(slots)), 0) FROM allocations WHERE state != 'TERMINATED'"
    counts = [
        dict(_query(state, f"SELECT state, COUNT(*) FROM {table} GROUP BY state ORDER BY state"))  # noqa: S608 - ours
        for table in ("experiments", "trials")
    ]
    return Usage(_query_number(state, used), counts[0], counts[1])


def _query_number(state: StateDirectory, sql: str) -> int:
    rows = _query(state, sql)
    return int(rows[0][0]) if rows else 0


def _query(state: StateDirectory, sql: str) -> list[tuple[Any, ...]]:
    """Run a query; return no rows if the database does not exist yet."""
    if not state.database_path.is_file():
        return []
    with _connection(state) as connection:
        if not connection.execute("PRAGMA user_version").fetchone()[0]:
            return []
        return [tuple(row) for row in connection.execute(sql)]
