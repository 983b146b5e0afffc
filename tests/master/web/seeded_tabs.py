"""Rows for the tabs of an experiment: files, a config with its text, checkpoints, the rungs of a search by halving."""

from __future__ import annotations

import io
import json
import sys
import tarfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrial.master.clock import now_us
from dstrial.master.store.database import Transaction

DEEPSPEED = {
    "train_batch_size": 64,
    "zero_optimization": {"stage": 1},
    "comet": {"enabled": True, "api_key": "very-secret-1"},
}
CONFIG_TEXT = """\
# What is searched for
name: digits
entrypoint: python3 train.py
searcher:
  name: random
  metric: loss
  max_trials: 16
  max_length: {batches: 200}
hyperparameters:
  deepspeed_config: ds.json
  global_batch_size: 64
  lr: {type: log, base: 10, minval: -4, maxval: -1}
environment:
  environment_variables: [HF_TOKEN=very-secret-2]
"""
TRAIN = "\n".join([f"line_{number} = {number}" for number in range(1, 81)]) + "\nprint('<b>end</b>')\n"


def packed(files: Mapping[str, str | bytes]) -> bytes:
    """Return a model definition."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(path)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def give_files(tx: Transaction, experiment: int, files: Mapping[str, str | bytes]) -> None:
    """Replace an experiment's model definition."""
    tx.execute("UPDATE model_definitions SET tgz = ? WHERE experiment_id = ?", (packed(files), experiment))


def give_config(tx: Transaction, experiment: int, text: str, **changes: Any) -> None:
    """Let an experiment have been submitted with a text, and change its effective config."""
    config = json.loads(
        tx.execute("SELECT config FROM experiments WHERE id = ?", (experiment,)).fetchone()[0]
    )
    tx.execute(
        "UPDATE experiments SET original_config = ?, config = ? WHERE id = ?",
        (text, json.dumps({**config, **changes}), experiment),
    )


def trials_of(tx: Transaction, experiment: int) -> list[tuple[int, str]]:
    """Return id and request id of an experiment's trials."""
    rows = tx.execute("SELECT id, request_id FROM trials WHERE experiment_id = ? ORDER BY id", (experiment,))
    return [(int(row["id"]), str(row["request_id"])) for row in rows.fetchall()]


def make_halving(tx: Transaction, experiment: int) -> None:
    """Make a search of eight trials or more one by halving: three rungs, one trial failed, two under way."""
    config = json.loads(
        tx.execute("SELECT config FROM experiments WHERE id = ?", (experiment,)).fetchone()[0]
    )
    config["searcher"] = {
        "name": "async_halving",
        "metric": "loss",
        "smaller_is_better": True,
        "time_metric": "batches",
        "max_time": 160,
        "num_rungs": 3,
        "divisor": 4.0,
        "max_trials": 16,
        "max_concurrent_trials": 4,
    }
    ids = [request_id for _, request_id in trials_of(tx, experiment)]
    winner, second, failed, *others = ids[:6]
    snapshot = {
        "method": {
            "rungs": [
                [
                    [0.1, winner],
                    [0.2, second],
                    *[[0.3 + at, one] for at, one in enumerate(others)],
                    [sys.float_info.max, failed],
                ],
                [[0.08, winner], [0.15, second]],
                [[0.05, winner]],
            ],
            "rung_of": {winner: 2, second: 1, failed: 0, **dict.fromkeys(others, 0), ids[6]: 0, ids[7]: 0},
            "stopped": [winner, second, failed, *others],
            "num_invalid": 0,
            "num_completed": 6,
        },
        "closed": [winner, second, failed, *others],
    }
    tx.execute(
        "UPDATE experiments SET config = ?, searcher_type = 'async_halving', searcher_snapshot = ? WHERE id = ?",
        (json.dumps(config), json.dumps(snapshot), experiment),
    )


def add_checkpoint(
    tx: Transaction,
    experiment: int,
    trial: int,
    steps: int,
    *,
    state: str = "COMPLETED",
    storage: Path | None = None,
) -> str:
    """Add a checkpoint of two files, in a storage where there is one; return its uuid."""
    name = str(uuid.uuid4())
    resources = {"weights.pt": 3000, "state.json": 2}
    if storage is not None:
        (storage / name).mkdir(parents=True)
        (storage / name / "weights.pt").write_bytes(b"w" * 3000)
        (storage / name / "state.json").write_text("{}")
    engine = {
        "engine_kind": "data_parallel",
        "world_size": 2,
        "data_parallel_size": 2,
        "pipeline_stages": 1,
        "model_parallel_size": 1,
        "zero_stage": 2,
        "offload_optimizer": "cpu",
        "optimizer": "AdamW",
        "train_batch_size": 64,
    }
    metadata = {"steps_completed": steps, "format": "dstrial", "engines": [engine]}
    tx.execute(
        "INSERT INTO checkpoints (uuid, experiment_id, trial_id, task_id, run_id, state, steps, resources, metadata, size, "
        "report_us, manifest_sha256) VALUES (?, ?, ?, 'task', 1, ?, ?, ?, ?, 3002, ?, ?)",
        (
            name,
            experiment,
            trial,
            state,
            steps,
            json.dumps(resources),
            json.dumps(metadata),
            now_us(),
            "ab" * 32,
        ),
    )
    return name
