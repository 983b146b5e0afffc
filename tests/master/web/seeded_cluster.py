"""Rows for the page besides experiments: tasks, models, webhooks, past use; no processes."""

from __future__ import annotations

import json
import uuid

from seeded import add_experiment

from dstrial.master.clock import now_us
from dstrial.master.store import models, webhooks
from dstrial.master.store.database import Transaction
from dstrial.master.store.webhooks import Trigger, Webhook

SECRET_URL = "https://user:pass@hooks.example/services/T0/secret?token=secret"


def _owner(tx: Transaction) -> int:
    return int(tx.execute("SELECT id FROM users WHERE username = 'determined'").fetchone()["id"])


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
    priority: int = 42,
    is_pausable: bool = False,
) -> str:
    """Add a command, TensorBoard or generic task; with ``slots`` (also none) it runs. Return its id."""
    task_id, now = str(uuid.uuid4()), now_us() - 60_000_000
    is_over = state in ("COMPLETED", "CANCELED", "ERROR")
    config = {
        "description": name,
        "resources": {"priority": priority, "slots": num_slots},
        "environment": {"proxy_ports": [{"proxy_port": port, "proxy_tcp": False} for port in ports]},
    }
    tx.execute(
        "INSERT INTO commands (task_id, kind, job_id, state, description, config, owner_id, workspace_id, num_slots, priority, "
        "queue_position, run_id, is_pausable, experiment_ids, exit_status, start_us, end_us) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, 1, ?, ?, ?, 1, ?, ?, ?, ?, ?)",
        (
            task_id,
            kind,
            str(uuid.uuid4()),
            state,
            name,
            json.dumps(config),
            _owner(tx),
            num_slots,
            priority,
            float(now),
            is_pausable,
            json.dumps(list(experiments)),
            "exit code 3" if state == "ERROR" else None,
            now,
            now + 5_000_000 if is_over else None,
        ),
    )
    tx.execute("INSERT INTO tasks (id, type, start_us) VALUES (?, ?, ?)", (task_id, kind, now))
    if slots is not None and not is_over:
        tx.execute(
            "INSERT INTO allocations (id, task_id, trial_id, experiment_id, run_id, state, slots, ports, resources_id, "
            "directory, start_us, is_ready) VALUES (?, ?, 0, 0, 1, 'RUNNING', ?, '{}', ?, '/nonexistent', ?, 1)",
            (f"{task_id}.1", task_id, json.dumps(list(slots)), str(uuid.uuid4()), now),
        )
    tx.publish("scheduler", f"command:{task_id}")
    return task_id


def add_past_use(tx: Transaction, hours_ago: float, hours: float, num_slots: int) -> None:
    """Add what a deleted experiment has used."""
    start_us = now_us() - round(hours_ago * 3600e6)
    tx.execute(
        "INSERT INTO past_usage VALUES (?, 'TRIAL', ?, 999, 'Uncategorized', '[]', ?, ?, ?)",
        (str(uuid.uuid4()), _owner(tx), num_slots, start_us, start_us + round(hours * 3600e6)),
    )


def add_model(tx: Transaction, name: str, *checkpoints: str, labels: tuple[str, ...] = ()) -> int:
    """Add a model whose versions are some checkpoints; return its number."""
    owner = _owner(tx)
    number = models.create(
        tx,
        name=name,
        owner_id=owner,
        workspace_id=1,
        description="reads digits",
        notes="",
        metadata={},
        labels=labels,
    )
    for checkpoint in checkpoints:
        models.add_version(tx, number, checkpoint, owner, name="first", comment="good", labels=["best"])
    return number


def add_webhook(tx: Transaction, name: str, url: str = SECRET_URL) -> int:
    """Add a webhook that is told of ends."""
    triggers = tuple(Trigger("EXPERIMENT_STATE_CHANGE", state) for state in ("COMPLETED", "ERROR"))
    return webhooks.create(tx, Webhook(name, url, "DEFAULT", "WORKSPACE", None, triggers))


NOTES_BEGIN = "Report of a search of dsat (JSON; do not edit):\n"


def add_search(tx: Transaction, *, has_report: bool = False, search_id: str = "0a1b2c3d") -> str:
    """Add a search of dsat as a master knows it: three trials, one that searches and, once it has ended, its report."""
    numbers = {"latency": 2e5, "throughput": 40.0, "peak_memory_bytes": 3e9}

    def submit(label: str, name: str, description: str, state: str, notes: str = "") -> int:
        experiment = add_experiment(tx, name=name, state=state, num_points=0, labels=("dsat", label))
        tx.execute(
            "UPDATE experiments SET description = ?, notes = ?, searcher_metric = 'throughput', smaller_is_better = 0 "
            "WHERE id = ?",
            (description, notes, experiment),
        )
        return experiment

    def report(experiment: int, group: str, steps: int, metrics: dict[str, object]) -> None:
        tx.execute(
            "INSERT INTO metrics (trial_id, run_id, group_name, steps, end_us, metrics) "
            "SELECT id, 1, ?, ?, 1, ? FROM trials WHERE experiment_id = ?",
            (group, steps, json.dumps(metrics), experiment),
        )

    for number, state in ((1, "COMPLETED"), (2, "COMPLETED"), (3, "ACTIVE")):
        made = submit(
            f"dsat-{search_id}-{number}",
            f"gpt (dsat trial {number})",
            f"dsat predict: zero {number}, <b>4 x 8</b>",
            "COMPLETED" if has_report else state,
        )
        if state == "COMPLETED":
            measured = {name: value * number for name, value in numbers.items()}
            report(made, "validation", 30, measured)
    search = submit(f"dsat-{search_id}-search", "gpt (dsat search)", "dsat predict: measures", "COMPLETED")
    event = {"event": "result", "trial_id": 4, "seconds": 3.0, "metrics": numbers}
    report(search, "dsat", 1, {**numbers, "event": json.dumps(event)})
    failure = {"kind": "DEVICE_OOM", "message": "no memory <i>"}
    report(
        search,
        "dsat",
        2,
        {"event": json.dumps({**event, "trial_id": 5, "metrics": None, "failure": failure})},
    )
    if has_report:
        rows = [
            {
                "trial_id": number,
                "description": f"zero {number}, <b>4 x 8</b>",
                "state": "measured",
                "value": 40.0 * number,
                "throughput": 40.0 * number,
                "step_s": 0.2 * number,
                "memory_bytes": 3e9 * number,
                "predicted": {"step_s": 0.19 * number},
            }
            for number in (1, 2)
        ]
        document = {
            **{
                "name": "gpt",
                "method": "predict",
                "metric": "throughput",
                "unit": "records/s",
                "smaller_is_better": False,
            },
            **{
                "reason": "the budget is spent",
                "is_finished": True,
                "notes": ["<script>alert(1)</script>"],
                "best": 2,
            },
            **{"gain": 1.0, "is_gain_certain": True, "pareto": [1, 2], "trials": rows},
        }
        results = {"results": {"report.json": json.dumps(document)}}
        notes = NOTES_BEGIN + json.dumps(results)
        submit(f"dsat-{search_id}-results", "gpt (dsat results)", "dsat predict: keeps", "COMPLETED", notes)
    return search_id
