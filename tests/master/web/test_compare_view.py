"""Comparison of trials, in a real browser."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from browsing import Browser
from seeded import add_experiment, trials_of
from serving import Master

pytestmark = pytest.mark.process

NAME = "<script>alert(1)</script>"
Open = Callable[..., Browser]


@dataclasses.dataclass(frozen=True)
class Seeded:
    first: int
    second: int
    trials: list[int]
    best_of_second: int


@pytest.fixture(scope="module")
def seeded(seeded_master: Master) -> Seeded:
    def fill(tx):
        first = add_experiment(tx, name=NAME, num_trials=3, num_points=20, seed=3)
        second = add_experiment(tx, name="other", num_trials=2, num_points=20, seed=4)
        row = tx.execute("SELECT best_trial_id FROM experiments WHERE id = ?", (second,)).fetchone()
        return Seeded(first, second, trials_of(tx, first), row["best_trial_id"])

    return seeded_master.write(fill)


def curves(number: int) -> str:
    return f"document.querySelector('.plot')?.getAttribute('aria-label').includes('{number} curves')"


def test_chosen_metrics_are_charted_for_all_trials(browser: Browser, seeded: Seeded) -> None:
    browser.show(f"/det/compare?trials={','.join(map(str, seeded.trials))}", ".chart")
    browser.until(curves(3))
    assert "validation: loss" in browser.text(".chart figcaption")
    browser.page.select_option("label:has-text('Add a metric') select", "training.accuracy")
    browser.until("document.querySelectorAll('.chart').length === 2")
    browser.page.reload()
    browser.until("document.querySelectorAll('.chart').length === 2")
    assert "training: accuracy" in browser.texts(".chart figcaption")[1]
    browser.page.click("button[aria-label='Remove the chart of validation.loss']")
    browser.until("document.querySelectorAll('.chart').length === 1")


def test_differing_hyperparameters_are_marked(browser: Browser, seeded: Seeded) -> None:
    browser.show(f"/det/compare?trials={seeded.trials[0]},{seeded.trials[1]}", "tr.differs")
    assert any(text.startswith("lr") for text in browser.texts("tr.differs th"))
    assert "global_batch_size" not in browser.text("table.side")
    browser.page.uncheck("label:has-text('only hyperparameters that differ') input")
    browser.until("document.querySelector('table.side').innerText.includes('global_batch_size')")
    assert browser.page.locator("tr:has-text('global_batch_size')").get_attribute("class") != "differs"
    browser.page.click(f"button[aria-label='Remove trial {seeded.trials[1]}']")
    browser.until("document.querySelector('h1').innerText === 'Compare 1 trial'")


def test_experiments_are_compared_by_best_trial_and_config(browser: Browser, seeded: Seeded) -> None:
    browser.show(f"/det/compare?experiments={seeded.first},{seeded.second}", ".diff")
    assert f"trial {seeded.best_of_second}" in browser.text("table.side thead")
    gone, new = browser.texts(".diff .removed"), browser.texts(".diff .added")
    assert any(NAME in line for line in gone)
    assert "+name: other" in map(str.strip, new)
    assert browser.page.locator("main script").count() == 0


def test_missing_trial_is_reported_and_rest_shown(browser: Browser, seeded: Seeded) -> None:
    browser.show(f"/det/compare?trials={seeded.trials[0]},999999", "main .problem")
    assert browser.text("main .problem") == "trial 999999 is not found."
    assert browser.text("h1") == "Compare 1 trial"
    browser.open("/det/compare", "h1")
    assert "press Compare" in browser.text("main")
