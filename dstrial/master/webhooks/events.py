"""Enqueue webhook events in the transactions that cause them.

``LogTriggers`` finds log lines that match the patterns of webhooks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from dstrial.config.schema import compile_pattern
from dstrial.master.clock import now_us
from dstrial.master.pubsub import PubSub
from dstrial.master.store import experiments, webhooks
from dstrial.master.store.database import Database, Transaction
from dstrial.master.webhooks.payloads import CUSTOM, STATE_CHANGE, TASK_LOG

K = TypeVar("K")

# Longest texts in an event, characters.
_MAX_TITLE = 1000
_MAX_DESCRIPTION = 10_000
_MAX_LINE = 10_000


def _compiled(rows: Iterable[webhooks.TriggeredWebhook]) -> Iterator[tuple[int, Any]]:
    for row in rows:
        # Skip a pattern that only another release of RE2 accepts, so that logs are still stored.
        with contextlib.suppress(ValueError):
            yield row.trigger_id, compile_pattern(row.condition)


def first_matches(patterns: Iterable[tuple[K, Any]], texts: Sequence[str]) -> list[tuple[K, str]]:
    """Return (key, first matching text) for each pattern that matches a text.

    ``patterns`` are (key, compiled RE2 pattern). RE2 searches in linear time: half a MiB takes about 40 ms with 50 patterns.
    """
    joined = "\n".join(texts)
    found = []
    for key, pattern in patterns:
        # Search the whole text first: most patterns match nothing.
        if pattern.search(joined):
            first = next((text for text in texts if pattern.search(text)), None)
            if first is not None:
                found.append((key, first))
    return found


class LogTriggers:
    """Compiled patterns of webhooks for log lines, reloaded on change. Thread-safe."""

    def __init__(self, database: Database, pubsub: PubSub) -> None:
        self._database = database
        self._pubsub = pubsub
        self._lock = threading.Lock()
        self._version = -1
        self._patterns: tuple[tuple[int, Any], ...] = ()

    def find(self, lines: Iterable[str]) -> list[tuple[int, str]]:
        """Return (trigger id, first matching line) of each trigger that matches a line.

        Do not call this method inside ``Database.read``, because the method may open a read transaction.
        """
        patterns = self._current()
        return first_matches(patterns, [line.rstrip("\r\n") for line in lines]) if patterns else []

    def _current(self) -> tuple[tuple[int, Any], ...]:
        version = self._pubsub.version(webhooks.TOPIC)
        with self._lock:
            if version != self._version:
                with self._database.read() as connection:
                    rows = webhooks.triggered(connection, "TASK_LOG")
                self._patterns = tuple(_compiled(rows))
                self._version = version
            return self._patterns


def notify_state(tx: Transaction, experiment_id: int) -> None:
    state = experiments.require(tx.connection, experiment_id).state
    rows = webhooks.triggered(tx.connection, STATE_CHANGE, state)
    if not rows:
        return
    experiment = webhooks.notified_experiment(tx.connection, experiment_id)
    if experiment is None:  # The project was deleted: enqueue nothing, so that the experiment can still end.
        return
    choice = WebhookChoice.from_config(experiment.config)
    for row in rows:
        if _is_notified(row, experiment.workspace_id, choice):
            event = {**_new_event(STATE_CHANGE), "state": state, "experiment": _facts(experiment)}
            webhooks.add_event(tx, row.id, event)


def notify_alert(
    tx: Transaction, experiment_id: int, trial_id: int | None, *, title: str, description: str, level: str
) -> int:
    """Enqueue an alert of ``core_context.alert``; return how many webhooks receive it.

    A long title or description is truncated, because an error would end the trial.
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
    notified = {row.id for row in rows if _is_notified(row, experiment.workspace_id, choice)}
    for webhook_id in sorted(notified):
        event = {
            **_new_event(CUSTOM),
            "state": experiment.state,
            "experiment": _facts(experiment),
            "trial_id": trial_id,
            "custom": custom,
        }
        webhooks.add_event(tx, webhook_id, event)
    return len(notified)


def notify_lines(tx: Transaction, task_id: str, matches: Iterable[tuple[int, str]]) -> None:
    """Enqueue an event for each (trigger id, matching line) of a task's log.

    A trigger fires only once per task; later matches are ignored.
    """
    for trigger_id, line in matches:
        _notify_line(tx, task_id, trigger_id, line)


def _notify_line(tx: Transaction, task_id: str, trigger_id: int, line: str) -> None:
    # The trigger may have been deleted since the match.
    row = webhooks.triggered_by_line(tx.connection, task_id, trigger_id)
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
    if not webhooks.note_task(tx, task_id, trigger_id):
        return
    event = {
        **_new_event(TASK_LOG),
        "regex": row.condition,
        "task_id": task_id,
        "task_type": row.task_type,
        "log": _cut(line, _MAX_LINE),
        "experiment_id": row.experiment_id,
        "trial_id": row.trial_id,
    }
    webhooks.add_event(tx, row.id, event)


def _new_event(kind: str) -> dict[str, Any]:
    """Return the fields that every event has: a new id, the type and the current time.

    Retries send the stored event, with the same id and time.
    """
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
    """Return whether a webhook receives an event of workspace ``workspace_id``.

    ``choice`` is from the experiment's config; None for a task without an experiment. Source: Determined 0.38.1
    ``matchWebhook``.
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
    """The webhooks that an experiment config selects, by id or name.

    If ``excludes`` is true, no webhook receives events of the experiment.
    """

    ids: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()
    excludes: bool = False

    @classmethod
    def from_config(cls, config: str) -> WebhookChoice:
        """Read ``integrations.webhooks`` of a config (JSON); ignore values of wrong types."""
        # Fast path: most configs have no webhooks, and parsing a large one is slow.
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
