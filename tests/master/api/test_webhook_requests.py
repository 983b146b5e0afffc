"""Webhook requests of Determined's client, and the payloads that receivers get."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from determined.common import api
from determined.common.api import bindings, errors
from receiver import Receiver, receiving
from serving import Master
from waiting import wait_for

from dstrial.master.lifecycle import endings
from dstrial.master.store import webhooks
from dstrial.master.store.database import Transaction
from dstrial.master.webhooks.delivery import Delivery

pytestmark = pytest.mark.process

STATE_CHANGE = bindings.v1TriggerType.EXPERIMENT_STATE_CHANGE
TASK_LOG = bindings.v1TriggerType.TASK_LOG
CUSTOM = bindings.v1TriggerType.CUSTOM
SPECIFIC = bindings.v1WebhookMode.SPECIFIC


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as one:
        yield one


@pytest.fixture
def delivery(fresh_master: Master) -> Iterator[Delivery]:
    one = Delivery(fresh_master.services, retry_s=(0.01, 0.01))
    one.start()
    yield one
    one.stop(0.0)


def session(master: Master, user: str = "admin") -> api.Session:
    return api.Session(master.address, user, master.tokens[user], None)


def completed() -> list[bindings.v1Trigger]:
    return [bindings.v1Trigger(triggerType=STATE_CHANGE, condition={"state": "COMPLETED"})]


def make(
    master: Master,
    url: str,
    triggers: list[bindings.v1Trigger] | None = None,
    *,
    user: str = "admin",
    **fields: Any,
) -> bindings.v1Webhook:
    body = bindings.v1Webhook(
        **{
            "name": "hook",
            "mode": bindings.v1WebhookMode.WORKSPACE,
            "webhookType": bindings.v1WebhookType.DEFAULT,
            "url": url,
            "triggers": completed() if triggers is None else triggers,
            **fields,
        }
    )
    return bindings.post_PostWebhook(session(master, user), body=body).webhook


def finish(master: Master, state: str, experiment_id: int = 1) -> None:
    master.services.database.write(lambda tx: endings.finish_experiment(tx, experiment_id, state, None))


def configure(master: Master, webhooks_of: Any, experiment_id: int = 1) -> None:
    (row,) = master.rows("SELECT config FROM experiments WHERE id = ?", experiment_id)
    config = {**json.loads(row["config"]), "integrations": {"webhooks": webhooks_of}}
    master.change("UPDATE experiments SET config = ? WHERE id = ?", json.dumps(config), experiment_id)


def listed(master: Master) -> dict[str, Any]:
    (one,) = master.get("/api/v1/webhooks", "admin").json["webhooks"]
    return dict(one)


def settled(master: Master) -> dict[str, Any]:
    """Wait until the queue is empty; return the webhook's delivery statistics."""
    wait_for(lambda: listed(master)["delivery"]["waiting"] == 0)
    return dict(listed(master)["delivery"])


def assert_no_pending_events(master: Master) -> None:
    assert master.rows("SELECT event FROM webhook_events") == []


def test_webhook_create_list_delete_by_bindings(fresh_master: Master) -> None:
    made = make(fresh_master, "http://127.0.0.1:1/x")
    one = session(fresh_master)

    (found,) = bindings.get_GetWebhooks(one).webhooks
    assert found.to_json() == made.to_json()
    assert (found.name, found.url, found.mode.value) == (
        "hook",
        "http://127.0.0.1:1/x",
        "WEBHOOK_MODE_WORKSPACE",
    )
    assert found.triggers is not None
    assert (found.triggers[0].triggerType, found.triggers[0].condition) == (
        STATE_CHANGE,
        {"state": "COMPLETED"},
    )
    assert found.triggers[0].webhookId == found.id
    assert found.id is not None
    bindings.delete_DeleteWebhook(one, id=found.id)
    assert not bindings.get_GetWebhooks(one).webhooks
    for request in (
        lambda: bindings.delete_DeleteWebhook(one, id=found.id or 0),
        lambda: bindings.post_TestWebhook(one, id=found.id or 0),
    ):
        with pytest.raises(errors.NotFoundException):
            request()


def test_experiment_end_sends_signed_determined_payload(
    fresh_master: Master, receiver: Receiver, delivery: Delivery
) -> None:
    make(fresh_master, receiver.url)
    fresh_master.change("UPDATE experiments SET name = ?, start_us = 1 WHERE id = 1", 'bäd "name" <&> 🎉')

    finish(fresh_master, "ERROR", 2)
    finish(fresh_master, "COMPLETED")

    (got,) = receiver.wait()
    assert got.path == "/hook?a=b"
    assert got.headers["content-type"] == "application/json; charset=UTF-8"
    assert got.is_signed_with(fresh_master.services.signing_key)
    assert not got.is_signed_with("another key")
    event = got.json
    duration = event["event_data"]["experiment"].pop("duration")
    assert duration > 10**9
    assert len(event.pop("event_id")) == 36
    assert event.pop("timestamp") == pytest.approx(
        int(got.headers["x-determined-ai-signature-timestamp"]), abs=60
    )
    assert event == {
        "event_type": "EXPERIMENT_STATE_CHANGE",
        "condition": {"state": "COMPLETED"},
        "event_data": {
            "experiment": {
                "id": 1,
                "state": "COMPLETED",
                "name": 'bäd "name" <&> 🎉',
                "resource_pool": "default",
                "slots_per_trial": 1,
                "workspace": "Uncategorized",
                "project": "Uncategorized",
            }
        },
    }
    assert settled(fresh_master)["delivered"] == 1
    assert fresh_master.rows("SELECT * FROM webhook_events") == []
    assert len(receiver.received) == 1


def test_experiment_config_selects_webhooks(fresh_master: Master) -> None:
    make(fresh_master, "http://127.0.0.1:1/", name="all")
    make(fresh_master, "http://127.0.0.1:1/", name="named", mode=SPECIFIC)
    fresh_master.change("INSERT INTO workspaces (name, owner_id, created_us) VALUES ('w', 2, 1)")
    make(fresh_master, "http://127.0.0.1:1/", name="elsewhere", workspaceId=2)
    make(fresh_master, "http://127.0.0.1:1/", name="here", workspaceId=1, mode=SPECIFIC)

    def notified(choice: Any) -> list[str]:
        configure(fresh_master, choice)
        fresh_master.change("UPDATE experiments SET state = 'ACTIVE' WHERE id = 1")
        fresh_master.change("DELETE FROM webhook_events")
        finish(fresh_master, "COMPLETED")
        return [
            row["name"]
            for row in fresh_master.rows(
                "SELECT w.name FROM webhook_events e JOIN webhooks w ON w.id = e.webhook_id ORDER BY w.id"
            )
        ]

    assert notified(None) == ["all"]
    assert notified({"webhook_name": ["named", "elsewhere"]}) == ["all", "named"]
    assert notified({"webhook_id": [4]}) == ["all", "here"]
    assert notified({"webhook_id": [2], "webhook_name": ["here"], "exclude": False}) == [
        "all",
        "named",
        "here",
    ]
    assert notified({"webhook_id": [2], "exclude": True}) == []
    assert notified("nonsense") == ["all"]
    assert notified({"webhook_id": "2", "webhook_name": {"named": 1}}) == ["all"]


def test_log_pattern_webhook_fires_once_per_task(
    fresh_master: Master, receiver: Receiver, delivery: Delivery
) -> None:
    triggers = [bindings.v1Trigger(triggerType=TASK_LOG, condition={"regex": "CUDA out of (memory|luck)$"})]
    make(fresh_master, receiver.url, triggers)

    def say(number: int, *lines: str) -> None:
        logs = [{"task_id": f"{number}.request", "log": line} for line in lines]
        answer = fresh_master.send("POST", "/task-logs", logs, token=f"trial-{number}")
        assert answer.status == 200, answer

    say(1, "all is well\n", "CUDA out of memory, perhaps\n")
    say(1, "then: CUDA out of memory\n", "CUDA out of luck\n")
    say(1, "CUDA out of memory\n")
    say(2, "CUDA out of luck")

    first, second = receiver.wait(2)
    assert settled(fresh_master)["delivered"] == 2
    assert first.is_signed_with(fresh_master.services.signing_key)
    del first.json["event_id"]
    assert first.json["event_type"] == "TASK_LOG"
    assert first.json["condition"] == {"regex": "CUDA out of (memory|luck)$"}
    assert first.json["event_data"] == {
        "task_log": {
            "task_id": "1.request",
            "node_name": fresh_master.services.agent_id,
            "triggering_log": "then: CUDA out of memory",
        }
    }
    assert second.json["event_data"]["task_log"]["task_id"] == "2.request"


def test_log_patterns_follow_webhook_creation_and_deletion(fresh_master: Master) -> None:
    find = fresh_master.services.log_triggers.find
    assert find(["x\n"]) == []
    made = make(
        fresh_master,
        "http://127.0.0.1:1/",
        [bindings.v1Trigger(triggerType=TASK_LOG, condition={"regex": "^x"})],
    )
    assert [line for _, line in find(["ax\n", "xb\n"])] == ["xb"]
    matches = find(["x\n"])
    assert made.id is not None
    bindings.delete_DeleteWebhook(session(fresh_master), id=made.id)
    assert find(["x\n"]) == []
    # A match found before the deletion is not sent.
    from dstrial.master.webhooks import events

    fresh_master.services.database.write(lambda tx: events.notify_lines(tx, "1.request", matches))
    assert_no_pending_events(fresh_master)


def alert(master: Master, token: str, **body: Any) -> int:
    data = {"title": "T", "description": "D", "level": "LOG_LEVEL_WARNING"}
    return master.send(
        "POST",
        "/api/v1/webhooks/custom",
        {"experimentId": 1, "trialId": 1, "data": data, **body},
        token=token,
    ).status


def test_alert_foreign_or_invalid_is_refused(fresh_master: Master) -> None:
    assert alert(fresh_master, "trial-2") == 403
    assert alert(fresh_master, "trial-1", experimentId=2) == 403
    assert alert(fresh_master, "trial-1", trialId=2) == 403
    assert alert(fresh_master, "trial-1", trialId=2, experimentId=2) == 403
    assert alert(fresh_master, "determined", trialId=2) == 400
    assert alert(fresh_master, "determined", experimentId=999) == 404
    assert alert(fresh_master, "determined", data={"level": "LOUD"}) == 400


def test_overlong_alert_is_truncated(fresh_master: Master) -> None:
    make(fresh_master, "http://127.0.0.1:1/", [bindings.v1Trigger(triggerType=CUSTOM)], mode=SPECIFIC)
    configure(fresh_master, {"webhook_id": [1]})
    data = {"title": "t" * 10**6, "description": "d" * 10**6, "level": "LOG_LEVEL_INFO"}
    assert alert(fresh_master, "trial-1", data=data) == 200
    (row,) = fresh_master.rows("SELECT event FROM webhook_events")
    assert len(row["event"]) < 20_000


def test_only_admins_and_workspace_owners_manage_webhooks(fresh_master: Master) -> None:
    # As in Determined 0.38.1, whose client raises APIException for this 403, not ForbiddenException.
    with pytest.raises(errors.APIException):
        make(fresh_master, "http://127.0.0.1:1/", user="determined")
    with pytest.raises(errors.APIException):
        make(fresh_master, "http://127.0.0.1:1/", user="determined", workspaceId=1)
    fresh_master.change("INSERT INTO workspaces (name, owner_id, created_us) VALUES ('mine', 2, 1)")
    mine = make(fresh_master, "https://hooks.example/mine", user="determined", workspaceId=2)
    theirs = make(fresh_master, "https://u:pw@hooks.example:8443/services/T0/secret")

    seen = {one.id: one.url for one in bindings.get_GetWebhooks(session(fresh_master, "determined")).webhooks}
    assert seen == {mine.id: "https://hooks.example/mine", theirs.id: "https://hooks.example:8443/********"}
    other = bindings.get_GetWebhooks(session(fresh_master, "other")).webhooks
    assert [one.id for one in other] == [theirs.id]
    assert "secret" not in str([one.to_json() for one in other])
    for user in ("determined", "other"):
        assert theirs.id is not None
        for request in (
            lambda user=user: bindings.delete_DeleteWebhook(session(fresh_master, user), id=theirs.id),
            lambda user=user: bindings.post_TestWebhook(session(fresh_master, user), id=theirs.id),
        ):
            with pytest.raises(errors.APIException):
                request()
    assert fresh_master.send("GET", "/api/v1/webhooks", token="trial-1").status == 403
    assert mine.id is not None
    bindings.delete_DeleteWebhook(session(fresh_master, "determined"), id=mine.id)
    make(fresh_master, "http://127.0.0.1:1/", user="determined", workspaceId=2, name="")
    fresh_master.change("DELETE FROM workspaces WHERE id = 2")
    assert {row["webhook_id"] for row in fresh_master.rows("SELECT * FROM webhook_triggers")} == {theirs.id}


_STATE = {"triggerType": "TRIGGER_TYPE_EXPERIMENT_STATE_CHANGE"}
_LOG = {"triggerType": "TRIGGER_TYPE_TASK_LOG"}
INVALID: dict[str, dict[str, Any]] = {
    "a file": {"url": "file:///etc/passwd"},
    "ftp": {"url": "ftp://x/y"},
    "no scheme": {"url": "hooks.example/x"},
    "no host": {"url": "http:///x"},
    "a line end": {"url": "http://x/\r\nX-Evil: 1"},
    "a space": {"url": "http://x/a b"},
    "other letters": {"url": "http://exämple/"},
    "an invalid port": {"url": "http://x:99999/"},
    "brackets": {"url": "http://[::1/"},
    "a long address": {"url": "http://x/" + "a" * 5000},
    "no address": {"url": None},
    "a name that moves the cursor": {"name": "a\x1b[2J"},
    "no triggers": {"triggers": []},
    "an unknown state": {"triggers": [{**_STATE, "condition": {"state": "DONE"}}]},
    "no state": {"triggers": [_STATE]},
    "a metric trigger": {"triggers": [{"triggerType": "TRIGGER_TYPE_METRIC_THRESHOLD_EXCEEDED", "condition": {}}]},
    "no pattern": {"triggers": [{**_LOG, "condition": {}}]},
    "two conditions": {"triggers": [{**_LOG, "condition": {"regex": "a", "x": 1}}]},
    "a Python-only pattern": {"triggers": [{**_LOG, "condition": {"regex": "(?=a)"}}]},
    "a long pattern": {"triggers": [{**_LOG, "condition": {"regex": "a" * 2000}}]},
    "a custom trigger for a workspace": {"triggers": [{"triggerType": "TRIGGER_TYPE_CUSTOM"}]},
    "an unknown mode": {"mode": "WEBHOOK_MODE_X"},
}  # fmt: skip


@pytest.mark.parametrize("what", INVALID)
def test_create_webhook_invalid_is_refused(fresh_master: Master, what: str) -> None:
    good = {
        "name": "n",
        "url": "http://127.0.0.1:1/",
        "mode": "WEBHOOK_MODE_WORKSPACE",
        "webhookType": "WEBHOOK_TYPE_DEFAULT",
        "triggers": [{**_STATE, "condition": {"state": "ERROR"}}],
    }
    answer = fresh_master.send("POST", "/api/v1/webhooks", {**good, **INVALID[what]}, token="admin")

    assert answer.status == 400, answer
    assert "expected" in answer.error
    assert "\x1b" not in answer.error
    assert fresh_master.rows("SELECT * FROM webhooks") == []
    assert fresh_master.send("POST", "/api/v1/webhooks", good, token="admin").status == 200


def test_webhook_test_request_reports_receiver_status(fresh_master: Master, receiver: Receiver) -> None:
    made = make(fresh_master, receiver.url)
    slack = make(fresh_master, receiver.url, name="slack", webhookType=bindings.v1WebhookType.SLACK)
    one = session(fresh_master)
    assert made.id is not None
    assert slack.id is not None

    assert bindings.post_TestWebhook(one, id=made.id).completed
    got = receiver.received[0]
    assert got.is_signed_with(fresh_master.services.signing_key)
    assert {**got.json, "event_id": "", "timestamp": 0} == {
        "event_id": "",
        "event_type": "EXPERIMENT_STATE_CHANGE",
        "timestamp": 0,
        "condition": {"state": "COMPLETED"},
        "event_data": {"data": "test"},
    }
    bindings.post_TestWebhook(one, id=slack.id)
    assert receiver.received[1].json == {
        "blocks": [{"type": "section", "text": {"type": "plain_text", "text": "test"}}]
    }
    receiver.statuses = [503]
    with pytest.raises(errors.APIException, match="HTTP 503"):
        bindings.post_TestWebhook(one, id=made.id)
    assert len(receiver.received) == 3


def test_failed_delivery_is_retried_then_marked_failed(
    fresh_master: Master, receiver: Receiver, delivery: Delivery
) -> None:
    make(fresh_master, receiver.url)
    receiver.statuses = [503, 429]
    finish(fresh_master, "COMPLETED")
    received = receiver.wait(3)
    assert settled(fresh_master)["delivered"] == 1
    assert len({one.json["event_id"] for one in received}) == 1
    assert len({one.body for one in received}) == 1
    assert all(one.is_signed_with(fresh_master.services.signing_key) for one in received)

    receiver.statuses = [500, 500, 500]
    finish(fresh_master, "COMPLETED", 2)
    receiver.wait(6)
    found = settled(fresh_master)
    assert (found["delivered"], found["failed"], found["lastResult"]) == (1, 1, "HTTP 500")
    assert found["lastTime"].endswith("Z")
    assert not fresh_master.rows("SELECT * FROM webhook_events")
    assert len(receiver.received) == 6


def test_delivery_rejected_by_receiver_is_not_retried(
    fresh_master: Master, receiver: Receiver, delivery: Delivery
) -> None:
    make(fresh_master, receiver.url)
    receiver.statuses = [404]
    finish(fresh_master, "COMPLETED")
    receiver.wait()
    assert settled(fresh_master)["failed"] == 1
    fresh_master.change("UPDATE webhooks SET url = 'http://127.0.0.1:1/'")
    finish(fresh_master, "COMPLETED", 2)
    wait_for(lambda: listed(fresh_master)["delivery"]["failed"] == 2)
    assert "refused" in listed(fresh_master)["delivery"]["lastResult"]
    assert len(receiver.received) == 1


def test_pending_event_is_deleted_with_webhook(fresh_master: Master) -> None:
    make(fresh_master, "http://127.0.0.1:1/")
    finish(fresh_master, "COMPLETED")
    assert len(fresh_master.rows("SELECT * FROM webhook_events")) == 1
    fresh_master.send("DELETE", "/api/v1/webhooks/1", token="admin")
    assert_no_pending_events(fresh_master)


def test_delivery_stop_sends_due_events_first(fresh_master: Master, receiver: Receiver) -> None:
    make(fresh_master, receiver.url)
    event = {"event_id": "e", "type": "EXPERIMENT_STATE_CHANGE", "timestamp": 1, "state": "COMPLETED"}
    for _ in range(20):
        fresh_master.services.database.write(lambda tx: webhooks.add_event(tx, 1, event))
    delivery = Delivery(fresh_master.services)
    delivery.start()
    delivery.stop(60.0)
    assert len(receiver.received) == 20
    assert_no_pending_events(fresh_master)


def test_event_queue_is_bounded_and_counts_dropped(fresh_master: Master) -> None:
    make(fresh_master, "http://127.0.0.1:1/", [bindings.v1Trigger(triggerType=CUSTOM)], mode=SPECIFIC)

    def fill(tx: Transaction) -> None:
        for _ in range(webhooks.MAX_PENDING + 5):
            webhooks.add_event(tx, 1, {})

    fresh_master.services.database.write(fill)
    found = listed(fresh_master)["delivery"]
    assert (found["waiting"], found["dropped"]) == (webhooks.MAX_PENDING, 5)
