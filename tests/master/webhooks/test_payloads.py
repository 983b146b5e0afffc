"""JSON bodies of webhook requests, for generic receivers and for Slack."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dstrial.master.webhooks.payloads import body_of

EXPERIMENT = {
    "id": 3,
    "state": "COMPLETED",
    "name": "größe",
    "duration_s": 3725,
    "has_ended": True,
    "slots_per_trial": 2,
    "workspace": "w",
    "project": "p",
}
STATE = {
    "event_id": "e",
    "type": "EXPERIMENT_STATE_CHANGE",
    "timestamp": 5,
    "state": "COMPLETED",
    "experiment": EXPERIMENT,
}
LOG = {
    "event_id": "e",
    "type": "TASK_LOG",
    "timestamp": 5,
    "regex": "a<b",
    "task_id": "3.r",
    "task_type": "TRIAL",
    "log": "x <!here> & y",
    "experiment_id": 3,
    "trial_id": 7,
}  # fmt: skip
CUSTOM = {
    **STATE,
    "type": "CUSTOM",
    "trial_id": 7,
    "custom": {"title": "T", "description": "<@U1>", "level": "ERROR"},
}


def body(event: dict[str, Any], kind: str = "DEFAULT", base_url: str = "") -> Any:
    return json.loads(body_of(event, kind, node="node", pool="default", base_url=base_url))


@pytest.mark.parametrize("event", [STATE, LOG, CUSTOM])
@pytest.mark.parametrize("kind", ["DEFAULT", "SLACK"])
def test_body_survives_json_round_trip(event: dict[str, Any], kind: str) -> None:
    """Receivers parse and re-serialise the body to check its signature."""
    sent = body_of(event, kind, node="nöde", pool="default", base_url="http://h")
    assert json.dumps(separators=(",", ":"), obj=json.loads(sent)).encode() == sent
    assert sent.isascii()


def test_body_keys_follow_determined_order() -> None:
    assert list(body(STATE)) == ["event_id", "event_type", "timestamp", "condition", "event_data"]
    assert list(body(STATE)["event_data"]["experiment"]) == [
        "id", "state", "name", "duration", "resource_pool", "slots_per_trial", "workspace", "project",
    ]  # fmt: skip


def test_running_experiment_has_zero_duration() -> None:
    running = {**CUSTOM, "experiment": {**EXPERIMENT, "has_ended": False}}
    assert body(running)["event_data"]["experiment"]["duration"] == 0
    assert body(STATE)["event_data"]["experiment"]["duration"] == 3725


def test_slack_log_message_escapes_markup() -> None:
    (block,) = body(LOG, "SLACK")["blocks"]
    assert block["text"]["text"] == (
        "Experiment ID `3`, Trial ID `7`, running on node `node`, reported a log\n"
        "```x &lt;!here&gt; &amp; y```\nThis log matched the regex\n```a&lt;b```\n"
        "View full logs at /det/experiments/3/trials/7/logs"
    )
    linked = body(LOG, "SLACK", "http://h:8080")["blocks"][0]["text"]["text"]
    assert linked.endswith("<http://h:8080/det/experiments/3/trials/7/logs | View full logs here>")
    task = body({**LOG, "trial_id": None, "task_type": "COMMAND"}, "SLACK")["blocks"][0]["text"]["text"]
    assert task.startswith("Task ID `3.r`, task type `COMMAND`, running on node `node`")


def test_slack_alert_message_includes_trial() -> None:
    shown = body(CUSTOM, "SLACK", "http://h")
    assert [one["text"] for one in shown["blocks"][0]["fields"]] == [
        "*Level*: ERROR", "*Title*: T", "*Description*: &lt;@U1&gt;",
    ]  # fmt: skip
    block = shown["attachments"][0]["blocks"][0]
    assert block["text"]["text"] == "✅ <http://h/det/experiments/3 | größe (#3)>"
    assert [one["text"] for one in block["fields"]] == [
        "*Status*: Completed", "*Duration*: 1h 2min", "*Workspace*: w", "*Project*: p", "*Trial ID*: 7",
    ]  # fmt: skip


def test_slack_block_stays_within_length_limit() -> None:
    long = body({**LOG, "log": "<" * 9000, "regex": "a" * 1000}, "SLACK")
    assert len(long["blocks"][0]["text"]["text"].replace("&lt;", "<")) < 3000
