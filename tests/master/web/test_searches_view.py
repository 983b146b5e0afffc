"""Views of dsat searches, from the reports that dsat writes."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from browsing import Browser
from seeded import NOTES_BEGIN, add_search, search_row
from serving import Master

pytestmark = pytest.mark.process

LIVE, ENDED, REPORTING, FAILED = "0a1b2c3d", "11111111", "22222222", "33333333"
CURVES = "[...document.querySelectorAll('.plot')].map((one) => one.getAttribute('aria-label'))"


@pytest.fixture(scope="module", autouse=True)
def _filled(seeded_master: Master) -> None:
    seeded_master.write(
        lambda tx: (add_search(tx, search_id=LIVE), add_search(tx, search_id=ENDED, has_report=True))
    )


def test_search_without_progress_is_listed(browser: Browser) -> None:
    browser.show("/det/searches", "tbody tr[data-idx='1']")
    browser.page.click(f"a[href='/det/searches/{LIVE}']:has-text('gpt')")
    browser.page.wait_for_selector(".facts")
    assert "Nothing has been told of this search yet" in browser.text("main")
    assert "0 of 0 configurations measured" in browser.text(".facts")


def test_running_search_shows_growing_front(browser: Browser, seeded_master: Master) -> None:
    def fill(tx):
        add_search(tx, search_id=REPORTING)
        return tx.execute(
            "SELECT id FROM experiments WHERE labels LIKE ?", (f"%dsat-{REPORTING}-search%",)
        ).fetchone()[0]

    worker = seeded_master.write(fill)

    def write_report(num_measured: int) -> None:
        running = {"state": "running", **dict.fromkeys(("value", "throughput", "step_s", "memory_bytes"))}
        rows = [
            search_row(number, 10.0 * number, experiment=worker, memory_bytes=1e9 * number)
            | ({} if number <= num_measured else running)
            for number in range(11, 14)
        ]
        report = {
            "name": "gpt", "method": "predict", "metric": "throughput", "unit": "records/s", "smaller_is_better": False,
            "reason": "", "is_finished": False, "notes": ["so far"], "best": 11, "own": 11, "gain": None,
            "is_gain_certain": False, "pareto": [11], "trials": rows,
        }  # fmt: skip
        notes = NOTES_BEGIN + json.dumps({"report": report})

        def write(tx):
            tx.execute("UPDATE experiments SET notes = ? WHERE id = ?", (notes, worker))
            tx.publish(f"experiment:{worker}")

        seeded_master.write(write)

    write_report(11)
    browser.show(f"/det/searches/{REPORTING}", "tbody tr.best")
    assert "so far" in browser.text("main ul")
    assert "running" in browser.text(".facts")
    assert "1 of 3 configurations measured" in browser.text(".facts")
    curves = [
        "Records per second against memory over GiB of a device: 2 curves",
    ]
    assert browser.page.evaluate(CURVES) == curves
    browser.page.evaluate("window.isSame = true")
    write_report(13)
    browser.until("document.querySelector('.facts').textContent.includes('3 of 3 configurations measured')")
    grown = [one.replace("2 curves", "4 curves") for one in curves]
    assert browser.page.evaluate(CURVES) == grown
    assert "zero 13" in browser.text("tbody tr.best")
    assert browser.page.get_attribute("tbody tr.best a", "href") == f"/det/experiments/{worker}"
    assert browser.page.evaluate("window.isSame")


def test_ended_search_shows_report_and_escapes_markup(browser: Browser) -> None:
    browser.show(f"/det/searches/{ENDED}", "tbody tr.best")
    facts = browser.text(".facts")
    assert "100.0 % better than its own configuration" in facts
    assert "predict, for throughput" in facts
    assert "the budget is spent" in browser.text("main")
    assert "<script>alert(1)</script>" in browser.text("main ul")
    assert browser.page.evaluate(CURVES) == [
        "Records per second against memory over GiB of a device: 3 curves",
    ]
    href = browser.page.get_attribute("tbody tr.best a", "href")
    assert href is not None
    assert href.startswith("/det/experiments/")


def test_failed_search_is_not_shown_as_completed(browser: Browser, seeded_master: Master) -> None:
    def fill(tx):
        add_search(tx, search_id=FAILED, has_report=True)
        told = r"\"is_finished\": true"
        tx.execute(
            "UPDATE experiments SET notes = REPLACE(notes, ?, ?) WHERE labels LIKE ?",
            (told, told + r", \"is_failure\": true", f"%dsat-{FAILED}-results%"),
        )

    seeded_master.write(fill)
    browser.show(f"/det/searches/{FAILED}", "tbody tr.best")
    assert browser.text(".facts .state") == "error"
    browser.open(f"/det/searches/{ENDED}", "tbody tr.best")
    assert browser.text(".facts .state") == "completed"
    listed = {row["id"]: row["state"] for row in seeded_master.get("/page/searches").json["searches"]}
    assert (listed[FAILED], listed[ENDED], listed[LIVE]) == ("ERROR", "COMPLETED", "RUNNING")
    browser.open("/det/searches", f"tbody a[href='/det/searches/{FAILED}']")
    assert browser.text(f"tbody tr:has(a[href='/det/searches/{FAILED}']) .state") == "error"
    assert browser.text(f"tbody tr:has(a[href='/det/searches/{ENDED}']) .state") == "completed"


def test_unknown_search_is_not_found(open_browser: Callable[..., Browser]) -> None:
    browser = open_browser()
    browser.open("/det/searches/%3Cb%3E", "main .problem")
    assert "search '<b>' is not found" in browser.text("main .problem")
    browser.problems.clear()  # The browser logs the 404 response as an error.
