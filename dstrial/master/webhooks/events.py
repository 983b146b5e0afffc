"""Writes what webhooks are to send, in the transaction of what has happened."""

from __future__ import annotations

import dataclasses
import json
import time
import uuid
from collections.abc import Iterable
from typing import Any

from dstrial.master.clock import now_us
from dstrial.master.store import experiments, webhooks
from dstrial.master.store.database import Transaction
from dstrial.master.webhooks.log_triggers import LogMatch
from dstrial.master.webhooks.payloads import CUSTOM, STATE_CHANGE, TASK_LOG

_MAX_TITLE = 1000
_MAX_DESCRIPTION = 10_000
_MAX_LINE = 10_000


def notify_state(tx: Transaction, experiment_id: int) -> None:
    state = experiments.require(tx.connection, experiment_id).state
    rows = webhooks.triggered(tx.connection, STATE_CHANGE, state)
    if not rows:
        return
    experiment = webhooks.notified_experiment(tx.connection, experiment_id)
    if experiment is None:  # Its project is gone; that must not keep it from ending.
        return
    choice = WebhookChoice.from_config(experiment.config)
    for row in rows:
        if _is_notified(row, experiment.workspace_id, choice):
            event = {**_new(STATE_CHANGE), "state": state, "experiment": _facts(experiment)}
            webhooks.add_event(tx, row.id, event)


def notify_alert(
    tx: Transaction, experiment_id: int, trial_id: int | None, *, title: str, description: str, level: str
) -> int:
    """Store an alert of ``core_context.alert``; return for how many webhooks.

    A long title or description is cut, as an alert must not end a training.
    """
    rows = webhooks.triggered(tx.connection, CUSTOM)
    if not rows:
        return 0
    experiment = webhooks.notified_experiment(tx.connection, experiment_id)
    if experiment is None:
        return 0
    choice = WebhookChoice.from_config(experiment.config)
    custom = {
        "title": _cut(title, _MAX_TITLE),
        "description": _cut(description, _MAX_DESCRIPTION),
        "level": level,
    }
    told = {row.id for row in rows if _is_notified(row, experiment.workspace_id, choice)}
    for webhook_id in sorted(told):
        event = {
            **_new(CUSTOM),
            "state": experiment.state,
            "experiment": _facts(experiment),
            "trial_id": trial_id,
            "custom": custom,
        }
        webhooks.add_event(tx, webhook_id, event)
    return len(told)


def notify_lines(tx: Transaction, task_id: str, matches: Iterable[LogMatch]) -> None:
    """Store matching lines of a task's log, of each trigger once a task."""
    for match in matches:
        _notify_line(tx, task_id, match)


def _notify_line(tx: Transaction, task_id: str, match: LogMatch) -> None:
    # The trigger may be gone since the line was looked at.
    row = webhooks.triggered_by_line(tx.connection, task_id, match.trigger_id)
    if row is None:
        return
    choice = None
    workspace_id = row.command_workspace
    if row.experiment_id:
        experiment = webhooks.notified_experiment(tx.connection, row.experiment_id)
        if experiment is None:
            return
        choice = WebhookChoice.from_config(experiment.config)
        workspace_id = experiment.workspace_id
    if workspace_id is None or not _is_notified(row, workspace_id, choice):
        return
    if not webhooks.note_task(tx, task_id, match.trigger_id):
        return
    event = {
        **_new(TASK_LOG),
        "regex": row.condition,
        "task_id": task_id,
        "task_type": row.task_type,
        "log": _cut(match.line, _MAX_LINE),
        "experiment_id": row.experiment_id,
        "trial_id": row.trial_id,
    }
    webhooks.add_event(tx, row.id, event)


def _new(kind: str) -> dict[str, Any]:
    """Begin an event; retries keep its id and time, so receivers see repetitions."""
    return {"event_id": str(uuid.uuid4()), "type": kind, "timestamp": int(time.time())}


def _facts(row: webhooks.NotifiedExperiment) -> dict[str, Any]:
    end_us = row.end_us
    return {
        "id": row.id,
        "state": row.state,
        "name": row.name,
        "duration_s": ((end_us or now_us()) - row.start_us) // 1_000_000,
        "has_ended": end_us is not None,
        "slots_per_trial": row.slots_per_trial,
        "workspace": row.workspace_name,
        "project": row.project_name,
    }


def _is_notified(row: webhooks.TriggeredWebhook, workspace_id: int, choice: WebhookChoice | None) -> bool:
    """Return whether a webhook hears of what happens in a workspace.

    A webhook of mode SPECIFIC hears only of experiments whose config names it; one without a workspace hears of all
    workspaces. ``choice`` is None for a task without an experiment. Source: Determined 0.38.1 ``matchWebhook``.
    """
    if choice is not None and choice.excludes:
        return False
    if row.workspace_id not in (None, workspace_id):
        return False
    if row.mode != "SPECIFIC":
        return True
    return choice is not None and (row.id in choice.ids or row.name in choice.names)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"


@dataclasses.dataclass(frozen=True, slots=True)
class WebhookChoice:
    """The ``integrations.webhooks`` of a config; ``excludes`` is none at all."""

    ids: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()
    excludes: bool = False

    @classmethod
    def from_config(cls, config: str) -> WebhookChoice:
        """Read the JSON of a config; what is not as the schema has it is ignored."""
        # Nearly every config says nothing of it, and some are large.
        if '"webhooks"' not in config:
            return cls()
        value: Any = json.loads(config)
        for key in ("integrations", "webhooks"):
            value = value.get(key)
            if not isinstance(value, dict):
                return cls()
        ids, names = value.get("webhook_id"), value.get("webhook_name")
        return cls(
            frozenset(one for one in ids if isinstance(one, int)) if isinstance(ids, list) else frozenset(),
            frozenset(one for one in names if isinstance(one, str))
            if isinstance(names, list)
            else frozenset(),
            value.get("exclude") is True,
        )
