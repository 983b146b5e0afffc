"""Store metric reports, and update each trial's best and latest validation.

Every SQL statement on ``metrics`` needs a literal condition ``steps >= 0`` or ``steps < 0``. Otherwise SQLite cannot use the
partial indexes, and scans the reports of all trials.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sqlite3
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from dstrial.master.store import checkpoints, trials
from dstrial.master.store.database import Transaction, exists, fetch_each, fetch_one, fetch_value
from dstrial.master.store.errors import ConflictError, InvalidError
from dstrial.master.store.reports import metric_summaries
from dstrial.master.store.reports.metric_summaries import as_number, plain
from dstrial.master.store.trials import Trial

_NO_STEPS = -1  # stored as the batch number of profiling reports, which have none
# Approximate limits of a stream message: number of reports, and of characters.
_AT_ONCE = 1000
_CHARS_AT_ONCE = 4 * 2**20
_MAX_REPORTS = 1000  # in a response that is not a stream


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """A row of table ``metrics``, documented in ``schema.sql``."""

    id: int
    trial_id: int
    run_id: int
    group_name: str
    steps: int
    end_us: int
    metrics: str
    per_batch: str | None
    archived: bool


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
) -> bool:
    """Store a report and update the trial's summaries and best and latest validation.

    ``steps`` is the number of completed batches; None for a profiling report. If the run has already reported this batch and
    group, new metrics are added to the stored report. Equal metrics are ignored. The first report of a run archives the
    reports of older runs whose batches the run repeats. Returns False if the report contains nothing new.

    Raises:
        StoreError: the report is of an older run, or a metric differs from its stored value.
    """
    trial = trials.require(tx.connection, trial_id)
    if run_id != trial.run_id:
        raise InvalidError(
            f"trialRunId is {run_id}; expected {trial.run_id}, the current run of trial {trial_id}. "
            "Reports of an earlier run are refused."
        )
    tx.publish(f"metrics:{trial_id}:{trial.experiment_id}")
    values, of_batches = plain(metrics), [plain(of_batch) for of_batch in per_batch]
    if steps is None:
        _insert(tx, trial, group, _NO_STEPS, end_us, values, of_batches)
        return True
    known = tx.execute(
        "SELECT id, metrics FROM metrics WHERE trial_id = ? AND group_name = ? AND steps = ? AND run_id = ? AND steps >= 0",
        (trial_id, group, steps, run_id),
    ).fetchone()
    if known is not None:
        return _merge(tx, trial, group, steps, known, values)
    if _begin_run(tx, trial, steps):
        trial = trials.require(tx.connection, trial_id)
    report_id = _insert(tx, trial, group, steps, end_us, values, of_batches)
    _record_values(tx, trial, group, steps, report_id, values)
    return True


def _insert(
    tx: Transaction,
    trial: Trial,
    group: str,
    steps: int,
    end_us: int,
    values: Mapping[str, Any],
    of_batches: list[dict[str, Any]],
) -> int:
    columns = {
        "trial_id": trial.id,
        "run_id": trial.run_id,
        "group_name": group,
        "steps": steps,
        "end_us": end_us,
        "metrics": values,
        "per_batch": of_batches or None,
    }
    return tx.insert("metrics", columns)


def _begin_run(tx: Transaction, trial: Trial, steps: int) -> bool:
    """Archive older runs' reports that a run repeats, at the first report of the run.

    A run repeats the batches after the checkpoint from which its allocation started. ``steps`` is the batch of the report, and
    is used for detached runs only. Returns whether any report was archived.
    """
    trial_id, run_id = trial.id, trial.run_id
    if trial.heartbeat_us is not None:
        return _begin_detached_run(tx, trial_id, run_id, steps)
    row = tx.execute(
        "SELECT num_reports, steps_at_start FROM allocations WHERE trial_id = ? AND run_id = ?",
        (trial_id, run_id),
    ).fetchone()
    if row is None or row["num_reports"] or run_id <= 1:
        return False
    return archive_beyond(tx, trial_id, run_id, int(row["steps_at_start"]))


def _begin_detached_run(tx: Transaction, trial_id: int, run_id: int, steps: int) -> bool:
    """Archive older runs' reports from batch ``steps`` on, at a run's first report.

    ``steps`` is the batch of that first report. Returns whether any report was archived.
    """
    # The run's first batch is unknown until its first report: a detached run need not resume from its checkpoint.
    known = "SELECT 1 FROM metrics WHERE trial_id = ? AND run_id = ? AND steps >= 0 LIMIT 1"
    is_first = not exists(tx.connection, known, (trial_id, run_id))
    return is_first and run_id > 1 and archive_beyond(tx, trial_id, run_id, steps - 1)


def _merge(
    tx: Transaction, trial: Trial, group: str, steps: int, known: sqlite3.Row, given: Mapping[str, Any]
) -> bool:
    stored: dict[str, Any] = json.loads(known["metrics"])
    for name in stored.keys() & given.keys():
        if stored[name] != given[name]:
            raise ConflictError(
                f"metric {name!r} of group {group!r} at batch {steps} is {given[name]!r}; expected {stored[name]!r}, "
                "which was reported before. Report every metric once per batch."
            )
    new = {name: value for name, value in given.items() if name not in stored}
    if new:
        tx.update("metrics", known["id"], {"metrics": {**stored, **new}})
        _record_values(tx, trial, group, steps, known["id"], new)
    return bool(new)


def archive_beyond(tx: Transaction, trial_id: int, run_id: int, steps: int) -> bool:
    """Archive the reports after batch ``steps`` of a trial's runs before ``run_id``.

    Run ``run_id`` repeats these batches. If any report was archived, the trial's number of batches is set to ``steps``. Its
    summaries and best validation are then recomputed from the other reports. Returns whether any report was archived.
    """
    cursor = tx.execute(
        "UPDATE metrics SET archived = 1 WHERE trial_id = ? AND run_id < ? AND steps > ? AND archived = 0 AND steps >= 0",
        (trial_id, run_id, steps),
    )
    if not cursor.rowcount:
        return False
    nothing = dict.fromkeys(("best_validation_id", "latest_validation_id", "searcher_metric_value"))
    tx.update("trials", trial_id, {"total_batches": max(steps, 0), **nothing})
    left = every_report(tx.connection, trial_id)
    metric_summaries.replace(tx, trial_id, ((row.group_name, json.loads(row.metrics)) for row in left))
    for row in every_report(tx.connection, trial_id, "validation"):
        trial = trials.require(tx.connection, trial_id)
        _record_validation(tx, trial, row.steps, row.id, json.loads(row.metrics))
    update_best_of_experiment(tx, trial_id)
    return True


def _record_values(
    tx: Transaction, trial: Trial, group: str, steps: int, report_id: int, values: Mapping[str, Any]
) -> None:
    metric_summaries.add(tx, trial, group, values)
    tx.execute("UPDATE trials SET total_batches = MAX(total_batches, ?) WHERE id = ?", (steps, trial.id))
    if group == "validation":
        _record_validation(tx, trial, steps, report_id, values)


def _record_validation(
    tx: Transaction, trial: Trial, steps: int, report_id: int, metrics: Mapping[str, Any]
) -> None:
    metric, is_smaller_better = tx.execute(
        "SELECT searcher_metric, smaller_is_better FROM experiments WHERE id = ?", (trial.experiment_id,)
    ).fetchone()
    latest = get_report(tx.connection, trial.latest_validation_id)
    if latest is None or steps >= latest.steps:
        tx.update("trials", trial.id, {"latest_validation_id": report_id})
    value = as_number(metrics.get(metric))
    if value is None or math.isnan(value):
        return
    best = trial.searcher_metric_value
    if best is None or (value < best if is_smaller_better else value > best):
        tx.update("trials", trial.id, {"searcher_metric_value": value, "best_validation_id": report_id})
        checkpoints.update_best(tx, trial.id)
        update_best_of_experiment(tx, trial.id)


def update_best_of_experiment(tx: Transaction, trial_id: int) -> None:
    """Update the best trial of the experiment to which trial ``trial_id`` belongs."""
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
    best_id, value = (None, None) if best is None else best
    tx.update("experiments", experiment["id"], {"best_trial_id": best_id, "best_metric": value})


def get_report(connection: sqlite3.Connection, report_id: int | None) -> Report | None:
    if report_id is None:
        return None
    return fetch_one(Report, connection, "SELECT * FROM metrics WHERE id = ?", (report_id,))


def last_validation(connection: sqlite3.Connection, trial_id: int) -> int:
    """Return the last batch at which any run of a trial validated; 0 if none."""
    sql = "SELECT MAX(steps) FROM metrics WHERE trial_id = ? AND group_name = 'validation' AND steps >= 0"
    return fetch_value(int, connection, sql, (trial_id,)) or 0


def report_keys(connection: sqlite3.Connection, trial_id: int) -> list[tuple[int, int, str]]:
    """Return (id, batch, group) of the reports that ``every_report`` yields."""
    rows = connection.execute(
        "SELECT id, steps, group_name FROM metrics WHERE trial_id = ? AND archived = 0 AND steps >= 0 ORDER BY steps, id",
        (trial_id,),
    )
    return [(report_id, steps, group) for report_id, steps, group in rows]


def report_ids(connection: sqlite3.Connection, trial_id: int, group: str | None) -> array[int]:
    """Return ids of a trial's reports in batch order, without archived reports.

    ``group`` None means all groups. A report is archived if a later run repeats its batch. Profiling reports, which have no
    batch, come first.
    """
    condition = "" if group is None else " AND group_name = ?"
    values = (trial_id, *(() if group is None else (group,)))
    found = array("q")
    # Use two queries, as each condition on ``steps`` has its own partial index.
    for part, order in (("steps < 0", "id"), ("steps >= 0", "steps, id")):
        rows = connection.execute(
            f"SELECT id FROM metrics WHERE trial_id = ? AND {part} AND archived = 0{condition} ORDER BY {order}",  # noqa: S608 - constants
            values,
        )
        found.extend(row["id"] for row in rows)
    return found


def some_reports(connection: sqlite3.Connection, ids: Sequence[int]) -> list[Report]:
    """Return reports from the start of ``ids``, as many as fit in a stream message.

    A report that alone exceeds the limit is returned alone. Reports that were deleted concurrently are skipped.
    """
    found: list[Report] = []
    num_chars = 0
    for report_id in ids[:_AT_ONCE]:
        row = get_report(connection, report_id)
        if row is not None:
            found.append(row)
            num_chars += len(row.metrics) + len(row.per_batch or "")
        if num_chars > _CHARS_AT_ONCE:
            break
    return found


def reports(connection: sqlite3.Connection, trial_ids: Collection[int], group: str | None) -> list[Report]:
    """Return at most ``_MAX_REPORTS`` reports of trials, by trial id, then batch.

    ``group`` None means all groups. Archived reports, whose batches a later run of the trial repeats, are left out.
    """
    taken: list[Report] = []
    for trial_id in sorted(trial_ids):
        for report_id in report_ids(connection, trial_id, group)[: _MAX_REPORTS - len(taken)]:
            row = get_report(connection, report_id)
            if row is not None:
                taken.append(row)
    return taken


def every_report(connection: sqlite3.Connection, trial_id: int, group: str | None = None) -> Iterator[Report]:
    """Yield a trial's reports in batch order, without profiling and archived reports.

    ``group`` None means all groups. A report is archived if a later run repeats its batch.
    """
    condition = "" if group is None else " AND group_name = ?"
    yield from fetch_each(
        Report,
        connection,
        f"SELECT * FROM metrics WHERE trial_id = ? AND archived = 0 AND steps >= 0{condition} ORDER BY steps, id",  # noqa: S608 - a constant
        (trial_id, *(() if group is None else (group,))),
    )
