"""Login link printed by `dstrial up`, and a login that expires on an open page."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from browsing import Browser

from dstrial.master.client import Client
from dstrial.testing.master import MasterForTest

pytestmark = pytest.mark.process


@pytest.fixture
def window(open_browser: Callable[..., Browser], shared_master: MasterForTest) -> Browser:
    """A window on a real master, without a login."""
    real: Any = SimpleNamespace(port=urlsplit(shared_master.address).port, tokens={})
    return open_browser(master=real, token=None)


def link(master: MasterForTest) -> str:
    told = master.dstrial("up", "--state-dir", str(master.state.path)).stdout
    found = re.search(r"browser: +(http://localhost:\d+/login#\S+)", told)
    assert found is not None, told
    return found[1]


def test_login_link_works_once_and_leaves_no_code(window: Browser, shared_master: MasterForTest) -> None:
    address = link(shared_master)
    code = address.partition("#")[2]
    window.page.goto(address)
    window.page.wait_for_selector("main h1:has-text('Experiments')")
    window.until("document.querySelector('.who').textContent.includes('determined')")
    assert window.page.url == window.address + "/"
    assert code not in window.page.content()
    window.page.go_back()
    assert code not in window.page.url
    # The link does not work a second time.
    window.page.context.clear_cookies()
    window.page.goto(address)
    window.page.wait_for_selector("[role=alert]:has-text('has been used')")
    assert window.page.context.cookies() == []
    window.forgive("401")  # the login form is sent with status 401


def test_expired_login_is_reported_and_restores_address(
    window: Browser, shared_master: MasterForTest
) -> None:
    window.page.goto(link(shared_master))
    window.page.wait_for_selector("main h1")
    window.open("/det/experiments?state=ERROR", ".table")
    token = next(cookie["value"] for cookie in window.page.context.cookies() if cookie["name"] == "auth")
    Client(shared_master.address, token).post("/api/v1/auth/logout")
    window.show("/det/tasks?living=1")
    window.page.wait_for_selector(".banner[role=alert]:has-text('Your login has expired')")
    assert window.text("main h1") == "Tasks"  # The view stays visible.
    window.page.click(".banner button")
    window.page.wait_for_selector("#password")
    assert window.page.url == f"{window.address}/det/tasks?living=1"
    window.page.fill("#password", shared_master.password())
    window.page.click("form button")
    window.page.wait_for_selector("main .table")
    assert window.page.url == f"{window.address}/det/tasks?living=1"
    assert window.page.locator(".banner").count() == 0
    window.forgive("401")
