"""The model registry in a real browser: create, edit, archive, delete."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from browsing import Browser
from seeded import add_model
from serving import Master

pytestmark = pytest.mark.process

HTML = "<img src=x onerror=alert(1)> & co"


def test_created_model_shows_checkpoint_of_its_version(browser: Browser, seeded_master: Master) -> None:
    checkpoint = seeded_master.checkpoints[1]
    browser.show("/det/models", "main table")
    browser.page.click("button:has-text('New model')")
    assert browser.page.is_disabled("dialog button.main")
    browser.page.fill("#field-name", HTML)
    browser.page.fill("#field-labels", "ours, ours , best")
    browser.page.click("dialog button.main")
    browser.page.wait_for_selector("h2:has-text('Versions')")
    assert browser.text("h1") == HTML
    assert browser.texts(".facts .label") == ["ours", "best"]
    (row,) = seeded_master.rows("SELECT id FROM models WHERE name = ?", HTML)
    body = {"checkpointUuid": checkpoint, "comment": HTML}
    path = f"/api/v1/models/{row['id']}/versions"
    assert seeded_master.send("POST", path, body, token="determined").status == 200
    browser.page.click("button[aria-label='Show version 1']")
    browser.page.wait_for_selector(".panel")
    panel = browser.text(".panel")
    assert f"det checkpoint download {checkpoint}" in panel
    assert HTML in panel
    assert browser.page.get_attribute(".panel .facts a", "href") == "/det/experiments/1/trials/1"
    # The name is quoted for the shell.
    assert f"det model describe '{HTML}' --version 1" in panel


def test_models_and_versions_are_edited_archived_deleted(browser: Browser, seeded_master: Master) -> None:
    seeded_master.write(
        lambda tx: add_model(tx, "digits", seeded_master.checkpoints[1], seeded_master.checkpoints[2])
    )
    browser.show("/det/models/digits", "tbody tr[data-idx='1']")
    browser.page.click(".tools button:has-text('Edit')")
    browser.page.fill("#field-name", "digits of mine")
    browser.page.fill("#field-notes", "line 1\nline 2")
    browser.page.click("dialog button.main")
    browser.until("location.pathname === '/det/models/digits%20of%20mine'")
    browser.page.wait_for_selector("pre:has-text('line 2')")
    browser.page.click("button[aria-label='Delete version 1']")
    browser.page.wait_for_selector("dialog[open]")
    browser.page.keyboard.press("Escape")
    browser.page.click("button[aria-label='Delete version 1']")
    browser.page.click("dialog button.danger")
    browser.page.wait_for_selector("button[aria-label='Delete version 1']", state="detached")
    browser.page.click(".tools button:has-text('Archive')")
    browser.page.wait_for_selector(".tools button:has-text('Unarchive')")
    assert browser.page.is_disabled(".tools button:has-text('Edit')")
    browser.page.click(".tools button:has-text('Unarchive')")
    browser.page.wait_for_selector(".tools button:text-is('Archive')")
    browser.page.click("main > .tools button:has-text('Delete')")
    browser.page.click("dialog button.danger")
    browser.until("location.pathname === '/det/models'")
    assert seeded_master.rows("SELECT name FROM models WHERE name LIKE 'digits%'") == []
    browser.forgive("404")  # The view may ask for the model once more before it is left.


def test_external_changes_and_deletion_are_shown(
    open_browser: Callable[..., Browser], seeded_master: Master
) -> None:
    browser = open_browser()
    browser.open("/det/models?filter=label:later", "td.empty")
    seeded_master.write(lambda tx: add_model(tx, "made later", labels=("later",)))
    browser.page.wait_for_selector("tbody a:has-text('made later')")
    browser.page.click("tbody a")
    browser.page.wait_for_selector("h2:has-text('Versions')")
    assert seeded_master.send("DELETE", "/api/v1/models/made%20later", token="determined").status == 200
    browser.page.wait_for_selector("main .problem:has-text('is not found')")
    browser.problems.clear()  # The browser logs the 404 response as an error.
