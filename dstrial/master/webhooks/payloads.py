"""Build the request bodies of webhooks from stored events. Pure.

Bodies are ASCII, without spaces after separators, with keys in Determined's order, so that receivers can check signatures of
the parsed and reserialised body, as in Determined's documentation.

Source: Determined 0.38.1 ``master/internal/webhooks/webhook.go`` and ``postgres_webhook.go``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

# Types of events and of the triggers that cause them.
STATE_CHANGE = "EXPERIMENT_STATE_CHANGE"
TASK_LOG = "TASK_LOG"
CUSTOM = "CUSTOM"

_GREEN = "#13B670"
_RED = "#DD5040"
_SLACK_TEXT = 2800  # characters of user text per block; Slack rejects blocks of more than 3000

_TO_ESCAPE = re.compile("[&<>]")
_ESCAPED = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def body_of(event: Mapping[str, Any], kind: str, *, node: str, pool: str, base_url: str) -> bytes:
    """Return the body of the HTTP request that delivers a stored event.

    ``kind`` is the webhook's type, SLACK or DEFAULT; ``node`` and ``pool`` name the master's machine and resource pool.
    Links in the body begin with ``base_url``; if it is empty, the body has no links.
    """
    content = _slack(event, node, base_url) if kind == "SLACK" else _default(event, node, pool)
    return json.dumps(content, separators=(",", ":")).encode("ascii")


def test_event(event_id: str, timestamp_s: int) -> dict[str, Any]:
    return {
        "event_id": event_id,
        "type": STATE_CHANGE,
        "timestamp": timestamp_s,
        "state": "COMPLETED",
        "test": True,
    }


def _default(event: Mapping[str, Any], node: str, pool: str) -> dict[str, Any]:
    condition: dict[str, Any] = {}
    data: dict[str, Any] = {}
    if "state" in event:
        condition["state"] = event["state"]
    if "regex" in event:
        condition["regex"] = event["regex"]
    if event.get("test"):
        data["data"] = "test"
    if "experiment" in event:
        data["experiment"] = _experiment(event["experiment"], event.get("trial_id"), pool)
    if "log" in event:
        data["task_log"] = {
            "task_id": event["task_id"],
            "node_name": node,
            "triggering_log": event["log"],
        }
    if "custom" in event:
        data["custom_data"] = {key: event["custom"][key] for key in ("title", "description", "level")}
    return {
        "event_id": event["event_id"],
        "event_type": event["type"],
        "timestamp": event["timestamp"],
        "condition": condition,
        "event_data": data,
    }


def _experiment(experiment: Mapping[str, Any], trial_id: int | None, pool: str) -> dict[str, Any]:
    shown = {
        "id": experiment["id"],
        "state": experiment["state"],
        "name": experiment["name"],
        "duration": experiment["duration_s"] if experiment["has_ended"] else 0,
        "resource_pool": pool,
        "slots_per_trial": experiment["slots_per_trial"],
        "workspace": experiment["workspace"],
        "project": experiment["project"],
    }
    return shown if trial_id is None else {**shown, "trial_id": trial_id}


def _slack(event: Mapping[str, Any], node: str, base_url: str) -> dict[str, Any]:
    if event.get("test"):
        return {"blocks": [_section("test", "plain_text")]}
    if "log" in event:
        return {"blocks": [_section(_log_text(event, node, base_url))]}
    experiment = event["experiment"]
    status, mark, words, color = {
        "COMPLETED": ("Your experiment completed successfully 🎉", "✅ ", "Completed", _GREEN),
        "ERROR": ("Your experiment has stopped with errors", "❌ ", "Errored", _RED),
    }.get(
        experiment["state"],
        (f"The status of your experiment is {experiment['state']}", "", experiment["state"], _GREEN),
    )
    minutes = experiment["duration_s"] // 60
    fields = [
        f"*Status*: {words}",
        f"*Duration*: {minutes // 60}h {minutes % 60}min",
        f"*Workspace*: {_escaped(experiment['workspace'])}",
        f"*Project*: {_escaped(experiment['project'])}",
    ]
    if event.get("trial_id") is not None:
        fields.append(f"*Trial ID*: {event['trial_id']}")
    name = f"{_escaped(experiment['name'])} (#{experiment['id']})"
    if base_url:
        name = f"<{base_url}/det/experiments/{experiment['id']} | {name}>"
    message = _section(status, "plain_text")
    if "custom" in event:
        custom = event["custom"]
        message = _section("Event Data", "plain_text")
        message["fields"] = [
            _text(f"*{key.capitalize()}*: {_escaped(custom[key])}")
            for key in ("level", "title", "description")
        ]
    block = _section(f"{mark}{name}")
    block["fields"] = [_text(one) for one in fields]
    return {"blocks": [message], "attachments": [{"color": color, "blocks": [block]}]}


def _log_text(event: Mapping[str, Any], node: str, base_url: str) -> str:
    experiment_id, trial_id = event.get("experiment_id"), event.get("trial_id")
    if trial_id is None:
        who = f"Task ID `{_escaped(event['task_id'])}`, task type `{event['task_type']}`"
    else:
        who = f"Experiment ID `{experiment_id}`, Trial ID `{trial_id}`"
    text = (
        f"{who}, running on node `{_escaped(node)}`, reported a log\n"
        f"```{_escaped(event['log'], _SLACK_TEXT // 2)}```\n"
        f"This log matched the regex\n```{_escaped(event['regex'], _SLACK_TEXT // 4)}```\n"
    )
    if trial_id is None:
        return text
    path = f"/det/experiments/{experiment_id}/trials/{trial_id}/logs"
    if base_url:
        return f"{text}<{base_url}{path} | View full logs here>"
    return f"{text}View full logs at {_escaped(path)}"


def _section(text: str, kind: str = "mrkdwn") -> dict[str, Any]:
    return {"type": "section", "text": _text(text, kind)}


def _text(text: str, kind: str = "mrkdwn") -> dict[str, Any]:
    return {"type": kind, "text": text}


def _escaped(text: str, limit: int = _SLACK_TEXT // 2) -> str:
    """Truncate text to ``limit`` characters, and escape it for Slack.

    Escaped text such as ``<!channel>`` notifies nobody.
    """
    short = text if len(text) <= limit else f"{text[:limit]}…"
    return _TO_ESCAPE.sub(lambda match: _ESCAPED[match[0]], short)
