"""Fill a master's database with experiments, trials and metric rows, as a year of use would."""

from __future__ import annotations

import json
import pathlib
import sqlite3
import uuid
from collections.abc import Callable, Iterator

CONFIG = {
    "name": "filled",
    "entrypoint": "python3 train.py",
    "hyperparameters": {
        "lr": {"type": "double", "minval": 0.0, "maxval": 1.0},
        "layers": {"type": "const", "val": 12},
    },
    "searcher": {"name": "random", "metric": "validation_loss", "smaller_is_better": True, "max_trials": 10},
    "resources": {"slots_per_trial": 1, "max_slots": None, "priority": None, "weight": 1},
    "checkpoint_storage": {
        "type": "shared_fs",
        "host_path": "/checkpoints",
        "save_experiment_best": 0,
        "save_trial_best": 1,
        "save_trial_latest": 1,
    },
    "reproducibility": {"experiment_seed": 1},
    "labels": ["filled"],
    "max_restarts": 5,
    "environment": {"environment_variables": {"cpu": [], "cuda": [], "rocm": []}},
}
_START_US = 1_700_000_000_000_000
_SUMMARY = '{"count": 500, "sum": 1.0, "mean": 0.5, "min": 0.1, "max": 0.9, "last": 0.2, "type": "number"}'
_SUMMARIES = [
    (group, name, _SUMMARY)
    for group, names in (
        ("training", ("loss", "accuracy", "batches_per_second")),
        ("validation", ("validation_loss", "validation_accuracy", "batches", "epochs")),
    )
    for name in names
]


def fill(
    path: pathlib.Path,
    *,
    num_experiments: int,
    num_trials: int,
    num_metrics: int,
    on_rows: Callable[[int], None],
) -> None:
    """Insert completed experiments with trials and reports straight into the file of a stopped master."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("BEGIN")
    owner_id = connection.execute("SELECT MIN(id) FROM users").fetchone()[0]
    # The last experiment is a large search, which has a tenth of all trials.
    in_last = max(num_trials // 10, 1)
    per_experiment = max((num_trials - in_last) // max(num_experiments - 1, 1), 1)
    per_trial = max(num_metrics // num_trials, 2)
    config = json.dumps(CONFIG)
    for index in range(num_experiments):
        experiment_id = connection.execute(
            "INSERT INTO experiments (job_id, state, config, original_config, name, owner_id, searcher_type, "
            "searcher_metric, smaller_is_better, slots_per_trial, queue_position, start_us, end_us, progress, best_metric) "
            "VALUES (?, 'COMPLETED', ?, ?, 'filled', ?, 'random', 'validation_loss', 1, 1, 1.0, ?, ?, 1.0, 0.1)",
            (str(uuid.uuid4()), config, config, owner_id, _START_US, _START_US + 3_600_000_000),
        ).lastrowid
        for _ in range(in_last if index == num_experiments - 1 else per_experiment):
            _fill_trial(connection, int(experiment_id or 0), per_trial)
            on_rows(per_trial)
    connection.execute("COMMIT")
    connection.close()


def _fill_trial(connection: sqlite3.Connection, experiment_id: int, num_reports: int) -> None:
    request_id = str(uuid.uuid4())
    trial_id = connection.execute(
        "INSERT INTO trials (experiment_id, request_id, state, hparams, seed, task_id, run_id, progress, total_batches, "
        "start_us, end_us, searcher_metric_value, is_closed) "
        "VALUES (?, ?, 'COMPLETED', ?, 1, ?, 1, 1.0, ?, ?, ?, 0.1, 1)",
        (
            experiment_id,
            request_id,
            json.dumps({"lr": 0.1, "layers": 12}),
            f"{experiment_id}.{request_id}",
            num_reports * 100,
            _START_US,
            _START_US + 3_600_000_000,
        ),
    ).lastrowid
    connection.executemany(
        "INSERT INTO metric_summaries (trial_id, group_name, name, summary) VALUES (?, ?, ?, ?)",
        [(trial_id, *one) for one in _SUMMARIES],
    )
    connection.execute(
        "INSERT INTO tasks (id, type, experiment_id, trial_id, start_us, end_us) VALUES (?, 'TRIAL', ?, ?, ?, ?)",
        (f"{experiment_id}.{request_id}", experiment_id, trial_id, _START_US, _START_US + 3_600_000_000),
    )
    connection.executemany(
        "INSERT INTO metrics (trial_id, run_id, group_name, steps, end_us, metrics) VALUES (?, 1, ?, ?, ?, ?)",
        _reports(int(trial_id or 0), num_reports),
    )
    last = connection.execute(
        "SELECT MAX(id) FROM metrics WHERE trial_id = ? AND group_name = 'validation'", (trial_id,)
    ).fetchone()[0]
    connection.execute(
        "UPDATE trials SET best_validation_id = ?, latest_validation_id = ? WHERE id = ?",
        (last, last, trial_id),
    )


def _reports(trial_id: int, num_reports: int) -> Iterator[tuple[int, str, int, int, str]]:
    for index in range(num_reports):
        steps, time_us = (index + 1) * 100, _START_US + index * 1_000_000
        if index % 10 == 9 or index == num_reports - 1:
            yield (
                trial_id,
                "validation",
                steps,
                time_us,
                '{"validation_loss": 0.25, "batches": 100, "epochs": 1}',
            )
        else:
            yield (
                trial_id,
                "training",
                steps,
                time_us,
                '{"loss": 0.5, "accuracy": 0.75, "batches_per_second": 12.5}',
            )
