"""A real browser before a master's application; tests that want it are skipped where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from browsing import Browser
from serving import Master, serving

from dstrial.master.web import page

# The first has no window, whose own pages cost as much as ours.
CHROMIUM = next(
    filter(
        None, map(shutil.which, ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"))
    ),
    None,
)


@pytest.fixture(scope="module")
def seeded_master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    """A master's application over HTTP, without a scheduler; each file fills it by itself."""
    with serving(tmp_path_factory.mktemp("page") / "state", has_passwords=False) as master:
        yield master


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("Requires: [chromium]. Install chromium-headless-shell or chromium")
    api = pytest.importorskip("playwright.sync_api", reason="Requires: [playwright]")
    if not page.has_libraries():
        pytest.fail(page.MISSING)
    with api.sync_playwright() as playwright:
        # As root Chromium has no sandbox; what it opens is ours.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def open_window(
    chromium: Any, master: Master, token: str | None = "determined", **options: Any
) -> tuple[Browser, Any]:
    """Return a window, logged in, that notes what is wrong in it, and its context, which is to be closed."""
    context = chromium.new_context(
        **{"viewport": {"width": 1300, "height": 900}, "accept_downloads": True, "locale": "en-US", **options}
    )
    context.set_default_timeout(20_000)
    if token is not None:
        context.add_cookies(
            [
                {
                    "name": "auth",
                    "value": master.tokens.get(token, token),
                    "url": f"http://localhost:{master.port}",
                }
            ]
        )
    page = context.new_page()
    browser = Browser(master, page, [])
    page.on("pageerror", lambda error: browser.problems.append(f"error: {error}"))
    page.on(
        "console",
        lambda line: browser.problems.append(f"{line.type}: {line.text}") if line.type == "error" else None,
    )
    return browser, context


@pytest.fixture
def open_browser(chromium: Any, seeded_master: Master) -> Iterator[Callable[..., Browser]]:
    """Open windows, logged in; at the end none may have broken the page's rules or raised anything."""
    opened: list[tuple[Browser, Any]] = []

    def open_one(
        *, master: Master = seeded_master, token: str | None = "determined", **options: Any
    ) -> Browser:
        opened.append(open_window(chromium, master, token, **options))
        return opened[-1][0]

    yield open_one
    for browser, context in opened:
        context.close()
        assert browser.problems == []


@pytest.fixture(scope="module")
def kept_window(chromium: Any, seeded_master: Master) -> Iterator[Browser]:
    browser, context = open_window(chromium, seeded_master)
    yield browser
    context.close()


@pytest.fixture
def browser(kept_window: Browser) -> Iterator[Browser]:
    """A window that tests of a file share which look at views: the page is loaded in it once, as ``show`` does."""
    yield kept_window
    try:
        kept_window.show("/det/models")  # Nothing of a view is kept for the next test.
    except BaseException:
        kept_window.page.goto("about:blank")
        raise
    finally:
        problems, kept_window.problems[:] = [*kept_window.problems], []
    assert problems == []
