"""Pictures of every view and tab, light and dark, wide and as on a phone: each is painted, with its charts drawn.

``PAGE_PICTURES=DIRECTORY`` keeps them there, and those of README and docs below ``documents``; else they are thrown away.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browsing import Browser
from seeded_pictures import Shown, fill
from serving import Master

from dstrial.master.web.page import STATIC

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]
DOCUMENTS = {
    "page-experiments.png": ("experiments", "light"),
    "page-search.png": ("experiment-overview", "light"),
    "page-search-dark.png": ("experiment-overview", "dark"),
    "page-cluster.png": ("cluster", "light"),
}
"""Name of a picture in docs/pictures -> view and colours."""
MOST_BYTES = 120_000
# Charts and drawings that tell of something to draw and have no coloured point.
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
# Of a picture: how many colours it has, and the share of the most frequent one.
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
    return seeded_master.services.database.write(fill)


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
    """Return name -> address of every view and tab; those of the main line are found in the page itself."""
    experiment = f"/det/experiments/{shown.search}"
    trial = f"{experiment}/trials/{shown.trial}"
    main = re.findall(r'title: "([^"]+)", href: "([^"]+)"', (STATIC / "views.js").read_text())
    assert len(main) >= 5
    return {
        **{title.lower(): href for title, href in main},
        **{f"experiment-{tab}": f"{experiment}/{tab}" for tab in tabs_of("experiment.js")},
        **{f"trial-{tab}": f"{trial}/{tab}" for tab in tabs_of("trial.js")},
        "compare": f"/det/compare?experiments={shown.search},{shown.other}",
        "model": "/det/models/digits",
        "webhooks": "/det/webhooks",
        "search": f"/det/searches/{shown.dsat}",
        "task-log": f"/det/tasks/{shown.task}/logs",
        "missing": "/det/experiments/999999",
    }


def settle(browser: Browser, address: str) -> None:
    """Open a view and wait until it has been loaded, its charts have been drawn, and nothing moves any more."""
    browser.show(address)
    browser.until("!document.querySelector('.loading')")
    browser.until(f"({EMPTY_CHARTS}).length === 0")
    # What is drawn when it comes near to being seen.
    browser.page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    browser.page.wait_for_timeout(300)
    browser.page.evaluate("window.scrollTo(0, 0)")
    browser.until(f"({EMPTY_CHARTS}).length === 0")


def take(browser: Browser, judge: Any, target: Path, *, is_whole: bool) -> None:
    """Write a picture, and look at it: it is as wide as the window, has many colours, and is not all of one."""
    browser.page.screenshot(path=str(target), full_page=is_whole)
    url = f"data:image/png;base64,{base64.b64encode(target.read_bytes()).decode()}"
    count, share, width = judge.evaluate(COLOURS, url)
    assert width == browser.page.viewport_size["width"], f"{target.name} is wider than the window"
    assert count > 60, f"{target.name} has {count} colours"
    assert share < 0.995, f"{target.name} is blank"


@pytest.fixture
def judge(chromium: Any) -> Any:
    """A window of nobody's page, in which pictures are looked at."""
    context = chromium.new_context()
    yield context.new_page()
    context.close()


@pytest.mark.exhaustive("[dark-390]")
@pytest.mark.parametrize("width", [1300, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_and_tab_is_painted(
    open_browser: Callable[..., Browser], shown: Shown, directory: Path, judge: Any, scheme: str, width: int
) -> None:
    browser = open_browser(color_scheme=scheme, viewport={"width": width, "height": 900}, token="admin")
    for name, address in views(shown).items():
        settle(browser, address)
        across = browser.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert across <= 0, f"{address} scrolls sideways by {across} px"
        take(browser, judge, directory / f"{name}-{scheme}-{width}.png", is_whole=True)
    browser.forgive("404")  # Of what is not there.


def test_the_pictures_of_documents_can_be_made_and_are_shown(
    open_browser: Callable[..., Browser], shown: Shown, directory: Path, judge: Any
) -> None:
    for name, (view, scheme) in DOCUMENTS.items():
        browser = open_browser(color_scheme=scheme, viewport={"width": 1100, "height": 620})
        settle(browser, views(shown)[view])
        target = directory / "documents" / name
        take(browser, judge, target, is_whole=False)
        for one in (target, ROOT / "docs" / "pictures" / name):
            assert one.stat().st_size <= MOST_BYTES, f"{one} is larger than {MOST_BYTES} bytes; show less"
    text = "".join(one.read_text() for one in (ROOT / "README.md", ROOT / "docs" / "page.md"))
    assert {one.name for one in (ROOT / "docs" / "pictures").iterdir()} == set(DOCUMENTS)
    assert [name for name in DOCUMENTS if f"pictures/{name})" not in text] == []
