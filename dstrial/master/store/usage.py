"""Times, slots and users of allocations, those of deleted experiments included."""

from __future__ import annotations

import dataclasses
import json
import sqlite3

from dstrial.config.experiment_config.command import NAMES
from dstrial.master.store.database import Transaction

_LIVING = (
    "SELECT a.id AS allocation_id, k.type AS kind, e.owner_id AS user_id, u.username, a.experiment_id, "
    "COALESCE(a.workspace_name, w.name) AS workspace_name, "
    "e.labels, json_array_length(a.slots) AS num_slots, a.start_us, a.end_us, a.trial_id "
    "FROM allocations a JOIN tasks k ON k.id = a.task_id JOIN experiments e ON e.id = a.experiment_id "
    "JOIN users u ON u.id = e.owner_id JOIN projects p ON p.id = e.project_id JOIN workspaces w ON w.id = p.workspace_id"
)
_PAST = (
    "SELECT x.allocation_id, x.kind, x.user_id, u.username, x.experiment_id, x.workspace_name, x.labels, x.num_slots, "
    "x.start_us, x.end_us, NULL AS trial_id FROM past_usage x JOIN users u ON u.id = x.user_id"
)
_COMMANDS = (
    "SELECT a.id AS allocation_id, c.kind, c.owner_id AS user_id, u.username, 0 AS experiment_id, "
    "COALESCE(a.workspace_name, w.name, '') AS workspace_name, "
    "'[]' AS labels, json_array_length(a.slots) AS num_slots, a.start_us, a.end_us, NULL AS trial_id "
    "FROM allocations a JOIN commands c ON c.task_id = a.task_id JOIN users u ON u.id = c.owner_id "
    "LEFT JOIN workspaces w ON w.id = c.workspace_id"
)
_EVENTS = (
    "SELECT end_us AS time_us, CASE group_name WHEN 'validation' THEN 'validation' ELSE 'training' END AS kind FROM metrics "
    "WHERE trial_id = :trial_id AND steps >= 0 "
    "UNION ALL SELECT report_us, 'checkpointing' FROM checkpoints WHERE trial_id = :trial_id ORDER BY time_us"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Use:
    """One allocation.

    Attributes:
        allocation_id: its id.
        kind: of its task, TRIAL for example.
        user_id: whose.
        username: whose.
        experiment_id: of which experiment, which may be deleted; 0 for a command.
        workspace_name: where its experiment or command was when it began.
        labels: of the experiment.
        num_slots: how many it had.
        start_us: when it began.
        end_us: when it ended; None while it runs.
        trial_id: of which trial; None for deleted ones.
    """

    allocation_id: str
    kind: str
    user_id: int
    username: str
    experiment_id: int
    workspace_name: str
    labels: tuple[str, ...]
    num_slots: int
    start_us: int
    end_us: int | None
    trial_id: int | None


def uses(connection: sqlite3.Connection, after_us: int, before_us: int) -> list[Use]:
    """Return every allocation that lived for some of a time, by its start."""
    rows = connection.execute(
        f"{_LIVING} WHERE a.start_us < :before AND (a.end_us IS NULL OR a.end_us > :after) "
        f"UNION ALL {_COMMANDS} WHERE a.start_us < :before AND (a.end_us IS NULL OR a.end_us > :after) "
        f"UNION ALL {_PAST} WHERE x.start_us < :before AND x.end_us > :after ORDER BY start_us, allocation_id",
        {"before": before_us, "after": after_us},
    )
    return [Use(**{**dict(row), "labels": tuple(json.loads(row["labels"]))}) for row in rows]


def spans(connection: sqlite3.Connection, use: Use, now_us: int) -> list[tuple[str, int, int]]:
    """Return (what, from, to) of an allocation, microseconds, as its reports tell.

    Each report ends a span that began with the report before it; what is after the last one is training.
    """
    end_us = now_us if use.end_us is None else use.end_us
    if use.kind in NAMES:
        return [(use.kind.lower(), use.start_us, end_us)]
    found, position = [], use.start_us
    if use.trial_id is not None:
        for row in connection.execute(_EVENTS, {"trial_id": use.trial_id}):
            if position < row["time_us"] <= end_us:
                found.append((str(row["kind"]), position, int(row["time_us"])))
                position = int(row["time_us"])
    if position < end_us:
        found.append(("training", position, end_us))
    return found


def remember(tx: Transaction, experiment_id: int) -> None:
    """Keep an experiment's use before its rows are deleted."""
    tx.execute(
        "INSERT OR REPLACE INTO past_usage (allocation_id, kind, user_id, experiment_id, workspace_name, labels, "  # noqa: S608 - a constant
        "num_slots, "
        "start_us, end_us) SELECT allocation_id, kind, user_id, experiment_id, workspace_name, labels, num_slots, start_us, "
        f"end_us FROM ({_LIVING}) WHERE experiment_id = ? AND end_us IS NOT NULL",
        (experiment_id,),
    )
