"""The list of experiments and an experiment's overview, in a real browser."""

from __future__ import annotations

import re

import pytest
from browsing import Browser
from seeded import add_experiment, add_metric, add_trial
from serving import Master

pytestmark = pytest.mark.process

NAME = "<img src=x onerror=alert(1)> & co"


@pytest.fixture(scope="module")
def search(seeded_master: Master) -> int:
    def fill(tx):
        for number in range(40):
            add_experiment(
                tx,
                name=f"digits {number}",
                seed=number,
                state=("COMPLETED", "PAUSED")[number % 2],
                labels=("long",) if number % 10 == 0 else (),
            )
        return add_experiment(tx, name=NAME, num_trials=16, num_points=50, seed=7)

    return seeded_master.write(fill)


def test_list_filter_and_order_survive_reload(browser: Browser, search: int) -> None:
    browser.show("/", "tbody tr[data-idx]")
    assert browser.text("tbody tr[data-idx='0'] td:nth-child(3)") == NAME
    browser.page.fill("input[type=search]", "label:long state:completed")
    browser.until("document.querySelectorAll('tbody tr[data-idx]').length === 4")
    browser.page.click("th button:has-text('Best')")
    best = [float(text.split()[1]) for text in browser.texts("tbody tr[data-idx] td:nth-child(7)")]
    assert best == sorted(best)
    browser.page.reload()
    browser.until("document.querySelectorAll('tbody tr[data-idx]').length === 4")
    assert [float(text.split()[1]) for text in browser.texts("tbody tr[data-idx] td:nth-child(7)")] == best


def test_summary_counts_experiments_and_names_newest(
    browser: Browser, search: int, seeded_master: Master
) -> None:
    browser.show("/", ".summary")
    before = [
        int(word) for word in re.findall(r"\d+(?= (?:running|queued|failed))", browser.text(".summary"))
    ]
    assert f"newest result: {NAME}, loss 0." in browser.text(".summary")

    def fill(tx):
        failed = add_experiment(tx, name="fails", state="ERROR")
        add_experiment(tx, name="waits", state="ACTIVE")
        return failed

    failed = seeded_master.write(fill)
    counts = f"{before[0]} running, {before[1] + 1} queued, {before[2] + 1} failed (newest: fails, "
    browser.until(f"document.querySelector('.summary').innerText.startsWith('{counts}')")
    browser.page.click(".summary a:has-text('fails')")
    browser.page.wait_for_selector("h1:has-text('fails')")
    assert browser.page.url.endswith(f"/det/experiments/{failed}")


def test_search_curves_share_chart_with_best_marked(browser: Browser, search: int) -> None:
    browser.show(f"/det/experiments/{search}/overview", "tbody tr.best")
    browser.until("document.querySelector('.plot').getAttribute('aria-label').includes('16 curves')")
    assert browser.text("tbody tr.best td:nth-child(2)").endswith("★")
    assert NAME in browser.text("h1")
    browser.page.select_option("label:has-text('Over') select", "epochs")
    browser.until("document.querySelector('.plot').getAttribute('aria-label').includes('epochs')")
    assert "x=epochs" in browser.page.url


def test_change_is_shown_without_page_reload(browser: Browser, search: int, seeded_master: Master) -> None:
    browser.show("/?filter=appears", "td.empty")
    browser.page.evaluate("window.isSame = true")
    seeded_master.write(lambda tx: add_experiment(tx, name="appears later"))
    browser.until("document.querySelectorAll('tbody tr[data-idx]').length === 1")
    assert browser.page.evaluate("window.isSame")


def test_curves_update_while_search_creates_trials(browser: Browser, seeded_master: Master) -> None:
    database = seeded_master.services.database
    experiment = database.write(lambda tx: add_experiment(tx, name="grows", state="ACTIVE", num_trials=2))
    (row,) = seeded_master.rows("SELECT MIN(id) AS id FROM trials WHERE experiment_id = ?", experiment)
    browser.show(f"/det/experiments/{experiment}/overview", ".chart")
    browser.until("document.querySelector('.plot').getAttribute('aria-label').includes('2 curves')")
    database.write(lambda tx: add_metric(tx, row["id"], "validation", [(500, {"loss": 0.015625})]))
    for _ in range(20):  # Add trials about as often as the page refreshes.
        database.write(lambda tx: add_trial(tx, experiment))
        browser.page.wait_for_timeout(700)
        if b",500,0.015625" in browser.saved(".chart button:has-text('CSV')"):
            return
    pytest.fail("A curve was not asked for again while its search made trials.")


def test_ten_thousand_trials_are_listed_and_filtered(browser: Browser, seeded_master: Master) -> None:
    experiment = seeded_master.write(
        lambda tx: add_experiment(tx, name="many", num_trials=10_000, num_points=2, seed=1)
    )
    browser.show(f"/det/experiments/{experiment}/overview", "tbody tr[data-idx]")
    assert "10000 trials" in browser.text(".facts")
    assert browser.page.locator("tbody tr[data-idx]").count() < 100
    browser.until("document.querySelector('.plot').getAttribute('aria-label').includes('300 curves')")
    browser.page.fill("input[aria-label='Filter trials']", "layers=5 optimizer:sgd best<0.05")
    browser.until("!document.querySelector('.table .tools [role=status]').textContent.startsWith('10000')")
    best = [float(text) for text in browser.texts("tbody tr[data-idx] td:nth-child(4)")]
    assert best
    assert max(best) < 0.05
