"""Actions on an experiment's page, on a running master with real trials."""

from __future__ import annotations

import base64
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from browsing import Browser
from waiting import wait_for

from dstrial.testing.master import MasterForTest

pytestmark = pytest.mark.process

SCRIPT = """
import determined as det

with det.core.init() as core:
    for step in range(1, 4):
        core.train.report_validation_metrics(step, {"score": 2.0 / step})
"""
CONFIG = {
    "name": "<b>once</b>",
    "entrypoint": "python3 train.py",
    "searcher": {"name": "single", "metric": "score"},
    "max_restarts": 0,
}


def created(master: MasterForTest, **more: Any) -> int:
    content = base64.b64encode(SCRIPT.encode()).decode()
    file = {"path": "train.py", "type": 48, "content": content, "mtime": "0", "mode": 420}
    body = {"activate": True, "config": yaml.safe_dump(CONFIG), "modelDefinition": [file], **more}
    return int(master.client().post("/api/v1/experiments", body)["experiment"]["id"])


def experiment(master: MasterForTest, number: int) -> dict[str, Any]:
    found: dict[str, Any] = master.client().get(f"/api/v1/experiments/{number}")["experiment"]
    return found


@pytest.fixture
def browser(open_browser: Callable[..., Browser], shared_master: MasterForTest) -> Browser:
    client = shared_master.client()
    body = {"username": "determined", "password": shared_master.password(), "isHashed": False}
    token = client.post("/api/v1/auth/login", body)["token"]
    port = int(shared_master.address.rpartition(":")[2])
    return open_browser(master=types.SimpleNamespace(port=port, tokens={}), token=token)


@pytest.fixture(scope="module")
def done(shared_master: MasterForTest) -> Iterator[int]:
    number = created(shared_master)
    wait_for(lambda: experiment(shared_master, number)["state"] == "STATE_COMPLETED")
    yield number
    shared_master.client().send("DELETE", f"/api/v1/experiments/{number}")


def test_fork_is_validated_and_submitted_with_parent(
    browser: Browser, shared_master: MasterForTest, done: int
) -> None:
    browser.open(f"/det/experiments/{done}/config", ".tools")
    browser.page.click("text=Fork …")
    config = yaml.safe_load(browser.page.input_value("dialog textarea"))
    assert config["name"] == CONFIG["name"]
    browser.page.fill("dialog textarea", yaml.safe_dump({**config, "searcher": {"name": "nothing"}}))
    browser.page.click("dialog button.main")
    browser.page.wait_for_selector("dialog pre.problem")
    assert "searcher.name" in browser.text("dialog pre.problem")
    browser.page.fill("dialog textarea", yaml.safe_dump({**config, "name": "forked"}))
    browser.page.click("text=Check only")
    browser.page.wait_for_selector("text=The config is valid")
    browser.page.click("dialog button.main")
    browser.until(f"!document.querySelector('dialog') && !location.pathname.includes('/{done}/')")
    browser.until("document.querySelector('h1').innerText.startsWith('forked')")
    made = int(browser.page.url.split("/experiments/")[1].split("/")[0])
    browser.until("document.querySelector('.facts .state').innerText === 'completed'")
    assert experiment(shared_master, made)["forkedFrom"] == done
    shared_master.client().send("DELETE", f"/api/v1/experiments/{made}")
    assert [problem for problem in browser.problems if "400 (Bad Request)" not in problem] == []
    browser.problems.clear()


def test_ended_experiment_is_continued(browser: Browser, shared_master: MasterForTest, done: int) -> None:
    browser.open(f"/det/experiments/{done}/config", ".tools")
    browser.page.click("text=Continue …")
    browser.page.click("dialog button.main")
    browser.until("document.body.innerText.includes('goes on') && !document.querySelector('dialog')")

    def has_run_again() -> bool:
        trial = shared_master.client().get(f"/api/v1/experiments/{done}/trials")["trials"][0]
        return len(trial["taskIds"]) > 1

    wait_for(has_run_again)
    wait_for(lambda: experiment(shared_master, done)["state"] == "STATE_COMPLETED")
    browser.until("document.querySelector('.facts .state').innerText === 'completed'")


def test_kill_requires_confirmation(browser: Browser, shared_master: MasterForTest) -> None:
    number = created(shared_master, activate=False)
    browser.open(f"/det/experiments/{number}/config", ".tools")
    browser.page.click("button:text-is('Kill')")
    browser.page.click("dialog button.danger")
    wait_for(lambda: experiment(shared_master, number)["state"] == "STATE_CANCELED")
    browser.page.wait_for_selector("button:text-is('Archive')")
    shared_master.client().send("DELETE", f"/api/v1/experiments/{number}")


def test_tensorboard_opens_in_window_that_waits(browser: Browser, done: int) -> None:
    browser.open(f"/det/experiments/{done}/config", ".tools")
    with browser.page.expect_popup() as opened:
        browser.page.click("button:text-is('TensorBoard')")
    opened.value.wait_for_selector("tb-webapp", state="attached", timeout=120_000)
    assert ".localhost:" in opened.value.url
    with opened.value.expect_response(lambda answer: "/data/runs" in answer.url) as runs:
        opened.value.reload()
    assert runs.value.ok  # requests of TensorBoard's page carry the cookie of its own host name
    opened.value.close()
    browser.show("/det/tasks", "button[aria-label^='Kill']")
    browser.page.click("button[aria-label^='Kill']")
    browser.page.click("dialog button.danger")
    browser.page.wait_for_selector("button[aria-label^='Kill']", state="detached")
