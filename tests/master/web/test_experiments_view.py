"""The list of experiments and one experiment, in a real browser."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from browsing import Browser
from seeded import add_experiment
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

    return seeded_master.services.database.write(fill)


def test_the_list_is_filtered_sorted_and_kept_in_the_address(
    open_browser: Callable[..., Browser], search: int
) -> None:
    browser = open_browser()
    browser.open("/", "tbody tr[data-idx]")
    assert browser.text("tbody tr[data-idx='0'] td:nth-child(3)") == NAME
    browser.page.fill("input[type=search]", "label:long state:completed")
    browser.until("document.querySelectorAll('tbody tr[data-idx]').length === 4")
    browser.page.click("th button:has-text('Best')")
    best = [float(text) for text in browser.texts("tbody tr[data-idx] td:nth-child(7)")]
    assert best == sorted(best)
    browser.page.reload()
    browser.until("document.querySelectorAll('tbody tr[data-idx]').length === 4")
    assert [float(text) for text in browser.texts("tbody tr[data-idx] td:nth-child(7)")] == best


def test_the_curves_of_a_search_are_in_one_chart_with_the_best_marked(
    open_browser: Callable[..., Browser], search: int
) -> None:
    browser = open_browser()
    browser.open(f"/det/experiments/{search}/overview", "tbody tr.best")
    browser.until("document.querySelector('.plot').getAttribute('aria-label').includes('16 curves')")
    assert browser.text("tbody tr.best td:nth-child(2)").endswith("★")
    assert NAME in browser.text("h1")
    browser.page.select_option("label:has-text('Over') select", "epochs")
    browser.until("document.querySelector('.plot').getAttribute('aria-label').includes('epochs')")
    assert "x=epochs" in browser.page.url


def test_a_change_is_shown_without_loading_the_page_again(
    open_browser: Callable[..., Browser], search: int, seeded_master: Master
) -> None:
    browser = open_browser()
    browser.open("/?filter=appears", "td.empty")
    browser.page.evaluate("window.isSame = true")
    seeded_master.services.database.write(lambda tx: add_experiment(tx, name="appears later"))
    browser.until("document.querySelectorAll('tbody tr[data-idx]').length === 1")
    assert browser.page.evaluate("window.isSame")


def test_ten_thousand_trials_are_listed_filtered_and_drawn_in_part(
    open_browser: Callable[..., Browser], seeded_master: Master
) -> None:
    experiment = seeded_master.services.database.write(
        lambda tx: add_experiment(tx, name="many", num_trials=10_000, num_points=2, seed=1)
    )
    browser = open_browser()
    browser.open(f"/det/experiments/{experiment}/overview", "tbody tr[data-idx]")
    assert "10000 trials" in browser.text(".facts")
    assert browser.page.locator("tbody tr[data-idx]").count() < 100
    browser.until("document.querySelector('.plot').getAttribute('aria-label').includes('1000 curves')")
    browser.page.fill("input[aria-label='Filter trials']", "layers=5 optimizer:sgd best<0.05")
    browser.until("!document.querySelector('.table .tools [role=status]').textContent.startsWith('10000')")
    best = [float(text) for text in browser.texts("tbody tr[data-idx] td:nth-child(4)")]
    assert best
    assert max(best) < 0.05


def test_a_link_of_the_release_before_leads_to_its_experiment(
    open_browser: Callable[..., Browser], search: int
) -> None:
    browser = open_browser()
    browser.open(f"/?experiment={search}", "tbody tr.best")
    assert browser.page.url.endswith(f"/det/experiments/{search}")
