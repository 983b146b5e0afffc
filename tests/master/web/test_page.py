"""The documents of the master's page: who gets them, and what they may load."""

from __future__ import annotations

import base64
import html.parser
import http.client
import json
import urllib.parse
from collections.abc import Iterator

import pytest
import yaml
from waiting import wait_for

from dstrial.testing.master import MasterForTest

pytestmark = pytest.mark.process

NAME = "<script>alert(1)</script> & co"
SCRIPT = """
import determined as det

with det.core.init(tensorboard_mode=det.core.TensorboardMode.MANUAL) as core:
    for step in range(1, 9):
        print(f"<i>step {step}</i>")
        core.train.report_training_metrics(step, {"loss": 1.0 / step})
        core.train.report_validation_metrics(step, {"score": 2.0 / step})
"""


class Page(html.parser.HTMLParser):
    """What a page consists of: its elements with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def request(
    master: MasterForTest, method: str, path: str, body: object = None, **headers: str
) -> tuple[int, dict[str, str], str]:
    address = urllib.parse.urlsplit(master.address)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def cookie(shared_master: MasterForTest) -> str:
    body = {"username": "determined", "password": shared_master.password(), "isHashed": False}
    status, headers, _ = request(shared_master, "POST", "/api/v1/auth/login", body)
    assert status == 200
    assert "HttpOnly" in headers["set-cookie"]
    return headers["set-cookie"].partition(";")[0]


@pytest.fixture(scope="module")
def experiment_id(shared_master: MasterForTest) -> Iterator[int]:
    client = shared_master.client()
    config = {
        "name": NAME,
        "entrypoint": "python3 train.py",
        "searcher": {"name": "single", "metric": "score"},
        "max_restarts": 0,
    }
    content = base64.b64encode(SCRIPT.encode()).decode()
    file = {"path": "train.py", "type": 48, "content": content, "mtime": "0", "mode": 420}
    body = {"activate": True, "config": yaml.safe_dump(config), "modelDefinition": [file]}
    created = int(client.post("/api/v1/experiments", body)["experiment"]["id"])
    wait_for(lambda: client.get(f"/api/v1/experiments/{created}")["experiment"]["state"] == "STATE_COMPLETED")
    yield created
    client.send("DELETE", f"/api/v1/experiments/{created}")


def test_without_a_login_there_is_only_the_form(shared_master: MasterForTest, experiment_id: int) -> None:
    status, headers, text = request(shared_master, "GET", f"/?experiment={experiment_id}")

    assert status == 401
    assert "default-src 'none'" in headers["content-security-policy"]
    assert {"username", "password"} <= {element.get("id") for _, element in Page(text).elements}
    assert "alert(1)" not in text


def test_every_address_that_det_prints_is_the_page(shared_master: MasterForTest, cookie: str) -> None:
    for path in ("/", "/det/experiments/1/overview", "/det/experiments/1/trials/1/logs", "/det/tasks"):
        status, headers, text = request(shared_master, "GET", path, Cookie=cookie)
        page = Page(text)
        assert status == 200
        assert "unsafe" not in headers["content-security-policy"]
        (entry,) = [a for tag, a in page.elements if tag == "script" and a.get("type") == "module"]
        assert entry["src"] == "/page/assets/app.js"
        assert f"'nonce-{entry['nonce']}'" in headers["content-security-policy"]


def test_no_text_of_a_user_stands_in_the_document(
    shared_master: MasterForTest, cookie: str, experiment_id: int
) -> None:
    assert (
        "alert(1)" not in request(shared_master, "GET", f"/det/experiments/{experiment_id}", Cookie=cookie)[2]
    )
    shown = request(shared_master, "GET", f"/page/experiments/{experiment_id}", Cookie=cookie)
    assert shown[1]["content-type"] == "application/json"
    assert json.loads(shown[2])["experiment"]["name"] == NAME


def test_the_page_changes_nothing(shared_master: MasterForTest, cookie: str, experiment_id: int) -> None:
    origin = {"Origin": "http://evil.example"}
    for method, path in (("POST", "/"), ("DELETE", f"/api/v1/experiments/{experiment_id}")):
        status, _, _ = request(shared_master, method, path, {}, Cookie=cookie, **origin)
        assert status in (403, 404, 405)
    client = shared_master.client()
    assert client.get(f"/api/v1/experiments/{experiment_id}")["experiment"]["state"] == "STATE_COMPLETED"
