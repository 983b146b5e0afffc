"""Delivery of webhook events by a real master, also after failures."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from receiver import Receiver, receiving
from submitting import config, log_of, submit, wait_until
from waiting import wait_for

from dstrial.testing.master import MasterForTest, master_for_test

pytestmark = pytest.mark.process

QUICK = "print('done')"
ALERTING = """
import determined as det

with det.core.init(tensorboard_mode=det.core.TensorboardMode.MANUAL) as core:
    print("loss is NaN at batch 7")
    print("loss is NaN at batch 8")
    core.alert(title="look at this", description="the loss is NaN", level="error")
"""


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterForTest]:
    with master_for_test(tmp_path_factory.mktemp("hooked")) as one:
        yield one


@pytest.fixture
def receiver(master: MasterForTest) -> Iterator[Receiver]:
    with receiving() as one:
        yield one
        for webhook in list_webhooks(master):
            assert master.dstrial("webhook", "delete", str(webhook["id"])).returncode == 0
        one.hangs = False


def list_webhooks(master: MasterForTest) -> list[dict[str, Any]]:
    shown = master.dstrial("webhook", "list", "--json")
    assert shown.returncode == 0, shown.stderr
    return list(json.loads(shown.stdout))


def create_webhook(master: MasterForTest, *words: str) -> None:
    made = master.dstrial("webhook", "create", *words)
    assert made.returncode == 0, made.stderr
    assert "is created" in made.stdout


def key_of(master: MasterForTest) -> str:
    shown = master.dstrial("webhook", "key")
    assert shown.returncode == 0, shown.stderr
    return shown.stdout.strip()


def run(master: MasterForTest, script: str = QUICK, **changes: Any) -> int:
    experiment_id = submit(master, config(**changes), script)
    wait_until(master, experiment_id, "COMPLETED")
    return experiment_id


def received_ids(receiver: Receiver) -> list[int]:
    """Return the experiment ids in the received events, in order of arrival."""
    return [one.json["event_data"]["experiment"]["id"] for one in receiver.received]


def test_webhook_delivers_state_log_and_alert_events(master: MasterForTest, receiver: Receiver) -> None:
    words = ("--alert", "--log", "NaN at batch [0-9]+", "--state", "completed")
    create_webhook(master, "watch", receiver.url, *words)
    experiment_id = run(
        master, ALERTING, name="watched", integrations={"webhooks": {"webhook_name": ["watch"]}}
    )

    received = receiver.wait(3)
    assert all(one.is_signed_with(key_of(master)) for one in received)
    by_type = {one.json["event_type"]: one.json for one in received}
    data = {kind: event["event_data"] for kind, event in by_type.items()}
    assert data["TASK_LOG"]["task_log"]["triggering_log"] == "loss is NaN at batch 7"
    assert data["CUSTOM"]["custom_data"] == {
        "title": "look at this",
        "description": "the loss is NaN",
        "level": "ERROR",
    }
    assert data["CUSTOM"]["experiment"]["trial_id"] > 0
    shown = data["EXPERIMENT_STATE_CHANGE"]["experiment"]
    assert (shown["id"], shown["name"], shown["state"]) == (experiment_id, "watched", "COMPLETED")
    wait_for(lambda: list_webhooks(master)[0]["delivery"]["delivered"] == 3)
    assert list_webhooks(master)[0]["delivery"]["lastResult"] == "HTTP 200"
    assert len(receiver.received) == 3
    # The log of an experiment that names no webhook says that its alert reaches none.
    other = run(master, ALERTING)
    assert "reaches no webhook" in log_of(master, other)
    assert len(receiver.received) == 3


def test_hanging_receiver_does_not_block_other_webhooks(master: MasterForTest, receiver: Receiver) -> None:
    with receiving() as silent:
        silent.hangs = True
        create_webhook(master, "silent", silent.url)
        create_webhook(master, "other", receiver.url)
        ids = [run(master) for _ in range(3)]

        receiver.wait(3)
        assert received_ids(receiver) == ids
        (waiting,) = [one for one in list_webhooks(master) if one["name"] == "silent"]
        assert waiting["delivery"]["delivered"] == 0
        assert waiting["delivery"]["waiting"] >= 2
        assert len(silent.received) >= 1


def test_pending_deliveries_resume_after_master_restart(master: MasterForTest, receiver: Receiver) -> None:
    receiver.hangs = True
    create_webhook(master, "patient", receiver.url)
    first = run(master)
    receiver.wait()
    second = run(master)  # Its event is queued behind the event in flight.
    third = submit(master, config(), "import time; time.sleep(600)")
    wait_until(master, third, "RUNNING")

    master.kill()
    assert received_ids(receiver) == [first]
    receiver.hangs = False
    master.up()

    wait_for(lambda: {first, second} <= set(received_ids(receiver)[1:]))
    wait_for(lambda: list_webhooks(master)[0]["delivery"]["delivered"] == 2)
    of_first = [one for one in receiver.received if one.json["event_data"]["experiment"]["id"] == first]
    assert len({one.json["event_id"] for one in of_first}) == 1
    assert all(one.is_signed_with(key_of(master)) for one in receiver.received)
    master.client().post(f"/api/v1/experiments/{third}/kill")
    wait_until(master, third, "CANCELED")

    # `dstrial down` does not wait for the receiver.
    num_received = len(receiver.received)
    receiver.hangs = True
    fourth = run(master)
    receiver.wait(num_received + 1)
    assert master.dstrial("down").returncode == 0
    receiver.hangs = False
    master.up()
    wait_for(lambda: list_webhooks(master)[0]["delivery"]["delivered"] == 3)
    assert received_ids(receiver)[num_received:] == [fourth, fourth]
    assert len({one.json["event_id"] for one in receiver.received[num_received:]}) == 1


def test_webhook_commands_report_results_and_errors(master: MasterForTest, receiver: Receiver) -> None:
    assert "no webhooks" in master.dstrial("webhook", "list").stdout
    create_webhook(
        master, "shown\u00e9", receiver.url, "--slack", "--workspace", "uncategorized", "--specific"
    )
    number = str(list_webhooks(master)[0]["id"])
    shown = master.dstrial("webhook", "list").stdout
    for word in ("shown\u00e9", "COMPLETED, ERROR", "Uncategorized, if named", "slack", receiver.url):
        assert word in shown, shown
    tried = master.dstrial("webhook", "test", number)
    assert (tried.returncode, tried.stdout) == (
        0,
        f"the receiver of webhook {number} has taken a test event\n",
    )
    receiver.statuses = [500]
    failed = master.dstrial("webhook", "test", number)
    assert failed.returncode == 1
    assert "HTTP 500" in failed.stderr
    for words, error in {
        ("create", "x", "file:///etc/passwd"): "expected an address of http or https",
        ("create", "x", receiver.url, "--state", "DONE"): "expected one of ACTIVE",
        ("create", "x", receiver.url, "--workspace", "none"): "workspace 'none' is not found",
        ("create", "x", receiver.url, "--user", "determined"): "neither an administrator",
        ("create", "x", receiver.url, "--user", "nobody"): "does not exist",
        ("delete", "999"): "webhook 999 is not found",
    }.items():
        refused = master.dstrial("webhook", *words)
        assert refused.returncode == 1, words
        assert error in refused.stderr, refused
        assert "Traceback" not in refused.stderr
    assert len(list_webhooks(master)) == 1


def test_signing_key_is_private_and_not_exposed(master: MasterForTest) -> None:
    path = master.state.webhook_key_path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = key_of(master)
    assert path.read_text().strip() == key
    assert len(key) == 64
    shown = json.dumps(master.client("admin").get("/api/v1/master/config"))
    assert "signing_key" in shown
    assert key not in shown
    assert key not in master.state.log_path.read_text()


def test_configured_base_url_is_used(tmp_path: Path) -> None:
    settings = tmp_path / "master.yaml"
    settings.write_text("webhooks: {base_url: 'https://gpu.example/'}\n")
    with master_for_test(tmp_path, options=("--config-file", str(settings))) as one, receiving() as receiver:
        create_webhook(one, "slack", receiver.url, "--slack")
        experiment_id = run(one, name="linked")
        (got,) = receiver.wait()
        assert got.is_signed_with(key_of(one))
        text = got.json["attachments"][0]["blocks"][0]["text"]["text"]
        assert text == f"✅ <https://gpu.example/det/experiments/{experiment_id} | linked (#{experiment_id})>"
