"""Queries on webhooks, their triggers, and their queue of events."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import urlsplit

from dstrial.config.schema import compile_pattern
from dstrial.master.clock import now_us
from dstrial.master.store.database import Transaction, fetch_all, fetch_one, fetch_value
from dstrial.master.store.errors import Hint, InvalidError, required
from dstrial.master.store.experiments import Experiment

TOPIC = "webhooks"  # published when webhooks are created or deleted

EVENTS_TOPIC = "webhook_events"  # published when an event is enqueued

STATES = ("ACTIVE", "PAUSED", "COMPLETED", "CANCELED", "ERROR")  # experiment states that a trigger may name

MAX_PENDING = 1000  # pending events per webhook; further ones are dropped and counted

# Maximum lengths in characters.
_MAX_NAME = 128
_MAX_URL = 2048
_MAX_PATTERN = 1000
_GIVEN = ("name", "url", "type", "mode", "workspace_id")  # columns that users set
_COUNT_WAITING = "SELECT COUNT(*) FROM webhook_events WHERE webhook_id = ?"
_TRIGGERED = "w.id, w.name, w.mode, w.workspace_id, t.id AS trigger_id, t.condition"


@dataclasses.dataclass(frozen=True, slots=True)
class TriggeredWebhook:
    """A webhook joined with one of its triggers."""

    id: int
    name: str
    mode: str
    workspace_id: int | None
    trigger_id: int
    condition: str


@dataclasses.dataclass(frozen=True, slots=True)
class DueEvent:
    """The event that a webhook sends next, with the webhook's URL and type."""

    id: int
    webhook_id: int
    event: str
    due_us: int
    num_attempts: int
    url: str = dataclasses.field(repr=False)
    type: str


@dataclasses.dataclass(frozen=True, slots=True)
class Trigger:
    """A condition that enqueues an event for a webhook."""

    type: str  # EXPERIMENT_STATE_CHANGE, TASK_LOG or CUSTOM
    condition: str  # a state, an RE2 pattern, or empty
    id: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Webhook:
    name: str  # referenced by configs; may be empty, not unique
    url: str
    type: str  # DEFAULT or SLACK
    mode: str  # WORKSPACE, or SPECIFIC: only experiments that name the webhook
    workspace_id: int | None  # None: all
    triggers: tuple[Trigger, ...]
    id: int = 0
    delivery: Mapping[str, Any] = dataclasses.field(
        default_factory=dict
    )  # result counts, lastTime (us), lastResult


def create(tx: Transaction, webhook: Webhook) -> int:
    check(webhook)
    columns = {name: getattr(webhook, name) for name in _GIVEN}
    webhook_id = tx.insert("webhooks", {**columns, "created_us": now_us()})
    for one in webhook.triggers:
        columns = {"webhook_id": webhook_id, "type": one.type, "condition": one.condition}
        tx.insert("webhook_triggers", columns)
    tx.publish(TOPIC)
    return webhook_id


def check(webhook: Webhook) -> None:
    """Raise ``InvalidError`` if a field or a trigger of a webhook is invalid."""
    if len(webhook.name) > _MAX_NAME or not webhook.name.isprintable():
        raise InvalidError(
            f"the name of the webhook is {webhook.name[:80]!r}; expected at most {_MAX_NAME} printable characters. Choose "
            "another."
        )
    check_url(webhook.url)
    if not webhook.triggers:
        raise InvalidError(
            "the webhook has no triggers; expected at least one. Say what it is to be told of."
        )
    for trigger in webhook.triggers:
        _check_trigger(trigger, webhook.mode)


def _check_trigger(trigger: Trigger, mode: str) -> None:
    if trigger.type == "EXPERIMENT_STATE_CHANGE" and trigger.condition not in STATES:
        raise InvalidError(
            f"the state of a trigger is {trigger.condition[:80]!r}; expected one of {', '.join(STATES)}. Name one of these."
        )
    if trigger.type == "CUSTOM" and mode != "SPECIFIC":
        raise InvalidError(
            f"the mode of a webhook with a custom trigger is {mode}; expected SPECIFIC, so that experiments name it under "
            "integrations.webhooks. Change the mode."
        )
    if trigger.type == "TASK_LOG":
        if not 1 <= len(trigger.condition) <= _MAX_PATTERN:
            raise InvalidError(
                f"the regex of a trigger is {len(trigger.condition)} characters long; expected 1 to {_MAX_PATTERN}. Write a "
                "pattern."
            )
        try:
            compile_pattern(trigger.condition)
        except ValueError as error:
            raise InvalidError(
                f"the regex of a trigger is {trigger.condition[:80]!r}; expected a regular expression of RE2 ({error}). "
                "Correct it; RE2 has no look-around and no back-references."
            ) from error


def check_url(url: str) -> None:
    """Raise ``InvalidError`` unless a URL is valid and uses http or https."""
    problem = None
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            problem = "an address of http or https with a host"
        elif len(url) > _MAX_URL or not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
            problem = f"at most {_MAX_URL} printable ASCII characters without spaces"
    except ValueError as error:
        problem = f"an address that can be read ({error})"
    if problem is not None:
        raise InvalidError(
            f"the url of the webhook is {url[:80]!r}; expected {problem}. Write https://example.org/path, for example."
        )


def list_webhooks(connection: sqlite3.Connection, workspace_ids: Collection[int] | None) -> list[Webhook]:
    """Return webhooks of some workspaces (None: all) and those without a workspace."""
    rows = connection.execute("SELECT * FROM webhooks ORDER BY id").fetchall()
    return [
        _webhook(connection, row)
        for row in rows
        if workspace_ids is None or row["workspace_id"] is None or row["workspace_id"] in workspace_ids
    ]


def require(connection: sqlite3.Connection, webhook_id: int) -> Webhook:
    row = connection.execute("SELECT * FROM webhooks WHERE id = ?", (webhook_id,)).fetchone()
    return _webhook(connection, required(row, f"webhook {webhook_id}", Hint.LIST_WEBHOOKS))


def _webhook(connection: sqlite3.Connection, row: sqlite3.Row) -> Webhook:
    sql = "SELECT type, condition, id FROM webhook_triggers WHERE webhook_id = ? ORDER BY id"
    return Webhook(
        **{name: row[name] for name in ("id", *_GIVEN)},
        triggers=tuple(fetch_all(Trigger, connection, sql, (row["id"],))),
        delivery={
            "delivered": row["num_delivered"],
            "failed": row["num_failed"],
            "dropped": row["num_dropped"],
            "waiting": fetch_value(int, connection, _COUNT_WAITING, (row["id"],)),
            "lastTime": row["last_us"],
            "lastResult": row["last_result"],
        },
    )


def delete(tx: Transaction, webhook_id: int) -> None:
    """Delete a webhook and its pending events."""
    tx.execute("DELETE FROM webhooks WHERE id = ?", (webhook_id,))
    tx.publish(TOPIC)


def triggered(
    connection: sqlite3.Connection, kind: str, condition: str | None = None
) -> list[TriggeredWebhook]:
    """Return the triggers of type ``kind``, each joined with its webhook.

    ``kind`` is EXPERIMENT_STATE_CHANGE, TASK_LOG or CUSTOM. ``condition`` limits the result to triggers with exactly this
    condition; None means any.
    """
    sql = (
        f"SELECT {_TRIGGERED} FROM webhook_triggers t JOIN webhooks w ON w.id = t.webhook_id "  # noqa: S608 - a constant
        "WHERE t.type = ? AND (? IS NULL OR t.condition = ?) ORDER BY t.id"
    )
    return fetch_all(TriggeredWebhook, connection, sql, (kind, condition, condition))


def add_event(tx: Transaction, webhook_id: int, event: Mapping[str, Any]) -> None:
    """Enqueue an event, or count it as dropped if ``MAX_PENDING`` events are pending."""
    if (fetch_value(int, tx.connection, _COUNT_WAITING, (webhook_id,)) or 0) >= MAX_PENDING:
        tx.execute("UPDATE webhooks SET num_dropped = num_dropped + 1 WHERE id = ?", (webhook_id,))
        return
    now = now_us()
    tx.insert("webhook_events", {"webhook_id": webhook_id, "event": event, "created_us": now, "due_us": now})
    tx.publish(EVENTS_TOPIC)


def next_events(connection: sqlite3.Connection) -> list[DueEvent]:
    """Return each webhook's pending event with the earliest due time."""
    return fetch_all(
        DueEvent,
        connection,
        "SELECT e.id, webhook_id, event, due_us, num_attempts, url, type FROM webhooks w "
        "JOIN webhook_events e ON e.id = (SELECT id FROM webhook_events "
        "WHERE webhook_id = w.id ORDER BY due_us, id LIMIT 1) ORDER BY e.due_us",
    )


def note_result(
    tx: Transaction, webhook_id: int, event_id: int, result: str, *, is_delivered: bool, retry_us: int | None
) -> None:
    """Store the result of a delivery attempt, one line of text, and update the queue.

    If ``is_delivered``, or ``retry_us`` is None (no retry), the event is deleted. Otherwise ``retry_us`` is the time of the
    next attempt. No-op if the webhook was deleted concurrently.
    """
    is_given_up = not is_delivered and retry_us is None
    if is_delivered or is_given_up:
        tx.execute("DELETE FROM webhook_events WHERE id = ?", (event_id,))
    else:
        sql = "UPDATE webhook_events SET num_attempts = num_attempts + 1, due_us = ? WHERE id = ?"
        tx.execute(sql, (retry_us, event_id))
    tx.execute(
        "UPDATE webhooks SET num_delivered = num_delivered + ?, num_failed = num_failed + ?, last_us = ?, last_result = ? "
        "WHERE id = ?",
        (is_delivered, is_given_up, now_us(), result, webhook_id),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class LineTrigger(TriggeredWebhook):
    """A webhook's log trigger, joined with the task whose log line matched it."""

    task_type: str
    trial_id: int | None
    experiment_id: int | None
    command_workspace: int | None


def triggered_by_line(connection: sqlite3.Connection, task_id: str, trigger_id: int) -> LineTrigger | None:
    """Return log trigger ``trigger_id``, joined with the task whose log it matched.

    Returns None if the trigger or task ``task_id`` was deleted.
    """
    sql = (
        f"SELECT {_TRIGGERED}, k.type AS task_type, k.trial_id, k.experiment_id, "  # noqa: S608 - a constant
        "c.workspace_id AS command_workspace "
        "FROM webhook_triggers t JOIN webhooks w ON w.id = t.webhook_id JOIN tasks k ON k.id = ? "
        "LEFT JOIN commands c ON c.task_id = k.id WHERE t.id = ?"
    )
    return fetch_one(LineTrigger, connection, sql, (task_id, trigger_id))


def note_task(tx: Transaction, task_id: str, trigger_id: int) -> bool:
    """Record that a task's log fired a trigger; return False if already recorded."""
    cursor = tx.execute(
        "INSERT OR IGNORE INTO webhook_task_logs (task_id, trigger_id) VALUES (?, ?)", (task_id, trigger_id)
    )
    return bool(cursor.rowcount)


@dataclasses.dataclass(frozen=True, slots=True)
class NotifiedExperiment(Experiment):
    """An experiment with the names of its project and workspace, for webhook events."""

    project_name: str
    workspace_id: int
    workspace_name: str


def notified_experiment(connection: sqlite3.Connection, experiment_id: int) -> NotifiedExperiment | None:
    sql = (
        "SELECT e.*, p.name AS project_name, w.id AS workspace_id, w.name AS workspace_name FROM experiments e "
        "JOIN projects p ON p.id = e.project_id JOIN workspaces w ON w.id = p.workspace_id WHERE e.id = ?"
    )
    return fetch_one(NotifiedExperiment, connection, sql, (experiment_id,))
