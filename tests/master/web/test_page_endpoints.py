"""HTTP endpoints of the page: lists, curves, assets and events."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator

import pytest
from seeded import add_experiment
from serving import Master

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def search(seeded_master: Master) -> int:
    return seeded_master.write(
        lambda tx: add_experiment(tx, name="<b>", num_trials=3, num_points=5000, labels=("long",))
    )


def trials_of(master: Master, experiment: int) -> list[int]:
    return [row["id"] for row in master.get(f"/page/experiments/{experiment}/trials").json["trials"]]


def test_curve_is_downsampled_with_both_ends_kept(seeded_master: Master, search: int) -> None:
    first, *_ = trials = trials_of(seeded_master, search)
    path = "/page/series?group=validation&name=loss" + "".join(f"&trials={trial}" for trial in trials)
    whole = seeded_master.get(path).json["series"]
    assert [curve["trial"] for curve in whole] == trials
    assert {curve["points"] for curve in whole} == {5000}
    assert max(len(curve["values"]) for curve in whole) <= 2000
    (few,) = seeded_master.get(f"/page/series?group=validation&name=loss&trials={first}&points=50").json[
        "series"
    ]
    assert len(few["batches"]) == len(few["values"]) == len(few["times"]) <= 50
    assert (few["batches"][0], few["batches"][-1]) == (10, 50_000)


def test_non_finite_values_and_unusual_names_are_returned(seeded_master: Master) -> None:
    name = 'größe a."b\\c [0]'
    experiment = seeded_master.write(
        lambda tx: add_experiment(tx, num_points=3, metrics=("loss", name, "größe"))
    )
    (trial,) = trials_of(seeded_master, experiment)
    seeded_master.change(
        "UPDATE metrics SET metrics = ? WHERE trial_id = ? AND steps = 20",
        json.dumps({"loss": "NaN", name: "-Infinity"}),
        trial,
    )
    quoted = "gr%C3%B6%C3%9Fe%20a.%22b%5Cc%20[0]"
    (odd,) = seeded_master.get(f"/page/series?group=training&name={quoted}&trials={trial}").json["series"]
    assert odd["values"][1] == "-Infinity"
    assert [type(value) for value in odd["values"]] == [float, str, float]
    (size,) = seeded_master.get(f"/page/series?group=training&name=gr%C3%B6%C3%9Fe&trials={trial}").json[
        "series"
    ]
    assert len(size["values"]) == 2
    (loss,) = seeded_master.get(f"/page/series?group=training&name=loss&trials={trial}").json["series"]
    assert loss["values"][1] == "NaN"


def test_invalid_page_requests_return_errors(seeded_master: Master, search: int) -> None:
    for path, status, words in (
        ("/page/experiments/999999", 404, "experiment 999999 is not found"),
        ("/page/trials/999999", 404, "trial 999999 is not found"),
        ("/page/series?group=validation&name=loss", 400, "trials names 0 trials"),
        ("/page/series?trials=1&name=loss", 400, "group or name is missing"),
        ("/page/series?trials=x&group=a&name=b", 400, "trials"),
        ("/page/assets/../page.py", 404, ""),
        ("/page/assets/nothing.js", 404, "no file of the page"),
        ("/page/assets/..%2fpage.py", 404, "no file of the page"),
        ("/page/assets/vendor/..%2f..%2fpage.py", 404, "no file of the page"),
        ("/page/assets/%2fetc%2fpasswd", 404, "no file of the page"),
    ):
        answer = seeded_master.get(path)
        assert answer.status == status, path
        assert words in answer.error


def test_unchanged_assets_are_answered_with_304(seeded_master: Master) -> None:
    first = seeded_master.get("/page/assets/views/experiment/overview.js", token=None)
    assert first.status == 200
    assert first.headers["content-type"].startswith("text/javascript")
    again = seeded_master.send(
        "GET", "/page/assets/views/experiment/overview.js", headers={"If-None-Match": first.headers["etag"]}
    )
    assert (again.status, again.content) == (304, b"")


@contextlib.contextmanager
def listening(master: Master, token: str) -> Iterator[http.client.HTTPResponse]:
    """Open the stream of events with a token."""
    connection = http.client.HTTPConnection("127.0.0.1", master.port, timeout=30)
    with contextlib.closing(connection):
        headers = {"Host": "localhost", "Authorization": f"Bearer {token}"}
        connection.request("GET", "/page/events", headers=headers)
        yield connection.getresponse()


def next_event(answer: http.client.HTTPResponse) -> dict[str, object]:
    while True:
        line = answer.readline().decode()
        if line.startswith("data: "):
            return dict(json.loads(line.removeprefix("data: ")))


def test_events_announce_changes_and_master_id(seeded_master: Master) -> None:
    with listening(seeded_master, seeded_master.tokens["determined"]) as events:
        assert events.getheader("content-type") == "text/event-stream"
        assert next_event(events) == {"master": seeded_master.services.master_id}
        experiment = seeded_master.write(lambda tx: add_experiment(tx, name="new"))
        assert next_event(events) == {"topics": [f"experiment:{experiment}"]}
        seeded_master.services.pubsub.publish(["tokens", *(f"trial:{number}" for number in range(1000))])
        assert next_event(events) == {"all": True}


def test_events_end_after_logout(fresh_master: Master) -> None:
    token = fresh_master.tokens["other"]
    with listening(fresh_master, token) as answer:
        assert next_event(answer) == {"master": fresh_master.services.master_id}
        assert fresh_master.send("POST", "/api/v1/auth/logout", token=token).status == 200
        # Neither an event nor a keep-alive is due, so only the logout can end the stream.
        assert answer.read() in (b"", b"\n"), "it ends by itself"
