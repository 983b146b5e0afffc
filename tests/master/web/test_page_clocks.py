"""The page with wrong clocks, of the browser and of nodes that report."""

from __future__ import annotations

import dataclasses
import re
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from browsing import Browser
from seeded import add_experiment, add_runs, add_search, add_task, trials_of
from serving import Master

pytestmark = pytest.mark.process

HOUR_S = 3600
DAY_S = 24 * HOUR_S
TOOK = re.compile(r"^1h( [0-9]m)?$")
JUMPS: dict[str, Callable[[Any], None]] = {
    "a day forwards": lambda clock: clock.set_system_time(time.time() + DAY_S),
    "an hour back": lambda clock: clock.set_system_time(time.time() - HOUR_S),
    # Unlike set_system_time, fast_forward also runs the browser's timers.
    "an hour asleep": lambda clock: clock.fast_forward(HOUR_S * 1000),
}
"""Changes of a browser's clock while a page is open."""


@dataclasses.dataclass(frozen=True)
class Seeded:
    experiment: int
    """An experiment that has run for an hour, with two trials."""
    trial: int


@pytest.fixture(scope="module")
def seeded(seeded_master: Master) -> Seeded:
    def fill(tx):
        experiment = add_experiment(tx, name="runs", state="ACTIVE", num_trials=2)
        trial = trials_of(tx, experiment)[0]
        add_runs(tx, trial, [(0, 2, None, "")])
        add_task(tx, name="prints", slots=(3,), num_slots=1)
        add_search(tx)
        hour_us = HOUR_S * 1_000_000
        # The master sends times in whole seconds, so avoid ages of exactly an hour: add a minute.
        for table in ("experiments", "trials"):
            tx.execute(f"UPDATE {table} SET start_us = start_us - {hour_us // 60}")
        return Seeded(experiment, trial)

    return seeded_master.write(fill)


def took(browser: Browser, name: str) -> str:
    """Return the *Took* cell of the table row whose link has the text ``name``."""
    found = browser.page.evaluate(
        """(name) => {
          const row = [...document.querySelectorAll('tbody tr a')].find((a) => a.textContent === name).closest('tr');
          const at = [...document.querySelectorAll('thead th')].findIndex((one) => one.innerText.startsWith('Took'));
          return row.cells[at].innerText;
        }""",
        name,
    )
    return str(found).strip()


@pytest.mark.exhaustive("[an hour back]")
@pytest.mark.parametrize("jump", JUMPS)
def test_ages_follow_master_clock_when_browser_jumps(
    open_browser: Callable[..., Browser], seeded_master: Master, seeded: Seeded, jump: str
) -> None:
    seeded_master.change("UPDATE experiments SET name = 'runs' WHERE id = ?", seeded.experiment)
    browser = open_browser()
    browser.page.clock.install()
    browser.open("/det/experiments", "tbody tr[data-idx]")
    assert TOOK.match(took(browser, "runs"))
    browser.page.evaluate("window.isSame = true")
    JUMPS[jump](browser.page.clock)
    # Changes after the jump are shown, and the ages have not jumped.
    for number, name in enumerate(("renamed", "runs")):
        seeded_master.write(
            lambda tx, name=name: (
                tx.execute("UPDATE experiments SET name = ? WHERE id = ?", (name, seeded.experiment)),
                tx.publish(f"experiment:{seeded.experiment}"),
            )
        )
        browser.until(f"document.querySelector('tbody').innerText.includes('{name}')")
        assert TOOK.match(took(browser, name)), (number, took(browser, name))
    assert browser.page.evaluate("window.isSame")
    # Views that are opened after the jump show the same ages.
    for path in (f"/det/experiments/{seeded.experiment}", f"/det/trials/{seeded.trial}"):
        browser.open(path, ".facts")
        assert re.search(r", 1h( [0-9]m)?$", browser.text(".facts"), re.MULTILINE), browser.text(".facts")
    browser.open("/det/searches", "tbody tr[data-idx]")
    assert TOOK.match(took(browser, "gpt"))


def test_extreme_report_times_break_no_view(
    open_browser: Callable[..., Browser], seeded_master: Master, seeded: Seeded
) -> None:
    for told, status in (
        ("0001-01-01T00:00:00Z", 200),
        ("9999-12-31T23:59:59.999999Z", 200),
        ("9999-12-31T23:59:59-23:00", 400),
        ("0001-01-01T00:00:00+23:00", 400),
    ):
        body = {
            "uuid": str(uuid.uuid4()),
            "taskId": "1.request",
            "allocationId": "1.request.1",
            "reportTime": told,
        }
        answer = seeded_master.send(
            "POST",
            "/api/v1/checkpoints",
            {**body, "resources": {"a": "1"}, "metadata": {"steps_completed": 1}, "state": "STATE_COMPLETED"},
            token="trial-1",
        )
        assert answer.status == status, answer.content
    browser = open_browser()
    browser.open("/det/experiments/1/checkpoints", "tbody tr[data-idx='0']")
    browser.show("/det/trials/1/checkpoints", "tbody tr[data-idx='0']")
    assert [text for text in browser.texts("time") if "Invalid" in text] == []
