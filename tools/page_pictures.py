"""Write the pictures of the page that README and docs show: a master's application with made-up rows, in Chromium.

Usage: ``python tools/page_pictures.py [DIRECTORY]``, by default ``docs/pictures``; needs Chromium and playwright.
"""

from __future__ import annotations

import pathlib
import shutil
import sys
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "master" / "web"), str(ROOT / "tests" / "master")]

from seeded import add_experiment  # noqa: E402
from seeded_cluster import add_model, add_past_use, add_search, add_task  # noqa: E402
from serving import serving  # noqa: E402

MAX_BYTES = 120_000
WIDTH, HEIGHT = 1100, 620
NAMES = ("digits", "stdlib lm", "digits gan", "circle", "bert large")


def fill(tx: Any) -> dict[str, int]:
    """Add what the pictures show."""
    for number in range(14):
        state = ("COMPLETED", "COMPLETED", "PAUSED", "ERROR", "CANCELED")[number % 5]
        name = f"{NAMES[number % 5]} {number // 5 + 1}"
        add_experiment(
            tx,
            name=name,
            state=state,
            num_trials=1 + number % 4,
            seed=number,
            labels=("baseline",)[: number % 2],
        )
    search = add_experiment(
        tx, name="digits, 24 trials", num_trials=24, num_points=60, seed=9, labels=("search",)
    )
    tx.execute("UPDATE experiments SET progress = 1.0 WHERE id = ?", (search,))
    for number in range(60):
        add_past_use(tx, 23.5 - number * 0.39, 0.3 + 0.05 * (number % 7), 1 + number % 2)
    add_task(
        tx, kind="TENSORBOARD", name=f"TensorBoard of experiment {search}", slots=(), experiments=(search,)
    )
    add_task(tx, name="nvidia-smi dmon", slots=(2,), num_slots=1)
    add_task(tx, name="evaluate, 8 slots", num_slots=8)
    add_model(tx, "digits")
    add_search(tx, has_report=True)
    # The two experiments of every test: begun a while ago.
    tx.execute(
        "UPDATE experiments SET name = 'finetune ' || id, start_us = (SELECT MAX(start_us) FROM experiments) WHERE id < 3"
    )
    tx.execute("UPDATE allocations SET start_us = (SELECT MAX(start_us) FROM experiments) WHERE start_us = 1")
    return {"search": search}


def main() -> None:
    """Write the pictures.

    Raises:
        SystemExit: a picture is too large.
    """
    from playwright.sync_api import sync_playwright

    directory = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures"
    directory.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as scratch,
        serving(pathlib.Path(scratch) / "state", has_passwords=False) as master,
    ):
        ids = master.services.database.write(fill)
        address = f"http://localhost:{master.port}"
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"]
            )
            for name, path, scheme in (
                ("experiments", "/det/experiments", "light"),
                ("search", f"/det/experiments/{ids['search']}/overview", "light"),
                ("search-dark", f"/det/experiments/{ids['search']}/overview", "dark"),
                ("cluster", "/det/clusters", "light"),
            ):
                context = browser.new_context(
                    viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme, locale="en-US"
                )
                context.add_cookies([{"name": "auth", "value": master.tokens["determined"], "url": address}])
                page = context.new_page()
                page.goto(address + path)
                page.wait_for_selector("main table")
                page.wait_for_timeout(2000)
                target = directory / f"page-{name}.png"
                page.screenshot(path=str(target))
                context.close()
                if target.stat().st_size > MAX_BYTES:
                    sys.exit(
                        f"{target} has {target.stat().st_size} bytes; expected at most {MAX_BYTES}. Show less on it."
                    )
            browser.close()


if __name__ == "__main__":
    main()
