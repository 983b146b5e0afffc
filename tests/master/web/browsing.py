"""Helper that drives a master's page in a browser window."""

from __future__ import annotations

import csv
import dataclasses
import io
import time
from pathlib import Path
from typing import Any

from serving import Master

LIMIT_S = 30.0


@dataclasses.dataclass
class Browser:
    """A browser window on a master's page, with the errors that the page has logged."""

    master: Master
    page: Any
    problems: list[str]

    @property
    def address(self) -> str:
        return f"http://localhost:{self.master.port}"

    def open(self, path: str, wait_for: str = "main h1") -> None:
        """Load a path of the page and wait until an element appears."""
        self.page.goto(self.address + path)
        self.page.wait_for_selector(wait_for)

    def show(self, path: str, wait_for: str = "main h1") -> None:
        """Go to a view as the page's links do, without a reload unless the window is new."""
        if not self.page.url.startswith(f"{self.address}/"):
            self.open(path, wait_for)
            return
        self.page.evaluate(
            "(path) => { history.pushState(null, '', path); window.scrollTo(0, 0); "
            "window.dispatchEvent(new PopStateEvent('popstate')); }",
            path,
        )
        self.page.wait_for_selector(wait_for)

    def forgive(self, text: str) -> None:
        """Drop logged errors that contain a text, such as that of an expected response."""
        self.problems[:] = [one for one in self.problems if text not in one]

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def texts(self, selector: str) -> list[str]:
        """Wait for a first match, then return the texts of all that are there."""
        self.page.locator(selector).first.wait_for(state="attached")
        return [str(text) for text in self.page.locator(selector).all_inner_texts()]

    def saved(self, button: Any) -> bytes:
        """Click a download button (a locator or a selector) and return the file."""
        with self.page.expect_download() as waiting:
            (self.page.locator(button).first if isinstance(button, str) else button).click()
        return Path(waiting.value.path()).read_bytes()

    def csv(self, button: Any) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO(self.saved(button).decode(), newline="")))

    def until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        # Playwright's wait_for_function would need eval, which the page's policy forbids.
        deadline_s = time.monotonic() + LIMIT_S
        while not self.page.evaluate(condition):
            assert time.monotonic() < deadline_s, f"not within {LIMIT_S} s: {condition}"
            self.page.wait_for_timeout(50)
