"""Rows for the page: a search with curves, as many experiments and trials as are asked for; no processes."""

from __future__ import annotations

import json
import math
import random
import uuid

from dstrial.master.clock import now_us
from dstrial.master.store.database import Transaction

_CONFIG = {
    "entrypoint": "python3 train.py",
    "searcher": {"name": "random", "metric": "loss", "smaller_is_better": True, "max_trials": 16},
    "resources": {"slots_per_trial": 2},
    "records_per_epoch": 6400,
    "checkpoint_storage": {"type": "shared_fs", "host_path": "/nonexistent"},
}


def add_experiment(
    tx: Transaction,
    *,
    name: str = "digits",
    state: str = "COMPLETED",
    num_trials: int = 1,
    num_points: int = 20,
    labels: tuple[str, ...] = (),
    seed: int = 0,
    metrics: tuple[str, ...] = ("loss", "accuracy"),
) -> int:
    """Add an experiment whose trials have validated ``num_points`` times; return its id."""
    chance = random.Random(seed)
    space = {
        "global_batch_size": 64,
        "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
        "layers": {"type": "int", "minval": 1, "maxval": 8},
        "optimizer": {"type": "categorical", "vals": ["adam", "sgd"]},
    }
    config = {**_CONFIG, "name": name, "hyperparameters": space}
    start_us = now_us() - 3600 * 1_000_000
    owner = tx.execute("SELECT id FROM users WHERE username = 'determined'").fetchone()["id"]
    cursor = tx.execute(
        "INSERT INTO experiments (job_id, state, config, original_config, name, owner_id, searcher_type, searcher_metric, "
        "smaller_is_better, slots_per_trial, queue_position, start_us, end_us, progress, labels) "
        "VALUES (?, ?, ?, ?, ?, ?, 'random', 'loss', 1, 2, 1.0, ?, ?, ?, ?)",
        (
            str(uuid.uuid4()),
            state,
            json.dumps(config),
            f"name: {json.dumps(name)}\n",
            name,
            owner,
            start_us,
            None if state in ("ACTIVE", "PAUSED") else start_us + 1800 * 1_000_000,
            0.4 if state in ("ACTIVE", "PAUSED") else 1.0,
            json.dumps(sorted(labels)),
        ),
    )
    experiment = int(cursor.lastrowid or 0)
    tx.execute("INSERT INTO model_definitions VALUES (?, ?)", (experiment, b""))
    best: tuple[float, int] = (math.inf, 0)
    for _ in range(num_trials):
        hparams = {
            "global_batch_size": 64,
            "lr": 10 ** chance.uniform(-4, -1),
            "layers": chance.randint(1, 8),
            "optimizer": chance.choice(["adam", "sgd"]),
        }
        final = (
            abs(math.log10(hparams["lr"]) + 2.5) * 0.2
            + 0.02 * abs(hparams["layers"] - 5)
            + chance.random() * 0.05
        )
        values = [
            final + (2.3 - final) * math.exp(-6 * (point + 1) / num_points) for point in range(num_points)
        ]
        task = str(uuid.uuid4())
        trial = int(
            tx.execute(
                "INSERT INTO trials (experiment_id, request_id, state, hparams, seed, task_id, run_id, start_us, end_us, "
                "total_batches, searcher_metric_value, progress) VALUES (?, ?, ?, ?, 1, ?, 1, ?, ?, ?, ?, 1.0)",
                (
                    experiment,
                    str(uuid.uuid4()),
                    state,
                    json.dumps(hparams),
                    task,
                    start_us,
                    None if state in ("ACTIVE", "PAUSED") else start_us + 1800 * 1_000_000,
                    num_points * 10,
                    values[-1] if values else None,
                ),
            ).lastrowid
            or 0
        )
        tx.execute(
            "INSERT INTO tasks VALUES (?, 'TRIAL', ?, ?, ?, NULL)", (task, experiment, trial, start_us)
        )
        tx.executemany(
            "INSERT INTO metrics (trial_id, run_id, group_name, steps, end_us, metrics) VALUES (?, 1, ?, ?, ?, ?)",
            [
                (
                    trial,
                    group,
                    10 * (point + 1),
                    start_us + 1_000_000 * (point + 1),
                    json.dumps(
                        {name: value if idx == 0 else 1 - value / 3 for idx, name in enumerate(metrics)}
                    ),
                )
                for group in ("training", "validation")
                for point, value in enumerate(values)
            ],
        )
        tx.executemany(
            "INSERT INTO metric_summaries VALUES (?, ?, ?, ?)",
            [
                (trial, group, name, json.dumps({"count": num_points, "last": 1, "type": "number"}))
                for group in ("training", "validation")
                for name in metrics
            ],
        )
        newest = tx.execute(
            "SELECT MAX(id) FROM metrics WHERE trial_id = ? AND group_name = 'validation'", (trial,)
        ).fetchone()[0]
        tx.execute(
            "UPDATE trials SET best_validation_id = ?, latest_validation_id = ? WHERE id = ?",
            (newest, newest, trial),
        )
        if values and values[-1] < best[0]:
            best = values[-1], trial
    if best[1]:
        tx.execute(
            "UPDATE experiments SET best_trial_id = ?, best_metric = ? WHERE id = ?",
            (best[1], best[0], experiment),
        )
    tx.publish(f"experiment:{experiment}")
    return experiment
