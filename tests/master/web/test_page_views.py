"""Rendering and accessibility of every view and tab of the page.

``PAGE_PICTURES=DIRECTORY`` keeps the screenshots there, and those for README and docs in its subdirectory ``documents``.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browsing import Browser
from seeded import Shown, fill_every_view
from serving import Master

from dstrial.master.web.page import STATIC

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]
AXE = ROOT / "node_modules" / "axe-core" / "axe.min.js"
DOCUMENTS = {
    "page-experiments.png": ("experiments", "light"),
    "page-cluster.png": ("cluster", "light"),
}
"""Name of a picture in docs/pictures -> (view, colour scheme)."""
SEARCH_PICTURES = {"page-search.png", "page-search-dark.png"}  # made by tools/search_pictures.py
MOST_BYTES = 120_000
# Labels of charts that have data to draw but no coloured pixel.
EMPTY_CHARTS = """
[...document.querySelectorAll('.chart canvas')].filter((canvas) => {
  const label = canvas.closest('[aria-label]')?.getAttribute('aria-label') ?? '';
  if (label.endsWith(' 0 curves') || !canvas.width || !canvas.height) return false;
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  for (let at = 0; at < data.length; at += 4) {
    const [red, green, blue, alpha] = data.subarray(at, at + 4);
    if (alpha > 100 && Math.max(red, green, blue) - Math.min(red, green, blue) > 40) return false;
  }
  return true;
}).map((canvas) => canvas.closest('[aria-label]')?.getAttribute('aria-label') ?? canvas.outerHTML)
"""
# Of a picture: number of colours, share of the most frequent colour, width in pixels.
COLOURS = """
async (url) => {
  const image = new Image();
  image.src = url;
  await image.decode();
  const canvas = new OffscreenCanvas(image.width, image.height);
  const on = canvas.getContext('2d');
  on.drawImage(image, 0, 0);
  const counts = new Map();
  const words = new Uint32Array(on.getImageData(0, 0, image.width, image.height).data.buffer);
  for (const word of words) counts.set(word, (counts.get(word) ?? 0) + 1);
  return [counts.size, Math.max(...counts.values()) / words.length, image.width];
}
"""


@pytest.fixture(scope="module")
def shown(seeded_master: Master) -> Shown:
    return seeded_master.write(fill_every_view)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chosen = os.environ.get("PAGE_PICTURES")
    found = (ROOT / chosen) if chosen else tmp_path_factory.mktemp("pictures")
    (found / "documents").mkdir(parents=True, exist_ok=True)
    return found


def tabs_of(module: str) -> list[str]:
    found = re.findall(r'\{ id: "([\w-]+)", title: "[^"]+", show:', (STATIC / "views" / module).read_text())
    assert len(found) > 4
    return found


def views(shown: Shown) -> dict[str, str]:
    """Return name -> address of every view and tab; menu entries come from app.js."""
    experiment = f"/det/experiments/{shown.search}"
    trial = f"{experiment}/trials/{shown.trial}"
    main = re.findall(r'title: "([^"]+)", href: "([^"]+)"', (STATIC / "app.js").read_text())
    assert len(main) >= 5
    return {
        **{title.lower(): href for title, href in main},
        **{f"experiment-{tab}": f"{experiment}/{tab}" for tab in tabs_of("experiment.js")},
        **{f"trial-{tab}": f"{trial}/{tab}" for tab in tabs_of("trial.js")},
        "compare": f"/det/compare?experiments={shown.search},{shown.other}",
        "model": "/det/models/digits",
        "search": f"/det/searches/{shown.dsat}",
        "task-log": f"/det/tasks/{shown.task}/logs",
        "nothing found": "/det/experiments?filter=nothing-is-so",
        "missing": "/det/experiments/999999",
    }


def settle(browser: Browser, address: str) -> None:
    """Open a view and wait until it is loaded and its charts are drawn."""
    browser.show(address)
    browser.until("!document.querySelector('.loading')")
    browser.until(f"({EMPTY_CHARTS}).length === 0")
    # Some charts are drawn only when they are scrolled near the viewport.
    browser.page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    browser.page.wait_for_timeout(300)
    browser.page.evaluate("window.scrollTo(0, 0)")
    browser.until(f"({EMPTY_CHARTS}).length === 0")


def take(browser: Browser, judge: Any, target: Path, *, is_whole: bool) -> None:
    """Save a screenshot; check that it is as wide as the window and not blank."""
    browser.page.screenshot(path=str(target), full_page=is_whole)
    url = f"data:image/png;base64,{base64.b64encode(target.read_bytes()).decode()}"
    count, share, width = judge.evaluate(COLOURS, url)
    assert width == browser.page.viewport_size["width"], f"{target.name} is wider than the window"
    assert count > 60, f"{target.name} has {count} colours"
    assert share < 0.995, f"{target.name} is blank"


def violations(browser: Browser) -> list[str]:
    """Return axe-core's violations of WCAG 2 A and AA as JSON texts."""
    if not AXE.exists():
        pytest.skip("Requires: [axe-core]")
    if not browser.page.evaluate("'axe' in window"):
        browser.page.evaluate(AXE.read_text())
    found = browser.page.evaluate(
        "axe.run(document, { runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa'] }).then((all) => all.violations.map("
        "(one) => ({ id: one.id, help: one.help, where: one.nodes.slice(0, 4).map((node) => node.html.slice(0, 160) + ' | ' + "
        "node.any.map((any) => any.message).join('; ').slice(0, 160)) })))"
    )
    return [json.dumps(one) for one in found]


@pytest.fixture
def judge(chromium: Any) -> Any:
    """A blank browser page in which screenshots are analysed."""
    context = chromium.new_context()
    yield context.new_page()
    context.close()


@pytest.mark.exhaustive("[light-1300]", "[dark-390]")
@pytest.mark.parametrize("width", [1300, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_views_and_tabs_are_painted_and_accessible(
    open_browser: Callable[..., Browser], shown: Shown, directory: Path, judge: Any, scheme: str, width: int
) -> None:
    # Bypass the page's security policy in this window, so that axe-core can run.
    browser = open_browser(
        color_scheme=scheme, viewport={"width": width, "height": 900}, bypass_csp=True, token="admin"
    )
    found = {}
    for name, address in views(shown).items():
        settle(browser, address)
        across = browser.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert across <= 0, f"{address} scrolls sideways by {across} px"
        take(browser, judge, directory / f"{name}-{scheme}-{width}.png", is_whole=True)
        problems = violations(browser)
        if problems:
            found[address] = problems
    browser.forgive("404")  # The views of missing objects log it.
    assert found == {}


def test_document_pictures_are_renderable_and_referenced(
    open_browser: Callable[..., Browser], shown: Shown, directory: Path, judge: Any
) -> None:
    for name, (view, scheme) in DOCUMENTS.items():
        browser = open_browser(color_scheme=scheme, viewport={"width": 1100, "height": 620})
        settle(browser, views(shown)[view])
        target = directory / "documents" / name
        take(browser, judge, target, is_whole=False)
    text = "".join(one.read_text() for one in (ROOT / "README.md", ROOT / "docs" / "how-to" / "page.md"))
    names = {*DOCUMENTS, *SEARCH_PICTURES}
    pictures = ROOT / "docs" / "pictures"
    assert {one.name for one in pictures.iterdir()} == names
    for one in (*pictures.iterdir(), *(directory / "documents").iterdir()):
        assert one.stat().st_size <= MOST_BYTES, f"{one} is larger than {MOST_BYTES} bytes; show less"
    assert [name for name in names if f"pictures/{name})" not in text] == []


@pytest.mark.exhaustive("[dark]")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_dialogs_are_accessible_and_close_on_escape(
    open_browser: Callable[..., Browser], shown: Shown, scheme: str
) -> None:
    browser = open_browser(bypass_csp=True, color_scheme=scheme)
    for path, button in (
        ("/det/models", "button:has-text('New model')"),
        ("/det/tasks", "button[aria-label='Kill nvidia-smi dmon']"),
        ("/det/models/digits", ".tools button:has-text('Edit')"),
        ("/det/clusters", "button[aria-label^='Set the priority of evaluate']"),
    ):
        settle(browser, path)
        browser.page.focus(button)
        browser.page.keyboard.press("Enter")
        browser.page.wait_for_selector("dialog[open]")
        assert violations(browser) == []
        browser.page.keyboard.press("Escape")
        browser.page.wait_for_selector("dialog", state="detached")
