"""Views of one experiment from beside the master, for commands on its machine.

Reads the database itself, so that following goes on while the master is restarted. Changes nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dstrial.checkpoint.storage_identity import StorageIdentity
from dstrial.errors import MasterError
from dstrial.master.state_directory import StateDirectory
from dstrial.master.store import storages as storage_rows
from dstrial.master.store.file.integrity import reading
from dstrial.master.store.storages import StoredFiles
from dstrial.master.trial_files import read_json
from dstrial.visible_text import visible_line

TERMINAL_STATES = frozenset({"COMPLETED", "CANCELED", "ERROR"})

STOPPED_SUPERVISOR_NAME = "stopped_supervisor.json"
"""File of an allocation's directory that says that its supervisor is stopped."""


@dataclasses.dataclass(frozen=True, slots=True)
class TrialView:
    """One trial at one moment.

    Attributes:
        id: its number.
        state: ``ACTIVE``, ``COMPLETED`` and so on.
        hparams: its hyperparameters, JSON text.
        total_batches: batches it has reported.
        restarts: how often it has failed and was started again.
        best_metric: the searcher metric of its best validation; None before the first.
        is_running: whether it has an allocation that has not ended.
        exit_code: of its last allocation that has ended, as a shell sees it; None if none has.
        exit_reason: why that ended, one sentence; None if it says nothing.
        num_allocations: how many it has had.
        batches_saved: in its complete checkpoint of most batches; None without one.
    """

    id: int
    state: str
    hparams: str
    total_batches: int
    restarts: int
    best_metric: float | None
    is_running: bool
    exit_code: int | None
    exit_reason: str | None
    num_allocations: int
    batches_saved: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class ExperimentView:
    """One experiment at one moment.

    Attributes:
        id: its number.
        state: ``ACTIVE``, ``PAUSED``, ``COMPLETED`` and so on.
        progress: from 0 to 1.
        end_reason: why it ended, one sentence; None if it has nothing to say.
        trials: by number.
    """

    id: int
    state: str
    progress: float
    end_reason: str | None
    trials: tuple[TrialView, ...]

    @property
    def is_settled(self) -> bool:
        """Whether it has ended or is paused, and none of its processes runs."""
        return (self.state in TERMINAL_STATES or self.state == "PAUSED") and not any(
            trial.is_running for trial in self.trials
        )


@dataclasses.dataclass(frozen=True, slots=True)
class LogRow:
    """One line of a trial's log.

    Attributes:
        id: grows from line to line.
        rank: None for a line of no rank.
        source: ``task`` for what the processes printed, ``master`` for the master's own words.
        stdtype: ``stdout`` or ``stderr``; None for the master's.
        level: ``INFO`` and so on; None if the line names none.
        text: without its line end.
    """

    id: int
    rank: int | None
    source: str
    stdtype: str | None
    level: str | None
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """What holds up a trial that has not begun to train.

    Attributes:
        trial_id: the trial.
        experiment_id: its experiment.
        text: in a few words, for example ``compiling operator cpu_adam``, or for which slots it waits.
        since_s: when that began, seconds since the epoch.
    """

    trial_id: int
    experiment_id: int
    text: str
    since_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Stalled:
    """A trial whose ranks go on no more.

    Attributes:
        trial_id: the trial.
        experiment_id: its experiment.
        text: which rank is where, for example ``rank 1 is stopped (SIGSTOP) at batch 81 in train_batch``.
        since_s: when it began, seconds since the epoch.
    """

    trial_id: int
    experiment_id: int
    text: str
    since_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """What the database says about a master, running or not.

    Attributes:
        num_slots_used: slots that allocations hold.
        experiments: state -> number of experiments.
        trials: state -> number of trials.
    """

    num_slots_used: int
    experiments: dict[str, int]
    trials: dict[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Supervisor:
    """The process that an allocation which has not ended was given.

    Attributes:
        allocation_id: the allocation.
        pid: its number; another one may have it by now.
        start_time: when it began, as the kernel tells.
    """

    allocation_id: str
    pid: int
    start_time: str


@contextlib.contextmanager
def _connection(state: StateDirectory) -> Iterator[sqlite3.Connection]:
    try:
        with reading(state.database_path) as connection:
            yield connection
    except sqlite3.DatabaseError as error:
        raise _unusable(state, error) from error


_TRIALS = """
SELECT trials.id, trials.state, hparams, total_batches, restarts, searcher_metric_value,
    EXISTS (SELECT 1 FROM allocations WHERE trial_id = trials.id AND allocations.state != 'TERMINATED') AS is_running,
    (SELECT COUNT(*) FROM allocations WHERE trial_id = trials.id) AS num_allocations,
    (SELECT MAX(steps) FROM checkpoints WHERE trial_id = trials.id AND state = 'COMPLETED') AS batches_saved,
    last.exit_code, last.exit_reason
FROM trials LEFT JOIN allocations AS last ON last.id = (
    SELECT id FROM allocations WHERE trial_id = trials.id AND state = 'TERMINATED' ORDER BY run_id DESC LIMIT 1)
WHERE trials.experiment_id = ? ORDER BY trials.id
"""


def experiment_view(state: StateDirectory, experiment_id: int) -> ExperimentView | None:
    """Return an experiment and its trials; None if there is no such experiment."""
    with _connection(state) as connection:
        experiment = connection.execute(
            "SELECT state, progress, end_reason FROM experiments WHERE id = ?", (experiment_id,)
        ).fetchone()
        if experiment is None:
            return None
        trials = tuple(
            TrialView(
                id=row["id"],
                state=row["state"],
                hparams=row["hparams"],
                total_batches=row["total_batches"],
                restarts=row["restarts"],
                best_metric=row["searcher_metric_value"],
                is_running=bool(row["is_running"]),
                exit_code=row["exit_code"],
                exit_reason=row["exit_reason"],
                num_allocations=row["num_allocations"],
                batches_saved=row["batches_saved"],
            )
            for row in connection.execute(_TRIALS, (experiment_id,))
        )
    return ExperimentView(
        experiment_id, experiment["state"], experiment["progress"], experiment["end_reason"], trials
    )


_LIVE = "SELECT trial_id, experiment_id, directory FROM allocations WHERE state != 'TERMINATED' AND trial_id > 0 ORDER BY id"
_WAITING = """
SELECT trials.id, trials.experiment_id, logs.log, logs.time_us FROM trials
JOIN experiments ON experiments.id = trials.experiment_id
JOIN logs ON logs.id = (SELECT MAX(id) FROM logs WHERE trial_id = trials.id AND source = 'master')
WHERE trials.state = 'ACTIVE' AND experiments.state = 'ACTIVE' AND logs.log LIKE 'waiting for %'
    AND NOT EXISTS (SELECT 1 FROM allocations WHERE trial_id = trials.id AND state != 'TERMINATED')
ORDER BY trials.id
"""


def starting(state: StateDirectory, experiment_id: int | None = None) -> list[Start]:
    """Return what holds up trials that wait or start, of one experiment or of all."""
    with _connection(state) as connection:
        waiting = connection.execute(_WAITING).fetchall()
        live = connection.execute(_LIVE).fetchall()
    found = [
        Start(row["id"], row["experiment_id"], row["log"].rstrip("\n"), row["time_us"] / 1e6)
        for row in waiting
    ]
    for row in live:
        # Written by dstrial.launch.start_watch.
        said = _said(Path(row["directory"]) / "starting.json", "phase")
        if said is not None:
            found.append(Start(row["trial_id"], row["experiment_id"], *said))
    return [one for one in found if experiment_id in (None, one.experiment_id)]


def stalled(state: StateDirectory) -> list[Stalled]:
    """Return the trials whose ranks go on no more, or whose launcher is stopped."""
    with _connection(state) as connection:
        live = connection.execute(_LIVE).fetchall()
    found = []
    for row in live:
        said = stall_in(Path(row["directory"]))
        if said is not None:
            found.append(Stalled(row["trial_id"], row["experiment_id"], *said))
    return found


def stall_in(directory: Path) -> tuple[str, float] | None:
    """Return who holds up an allocation's ranks, and since when (epoch seconds).

    None if nobody does.
    """
    # Written by dstrial.master.scheduler.supervisor_watch, by dstrial.launch.stalls.stall_watch, and for a stopped launcher by
    # dstrial.master.backends.supervisor. The launcher knows nothing of a stopped supervisor, which so has a file of its own.
    return _said(directory / STOPPED_SUPERVISOR_NAME, "text") or _said(directory / "stalled.json", "text")


def untrained_phase_in(directory: Path) -> str | None:
    """Return what an allocation's ranks do before their first batch; else None."""
    said = _said(directory / "starting.json", "untrained")
    return None if said is None else said[0]


def _said(path: Path, key: str) -> tuple[str, float] | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
        fields = read_json(path)
        text, since_s = visible_line(str(fields[key])), float(fields["since_s"])
        return (text, since_s) if math.isfinite(since_s) else None
    return None


def new_log_rows(state: StateDirectory, trial_id: int, after_id: int, limit: int = 5000) -> list[LogRow]:
    """Return at most ``limit`` lines of a trial's log after a given one, in order."""
    with _connection(state) as connection:
        rows = connection.execute(
            "SELECT id, rank, source, stdtype, level, log FROM logs WHERE trial_id = ? AND id > ? ORDER BY id LIMIT ?",
            (trial_id, after_id, limit),
        ).fetchall()
    return [
        LogRow(row["id"], row["rank"], row["source"], row["stdtype"], row["level"], row["log"].rstrip("\n"))
        for row in rows
    ]


def last_log_id(state: StateDirectory, trial_id: int) -> int:
    """Return the number of the last line of a trial's log; 0 if it is empty."""
    with _connection(state) as connection:
        row = connection.execute(
            "SELECT COALESCE(MAX(id), 0) FROM logs WHERE trial_id = ?", (trial_id,)
        ).fetchone()
    return int(row[0])


def num_live_allocations(state: StateDirectory) -> int:
    """Return how many allocations have not ended, on whatever machine."""
    rows = _query(state, "SELECT COUNT(*) FROM allocations WHERE state != 'TERMINATED'")
    return int(rows[0][0]) if rows else 0


def supervisors(state: StateDirectory) -> list[Supervisor]:
    """Return the supervisors of the allocations that have not ended, oldest first."""
    rows = _query(
        state,
        "SELECT id, supervisor_pid, supervisor_start FROM allocations "
        "WHERE state != 'TERMINATED' AND supervisor_pid IS NOT NULL ORDER BY start_us",
    )
    return [Supervisor(str(row[0]), int(row[1]), str(row[2])) for row in rows]


def storages(state: StateDirectory) -> tuple[list[StorageIdentity], list[StoredFiles]]:
    """Return the known checkpoint storages, and what rows say of files in them.

    Raises:
        MasterError: the database cannot be used.
    """
    if not state.database_path.is_file():
        return [], []
    with _connection(state) as connection:
        return storage_rows.all_known(connection), storage_rows.all_files(connection)


def usage(state: StateDirectory) -> Usage:
    """Count slots in use, experiments and trials."""
    used = _query(
        state,
        "SELECT COALESCE(SUM(json_array_length(slots)), 0) FROM allocations WHERE state != 'TERMINATED'",
    )
    counts = [
        dict(_query(state, f"SELECT state, COUNT(*) FROM {table} GROUP BY state ORDER BY state"))  # noqa: S608 - ours
        for table in ("experiments", "trials")
    ]
    return Usage(int(used[0][0]) if used else 0, counts[0], counts[1])


def _query(state: StateDirectory, sql: str) -> list[tuple[Any, ...]]:
    """Read the database beside the master; nothing where there is none yet."""
    if not state.database_path.is_file():
        return []
    with reading(state.database_path) as connection:
        try:
            return [tuple(row) for row in connection.execute(sql)]
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                return []
            raise _unusable(state, error) from error
        except sqlite3.DatabaseError as error:
            raise _unusable(state, error) from error


def _unusable(state: StateDirectory, error: sqlite3.DatabaseError) -> MasterError:
    from dstrial.master.store.database import unusable

    return unusable(state.database_path, error)
