"""Metric reports of trials, with summaries, best and latest kept for lists."""

from __future__ import annotations

import dataclasses
import json
import math
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from dstrial.master.store import checkpoints
from dstrial.master.store.database import Transaction, fetch_all, fetch_each, fetch_one
from dstrial.master.store.errors import ConflictError, InvalidError, NotFoundError

_NO_STEPS = -1
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """A row of metrics; ``schema.sql`` says what the columns hold."""

    id: int
    trial_id: int
    run_id: int
    group_name: str
    steps: int
    end_us: int
    metrics: str
    per_batch: str | None
    archived: bool


@dataclasses.dataclass(frozen=True, slots=True)
class AddedReport:
    """What became of a report.

    Attributes:
        id: of its row.
        is_new: False if it, or a part of it with nothing new, had been stored before.
    """

    id: int
    is_new: bool


def summary_key(group: str) -> str:
    """Return under which key clients expect a group's summary and values."""
    return {"training": "avg_metrics", "validation": "validation_metrics"}.get(group, group)


def add_report(
    tx: Transaction,
    *,
    trial_id: int,
    run_id: int,
    group: str,
    steps: int | None,
    end_us: int,
    metrics: Mapping[str, Any],
    per_batch: Sequence[Mapping[str, Any]] = (),
) -> AddedReport:
    """Store a report, with everything that lists show of it.

    The same report again is recognised; other names at the same batch are added to it. The first report of a new run
    archives what older runs had reported beyond the checkpoint that it started from.

    Raises:
        StoreError: unknown trial, the report of an older run, another value for a metric that is stored.
    """
    trial = tx.execute("SELECT * FROM trials WHERE id = ?", (trial_id,)).fetchone()
    if trial is None:
        raise NotFoundError(f"trial {trial_id} is not found; expected one that exists.")
    if run_id != trial["run_id"]:
        raise InvalidError(
            f"trialRunId is {run_id}; expected {trial['run_id']}, the current run of trial {trial_id}. "
            "Reports of an earlier run are refused."
        )
    at = _NO_STEPS if steps is None else steps
    if at >= 0:
        known = tx.execute(
            "SELECT id, metrics FROM metrics WHERE trial_id = ? AND group_name = ? AND steps = ? AND run_id = ?",
            (trial_id, group, at, run_id),
        ).fetchone()
        if known is not None:
            return _merge(tx, trial, group, at, known, metrics)
        _begin_run(tx, trial, at)
    cursor = tx.execute(
        "INSERT INTO metrics (trial_id, run_id, group_name, steps, end_us, metrics, per_batch) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            trial_id,
            run_id,
            group,
            at,
            end_us,
            json.dumps(_plain(metrics)),
            json.dumps([_plain(values) for values in per_batch]) if per_batch else None,
        ),
    )
    report_id = int(cursor.lastrowid or 0)
    if at >= 0:
        trial = tx.execute("SELECT * FROM trials WHERE id = ?", (trial_id,)).fetchone()
        _note(tx, trial, group, at, report_id, metrics)
    return AddedReport(report_id, True)


def _begin_run(tx: Transaction, trial: sqlite3.Row, steps: int) -> None:
    trial_id, run_id = trial["id"], trial["run_id"]
    if trial["heartbeat_us"] is not None:
        _begin_detached_run(tx, trial_id, run_id, steps)
        return
    row = tx.execute(
        "SELECT num_reports, steps_at_start FROM allocations WHERE trial_id = ? AND run_id = ?",
        (trial_id, run_id),
    ).fetchone()
    if row is not None and row["num_reports"] == 0 and run_id > 1:
        archive_beyond(tx, trial_id, run_id, int(row["steps_at_start"]))


def _begin_detached_run(tx: Transaction, trial_id: int, run_id: int, steps: int) -> None:
    """Archive what older runs reported at or beyond the first batch of this run."""
    # Where it starts is not known: a detached run may not use its checkpoint.
    known = tx.execute(
        "SELECT 1 FROM metrics WHERE trial_id = ? AND run_id = ? AND steps >= 0 LIMIT 1", (trial_id, run_id)
    ).fetchone()
    if known is None and run_id > 1:
        archive_beyond(tx, trial_id, run_id, steps - 1)


def _merge(
    tx: Transaction,
    trial: sqlite3.Row,
    group: str,
    steps: int,
    known: sqlite3.Row,
    metrics: Mapping[str, Any],
) -> AddedReport:
    stored: dict[str, Any] = json.loads(known["metrics"])
    given = _plain(metrics)
    for name in stored.keys() & given.keys():
        if stored[name] != given[name]:
            raise ConflictError(
                f"metric {name!r} of group {group!r} at batch {steps} is {given[name]!r}; expected {stored[name]!r}, "
                "which was reported before. Report every metric once per batch."
            )
    new = {name: value for name, value in given.items() if name not in stored}
    if not new:
        return AddedReport(known["id"], False)
    tx.execute("UPDATE metrics SET metrics = ? WHERE id = ?", (json.dumps({**stored, **new}), known["id"]))
    _note(tx, trial, group, steps, known["id"], new)
    return AddedReport(known["id"], True)


def archive_beyond(tx: Transaction, trial_id: int, run_id: int, steps: int) -> None:
    """Archive what runs before ``run_id`` reported beyond a batch, and sum up again."""
    cursor = tx.execute(
        "UPDATE metrics SET archived = 1 WHERE trial_id = ? AND run_id < ? AND steps > ? AND archived = 0",
        (trial_id, run_id, steps),
    )
    if not cursor.rowcount:
        return
    tx.execute(
        "UPDATE trials SET summary_metrics = '{}', total_batches = ?, best_validation_id = NULL, "
        "latest_validation_id = NULL, searcher_metric_value = NULL WHERE id = ?",
        (max(steps, 0), trial_id),
    )
    rows = tx.execute(
        "SELECT * FROM metrics WHERE trial_id = ? AND archived = 0 AND steps >= 0 ORDER BY steps, id",
        (trial_id,),
    ).fetchall()
    for row in rows:
        trial = tx.execute("SELECT * FROM trials WHERE id = ?", (trial_id,)).fetchone()
        _note(tx, trial, row["group_name"], row["steps"], row["id"], json.loads(row["metrics"]))
    update_best_of_experiment(tx, trial_id)


def _note(
    tx: Transaction, trial: sqlite3.Row, group: str, steps: int, report_id: int, metrics: Mapping[str, Any]
) -> None:
    """Update the trial's summary, batches, and best and latest validation by a report."""
    summary: dict[str, Any] = json.loads(trial["summary_metrics"])
    of_group = summary.setdefault(summary_key(group), {})
    for name, value in metrics.items():
        of_group[name] = _summarised(of_group.get(name), value)
    tx.execute(
        "UPDATE trials SET summary_metrics = ?, total_batches = MAX(total_batches, ?) WHERE id = ?",
        (json.dumps(summary), steps, trial["id"]),
    )
    if group == "validation":
        _note_validation(tx, trial, steps, report_id, metrics)


def _note_validation(
    tx: Transaction, trial: sqlite3.Row, steps: int, report_id: int, metrics: Mapping[str, Any]
) -> None:
    experiment = tx.execute(
        "SELECT searcher_metric, smaller_is_better FROM experiments WHERE id = ?", (trial["experiment_id"],)
    ).fetchone()
    latest = trial["latest_validation_id"]
    latest_row = (
        None if latest is None else tx.execute("SELECT steps FROM metrics WHERE id = ?", (latest,)).fetchone()
    )
    if latest_row is None or steps >= latest_row["steps"]:
        tx.execute("UPDATE trials SET latest_validation_id = ? WHERE id = ?", (report_id, trial["id"]))
    value = as_number(metrics.get(experiment["searcher_metric"]))
    if value is None or math.isnan(value):
        return
    best = trial["searcher_metric_value"]
    if best is None or (value < best if experiment["smaller_is_better"] else value > best):
        tx.execute(
            "UPDATE trials SET searcher_metric_value = ?, best_validation_id = ? WHERE id = ?",
            (value, report_id, trial["id"]),
        )
        checkpoints.update_best(tx, trial["id"])
        update_best_of_experiment(tx, trial["id"])


def update_best_of_experiment(tx: Transaction, trial_id: int) -> None:
    """Keep the experiment's best trial and its metric."""
    experiment = tx.execute(
        "SELECT id, smaller_is_better FROM experiments WHERE id = (SELECT experiment_id FROM trials WHERE id = ?)",
        (trial_id,),
    ).fetchone()
    order = "ASC" if experiment["smaller_is_better"] else "DESC"
    best = tx.execute(
        "SELECT id, searcher_metric_value AS value FROM trials WHERE experiment_id = ? "  # noqa: S608 - ASC or DESC
        f"AND searcher_metric_value IS NOT NULL ORDER BY searcher_metric_value {order}, id LIMIT 1",
        (experiment["id"],),
    ).fetchone()
    tx.execute(
        "UPDATE experiments SET best_trial_id = ?, best_metric = ? WHERE id = ?",
        (None, None, experiment["id"]) if best is None else (best["id"], best["value"], experiment["id"]),
    )


def _summarised(before: dict[str, Any] | None, value: Any) -> dict[str, Any]:
    number = as_number(value)
    if number is None:
        kind = {str: "string", bool: "boolean", dict: "object", list: "array"}.get(type(value), "null")
        count = (before or {}).get("count", 0) + 1
        return {"count": count, "last": value, "type": kind}
    last = _plain_value(value)
    if before is None or before.get("type") != "number" or "sum" not in before:
        return {
            "count": 1,
            "sum": last,
            "mean": last,
            "min": last,
            "max": last,
            "last": last,
            "type": "number",
        }
    count = before["count"] + 1
    total = _number(before["sum"]) + number
    low, high = _number(before["min"]), _number(before["max"])
    return {
        "count": count,
        "sum": _plain_value(total),
        "mean": _plain_value(total / count),
        "min": _plain_value(number if number < low else low),
        "max": _plain_value(number if number > high else high),
        "last": last,
        "type": "number",
    }


def _number(value: Any) -> float:
    number = as_number(value)
    return math.nan if number is None else number


def as_number(value: Any) -> float | None:
    """Return a metric as a number, also from "NaN" and "Infinity"; None for others."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    return _WORDS.get(value) if isinstance(value, str) else None


def _plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name): _plain_value(value) for name, value in metrics.items()}


def _plain_value(value: Any) -> Any:
    """Return a value that JSON can hold: numbers that it cannot are words."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return _plain(value)
    return [_plain_value(item) for item in value] if isinstance(value, list) else value


def get_report(connection: sqlite3.Connection, report_id: int | None) -> Report | None:
    """Return one report, None for None."""
    if report_id is None:
        return None
    return fetch_one(Report, connection, "SELECT * FROM metrics WHERE id = ?", (report_id,))


def last_validation(connection: sqlite3.Connection, trial_id: int) -> int:
    """Return the batches of a trial's furthest validation in any run, 0 without one."""
    row = connection.execute(
        "SELECT COALESCE(MAX(steps), 0) AS steps FROM metrics WHERE trial_id = ? AND group_name = 'validation'",
        (trial_id,),
    ).fetchone()
    return max(int(row["steps"]), 0)


def reports(
    connection: sqlite3.Connection,
    trial_ids: Collection[int],
    group: str | None,
    *,
    after: tuple[int, int] | None = None,
    limit: int = 1000,
) -> list[Report]:
    """Return reports that are not archived, by trial and batch.

    ``group`` None stands for every group; ``after``, a trial and how many of its rows are taken already, is to go on.
    """
    taken: list[Report] = []
    condition = "" if group is None else " AND group_name = ?"
    for trial_id in sorted(trial_ids):
        offset = 0
        if after is not None:
            if trial_id < after[0]:
                continue
            offset = after[1] if trial_id == after[0] else 0
        taken += fetch_all(
            Report,
            connection,
            f"SELECT * FROM metrics WHERE trial_id = ? AND archived = 0{condition} "  # noqa: S608 - a constant
            "ORDER BY steps, id LIMIT ? OFFSET ?",
            (trial_id, *(() if group is None else (group,)), limit - len(taken), offset),
        )
        if len(taken) >= limit:
            break
    return taken


def every_report(connection: sqlite3.Connection, trial_id: int, group: str | None = None) -> Iterator[Report]:
    """Yield a trial's reports of one group or of all, by batch.

    Not those that are archived or belong to no batch.
    """
    condition = "" if group is None else " AND group_name = ?"
    yield from fetch_each(
        Report,
        connection,
        f"SELECT * FROM metrics WHERE trial_id = ? AND archived = 0 AND steps >= 0{condition} ORDER BY steps, id",  # noqa: S608 - a constant
        (trial_id, *(() if group is None else (group,))),
    )


def metric_names(connection: sqlite3.Connection, experiment_ids: Collection[int]) -> list[tuple[str, str]]:
    """Return (group, name) of every metric that the experiments' trials have reported."""
    found: set[tuple[str, str]] = set()
    for experiment_id in experiment_ids:
        for row in connection.execute(
            "SELECT summary_metrics FROM trials WHERE experiment_id = ?", (experiment_id,)
        ):
            for key, names in json.loads(row["summary_metrics"]).items():
                group = {"avg_metrics": "training", "validation_metrics": "validation"}.get(key, key)
                found.update((group, name) for name in names)
    return sorted(found)


def validations(connection: sqlite3.Connection, experiment_id: int) -> list[Report]:
    """Return the validations of an experiment's trials that are not archived, by time."""
    return fetch_all(
        Report,
        connection,
        "SELECT m.* FROM metrics m JOIN trials t ON t.id = m.trial_id "
        "WHERE t.experiment_id = ? AND m.group_name = 'validation' AND m.archived = 0 ORDER BY m.end_us",
        (experiment_id,),
    )
