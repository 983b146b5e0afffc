"""Endpoints and browser views of the cluster and its queue."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browsing import Browser
from seeded import add_experiment, add_task
from serving import Master

from dstrial.master.backends.backend import Node
from dstrial.master.backends.devices import Slot
from dstrial.master.store.nodes import agent_key
from dstrial.master.web.cluster import SlotCounts, count_slots, pending_reason

pytestmark = pytest.mark.process

HTML = "<img src=x onerror=alert(1)> & co"


@pytest.fixture(scope="module")
def busy(seeded_master: Master) -> dict[str, str]:
    """Ids of tasks in a cluster with four slots, three of them in use."""

    def fill(tx):
        add_experiment(tx, name="waits", state="ACTIVE", num_trials=2)
        return {
            "runs": add_task(tx, name=HTML, slots=(2,), num_slots=1),
            "without": add_task(tx, kind="TENSORBOARD", name="boards", slots=()),
            "big": add_task(tx, name="big", num_slots=8),
        }

    return seeded_master.write(fill)


def test_endpoint_reports_slot_holders_and_pending_reasons(
    seeded_master: Master, busy: dict[str, str]
) -> None:
    found = seeded_master.get("/page/cluster").json
    assert (found["usable"], found["free"]) == (4, 1)
    (node,) = found["nodes"]
    holders = [found["holders"].get(slot["holder"] or "", {}) for slot in node["slots"]]
    assert [(one.get("trial"), one.get("task") if not one.get("trial") else None) for one in holders] == [
        (1, None),
        (2, None),
        (None, busy["runs"]),
        (None, None),
    ]
    reasons = {entry["name"]: entry["reason"] for entry in found["queue"]}
    assert reasons["waits"].startswith("2 wait for 2 slots each: 1 of 4 free")
    assert reasons["big"] == "waits for 8 slots: only 4 can be used now"
    assert reasons[HTML] == ""


@pytest.fixture
def administrator(seeded_master: Master) -> Iterator[None]:
    """Make the browser's user an administrator, as only those may disable slots."""
    seeded_master.change("UPDATE users SET admin = 1 WHERE username = 'determined'")
    yield
    seeded_master.change("UPDATE users SET admin = 0 WHERE username = 'determined'")


def test_slot_and_node_disabling_requires_confirmation(
    browser: Browser, seeded_master: Master, busy: dict[str, str], administrator: None
) -> None:
    browser.show("/det/clusters", "main table")
    node = seeded_master.services.agent_id

    def off() -> dict[int, int]:
        return {
            row["slot_id"]: row["drain"]
            for row in seeded_master.rows("SELECT slot_id, drain FROM disabled_slots")
        }

    browser.page.click(f"button[aria-label='Disable slot 3 of {node}']")
    browser.page.click("dialog button:has-text('Cancel')")
    assert off() == {}
    browser.page.click(f"button[aria-label='Disable slot 3 of {node}']")
    browser.page.click("dialog button.danger")
    browser.page.wait_for_selector(f"button[aria-label='Enable slot 3 of {node}']")
    assert off() == {3: 0}
    browser.page.click(f"button[aria-label='Enable slot 3 of {node}']")
    browser.page.wait_for_selector(f"button[aria-label='Disable slot 3 of {node}']")
    browser.page.click(f"button[aria-label='Drain {node}']")
    browser.page.click("dialog button.danger")
    browser.page.wait_for_selector(f"button[aria-label='Enable {node}']")
    assert off() == {agent_key(0): 1}
    assert "draining" in browser.text("table.plain tbody")
    browser.page.click(f"button[aria-label='Enable {node}']")
    browser.page.wait_for_selector(f"button[aria-label='Disable {node}']")
    assert off() == {}


def test_queue_is_reordered_and_follows_external_changes(
    browser: Browser, seeded_master: Master, busy: dict[str, str]
) -> None:
    browser.show("/det/cluster", "[aria-label=Queue] tbody tr[data-idx='4']")
    names = (
        "[...document.querySelectorAll('[aria-label=Queue] tbody tr[data-idx] a')].map((a) => a.textContent)"
    )
    assert HTML in browser.page.evaluate(names)
    before = browser.page.evaluate(names)
    assert before[-1] == "big"
    browser.page.click("button[aria-label='Move big ahead']")
    browser.until(f"({names}).at(-2) === 'big'")
    browser.page.click("button[aria-label^='Set the priority of big']")
    browser.page.fill("dialog input", "100")
    assert browser.page.is_disabled("dialog button.main")
    browser.page.fill("dialog input", "7")
    browser.page.keyboard.press("Enter")
    browser.until(f"({names})[0] === 'big'")
    assert seeded_master.rows("SELECT priority FROM commands WHERE description = 'big'") == [{"priority": 7}]
    # A change by another client is shown without a page reload.
    body = {"updates": [{"jobId": job_of(seeded_master, "big"), "priority": 99}]}
    assert seeded_master.send("POST", "/api/v1/job-queues", body, token="determined").status == 200
    browser.until(f"({names}).at(-1) === 'big'")
    back = {"updates": [{"jobId": job_of(seeded_master, "big"), "priority": 42}]}
    seeded_master.send("POST", "/api/v1/job-queues", back, token="determined")


def job_of(master: Master, name: str) -> str:
    return str(master.rows("SELECT job_id FROM commands WHERE description = ?", name)[0]["job_id"])


def test_disabled_or_down_slots_are_not_usable() -> None:
    def node(node_id: int, *slots: int, why_down: str | None = None) -> Node:
        found = tuple(Slot(slot, "cpu", "cpu", f"cpu-{slot}") for slot in slots)
        return Node(node_id, f"n{node_id}", "127.0.0.1", found, why_down, 0)

    nodes = (node(0, 0, 1, 2), node(1, 1024, 1025), node(2, 2048, why_down="it does not answer"))
    assert count_slots(nodes, {}, frozenset({0})) == SlotCounts(usable=5, free=4)
    assert count_slots(nodes, {2: True, agent_key(1): False}, frozenset({0})) == SlotCounts(usable=2, free=1)


def test_pending_reason_describes_demand_and_supply() -> None:
    counts = SlotCounts(usable=4, free=1)
    assert pending_reason(2, 0, 3, counts) == ""
    assert pending_reason(1, 1, 0, counts) == "waits for 1 slot: 1 of 4 free"
    assert pending_reason(2, 3, 1, counts) == "3 wait for 2 slots each: 1 of 4 free, 1 ahead"
    assert pending_reason(8, 1, 0, counts) == "waits for 8 slots: only 4 can be used now"
