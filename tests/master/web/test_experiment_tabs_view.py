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
    label = browser.page.locator("canvas").first.get_attribute("aria-label")
    assert label.startswith("Parallel coordinates of 30 trials over lr, layers, optimizer, loss; 30 within")
    shares = {
        row.locator("td").nth(0).inner_text(): float(row.locator("meter").evaluate("meter => meter.value"))
        for row in browser.page.locator(
            "[aria-label='Importance of hyperparameters'] tbody tr[data-idx]"
        ).all()
    }
    # In the seeded rows, the metric depends strongly on lr, weakly on layers and not on the optimizer.
    assert set(shares) == {"lr", "layers", "optimizer"}
    assert shares["lr"] > 0.6 > 0.3 > shares["optimizer"]
    assert browser.page.locator(".charts.small canvas").count() == 3


def tab_to(browser: Browser, name: str) -> None:
    """Press Tab until the element with this label or text is focused."""
    for _ in range(60):
        browser.page.keyboard.press("Tab")
        named = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"
        if browser.page.evaluate(named) == name:
            return
    raise AssertionError(f"Tab does not come to {name!r}")


def selected_rows(browser: Browser) -> list[dict[str, str]]:
    """Return the CSV rows of the trials within the chosen ranges."""
    return browser.csv(browser.page.get_by_label("CSV of parallel coordinates"))


def test_axis_range_is_set_and_cleared_by_keyboard(browser: Browser, seeded: Seeded) -> None:
    press = browser.page.keyboard.press
    browser.show(tab(seeded.search, "hyperparameters"), "canvas")
    everything = selected_rows(browser)
    browser.page.focus("h1")
    tab_to(browser, "Ranges")
    press("Enter")
    tab_to(browser, "loss at most")
    focused = browser.page.locator(":focus")
    assert focused.evaluate("(one) => getComputedStyle(one).outlineStyle") != "none"
    for _ in range(6):
        press("PageDown")
    press("ArrowDown")
    browser.until("location.search.includes('ranges=loss%3A0.000%3A0.')")
    limit = float(focused.get_attribute("aria-valuetext"))
    rows = selected_rows(browser)
    assert 1 < len(rows) < 30
    assert rows == [row for row in everything if float(row["loss"]) <= limit * 1.001]
    assert f"{len(rows)} of 30 trials" in browser.text(".ranges [role=status]")
    label = browser.page.locator("canvas").first.get_attribute("aria-label")
    assert f"{len(rows)} within the marked ranges" in label
    # After a reload, the ranges in the address select the same trials.
    browser.page.reload()
    browser.until("document.body.innerText.includes('of 30 trials')")
    assert selected_rows(browser) == rows

    browser.page.focus("h1")
    tab_to(browser, "Ranges")
    press("Enter")
    tab_to(browser, "optimizer at least")
    focused = browser.page.locator(":focus")
    assert focused.get_attribute("aria-valuetext") == "adam"
    press("End")  # The lower end cannot pass the upper end.
    tab_to(browser, "optimizer at most")
    press("Home")
    browser.until("location.search.includes('optimizer')")
    last = browser.page.locator(":focus").get_attribute("aria-valuetext")
    assert last != "adam"
    assert selected_rows(browser) == [row for row in rows if row["optimizer"] == last]
    tab_to(browser, "optimizer at least")  # The download has moved the focus.
    press("Delete")
    browser.until("!location.search.includes('optimizer')")
    tab_to(browser, "loss at least")
    press("Escape")
    browser.until("!location.search.includes('ranges')")
    assert selected_rows(browser) == everything


def test_hovered_line_shows_and_opens_its_trial(browser: Browser, seeded: Seeded) -> None:
    browser.show(tab(seeded.search, "hyperparameters"), "canvas")
    box = browser.page.locator("canvas").first.bounding_box()
    # Near the metric's axis, the best trial's line is the lowest, almost at the bottom.
    browser.page.mouse.move(box["x"] + box["width"] - 85, box["y"] + box["height"] - 21)
    browser.page.wait_for_selector(".tip")
    assert "trial" in browser.text(".tip")
    assert "optimizer: " in browser.text(".tip")
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
    open_browser: Callable[..., Browser], seeded: Seeded
) -> None:
    browser = open_browser()
    browser.open(tab(seeded.search, f"checkpoints?checkpoint={seeded.whole}"), "section.details")
    browser.page.click("text=Register as a model version")
    browser.page.fill("dialog label:has-text('Name of the new model') input", NAME)
    browser.page.fill("dialog label:has-text('Comment') input", "the best")
    browser.page.click("dialog button:has-text('Register')")
    browser.until("!document.querySelector('dialog')")
    browser.until(f"document.querySelector('tbody').innerText.includes({NAME + ' v1'!r})")
    browser.page.click("text=Register as a model version")
    browser.page.select_option("dialog select", label=f"{NAME} (1 version)")
    browser.page.click("dialog button:has-text('Register')")
    browser.until(f"document.querySelector('tbody').innerText.includes({NAME + ' v2'!r})")
    browser.page.click("section.details button.danger")
    browser.page.click("dialog button.danger")
    browser.page.wait_for_selector(".notices .problem")
    assert "is version 2 of model" in browser.text(".notices .problem")
    browser.problems.remove(
        "error: Failed to load resource: the server responded with a status of 400 (Bad Request)"
    )


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
    browser.page.wait_for_selector("[aria-label='Values of deepspeed_config'] tbody tr[data-idx]")
    shown = browser.text("main")
    assert "experiment config:" in shown
    assert "train_batch_size 64 = train_micro_batch_size_per_gpu 64" in shown
    assert "comet.api_key" in shown
    assert "very-secret" not in browser.page.content()
    assert "zero_optimization.contiguous_gradients" not in shown
    browser.page.locator("label:has-text('with defaults')").last.click()
    browser.until(
        "document.querySelectorAll(\"[aria-label='Values of deepspeed_config'] tbody tr[data-idx]\").length > 20"
    )


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
    lines = [line for line in browser.text(".diff").splitlines() if line.startswith(("+", "-"))]
    assert lines == [
        *(f"--- a/models/{NAME.replace('/', '_')}.py", "+++ /dev/null", f"-{NAME}"),
        *("--- /dev/null", "+++ b/new.py", "+x = 1"),
        *("--- a/train.py", "+++ b/train.py", "-line_40 = 40", "+line_40 = 41", "+more = 1"),
    ]
    assert browser.page.locator(".diff img").count() == 0
    browser = open_browser()
    browser.open(tab(seeded.search, "code?against=987654"), "p.problem")
    assert "987654" in browser.text("p.problem")
    assert browser.problems.pop().endswith("404 (Not Found)")


def test_notes_labels_name_and_description_are_editable(
    browser: Browser, seeded: Seeded, seeded_master: Master
) -> None:
    experiment = seeded_master.write(lambda tx: add_experiment(tx, name="before", labels=("old",)))
    browser.show(tab(experiment, "notes"), "textarea")
    browser.page.fill("textarea", "<script>alert(1)</script>\nsecond line")
    browser.page.click("text=Save notes")
    browser.until("document.querySelector('button.main').disabled")
    browser.page.fill("label:has-text('Name') input", "after")
    browser.page.click("form:has-text('Name') button >> nth=0")
    browser.until("document.querySelector('h1').innerText.startsWith('after')")
    browser.page.fill("label:has-text('Description') input", "why")
    browser.page.click("form:has-text('Description') button")
    old = browser.page.get_by_label("Remove label old").element_handle()
    browser.page.fill("label:has-text('New label') input", "a/b & c")
    browser.page.click("form:has-text('New label') button")
    browser.until("document.body.innerText.includes('label a/b & c: added')")
    browser.page.get_by_label("Remove label a/b & c").wait_for()
    # The new label does not reuse the button of the old label.
    assert old.get_attribute("aria-label") == "Remove label old"
    browser.page.get_by_label("Remove label old").click()
    browser.until("document.body.innerText.includes('label old: removed')")
    [row] = seeded_master.rows(
        "SELECT name, description, notes, labels FROM experiments WHERE id = ?", experiment
    )
    assert (*row.values(),) == ("after", "why", "<script>alert(1)</script>\nsecond line", '["a/b & c"]')


def test_concurrent_note_edit_is_reported(browser: Browser, seeded_master: Master) -> None:
    experiment = seeded_master.write(add_experiment)
    browser.show(tab(experiment, "notes"), "textarea")
    browser.page.fill("textarea", "mine")

    def change(tx: Transaction) -> None:
        tx.execute("UPDATE experiments SET notes = 'theirs' WHERE id = ?", (experiment,))
        tx.publish(f"experiment:{experiment}")

    seeded_master.write(change)
    browser.page.wait_for_selector("text=changed meanwhile")
    assert browser.page.input_value("textarea") == "mine"
    browser.page.click("text=Discard changes")
    assert browser.page.input_value("textarea") == "theirs"


def test_experiment_deleted_while_open_is_reported(
    open_browser: Callable[..., Browser], seeded_master: Master
) -> None:
    experiment = seeded_master.write(add_experiment)
    browser = open_browser()
    browser.open(tab(experiment, "checkpoints"), ".table")

    def remove(tx: Transaction) -> None:
        for table in ("metrics", "metric_summaries"):
            tx.execute(
                f"DELETE FROM {table} WHERE trial_id IN (SELECT id FROM trials WHERE experiment_id = ?)",
                (experiment,),
            )
        tx.execute("DELETE FROM experiments WHERE id = ?", (experiment,))
        tx.publish(f"experiment:{experiment}")

    seeded_master.write(remove)
    browser.page.wait_for_selector("p.problem")
    assert "is not found" in browser.text("p.problem >> nth=0")
    browser.problems[:] = [problem for problem in browser.problems if "404 (Not Found)" not in problem]


def test_archive_and_unarchive_buttons_reach_master(browser: Browser, seeded_master: Master) -> None:
    experiment = seeded_master.write(add_experiment)
    browser.show(tab(experiment, "notes"), ".tools")
    browser.page.click("button:text-is('Archive')")
    browser.page.wait_for_selector("button:text-is('Unarchive')")
    browser.page.click("button.danger:text-is('Delete')")
    assert "cannot be brought back" in browser.text("dialog")
    browser.page.click("dialog button:text-is('Cancel')")
    browser.page.click("button:text-is('Unarchive')")
    browser.page.wait_for_selector("button:text-is('Archive')")
