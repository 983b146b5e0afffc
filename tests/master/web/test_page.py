"""HTML documents of the master's page: login, security policy and content."""

from __future__ import annotations

import html.parser

import pytest
from seeded import add_experiment
from serving import Answer, Master

pytestmark = pytest.mark.process

NAME = "<script>alert(1)</script> & co"


class Page(html.parser.HTMLParser):
    """HTML elements of a response, with their attributes."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(answer.content.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def cookie(seeded_master: Master) -> dict[str, str]:
    body = {"username": "other", "password": "Other-password-1", "isHashed": False}
    answer = seeded_master.send("POST", "/api/v1/auth/login", body)
    assert answer.status == 200
    assert "HttpOnly" in answer.headers["set-cookie"]
    return {"Cookie": answer.headers["set-cookie"].partition(";")[0]}


@pytest.fixture(scope="module")
def experiment_id(seeded_master: Master) -> int:
    return seeded_master.write(lambda tx: add_experiment(tx, name=NAME))


def test_page_without_login_shows_only_form(seeded_master: Master, experiment_id: int) -> None:
    answer = seeded_master.get(f"/det/experiments/{experiment_id}", token=None)

    assert answer.status == 401
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert {"username", "password"} <= {element.get("id") for _, element in Page(answer).elements}
    assert b"alert(1)" not in answer.content


@pytest.mark.parametrize(
    "path", ["/", "/det/experiments/1/overview", "/det/experiments/1/trials/1/logs", "/det/tasks"]
)
def test_addresses_printed_by_det_serve_page(
    seeded_master: Master, cookie: dict[str, str], path: str
) -> None:
    answer = seeded_master.send("GET", path, headers=cookie)
    assert answer.status == 200
    policy = answer.headers["content-security-policy"]
    assert "unsafe" not in policy
    (entry,) = [a for tag, a in Page(answer).elements if tag == "script" and a.get("type") == "module"]
    assert entry["src"] == "/page/assets/app.js"
    assert f"'nonce-{entry['nonce']}'" in policy


def test_document_contains_no_user_text(
    seeded_master: Master, cookie: dict[str, str], experiment_id: int
) -> None:
    document = seeded_master.send("GET", f"/det/experiments/{experiment_id}", headers=cookie)
    assert b"alert(1)" not in document.content
    shown = seeded_master.send("GET", f"/page/experiments/{experiment_id}", headers=cookie)
    assert shown.headers["content-type"] == "application/json"
    assert shown.json["experiment"]["name"] == NAME
