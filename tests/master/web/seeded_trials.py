"""Rows of one trial for the page: its runs, its log, what its ranks measured; no processes."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence

from dstrial.master.clock import now_us
from dstrial.master.store.database import Transaction


def trials_of(tx: Transaction, experiment: int) -> list[int]:
    rows = tx.execute("SELECT id FROM trials WHERE experiment_id = ? ORDER BY id", (experiment,))
    return [int(row["id"]) for row in rows]


def task_of(tx: Transaction, trial: int) -> str:
    return str(tx.execute("SELECT task_id FROM trials WHERE id = ?", (trial,)).fetchone()["task_id"])


def add_runs(tx: Transaction, trial: int, runs: Sequence[tuple[int, int, int | None, str]]) -> None:
    """Add allocations: (from batch, slots, exit code or None while it runs, why it ended)."""
    row = tx.execute("SELECT experiment_id, task_id, start_us FROM trials WHERE id = ?", (trial,)).fetchone()
    for number, (steps, slots, code, reason) in enumerate(runs, 1):
        start_us = row["start_us"] + number * 30_000_000
        tx.execute(
            "INSERT INTO allocations (id, task_id, trial_id, experiment_id, run_id, state, slots, ports, resources_id, "
            "directory, steps_at_start, checkpoint_uuid, start_us, end_us, exit_code, exit_reason) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, '{}', ?, '/nonexistent', ?, ?, ?, ?, ?, ?)",
            (
                f"{row['task_id']}.{number}",
                row["task_id"],
                trial,
                row["experiment_id"],
                number,
                "RUNNING" if code is None else "TERMINATED",
                json.dumps(list(range(slots))),
                str(uuid.uuid4()),
                steps,
                None if steps == 0 else str(uuid.uuid4()),
                start_us,
                None if code is None else start_us + 25_000_000,
                code,
                reason,
            ),
        )
    tx.execute(
        "UPDATE trials SET run_id = ?, restarts = ? WHERE id = ?",
        (len(runs), sum(1 for run in runs if run[2]), trial),
    )
    tx.publish(f"trial:{trial}")


def add_lines(
    tx: Transaction,
    task: str,
    trial: int | None,
    lines: Iterable[tuple[int | None, str | None, str]],
) -> None:
    """Add lines of a log: (rank, level, text without its end)."""
    start_us = now_us() - 600 * 1_000_000
    tx.executemany(
        "INSERT INTO logs (task_id, trial_id, time_us, level, rank, source, stdtype, log) "
        "VALUES (?, ?, ?, ?, ?, 'task', 'stdout', ?)",
        (
            (task, trial, start_us + 500 * idx, level, rank, f"{text}\n")
            for idx, (rank, level, text) in enumerate(lines)
        ),
    )
    tx.publish(f"logs:{task}", *(() if trial is None else (f"logs:trial:{trial}",)))


def add_task(tx: Transaction) -> str:
    """Add a task without a trial; return its id."""
    task = str(uuid.uuid4())
    tx.execute("INSERT INTO tasks VALUES (?, 'COMMAND', NULL, NULL, ?, NULL)", (task, now_us()))
    return task


def add_metric(
    tx: Transaction, trial: int, group: str, reports: Iterable[tuple[int, dict[str, object]]]
) -> None:
    """Add reports: (batches, metrics); each number becomes a metric that is listed."""
    row = tx.execute("SELECT experiment_id, start_us FROM trials WHERE id = ?", (trial,)).fetchone()
    kinds: dict[str, str] = {}
    for steps, metrics in reports:
        kinds |= {
            name: "string"
            if isinstance(value, str) and value not in ("NaN", "Infinity", "-Infinity")
            else "number"
            for name, value in metrics.items()
            if not isinstance(value, (dict, list))
        }
        tx.execute(
            "INSERT INTO metrics (trial_id, run_id, group_name, steps, end_us, metrics) VALUES (?, 1, ?, ?, ?, ?)",
            (trial, group, steps, row["start_us"] + steps * 1_000_000, json.dumps(metrics)),
        )
    tx.executemany(
        "INSERT OR REPLACE INTO metric_summaries VALUES (?, ?, ?, ?)",
        [
            (trial, group, name, json.dumps({"count": 1, "last": 1, "type": kind}))
            for name, kind in kinds.items()
        ],
    )
    tx.publish(f"metrics:{trial}:{row['experiment_id']}")


def add_instruments(tx: Transaction, trial: int, num_ranks: int, num_reports: int = 20) -> None:
    """Add what ranks measured; rank 1 is slow, and has most memory."""
    reports = []
    for report in range(1, num_reports + 1):
        forward = [20.0 + (15 if rank == 1 else rank % 3) + report % 4 for rank in range(num_ranks)]
        memory = [(300 + 40 * rank + (500 if rank == 1 else 0)) * 2**20 for rank in range(num_ranks)]
        ranks: dict[str, list[float]] = {
            "batch_ms": [80.0 + report % 5] * num_ranks,
            "data_wait_ms": [3.0 + rank % 2 for rank in range(num_ranks)],
            "forward_ms": forward,
            "backward_ms": [60.0 - one for one in forward],
            "step_ms": [9.0] * num_ranks,
            "other_ms": [2.5] * num_ranks,
            "process_memory_bytes": [float(one) for one in memory],
        }
        metrics: dict[str, object] = {name: sum(values) / num_ranks for name, values in ranks.items()}
        metrics |= {
            "process_memory_bytes": max(memory),
            "timed_by": "host clock",
            "records_per_second": 800.0 - report % 5,
            "mfu": 0.41,
            "skipped_steps": 0,
            "ranks": ranks,
        }
        reports.append((10 * report, metrics))
    add_metric(tx, trial, "telemetry", reports)
