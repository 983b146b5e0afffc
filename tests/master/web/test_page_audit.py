"""Every view of the page, looked at by axe-core: contrast, names, structure; its width on a phone; the keyboard."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browsing import Browser
from seeded import add_experiment
from seeded_cluster import add_model, add_search, add_task, add_webhook
from serving import Master

from dstrial.master.web.page import STATIC

pytestmark = pytest.mark.process

AXE = Path(__file__).parents[3] / "node_modules" / "axe-core" / "axe.min.js"
# What an address of a view looks like, for those whose words are made by what is shown.
SETTLED = "main h1"


def addresses(ids: dict[str, Any]) -> list[str]:
    """Return an address for each view and tab; what is not known here is found by the links of the main line."""
    experiment = f"/det/experiments/{ids['experiment']}"
    tabs = re.findall(r'\{ id: "([\w-]+)", title:', (STATIC / "views" / "experiment.js").read_text())
    assert "overview" in tabs
    return [
        *re.findall(r'href: "([^"]+)"', (STATIC / "views.js").read_text()),
        *(f"{experiment}/{tab}" for tab in tabs),
        f"{experiment}/trials/{ids['trial']}",
        f"{experiment}/trials/{ids['trial']}/logs",
        f"/det/compare?experiments={ids['experiment']},{ids['other']}",
        f"/det/tasks/{ids['task']}/logs",
        "/det/models/digits",
        "/det/webhooks",
        f"/det/searches/{ids['search']}",
        "/det/experiments?filter=nothing-is-so",
        "/det/experiments/999999",
    ]


@pytest.fixture(scope="module")
def ids(seeded_master: Master) -> dict[str, Any]:
    def fill(tx):
        found: dict[str, Any] = {
            "experiment": add_experiment(tx, name="search " + "x" * 200, num_trials=5, labels=("long",)),
            "other": add_experiment(tx, name="other", state="ACTIVE", num_trials=2, seed=1),
            "task": add_task(tx, name="sleep", slots=(2,), num_slots=1),
        }
        for state in ("PAUSED", "CANCELED", "ERROR", "COMPLETED"):
            add_experiment(tx, name=state, state=state)
        add_task(tx, kind="TENSORBOARD", name="boards", slots=(), experiments=(1,))
        add_task(tx, name="big", num_slots=8)
        add_task(tx, name="failed", state="ERROR")
        add_model(tx, "digits", seeded_master.checkpoints[1], labels=("ours",))
        add_webhook(tx, "hook")
        found["search"] = add_search(tx, has_report=True)
        found["trial"] = tx.execute(
            "SELECT MIN(id) FROM trials WHERE experiment_id = ?", (found["experiment"],)
        ).fetchone()[0]
        return found

    return seeded_master.services.database.write(fill)


def settle(browser: Browser, path: str) -> None:
    browser.show(path, SETTLED)
    browser.until("!document.querySelector('.loading')")
    browser.page.evaluate(
        "document.querySelectorAll('details.ranges').forEach((one) => { one.open = true; })"
    )
    browser.page.wait_for_timeout(
        200
    )  # For what is drawn after it was loaded; what is missing then is not looked at.


def violations(browser: Browser) -> list[str]:
    """Return what axe-core finds against WCAG 2 A and AA, with where."""
    if not browser.page.evaluate("'axe' in window"):
        browser.page.evaluate(AXE.read_text())
    found = browser.page.evaluate(
        "axe.run(document, { runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa'] }).then((all) => all.violations.map("
        "(one) => ({ id: one.id, help: one.help, where: one.nodes.slice(0, 4).map((node) => node.html.slice(0, 160) + ' | ' + "
        "node.any.map((any) => any.message).join('; ').slice(0, 160)) })))"
    )
    return [json.dumps(one) for one in found]


@pytest.mark.exhaustive("[light-1300]")
@pytest.mark.parametrize("width", [1300, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_view_has_anything_against_it(
    open_browser: Callable[..., Browser], ids: dict[str, Any], scheme: str, width: int
) -> None:
    if not AXE.exists():
        pytest.skip("Requires: [axe-core]")
    # The page's policy lets nothing foreign run; in this window alone it does not hold.
    browser = open_browser(
        color_scheme=scheme, viewport={"width": width, "height": 900}, bypass_csp=True, token="admin"
    )
    found = {}
    for path in addresses(ids):
        settle(browser, path)
        problems = violations(browser)
        across = browser.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        if across > 0:
            problems.append(f"the page scrolls sideways by {across} px")
        if problems:
            found[path] = problems
    browser.problems[:] = [one for one in browser.problems if "404" not in one]  # of what is not there
    assert found == {}


def test_an_audit_finds_what_is_wrong(open_browser: Callable[..., Browser], ids: dict[str, Any]) -> None:
    if not AXE.exists():
        pytest.skip("Requires: [axe-core]")
    browser = open_browser(bypass_csp=True)
    settle(browser, "/det/experiments")
    browser.page.evaluate(
        "document.querySelector('main').insertAdjacentHTML('beforeend', "
        "'<button></button><p class=\"pale\">pale</p>'); document.querySelector('.pale').style.color = '#ccc'"
    )
    assert {json.loads(one)["id"] for one in violations(browser)} >= {"button-name", "color-contrast"}


@pytest.mark.exhaustive("[dark]")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_dialogs_have_nothing_against_them_and_the_keyboard_ends_them(
    open_browser: Callable[..., Browser], ids: dict[str, Any], scheme: str
) -> None:
    if not AXE.exists():
        pytest.skip("Requires: [axe-core]")
    browser = open_browser(bypass_csp=True, color_scheme=scheme)
    for path, button in (
        ("/det/models", "button:has-text('New model')"),
        ("/det/tasks", "button[aria-label='Kill sleep']"),
        ("/det/models/digits", ".tools button:has-text('Edit')"),
        ("/det/clusters", "button[aria-label^='Set the priority of big']"),
    ):
        settle(browser, path)
        browser.page.focus(button)
        browser.page.keyboard.press("Enter")
        browser.page.wait_for_selector("dialog[open]")
        assert violations(browser) == []
        browser.page.keyboard.press("Escape")
        browser.page.wait_for_selector("dialog", state="detached")


@pytest.mark.exhaustive("[/det/experiments]")
@pytest.mark.parametrize("path", ["/det/experiments", "/det/tasks", "/det/models"])
def test_a_table_is_reached_and_used_by_the_keyboard(
    open_browser: Callable[..., Browser], ids: dict[str, Any], path: str
) -> None:
    browser = open_browser()
    browser.open(path, "tbody tr[data-idx]")
    press = browser.page.keyboard.press
    browser.page.evaluate("document.querySelector('input[type=search]').focus()")
    for _ in range(12):
        press("Tab")
        if browser.page.evaluate("document.activeElement.classList.contains('scroller')"):
            break
    assert browser.page.evaluate("document.activeElement.classList.contains('scroller')")
    press("ArrowDown")
    browser.until("document.activeElement.dataset?.idx === '0'")
    press("End")
    last = browser.page.evaluate("document.querySelector('table').getAttribute('aria-rowcount')")
    browser.until(f"document.activeElement.dataset?.idx === String({last} - 2)")
    press("Home")
    browser.until("document.activeElement.dataset?.idx === '0'")
    shows = browser.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert shows != "none"
    where = browser.page.evaluate("document.activeElement.querySelector('a[href]').getAttribute('href')")
    press("Enter")
    browser.until(f"location.pathname === {json.dumps(where)}")


def test_the_first_tab_leads_past_the_main_line(
    open_browser: Callable[..., Browser], ids: dict[str, Any]
) -> None:
    browser = open_browser(token="admin")
    for path in addresses(ids):
        browser.show(path, SETTLED)
        browser.until("!document.querySelector('.loading')")
        assert browser.page.evaluate("document.activeElement.tagName") == "BODY", path
        # From where a new window begins, and not from where the view before had the focus.
        browser.page.evaluate(
            "document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')"
        )
        browser.page.keyboard.press("Tab")
        assert browser.page.evaluate("document.activeElement.className") == "skip", path
        browser.page.keyboard.press("Enter")
        assert browser.page.evaluate("document.activeElement.tagName") == "H1", path
        browser.page.evaluate("document.activeElement.blur()")
    browser.forgive("404")  # Of what is not there.
