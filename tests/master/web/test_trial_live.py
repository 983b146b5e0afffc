"""A real trial of a real master in a real browser: its lines and metrics as they come, and its end by a click."""

from __future__ import annotations

import base64
import types
import urllib.parse
from collections.abc import Callable, Iterator

import pytest
import yaml
from browsing import Browser

from dstrial.master.login import new_token
from dstrial.testing.master import MasterForTest

pytestmark = pytest.mark.process

SCRIPT = """
import time

import determined as det

with det.core.init(tensorboard_mode=det.core.TensorboardMode.MANUAL) as core:
    for step in range(1, 2000):
        print(f"WARNING: <i>step {step}</i>", flush=True)
        core.train.report_training_metrics(step, {"loss": 1.0 / step})
        if step % 5 == 0:
            core.train.report_validation_metrics(step, {"score": 2.0 / step})
        time.sleep(0.1)
"""


@pytest.fixture
def trial_id(shared_master: MasterForTest) -> Iterator[int]:
    client = shared_master.client()
    config = {
        "name": "looked at",
        "entrypoint": "python3 train.py",
        "searcher": {"name": "single", "metric": "score"},
        "max_restarts": 0,
    }
    content = base64.b64encode(SCRIPT.encode()).decode()
    file = {"path": "train.py", "type": 48, "content": content, "mtime": "0", "mode": 420}
    body = {"activate": True, "config": yaml.safe_dump(config), "modelDefinition": [file]}
    created = int(client.post("/api/v1/experiments", body)["experiment"]["id"])
    (trial,) = client.get(f"/api/v1/experiments/{created}/trials")["trials"]
    yield int(trial["id"])
    client.post(f"/api/v1/experiments/{created}/kill", {})


def test_a_running_trial_is_followed_and_killed(
    open_browser: Callable[..., Browser], shared_master: MasterForTest, trial_id: int
) -> None:
    port = urllib.parse.urlsplit(shared_master.address).port
    token = new_token(shared_master.record, "determined")
    browser = open_browser(master=types.SimpleNamespace(port=port, tokens={}), token=token)
    browser.open(f"/det/trials/{trial_id}/logs", ".log")
    browser.page.evaluate("window.isSame = true")
    browser.until("document.querySelector('.lines').innerText.includes('<i>step 5</i>')")
    last = (
        "Number(/step (\\d+)/.exec([...document.querySelectorAll('.line .said')].at(-1).innerText)?.[1] ?? 0)"
    )
    before = browser.page.evaluate(last)
    browser.until(f"{last} > {before + 5}")
    assert browser.page.locator(".line.WARNING").count() > 5
    browser.page.click("nav.tabs a:has-text('Metrics')")
    browser.until("document.querySelectorAll('.chart').length >= 2")
    browser.until("document.querySelector('main').innerText.includes('best score')")
    browser.page.click("button.danger:has-text('Kill')")
    browser.page.click("dialog button:has-text('Kill')")
    browser.until("document.querySelector('.facts .state').innerText.includes('canceled')")
    browser.page.click("nav.tabs a:has-text('Runs')")
    browser.page.wait_for_selector("tbody tr[data-idx='0']")
    browser.until("!document.querySelector('tbody tr').innerText.endsWith('runs')")
    assert browser.page.evaluate("window.isSame")
