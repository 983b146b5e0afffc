"""The list of commands, TensorBoards and generic tasks, in a real browser."""

from __future__ import annotations

import pytest
from browsing import Browser
from seeded import add_task
from serving import Master
from waiting import wait_for

pytestmark = pytest.mark.process

HTML = "<img src=x onerror=alert(1)> & co"
ROWS = "document.querySelectorAll('tbody tr[data-idx]').length"


@pytest.fixture(scope="module")
def tasks(seeded_master: Master) -> dict[str, str]:
    def fill(tx):
        return {
            "command": add_task(tx, name=HTML, slots=(2,), num_slots=1),
            "board": add_task(tx, kind="TENSORBOARD", name="boards", slots=(), experiments=(1, 2)),
            "notebook": add_task(
                tx, kind="GENERIC", name="notebook", slots=(3,), num_slots=1, ports=(8888,), is_pausable=True
            ),
            "failed": add_task(tx, name="failed", state="ERROR"),
        }

    return seeded_master.write(fill)


def test_tasks_page_lists_services_state_and_reason(seeded_master: Master, tasks: dict[str, str]) -> None:
    found = {row["id"]: row for row in seeded_master.get("/page/tasks").json["tasks"]}
    assert found[tasks["board"]]["services"] == [f"/proxy/{tasks['board']}/"]
    assert found[tasks["notebook"]]["services"] == [f"/proxy/{tasks['notebook']}:8888/"]
    assert found[tasks["failed"]]["state"] == "ERROR"
    assert found[tasks["failed"]]["reason"] == "exit code 3"
    assert seeded_master.get("/page/tasks", token="trial-1").status in (401, 403)


def test_task_list_filters_and_links_related_pages(browser: Browser, tasks: dict[str, str]) -> None:
    browser.show("/det/tasks", "tbody tr[data-idx='3']")
    assert HTML in browser.text("tbody")
    links = browser.page.eval_on_selector_all(
        "tbody a", "(all) => all.map((one) => one.getAttribute('href'))"
    )
    assert f"/det/tasks/{tasks['command']}/logs" in links
    assert f"/proxy/{tasks['board']}/" in links
    assert "/det/experiments/2" in links
    browser.page.check("input[type=checkbox]")
    browser.until(f"{ROWS} === 3")
    browser.page.select_option("select[aria-label=Kind]", "GENERIC")
    browser.until(f"{ROWS} === 1")
    browser.page.reload()
    browser.page.wait_for_selector("tbody tr[data-idx]")
    browser.until(f"{ROWS} === 1")
    browser.page.fill("input[type=search]", "slots>5")
    browser.page.wait_for_selector("td.empty:has-text('No task fits the filter.')")


def test_kill_task_requires_confirmation_and_shows_stopping(
    browser: Browser, seeded_master: Master, tasks: dict[str, str]
) -> None:
    def kills() -> list[str]:
        return [
            row["task_id"] for row in seeded_master.rows("SELECT task_id FROM allocations WHERE kill_us > 0")
        ]

    browser.show("/det/tasks", "tbody tr[data-idx]")
    for name, task in ((HTML, "command"), ("boards", "board"), ("notebook", "notebook")):
        browser.page.click(f'button[aria-label="Kill {name}"]')
        browser.page.wait_for_selector("dialog[open]")
        browser.page.keyboard.press("Escape")
        browser.page.wait_for_selector("dialog", state="detached")
        assert tasks[task] not in kills()
        browser.page.click(f'button[aria-label="Kill {name}"]')
        browser.page.click("dialog button.danger")
        wait_for(lambda task=task: tasks[task] in kills())
        browser.page.wait_for_selector(".notices p:has-text('kill')")
        browser.until("document.querySelectorAll('.notices p.problem').length === 0")
    browser.until("document.querySelector('tbody').textContent.includes('stopping')")
