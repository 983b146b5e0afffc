"""The page of one trial in a real browser: charts, instruments, tables, actions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from browsing import Browser
from rows import add
from seeded import add_experiment, add_instruments, add_metric, add_runs, trials_of
from serving import Master

from dstrial.master.clock import now_us
from dstrial.master.store import experiments

pytestmark = pytest.mark.process

NAME = "<img src=x onerror=alert(1)> & co"
CHECKPOINT = "11112222-3333-4444-5555-666677778888"
Open = Callable[..., Browser]


@dataclasses.dataclass(frozen=True)
class Seeded:
    experiment: int
    trial: int


@pytest.fixture(scope="module")
def seeded(seeded_master: Master) -> Seeded:
    def fill(tx):
        experiment = add_experiment(tx, name=NAME, num_trials=3, num_points=40, seed=7)
        trial = trials_of(tx, experiment)[0]
        add_runs(
            tx,
            trial,
            [(0, 4, 1, "rank 2 has failed with <b>code</b> 1"), (120, 4, 0, ""), (250, 2, None, "")],
        )
        add_instruments(tx, trial, 4)
        add_metric(tx, trial, NAME, [(10, {NAME: 1.5}), (20, {NAME: 2.5})])
        add_metric(
            tx,
            trial,
            "broken",
            [(10, {"x": "NaN"}), (20, {"x": 1.0}), (30, {"x": "Infinity"}), (40, {"x": 2})],
        )
        own = {"uuid": CHECKPOINT, "experiment_id": experiment, "trial_id": trial, "steps": 100}
        files = {"resources": {"model/a": 2**20}, "size": 2**20, "metadata": {"steps_completed": 100}}
        add(tx, "checkpoints", **own, **files, report_us=now_us())
        return Seeded(experiment, trial)

    return seeded_master.write(fill)


def test_metric_charts_are_grouped_and_mark_restarts(browser: Browser, seeded: Seeded) -> None:
    browser.show(f"/det/experiments/{seeded.experiment}/trials/{seeded.trial}", ".chart")
    assert browser.texts("main h2")[:2] == ["validation", "training"]
    assert {"broken", "telemetry and counters", NAME} <= set(browser.texts("main h2"))
    assert browser.texts("main .chart figcaption > span:first-child")[0] == "loss"
    assert "restart; 4 → 2 slots" in browser.text("main")
    assert "1 restart, 3 runs" in browser.text(".facts")
    browser.page.fill("input[aria-label='Find metrics']", "accur")
    browser.until("document.querySelectorAll('.chart').length === 2")
    assert "find=accur" in browser.page.url
    assert browser.page.locator("main img").count() == 0


def test_charts_share_hover_pins_and_baseline(
    browser: Browser, seeded: Seeded, seeded_master: Master
) -> None:
    other = seeded_master.write(lambda tx: trials_of(tx, seeded.experiment)[1])
    browser.show(f"/det/trials/{seeded.trial}", ".chart")
    browser.page.hover(".chart .plot >> nth=0")
    browser.until("document.querySelectorAll('.tip').length > 1")
    shown = [text.split("\n")[1].split(":")[0] for text in browser.texts(".tip:visible")]
    assert shown.count(shown[0]) >= 4  # loss and accuracy of validation and training, at the same x
    browser.page.click("button[aria-label='Pin accuracy'] >> nth=0")
    browser.until("document.querySelector('main h2')?.innerText === 'pinned'")
    browser.page.click("button:has-text('Pin as baseline')")
    browser.show(f"/det/trials/{other}", f"h1:has-text('Trial {other}')")
    browser.until("document.querySelector('main h2')?.innerText === 'pinned'")
    browser.until(f"document.querySelector('.legend')?.innerText.includes('baseline: trial {seeded.trial}')")
    browser.page.click("button[aria-label='Unpin validation: accuracy']")
    browser.until("document.querySelector('main h2').innerText === 'validation'")
    browser.show(f"/det/trials/{seeded.trial}", f"h1:has-text('Trial {seeded.trial}')")
    browser.page.click("button:has-text('No baseline')")
    browser.show(f"/det/trials/{other}", f"h1:has-text('Trial {other}')")
    browser.until("document.querySelector('.plot').getAttribute('aria-label').includes(': 1 curves')")
    assert browser.page.locator(".legend").count() == 0


def test_failed_trial_shows_error_and_no_star(browser: Browser, seeded_master: Master) -> None:
    def fill(tx):
        experiment = add_experiment(tx, name="fails", num_trials=1, num_points=3, state="ERROR")
        (trial,) = trials_of(tx, experiment)
        tx.update("trials", trial, {"state": "ERROR"})
        tx.update("experiments", experiment, {"end_reason": "trial 1: max_restarts is 0: KeyError: 'x'"})
        code = "container failed with non-zero exit code: 1 (exit code 1): "
        add_runs(tx, trial, [(0, 1, 1, f"{code}rank 0: KeyError: 'x' (model_def.py:5, in f)")])
        return trial

    trial = seeded_master.write(fill)
    browser.show(f"/det/trials/{trial}", ".failure")
    assert browser.text(".failure") == "rank 0: KeyError: 'x' (model_def.py:5, in f) Open the log"
    assert browser.page.locator(".star, .facts progress").count() == 0
    browser.page.click(".failure a")
    browser.until("document.querySelector('.log') !== null")
    browser.show("/det/experiments?filter=fails", "tbody tr[data-idx]")
    assert "error KeyError: 'x'" in browser.text("tbody tr[data-idx='0']").replace("\n", " ")
    browser.show("/det/nowhere", "main.nowhere")


def test_chart_axis_offers_epochs_records_and_time(browser: Browser, seeded: Seeded) -> None:
    browser.show(f"/det/trials/{seeded.trial}?find=validation.loss", ".chart")
    for word, label in (("epochs", "epochs"), ("records", "records"), ("time", "time since the start")):
        browser.page.select_option("label:has-text('Over') select", word)
        browser.until(f"document.querySelector('.plot').getAttribute('aria-label').includes('over {label}')")


def test_instruments_are_shown_by_rank(browser: Browser, seeded: Seeded) -> None:
    browser.show(f"/det/trials/{seeded.trial}/instruments", "table.bars")
    slow = browser.page.locator("table[aria-label='Time of a batch by rank'] tr").nth(1)
    assert slow.locator("[role=img]").nth(1).get_attribute("aria-label") == "forward 35 ms"
    memory = browser.page.locator("table[aria-label='process memory by rank'] tr")
    assert memory.count() == 4
    assert "840 MiB" in memory.nth(1).inner_text()
    assert "41 %" in browser.text(".numbers")


def test_missing_instruments_page_names_telemetry_setting(
    browser: Browser, seeded: Seeded, seeded_master: Master
) -> None:
    other = seeded_master.rows("SELECT id FROM trials WHERE experiment_id = ? ORDER BY id", seeded.experiment)
    browser.show(f"/det/trials/{other[1]['id']}/instruments")
    browser.until("document.querySelector('main').innerText.includes('telemetry: false')")


def test_trial_tabs_list_hyperparameters_checkpoints_and_runs(browser: Browser, seeded: Seeded) -> None:
    browser.show(f"/det/trials/{seeded.trial}/hyperparameters", "tbody tr[data-idx]")
    assert browser.texts("tbody tr td:first-child") == ["global_batch_size", "lr", "layers", "optimizer"]
    browser.page.click("nav.tabs a:has-text('Checkpoints')")
    browser.page.wait_for_selector("tbody tr[data-idx]")
    row = browser.text("tbody tr[data-idx='0']")
    assert CHECKPOINT[:8] in row
    assert "1.0 MiB" in row
    browser.page.click("nav.tabs a:has-text('Runs')")
    browser.page.wait_for_selector("table[aria-label=Runs] tr[data-idx='2']")
    rows = [text.split("\t") for text in browser.texts("tbody tr[data-idx]")]
    assert [row[1] for row in rows] == ["first", "restart", "4 → 2 slots"]
    assert [row[-1] for row in rows] == ["rank 2 has failed with <b>code</b> 1", "ended", "runs"]


def test_kill_trial_requires_confirmation(browser: Browser, seeded_master: Master) -> None:
    def kills() -> list[object]:
        return [
            row["kill_us"] for row in seeded_master.rows("SELECT kill_us FROM allocations WHERE trial_id = 2")
        ]

    browser.show("/det/trials/2", "button.danger")
    browser.page.click("button.danger:has-text('Kill')")
    browser.page.click("dialog button:has-text('Cancel')")
    assert kills() == [None]
    browser.page.click("button.danger:has-text('Kill')")
    browser.page.click("dialog button:has-text('Kill')")
    browser.until("document.querySelector('.notices').innerText.includes('Trial 2 is being killed')")
    assert kills() != [None]


def test_ten_thousand_metrics_are_searched_and_paged(browser: Browser, seeded_master: Master) -> None:
    def fill(tx):
        trial = trials_of(tx, add_experiment(tx, num_points=3))[0]
        add_metric(tx, trial, "many", [(10, {f"metric_{idx:05}": idx for idx in range(9996)})])
        return trial

    trial = seeded_master.write(fill)
    browser.show(f"/det/trials/{trial}", "button:has-text('Show 24 more')")
    assert "10,000 metrics" in browser.text(".filters")
    browser.page.fill("input[aria-label='Find metrics']", "METRIC_0998")
    browser.until("document.querySelector('.filters').innerText.includes('10 metrics')")
    browser.until("document.querySelectorAll('main .charts > div').length === 10")
    browser.page.fill("input[aria-label='Find metrics']", "")
    browser.until("document.querySelectorAll('main .charts > div').length === 24")
    browser.page.click("button:has-text('Show 24 more')")
    browser.until("document.querySelectorAll('main .charts > div').length === 48")


def test_trial_deleted_while_open_shows_notice(open_browser: Open, seeded_master: Master) -> None:
    def fill(tx):
        experiment = add_experiment(tx, name="goes", num_points=5)
        return Seeded(experiment, trials_of(tx, experiment)[0])

    gone = seeded_master.write(fill)
    browser = open_browser()
    browser.open(f"/det/trials/{gone.trial}", ".chart")
    seeded_master.write(lambda tx: experiments.forget(tx, gone.experiment))
    browser.until("document.querySelector('main').innerText.includes('This trial has been deleted')")
    assert browser.page.locator("main h1").inner_text().startswith(f"Trial {gone.trial}")
    browser.forgive("404")
