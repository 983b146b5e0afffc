"""Get a page of a master as a browser does, after a login."""

from __future__ import annotations

import html
import http.client
import json
import urllib.parse

from dstrial.testing.master import MasterForTest


def text_of_page(master: MasterForTest, path: str) -> str:
    """Return a page with what is escaped in it put back."""
    address = urllib.parse.urlsplit(master.address)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
    try:
        login = {"username": "determined", "password": master.password(), "isHashed": False}
        connection.request("POST", "/api/v1/auth/login", json.dumps(login))
        answer = connection.getresponse()
        answer.read()
        cookie = (answer.getheader("set-cookie") or "").partition(";")[0]
        connection.request("GET", path, headers={"Cookie": cookie})
        page = connection.getresponse()
        assert page.status == 200
        return html.unescape(page.read().decode())
    finally:
        connection.close()
