"""Tabs of an experiment other than its overview, in a real browser."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest
import yaml
from browsing import Browser
from seeded import (
    CONFIG_TEXT,
    DEEPSPEED,
    TRAIN,
    add_checkpoint,
    add_experiment,
    add_model,
    give_config,
    give_files,
    make_halving,
    trials_of,
)
from serving import Master

from dstrial.master.store.checkpoints import set_resources
from dstrial.master.store.database import Transaction

pytestmark = pytest.mark.process

NAME = "<img src=x onerror=alert(1)>"


@dataclasses.dataclass(frozen=True)
class Seeded:
    """Ids of a search, its fork (an async_halving search) and a checkpoint on disk."""

    search: int
    fork: int
    whole: str


@pytest.fixture(scope="module")
def seeded(seeded_master: Master, tmp_path_factory: pytest.TempPathFactory) -> Seeded:
    storage = tmp_path_factory.mktemp("checkpoints")

    def fill(tx: Transaction) -> Seeded:
        search = add_experiment(tx, name="digits", num_trials=30, num_points=20, seed=7)
        place = {"type": "shared_fs", "host_path": str(storage)}
        give_config(tx, search, CONFIG_TEXT, checkpoint_storage=place)
        give_files(
            tx,
            search,
            {
                "train.py": TRAIN,
                "ds.json": json.dumps(DEEPSPEED),
                f"models/{NAME.replace('/', '_')}.py": NAME,
            },
        )
        trial = trials_of(tx, search)[0]
        whole, _ = (add_checkpoint(tx, search, trial, steps, storage=storage) for steps in (200, 100))
        add_checkpoint(tx, search, trial, 50, state="DELETED")
        fork = add_experiment(tx, name=NAME, num_trials=8, seed=3)
        changed = TRAIN.replace("line_40 = 40", "line_40 = 41\nmore = 1")
        give_files(tx, fork, {"train.py": changed, "ds.json": json.dumps(DEEPSPEED), "new.py": "x = 1\n"})
        make_halving(tx, fork)
        tx.execute("UPDATE experiments SET parent_id = ? WHERE id = ?", (search, fork))
        return Seeded(search, fork, whole)

    return seeded_master.write(fill)


def tab(experiment: int, name: str) -> str:
    return f"/det/experiments/{experiment}/{name}"


def test_differing_hyperparameters_have_axes_and_importance(browser: Browser, seeded: Seeded) -> None:
    browser.show(tab(seeded.search, "hyperparameters"), "canvas")
    assert (
        browser.page.locator("[aria-label='parallel coordinates over hyperparameters: 30 curves']").count()
        == 1
    )
    shares = {
        row.locator("td").nth(0).inner_text(): float(row.locator("meter").evaluate("meter => meter.value"))
        for row in browser.page.locator(
            "[aria-label='Importance of hyperparameters'] tbody tr[data-idx]"
        ).all()
    }
    # In the seeded rows, the metric depends strongly on lr, weakly on layers and not on the optimizer.
    assert set(shares) == {"lr", "layers", "optimizer"}
    assert shares["lr"] > 0.6 > 0.3 > shares["optimizer"]
    assert browser.page.locator(".charts canvas").count() == 3


def test_hovered_line_shows_and_opens_its_trial(browser: Browser, seeded: Seeded) -> None:
    browser.show(tab(seeded.search, "hyperparameters"), "canvas")
    box = browser.page.locator(".plot .u-over").first.bounding_box()
    # On the metric's axis, the best trial's line is the lowest.
    browser.page.mouse.move(box["x"] + box["width"] - 4, box["y"] + box["height"] - 20)
    browser.page.wait_for_selector(".tip")
    assert "(best), " in browser.text(".tip")
    assert "optimizer " in browser.text(".tip")
    browser.page.mouse.down()
    browser.page.mouse.up()
    browser.until("location.pathname.includes('/trials/')")


def test_too_few_or_equal_trials_are_reported(
    browser: Browser, seeded: Seeded, seeded_master: Master
) -> None:
    def fill(tx: Transaction) -> int:
        experiment = add_experiment(tx, name="odd", num_trials=3)
        one, two, three = trials_of(tx, experiment)
        odd = json.dumps({"lr": 0.1, NAME: NAME, "nested": {"a": [1, {"b": 2}]}})
        tx.execute("UPDATE trials SET hparams = ?, searcher_metric_value = NULL WHERE id = ?", (odd, one))
        tx.execute("UPDATE trials SET hparams = '{}' WHERE id = ?", (two,))
        tx.execute("UPDATE trials SET hparams = ? WHERE id = ?", (json.dumps({"lr": "fast"}), three))
        return experiment

    browser.show(tab(seeded_master.write(fill), "hyperparameters"), "canvas")
    assert "Not enough trials: 2 of 20" in browser.text("main")
    assert "1 of 3 trials have no finite loss" in browser.text("main")
    browser.page.goto(browser.address + tab(seeded_master.write(add_experiment), "hyperparameters"))
    browser.until("document.body.innerText.includes('nothing to compare yet')")


def test_rungs_show_outcome_of_every_trial(browser: Browser, seeded: Seeded) -> None:
    browser.show(tab(seeded.fork, "rungs"), "table.rungs")
    assert browser.texts("table.rungs tbody tr")[0].split()[:7] == ["1", "10", "6", "2", "3", "1", "2"]
    outcomes = browser.texts("[aria-label='Trials by rung'] tbody tr[data-idx] td:last-child")
    assert outcomes.count("stopped here") == 4
    assert outcomes.count("got to the end") == 1
    assert outcomes.count("on its way there") == 2
    browser.open(tab(seeded.search, "overview"), ".tabs a")
    assert "Rungs" not in browser.texts(".tabs a")


def test_checkpoints_show_layout_and_copyable_commands(
    open_browser: Callable[..., Browser], seeded: Seeded
) -> None:
    browser = open_browser(permissions=["clipboard-read", "clipboard-write"])
    browser.open(tab(seeded.search, f"checkpoints?checkpoint={seeded.whole}"), "section.details")
    assert len(browser.texts("tbody tr[data-idx]")) == 2
    assert "2 ranks, ZeRO 2, 2 replicas, optimizer on cpu" in browser.text("tbody tr[data-idx='0']")
    browser.page.click("section.details button:has-text('copy') >> nth=0")
    assert (
        browser.page.evaluate("navigator.clipboard.readText()") == f"det checkpoint download {seeded.whole}"
    )
    browser.page.check("label:has-text('with deleted ones (1)') input")
    browser.until("document.querySelectorAll('tbody tr[data-idx]').length === 3")


def test_registered_checkpoint_cannot_be_deleted(
    open_browser: Callable[..., Browser], seeded: Seeded, seeded_master: Master
) -> None:
    seeded_master.write(lambda tx: add_model(tx, NAME))
    browser = open_browser()
    browser.open(tab(seeded.search, f"checkpoints?checkpoint={seeded.whole}"), "section.details")
    browser.page.click("text=Register as a model version")
    browser.page.fill("#field-model", NAME)
    browser.page.click("dialog button:has-text('Register')")
    browser.until(f"document.querySelector('tbody').innerText.includes({NAME + ' v1'!r})")
    browser.page.click("section.details button.danger")
    browser.page.click("dialog button.danger")
    browser.page.wait_for_selector(".notices .problem")
    assert "is version 1 of model" in browser.text(".notices .problem")
    browser.forgive("400 (Bad Request)")


def test_checkpoint_deletion_requires_confirmation(
    browser: Browser, seeded: Seeded, seeded_master: Master
) -> None:
    def fill(tx: Transaction) -> str:
        return add_checkpoint(tx, seeded.search, trials_of(tx, seeded.search)[1], 10)

    name = seeded_master.write(fill)

    def is_asked_for() -> bool:
        jobs = seeded_master.rows("SELECT payload FROM work WHERE kind = 'delete_checkpoints'")
        return any(name in row["payload"] for row in jobs)

    browser.show(tab(seeded.search, f"checkpoints?checkpoint={name}"), "section.details")
    browser.page.click("section.details button.danger")
    assert "cannot be brought back" in browser.text("dialog")
    browser.page.click("dialog button:has-text('Cancel')")
    assert not is_asked_for()
    browser.page.click("section.details button.danger")
    browser.page.click("dialog button.danger")
    browser.until("document.body.innerText.includes('being deleted')")
    assert is_asked_for()
    # This master has no scheduler, so delete the files here.
    seeded_master.write(lambda tx: set_resources(tx, name, {}))
    browser.until("!document.querySelector('section.details button.danger')")


def test_config_is_shown_with_origins_without_secrets(browser: Browser, seeded: Seeded) -> None:
    browser.show(tab(seeded.search, "config"), ".code")
    assert "HF_TOKEN=********" in browser.text(".code")
    text = browser.saved("button:has-text('Download')").decode()
    assert yaml.safe_load(text) == yaml.safe_load(CONFIG_TEXT.replace("very-secret-2", "********"))
    browser.page.click("text=In effect, with origins")
    browser.page.wait_for_selector("[aria-label='Values of the experiment config'] tbody tr[data-idx]")
    assert "experiment config:" in browser.text("main")
    assert "very-secret" not in browser.page.content()
    assert "searcher.smaller_is_better" not in browser.text("main")
    browser.page.locator("label:has-text('with defaults')").click()
    browser.until("document.querySelector('main').innerText.includes('searcher.smaller_is_better')")


def test_code_is_shown_with_diff_to_parent(
    open_browser: Callable[..., Browser], browser: Browser, seeded: Seeded
) -> None:
    browser.show(tab(seeded.search, "code?file=train.py"), ".code")
    assert browser.text(".code .numbers").split()[-1] == "81"
    assert "print('<b>end</b>')" in browser.text(".code")
    browser.page.click("nav[aria-label=Files] details a")
    browser.until(f"document.querySelector('.code')?.innerText.includes({NAME!r})")
    browser.open(tab(seeded.fork, "code"), ".files")
    browser.page.click(f"text=with its parent {seeded.search}")
    browser.page.wait_for_selector(".diff")
    browser.until("document.querySelectorAll('.diff').length === 2")
    lines = [line for line in browser.texts(".diff")[1].splitlines() if line.startswith(("+", "-"))]
    assert lines == [
        *(f"--- a/models/{NAME.replace('/', '_')}.py", "+++ /dev/null", f"-{NAME}"),
        *("--- /dev/null", "+++ b/new.py", "+x = 1"),
        *("--- a/train.py", "+++ b/train.py", "-line_40 = 40", "+line_40 = 41", "+more = 1"),
    ]
    assert browser.page.locator(".diff img").count() == 0
    browser = open_browser()
    browser.open(tab(seeded.search, "code?against=987654"), "p.problem")
    assert "987654" in browser.text("p.problem")
    browser.forgive("404 (Not Found)")


def test_name_labels_and_notes_are_editable(browser: Browser, seeded: Seeded, seeded_master: Master) -> None:
    experiment = seeded_master.write(lambda tx: add_experiment(tx, name="before", labels=("old",)))
    browser.show(tab(experiment, "config"), ".tools")
    browser.page.click("button:text-is('Edit …')")
    given = {"name": "after", "description": "why", "labels": "a/b & c, a/b & c", "notes": NAME}
    for name, text in given.items():
        browser.page.fill(f"#field-{name}", text)
    browser.page.click("dialog button.main")
    browser.until("document.querySelector('h1').innerText.startsWith('after')")
    assert NAME in browser.text("main > pre")
    [row] = seeded_master.rows(
        "SELECT name, description, notes, labels FROM experiments WHERE id = ?", experiment
    )
    assert (*row.values(),) == ("after", "why", NAME, '["a/b & c"]')
