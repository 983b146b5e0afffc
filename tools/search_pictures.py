"""Run a real search of the digits' net on a master of its own, and take the pictures of it in README and docs.

Usage: ``python tools/search_pictures.py DIRECTORY``. Needs playwright and a Chromium, as the tests of the page do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from dstrial.testing.master import master_for_test

ROOT = Path(__file__).parents[1]
PICTURES = {"page-search.png": "light", "page-search-dark.png": "dark"}
"""File name -> colours."""


def main() -> None:
    target = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as directory, master_for_test(Path(directory)) as master:
        experiment = [
            ROOT / "experiment_configs" / "digits_adaptive_asha.yaml",
            ROOT / "model_defs" / "digits",
        ]
        det = Path(sys.executable).with_name("det")
        subprocess.run([det, "experiment", "create", "-f", *experiment], check=True, env=master.env)
        with sync_playwright() as playwright:
            chromium = shutil.which("chromium-headless-shell") or shutil.which("chromium")
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for name, colours in PICTURES.items():
                page = browser.new_page(color_scheme=colours, viewport={"width": 1100, "height": 760})
                page.goto(f"{master.address}/login")
                page.fill("#username", "determined")
                page.fill("#password", master.password())
                page.click("button")
                page.wait_for_selector("table")
                page.goto(f"{master.address}/det/experiments/1")
                page.wait_for_selector(".legend", timeout=120_000)
                page.wait_for_timeout(1000)  # until the chart is drawn
                page.screenshot(path=target / name)
            browser.close()


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
