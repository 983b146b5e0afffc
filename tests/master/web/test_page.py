"""The master's page, as a browser gets it: a login, experiments, plots and a log of a real experiment."""

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

from dstrial.master.web.page import line_plot
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


def test_an_experiment_is_shown_with_its_progress_plots_and_log(
    shared_master: MasterForTest, cookie: str, experiment_id: int
) -> None:
    status, _, text = request(shared_master, "GET", f"/?experiment={experiment_id}", Cookie=cookie)
    page = Page(text)

    assert status == 200
    assert NAME in page.text
    assert "COMPLETED" in page.text
    assert [a["points"] for tag, a in page.elements if tag == "polyline" and len(a["points"].split()) == 8]
    assert "validation: score" in page.text
    assert "<i>step 8</i>" in page.text
    assert not [tag for tag, _ in page.elements if tag in ("script", "i")]
    assert ("progress", {"max": "100", "value": "100.0"}) in page.elements


def test_a_page_of_an_experiment_that_is_not_there_is_an_error(
    shared_master: MasterForTest, cookie: str
) -> None:
    assert request(shared_master, "GET", "/?experiment=999999", Cookie=cookie)[0] == 404
    assert request(shared_master, "GET", "/?experiment=x", Cookie=cookie)[0] == 400


def test_the_page_changes_nothing(shared_master: MasterForTest, cookie: str, experiment_id: int) -> None:
    origin = {"Origin": "http://evil.example"}
    for method, path in (("POST", "/"), ("DELETE", f"/api/v1/experiments/{experiment_id}")):
        status, _, _ = request(shared_master, method, path, {}, Cookie=cookie, **origin)
        assert status in (403, 404, 405)
    client = shared_master.client()
    assert client.get(f"/api/v1/experiments/{experiment_id}")["experiment"]["state"] == "STATE_COMPLETED"


def test_a_plot_has_its_extremes_and_a_long_series_keeps_its_last_point() -> None:
    plot = line_plot([(batch, float(batch % 7)) for batch in range(1, 1003)])

    assert plot is not None
    assert [text for _, text in plot.y_labels] == ["6", "0"]
    assert [text for _, text in plot.x_labels] == ["1", "1002"]
    assert len(plot.dots) <= 402
    assert plot.dots[-1][2].startswith("batch 1002:")


def test_values_that_are_not_finite_are_not_drawn() -> None:
    plot = line_plot([(1, float("nan")), (2, 0.5), (3, float("inf"))])

    assert plot is not None
    assert len(plot.dots) == 1
    assert line_plot([(1, float("nan"))]) is None
    assert line_plot([]) is None


def test_webhooks_are_shown_without_what_of_their_address_may_be_secret(
    shared_master: MasterForTest, cookie: str
) -> None:
    secret = "https://hooks.example/services/T0/secret"
    assert shared_master.dstrial("webhook", "create", "<b>hook</b>", secret).returncode == 0
    (made,) = shared_master.client("admin").get("/api/v1/webhooks")["webhooks"]
    try:
        page = Page(request(shared_master, "GET", "/", Cookie=cookie)[2])
    finally:
        shared_master.dstrial("webhook", "delete", str(made["id"]))
    assert "<b>hook</b>" in page.text
    assert "experiment state change COMPLETED, experiment state change ERROR" in page.text
    assert "https://hooks.example/********" in page.text
    assert "services" not in page.text
