"""Browser fixtures on a served master; without Chromium, their tests are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from browsing import Browser
from serving import Master, serving

from dstrial.master.web import page

# Prefer the headless shell: the user interface of a full browser costs as much time as the page itself.
CHROMIUM = next(
    filter(
        None, map(shutil.which, ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"))
    ),
    None,
)


@pytest.fixture(scope="module")
def seeded_master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    """A served master without a scheduler; each test file inserts its own rows."""
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
        # Chromium's sandbox does not work as root; only our own pages are opened.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def open_window(
    chromium: Any, master: Master, token: str | None = "determined", **options: Any
) -> tuple[Browser, Any]:
    """Return a window that collects errors, and its context, which must be closed."""
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
    """Function that opens windows; at teardown, none may have logged an error."""
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
    """A window shared by all tests of a file; teardown fails if it has logged errors."""
    yield kept_window
    try:
        kept_window.show("/det/models")  # Leave the view, so that the next test starts without its state.
    except BaseException:
        kept_window.page.goto("about:blank")
        raise
    finally:
        problems, kept_window.problems[:] = [*kept_window.problems], []
    assert problems == []
