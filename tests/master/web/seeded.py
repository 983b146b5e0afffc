"""Insert rows for the page to show, such as experiments, logs, tasks and models."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import random
import sys
import tarfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rows import add, value

from dstrial.master.clock import now_us
from dstrial.master.store import models
from dstrial.master.store.database import Transaction

NOTES_BEGIN = "Report of a search of dsat (JSON; do not edit):\n"
SPACE = {
    "global_batch_size": 64,
    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
    "layers": {"type": "int", "minval": 1, "maxval": 8},
    "optimizer": {"type": "categorical", "vals": ["adam", "sgd"]},
}
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
_CONFIG = {
    "entrypoint": "python3 train.py",
    "searcher": {"name": "random", "metric": "loss", "smaller_is_better": True, "max_trials": 16},
    "resources": {"slots_per_trial": 2},
    "records_per_epoch": 6400,
    "checkpoint_storage": {"type": "shared_fs", "host_path": "/nonexistent"},
}
_ENGINE = {
    "engine_kind": "data_parallel", "world_size": 2, "data_parallel_size": 2, "pipeline_stages": 1, "model_parallel_size": 1,
    "zero_stage": 2, "offload_optimizer": "cpu", "optimizer": "AdamW", "train_batch_size": 64,
}  # fmt: skip


def owner_of(tx: Transaction) -> int:
    return int(value(tx, "SELECT id FROM users WHERE username = 'determined'"))


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
    """Add an experiment whose trials validate ``num_points`` times; return its id."""
    chance = random.Random(seed)
    start_us = now_us() - 3600 * 1_000_000
    is_live = state in ("ACTIVE", "PAUSED")
    times = {"start_us": start_us, "end_us": None if is_live else start_us + 1800 * 1_000_000}
    experiment = add(
        tx, "experiments", state=state, config={**_CONFIG, "name": name, "hyperparameters": SPACE},
        original_config=f"name: {json.dumps(name)}\n", name=name, owner_id=owner_of(tx), searcher_type="random",
        slots_per_trial=2, progress=0.4 if is_live else 1.0, labels=sorted(labels), **times,
    )  # fmt: skip
    add(tx, "model_definitions", experiment_id=experiment, tgz=b"")
    best: tuple[float, int] = (math.inf, 0)
    for _ in range(num_trials):
        hparams = {
            "global_batch_size": 64,
            "lr": 10 ** chance.uniform(-4, -1),
            "layers": chance.randint(1, 8),
            "optimizer": chance.choice(["adam", "sgd"]),
        }
        final = abs(math.log10(hparams["lr"]) + 2.5) * 0.2 + 0.02 * abs(hparams["layers"] - 5)
        final += chance.random() * 0.05
        values = [
            final + (2.3 - final) * math.exp(-6 * (point + 1) / num_points) for point in range(num_points)
        ]
        trial = add_trial(
            tx, experiment, state=state, hparams=hparams, progress=1.0, total_batches=num_points * 10,
            searcher_metric_value=values[-1] if values else None, **times,
        )  # fmt: skip
        tx.executemany(
            "INSERT INTO metrics (trial_id, run_id, group_name, steps, end_us, metrics) VALUES (?, 1, ?, ?, ?, ?)",
            [
                (
                    *(trial, group, 10 * (point + 1), start_us + 1_000_000 * (point + 1)),
                    json.dumps({name: one if idx == 0 else 1 - one / 3 for idx, name in enumerate(metrics)}),
                )
                for group in ("training", "validation")
                for point, one in enumerate(values)
            ],
        )
        for group in ("training", "validation"):
            _add_summaries(tx, trial, group, dict.fromkeys(metrics, "number"))
        newest = value(
            tx, "SELECT MAX(id) FROM metrics WHERE trial_id = ? AND group_name = 'validation'", trial
        )
        tx.update("trials", trial, {"best_validation_id": newest, "latest_validation_id": newest})
        if values and values[-1] < best[0]:
            best = values[-1], trial
    if best[1]:
        tx.update("experiments", experiment, {"best_trial_id": best[1], "best_metric": best[0]})
    tx.publish(f"experiment:{experiment}")
    return experiment


def add_trial(tx: Transaction, experiment: int, **columns: Any) -> int:
    """Add a trial with its task."""
    task = str(uuid.uuid4())
    columns = {"state": "ACTIVE", "start_us": now_us(), **columns}
    trial = add(tx, "trials", experiment_id=experiment, task_id=task, run_id=1, **columns)
    add(tx, "tasks", id=task, experiment_id=experiment, trial_id=trial, start_us=columns["start_us"])
    tx.publish(f"experiment:{experiment}")
    return trial


def _add_summaries(tx: Transaction, trial: int, group: str, kinds: Mapping[str, str]) -> None:
    for name, kind in kinds.items():
        summary = {"count": 1, "last": 1, "type": kind}
        columns = {"trial_id": trial, "group_name": group, "name": name, "summary": summary}
        tx.insert("metric_summaries", columns, "INSERT OR REPLACE")


def trials_of(tx: Transaction, experiment: int) -> list[int]:
    rows = tx.execute("SELECT id FROM trials WHERE experiment_id = ? ORDER BY id", (experiment,))
    return [int(row["id"]) for row in rows]


def task_of(tx: Transaction, trial: int) -> str:
    return str(value(tx, "SELECT task_id FROM trials WHERE id = ?", trial))


def add_runs(tx: Transaction, trial: int, runs: Sequence[tuple[int, int, int | None, str]]) -> None:
    """Add allocations of (first batch, slots, exit code or None if running, reason)."""
    row = tx.execute("SELECT experiment_id, task_id, start_us FROM trials WHERE id = ?", (trial,)).fetchone()
    for number, (steps, slots, code, reason) in enumerate(runs, 1):
        start_us = row["start_us"] + number * 30_000_000
        add(
            tx, "allocations", id=f"{row['task_id']}.{number}", task_id=row["task_id"], trial_id=trial,
            experiment_id=row["experiment_id"], run_id=number, state="RUNNING" if code is None else "TERMINATED",
            slots=list(range(slots)), steps_at_start=steps, checkpoint_uuid=str(uuid.uuid4()) if steps else None,
            start_us=start_us, end_us=None if code is None else start_us + 25_000_000, exit_code=code, exit_reason=reason,
        )  # fmt: skip
    tx.update("trials", trial, {"run_id": len(runs), "restarts": sum(1 for run in runs if run[2])})
    tx.publish(f"trial:{trial}")


def add_lines(
    tx: Transaction, task: str, trial: int | None, lines: Iterable[tuple[int | None, str | None, str]]
) -> None:
    """Add log lines of (rank, level, text without newline)."""
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


def add_bare_task(tx: Transaction) -> str:
    """Add a task that belongs to no trial or command; return its id."""
    task = str(uuid.uuid4())
    add(tx, "tasks", id=task, type="COMMAND", start_us=now_us())
    return task


def add_metric(
    tx: Transaction, trial: int, group: str, reports: Iterable[tuple[int, dict[str, object]]]
) -> None:
    """Add reports of (batches, metrics), and summaries of their scalar metrics."""
    row = tx.execute("SELECT experiment_id, start_us FROM trials WHERE id = ?", (trial,)).fetchone()
    kinds: dict[str, str] = {}
    for steps, metrics in reports:
        for name, one in metrics.items():
            is_text = isinstance(one, str) and one not in ("NaN", "Infinity", "-Infinity")
            if not isinstance(one, (dict, list)):
                kinds[name] = "string" if is_text else "number"
        end_us = row["start_us"] + steps * 1_000_000
        add(tx, "metrics", trial_id=trial, group_name=group, steps=steps, end_us=end_us, metrics=metrics)
    _add_summaries(tx, trial, group, kinds)
    tx.publish(f"metrics:{trial}:{row['experiment_id']}")


def add_instruments(tx: Transaction, trial: int, num_ranks: int, num_reports: int = 20) -> None:
    """Add telemetry by rank, with extra forward time and memory for rank 1."""
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
        means: dict[str, object] = {name: sum(values) / num_ranks for name, values in ranks.items()}
        numbers = {"records_per_second": 800.0 - report % 5, "mfu": 0.41, "skipped_steps": 0}
        own = {"process_memory_bytes": max(memory), "timed_by": "host clock", "ranks": ranks}
        reports.append((10 * report, {**means, **numbers, **own}))
    add_metric(tx, trial, "telemetry", reports)


def packed(files: Mapping[str, str | bytes]) -> bytes:
    """Return a model definition archive (tar.gz) of the files."""
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
    tx.update("model_definitions", experiment, {"tgz": packed(files)}, key="experiment_id")


def config_of(tx: Transaction, experiment: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(value(tx, "SELECT config FROM experiments WHERE id = ?", experiment))
    return found


def give_config(tx: Transaction, experiment: int, text: str, **changes: Any) -> None:
    """Set an experiment's submitted config text, and change its effective config."""
    config = {**config_of(tx, experiment), **changes}
    tx.update("experiments", experiment, {"original_config": text, "config": config})


def make_halving(tx: Transaction, experiment: int) -> None:
    """Turn a search of at least 8 trials into async_halving with three rungs."""
    searcher = {
        **{"name": "async_halving", "metric": "loss", "smaller_is_better": True, "time_metric": "batches"},
        **{"max_time": 160, "num_rungs": 3, "divisor": 4.0, "max_trials": 16, "max_concurrent_trials": 4},
    }
    rows = tx.execute("SELECT request_id FROM trials WHERE experiment_id = ? ORDER BY id", (experiment,))
    ids = [row["request_id"] for row in rows]
    winner, second, failed, *others = ids[:6]
    ended = [[0.3 + at, one] for at, one in enumerate(others)]
    bracket = {
        "rungs": [
            [[0.1, winner], [0.2, second], *ended, [sys.float_info.max, failed]],
            [[0.08, winner], [0.15, second]],
            [[0.05, winner]],
        ],
        "rung_of": {winner: 2, second: 1, **dict.fromkeys([failed, *others, ids[6], ids[7]], 0)},
        "stopped": ids[:6],
        "num_invalid": 0,
        "num_completed": 6,
    }
    snapshot = {"method": {"brackets": [bracket]}, "closed": ids[:6]}
    config = {**config_of(tx, experiment), "searcher": searcher}
    columns = {"config": config, "searcher_type": "async_halving", "searcher_snapshot": snapshot}
    tx.update("experiments", experiment, columns)


def add_checkpoint(
    tx: Transaction,
    experiment: int,
    trial: int,
    steps: int,
    *,
    state: str = "COMPLETED",
    storage: Path | None = None,
) -> str:
    """Add a checkpoint and return its uuid; with ``storage``, write its two files."""
    name = str(uuid.uuid4())
    if storage is not None:
        (storage / name).mkdir(parents=True)
        (storage / name / "weights.pt").write_bytes(b"w" * 3000)
        (storage / name / "state.json").write_text("{}")
    add(
        tx, "checkpoints", uuid=name, experiment_id=experiment, trial_id=trial, state=state, steps=steps, size=3002,
        resources={"weights.pt": 3000, "state.json": 2}, report_us=now_us(), manifest_sha256="ab" * 32,
        metadata={"steps_completed": steps, "format": "dstrial", "engines": [_ENGINE]},
    )  # fmt: skip
    return name


def add_task(
    tx: Transaction,
    *,
    kind: str = "COMMAND",
    name: str = "sleep 60",
    state: str = "ACTIVE",
    slots: tuple[int, ...] | None = None,
    num_slots: int = 0,
    experiments: tuple[int, ...] = (),
    ports: tuple[int, ...] = (),
    is_pausable: bool = False,
) -> str:
    """Add a task and return its id; unless ``slots`` is None, the task is running."""
    task_id, now = str(uuid.uuid4()), now_us() - 60_000_000
    is_over = state in ("COMPLETED", "CANCELED", "ERROR")
    config = {
        "description": name,
        "resources": {"priority": 42, "slots": num_slots},
        "environment": {"proxy_ports": [{"proxy_port": port, "proxy_tcp": False} for port in ports]},
    }
    add(
        tx, "commands", task_id=task_id, kind=kind, state=state, description=name, config=config, owner_id=owner_of(tx),
        num_slots=num_slots, priority=42, queue_position=float(now), is_pausable=is_pausable,
        experiment_ids=list(experiments), exit_status="exit code 3" if state == "ERROR" else None, start_us=now,
        end_us=now + 5_000_000 if is_over else None,
    )  # fmt: skip
    add(tx, "tasks", id=task_id, type=kind, start_us=now)
    if slots is not None and not is_over:
        own = {"id": f"{task_id}.1", "task_id": task_id, "slots": list(slots)}
        add(tx, "allocations", **own, start_us=now, is_ready=True)
    tx.publish("scheduler", f"command:{task_id}")
    return task_id


def add_model(tx: Transaction, name: str, *checkpoints: str, labels: tuple[str, ...] = ()) -> int:
    """Add a model with a version for each checkpoint; return the model's id."""
    owner, own = owner_of(tx), {"description": "reads digits", "labels": list(labels)}
    number = models.create(tx, name=name, owner_id=owner, workspace_id=1, **own)
    for checkpoint in checkpoints:
        models.add_version(tx, number, checkpoint, owner, name="first", comment="good", labels=["best"])
    return number


def search_row(number: int, scale: float, **columns: Any) -> dict[str, Any]:
    """Return the row of a measured configuration in the report of a dsat search."""
    measured = {"value": scale, "throughput": scale, "step_s": 0.2 * number, "state": "measured"}
    shown = {"trial_id": number, "description": f"zero {number}, <b>4 x 8</b>"}
    return {**shown, **measured, "predicted": {"step_s": 0.19 * number}, **columns}


def add_search(tx: Transaction, *, has_report: bool = False, search_id: str = "0a1b2c3d") -> str:
    """Add the experiments of a dsat search; with ``has_report``, add its results too."""

    def submit(part: str, name: str, description: str, state: str, notes: str = "") -> int:
        labels = ("dsat", f"dsat-{search_id}-{part}")
        experiment = add_experiment(tx, name=f"gpt (dsat {name})", state=state, num_points=0, labels=labels)
        columns = {"description": f"dsat predict: {description}", "notes": notes}
        tx.update(
            "experiments",
            experiment,
            {**columns, "searcher_metric": "throughput", "smaller_is_better": False},
        )
        return experiment

    experiments = {}
    for number, state in ((1, "COMPLETED"), (2, "COMPLETED"), (3, "ACTIVE")):
        shown = "COMPLETED" if has_report else state
        experiments[number] = submit(str(number), f"trial {number}", f"zero {number}, <b>4 x 8</b>", shown)
    submit("search", "search", "measures", "COMPLETED")
    if has_report:
        facts = {
            "name": "gpt", "method": "predict", "metric": "throughput", "unit": "records/s", "smaller_is_better": False,
            "reason": "the budget is spent", "is_finished": True, "notes": ["<script>alert(1)</script>"], "best": 2,
            "gain": 1.0, "is_gain_certain": True, "pareto": [1, 2],
        }  # fmt: skip
        rows = [
            search_row(number, 40.0 * number, memory_bytes=3e9 * number, experiment=experiments[number])
            for number in (1, 2)
        ]
        results = {"results": {"report.json": json.dumps({**facts, "trials": rows})}}
        submit("results", "results", "keeps", "COMPLETED", NOTES_BEGIN + json.dumps(results))
    return search_id


@dataclasses.dataclass(frozen=True)
class Shown:
    """Ids of a search, its best trial, another experiment, a task and a dsat search."""

    search: int
    trial: int
    other: int
    task: str
    dsat: str


_NAMES = ("digits", "stdlib lm", "digits gan", "circle", "bert large")
_STATES = ("COMPLETED", "COMPLETED", "PAUSED", "ERROR", "CANCELED")
_LINES = (
    (0, "INFO", "Step {step}: loss {loss:.4f}, lr 3.1e-04, 812 records/s"),
    (1, "INFO", "Step {step}: waits 3 ms for data"),
    (0, "DEBUG", "bucket of 32 MiB reduced in 4 ms"),
    (1, "WARNING", "Gradient norm 11.4 was clipped to 1.0"),
    (0, None, "100%|##########| 64/64 [00:04<00:00, 14.2it/s]"),
)


def fill_every_view(tx: Transaction) -> Shown:
    """Add rows for every view and tab of the page; return the ids in their addresses."""
    dsat = add_search(tx, has_report=True)
    for number in range(14):
        given = {"state": _STATES[number % 5], "num_trials": 1 + number % 4, "seed": number}
        name = f"{_NAMES[number % 5]} {number // 5 + 1}"
        other = add_experiment(tx, name=name, labels=("baseline",)[: number % 2], **given)
    search = add_experiment(
        tx, name="digits, 24 trials", num_trials=24, num_points=60, seed=9, labels=("search",)
    )
    add_task(tx, kind="TENSORBOARD", name=f"TensorBoard of {search}", slots=(), experiments=(search,))
    add_task(tx, name="nvidia-smi dmon", slots=(2,), num_slots=1)
    task = add_task(tx, name="evaluate, 8 slots", num_slots=8)
    for experiment, rate in ((search, 1), (other, 2)):
        train = f"import torch\n\nRATE = {rate}\n{TRAIN}"
        files = {
            "train.py": train,
            "ds.json": '{"train_batch_size": 64}\n',
            "data/README": "digits, 8 by 8\n",
        }
        give_files(tx, experiment, files)
        give_config(tx, experiment, CONFIG_TEXT, deepspeed_config=DEEPSPEED)
    make_halving(tx, search)
    for trial in trials_of(tx, search)[:6]:
        for steps in (200, 400):
            add_checkpoint(tx, search, trial, steps)
    tx.update("experiments", search, {"notes": "The learning rate decides; try 1e-3 to 5e-3 next."})
    trial = int(value(tx, "SELECT best_trial_id FROM experiments WHERE id = ?", search))
    add_runs(tx, trial, [(0, 2, 1, "out of memory"), (200, 2, 0, "preempted"), (400, 4, 0, "")])
    add_instruments(tx, trial, 4)
    lines = [
        (rank, level, text.format(step=step, loss=2.3 / (1 + step)))
        for step in range(60)
        for rank, level, text in _LINES[: 2 + (step % 5 == 0) * 3]
    ]
    for owner, of in ((task_of(tx, trial), trial), (task, None)):
        add_lines(tx, owner, of, lines)
    add_model(tx, "digits", add_checkpoint(tx, search, trial, 600), labels=("vision",))
    # The two experiments of every served master start at time 1: move them to the newest start time.
    newest = "(SELECT MAX(start_us) FROM experiments)"
    for change in (
        f"experiments SET name = 'finetune ' || id, start_us = {newest} WHERE id < 3",
        f"allocations SET start_us = {newest}, is_ready = 1 WHERE start_us = 1",
        f"checkpoints SET report_us = {newest} WHERE report_us = 1",
        f"trials SET start_us = {newest} WHERE start_us = 1",
    ):
        tx.execute(f"UPDATE {change}")
    return Shown(search, trial, other, task, dsat)
