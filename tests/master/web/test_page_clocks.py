"""The page under clocks that are wrong: the reader's, which jumps under an open page, and those of nodes that report."""

from __future__ import annotations

import dataclasses
import re
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from browsing import Browser
from seeded import add_experiment, add_lines, add_runs, add_search, add_task, task_of, trials_of
from serving import Master

from dstrial.master.clock import now_us

pytestmark = pytest.mark.process

HOUR_S = 3600
DAY_S = 24 * HOUR_S
# What a person would read as a time or an age below zero, or as none: "-1h", "-0.5 hours ago", "NaN".
NEGATIVE = re.compile(r"(?<![\w.-])-\d[\d.]*\s?(?:d|h|m|s|ms|hours|minutes|days)\b|\bNaN\b|Invalid|undefined")
TOOK = re.compile(r"^1h( [0-9]m)?$")
JUMPS: dict[str, Callable[[Any], None]] = {
    "a day forwards": lambda clock: clock.set_system_time(time.time() + DAY_S),
    "an hour back": lambda clock: clock.set_system_time(time.time() - HOUR_S),
    # With it everything else of the browser that measures time goes on, too.
    "an hour asleep": lambda clock: clock.fast_forward(HOUR_S * 1000),
}
"""What happens to a browser's clock while a page is open."""


@dataclasses.dataclass(frozen=True)
class Seeded:
    experiment: int
    """Runs for an hour, with two trials."""
    trial: int
    wrong: int
    """Whose times are in the future, go backwards, or end before they begin."""
    wrong_trial: int


@pytest.fixture(scope="module")
def seeded(seeded_master: Master) -> Seeded:
    def fill(tx):
        experiment = add_experiment(tx, name="runs", state="ACTIVE", num_trials=2)
        trial = trials_of(tx, experiment)[0]
        add_runs(tx, trial, [(0, 2, None, "")])
        add_task(tx, name="prints", slots=(3,), num_slots=1)
        wrong = add_experiment(tx, name="wrong", state="ACTIVE", num_trials=2, num_points=40)
        wrong_trial, ended = trials_of(tx, wrong)
        add_runs(tx, wrong_trial, [(0, 2, 1, "lost"), (200, 2, 0, "stopped"), (300, 2, None, "")])
        add_search(tx)
        hour_us = HOUR_S * 1_000_000
        of_wrong, now = f"WHERE trial_id = {wrong_trial}", now_us()
        for sql in (
            # The times that a master sends with its answers are of whole seconds: nothing began an hour ago to the second.
            f"experiments SET start_us = start_us - {hour_us // 60}",
            f"trials SET start_us = start_us - {hour_us // 60}",
            # It begins in an hour, and one of its trials has ended before it began.
            f"experiments SET start_us = {now + hour_us} WHERE id = {wrong}",
            f"trials SET start_us = {now + hour_us} WHERE id = {wrong_trial}",
            f"trials SET end_us = start_us - {hour_us} WHERE id = {ended}",
            # Its second run ended before it began, its third begins in a day.
            f"allocations SET end_us = start_us - {hour_us} {of_wrong} AND run_id = 2",
            f"allocations SET start_us = start_us + {24 * hour_us} {of_wrong} AND run_id = 3",
            # From batch 200 on its node's clock is an hour behind, from batch 300 on two days ahead.
            f"metrics SET end_us = end_us - {hour_us} {of_wrong} AND steps BETWEEN 200 AND 299",
            f"metrics SET end_us = end_us + {48 * hour_us} {of_wrong} AND steps >= 300",
        ):
            tx.execute(f"UPDATE {sql}")
        add_lines(
            tx, task_of(tx, wrong_trial), wrong_trial, [(0, "INFO", f"step {idx}") for idx in range(30)]
        )
        tx.execute(
            "UPDATE logs SET time_us = CASE WHEN id % 3 = 0 THEN 0 WHEN id % 3 = 1 THEN time_us - ? ELSE 253402300799000000 END "
            "WHERE trial_id = ?",
            (hour_us, wrong_trial),
        )
        return Seeded(experiment, trial, wrong, wrong_trial)

    return seeded_master.write(fill)


def took(browser: Browser, name: str) -> str:
    """Return what a table says in the column *Took* of the row with a link of this text."""
    found = browser.page.evaluate(
        """(name) => {
          const row = [...document.querySelectorAll('tbody tr a')].find((a) => a.textContent === name).closest('tr');
          const at = [...document.querySelectorAll('thead th')].findIndex((one) => one.innerText.startsWith('Took'));
          return row.cells[at].innerText;
        }""",
        name,
    )
    return str(found).strip()


def assert_no_time_below_zero(browser: Browser, where: str) -> None:
    found = NEGATIVE.findall(browser.text("main"))
    assert found == [], f"{where}: {found}"


@pytest.mark.exhaustive("[an hour back]")
@pytest.mark.parametrize("jump", JUMPS)
def test_ages_are_by_the_masters_clock_when_the_readers_jumps(
    open_browser: Callable[..., Browser], seeded_master: Master, seeded: Seeded, jump: str
) -> None:
    seeded_master.change("UPDATE experiments SET name = 'runs' WHERE id = ?", seeded.experiment)
    browser = open_browser()
    browser.page.clock.install()
    browser.open("/det/experiments", "tbody tr[data-idx]")
    assert TOOK.match(took(browser, "runs"))
    browser.page.evaluate("window.isSame = true")
    JUMPS[jump](browser.page.clock)
    # What happens after the jump is shown, and ages are as old as they were.
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
    # A view that is opened after the jump.
    for path in (f"/det/experiments/{seeded.experiment}", f"/det/trials/{seeded.trial}"):
        browser.open(path, ".facts")
        assert re.search(r", 1h( [0-9]m)?$", browser.text(".facts"), re.MULTILINE), browser.text(".facts")
    browser.open("/det/searches", "tbody tr[data-idx]")
    assert TOOK.match(took(browser, "gpt"))


def test_charts_by_time_never_go_back_when_the_clock_of_a_node_did(
    open_browser: Callable[..., Browser], seeded: Seeded
) -> None:
    browser = open_browser()
    for path in (
        f"/det/experiments/{seeded.wrong}/overview?x=time",
        f"/det/trials/{seeded.wrong_trial}/metrics?x=time",
        f"/det/compare?trials={seeded.wrong_trial}&x=time",
    ):
        browser.show(path, ".chart .plot:not([aria-label$=': 0 curves'])")
        rows = browser.csv(".chart button:has-text('CSV')")
        xs = [
            float(row["time since the start"])
            for row in rows
            if row["curve"].startswith(f"trial {seeded.wrong_trial}")
        ]
        assert len(xs) == 40
        assert xs == sorted(xs), path
        assert xs[0] >= 0
        assert xs[-1] < 72 * HOUR_S  # And it has not been left at the end of what was ahead.
        assert_no_time_below_zero(browser, path)


def test_no_view_shows_a_time_below_zero_of_a_master_whose_times_are_wrong(
    open_browser: Callable[..., Browser], seeded_master: Master, seeded: Seeded
) -> None:
    browser = open_browser()
    for path in (
        f"/det/experiments/{seeded.wrong}",
        f"/det/trials/{seeded.wrong_trial}",
        f"/det/trials/{seeded.wrong_trial}/logs",
        f"/det/compare?experiments={seeded.wrong},{seeded.experiment}",
        "/det/clusters?hours=24",
        "/det/tasks",
    ):
        browser.show(path)
        browser.until("!document.querySelector('.loading')")
        browser.page.wait_for_timeout(200)
        assert_no_time_below_zero(browser, path)
    for path, row in (
        ("/det/experiments", "tbody tr[data-idx]"),
        (f"/det/experiments/{seeded.wrong}", "tbody tr[data-idx]"),
        (f"/det/trials/{seeded.wrong_trial}/runs", "tbody tr[data-idx='2']"),
    ):
        browser.show(path, row)
        found = [one["Took"] for one in browser.csv(".table button:has-text('CSV')")]
        assert [value for value in found if float(value) < 0] == [], path
    use = seeded_master.get("/page/cluster/usage?hours=24").json
    assert 0 <= min(use["used"]) <= max(use["used"])


def test_a_time_at_the_end_of_all_times_keeps_no_view_from_being_shown(
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
