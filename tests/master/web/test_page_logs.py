"""HTTP endpoints of the page for logs, telemetry and comparison of trials."""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Iterator

import pytest
from seeded import add_bare_task, add_experiment, add_instruments, add_lines, add_metric, task_of, trials_of
from serving import Master, serving

from dstrial.master.store.reports import logs

pytestmark = pytest.mark.process


@dataclasses.dataclass(frozen=True)
class Seeded:
    master: Master
    trial: int
    other: int
    task: str

    def logs(self, **query: object) -> dict[str, object]:
        text = urllib.parse.urlencode({"trial": self.trial, **query}, doseq=True)
        answer = self.master.get(f"/page/logs?{text}")
        assert answer.status == 200, answer.content
        return dict(answer.json)

    def numbers(self, **query: object) -> list[int]:
        return [int(line["text"].split()[1]) for line in self.logs(**query)["lines"]]


LEVELS = (None, "DEBUG", "INFO", "WARNING", "CRITICAL")


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeded]:
    with serving(tmp_path_factory.mktemp("logs") / "state", has_passwords=False) as master:

        def fill(tx):
            trial, other = trials_of(tx, add_experiment(tx, num_trials=2))
            lines = [(idx % 3 or None, LEVELS[idx % 5], f"Step {idx} é") for idx in range(1000)]
            # Both trials print alternately, so that the line ids of each log have gaps.
            for start in range(0, 1000, 10):
                add_lines(tx, task_of(tx, trial), trial, lines[start : start + 10])
                add_lines(tx, task_of(tx, other), other, [(0, None, "of another trial")])
            task = add_bare_task(tx)
            add_lines(tx, task, None, [(None, None, "of a command")])
            return Seeded(master, trial, other, task)

        yield master.write(fill)


def test_pages_cover_log_in_both_directions(seeded: Seeded) -> None:
    found: list[int] = []
    page = seeded.logs(limit=70)
    while True:
        found[:0] = [int(line["text"].split()[1]) for line in page["lines"]]
        if page["searchedTo"] is None:
            break
        page = seeded.logs(limit=70, before=page["searchedTo"])
    assert found == list(range(1000))
    forth: list[int] = []
    after: object = 0
    while after is not None:
        page = seeded.logs(limit=70, after=after)
        forth += [int(line["text"].split()[1]) for line in page["lines"]]
        after = page["searchedTo"]
    assert forth == list(range(1000))


def test_search_resumes_across_requests(seeded: Seeded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_SEARCHED", 300)
    page = seeded.logs(text="Step 5 ")
    times = 1
    while not page["lines"]:
        assert page["searchedTo"] is not None
        page = seeded.logs(text="Step 5 ", before=page["searchedTo"])
        times += 1
    assert [line["text"] for line in page["lines"]] == ["Step 5 é"]
    assert times == 4
    assert page["searchedTo"] is None


def test_task_has_own_log_or_trials_log(seeded: Seeded) -> None:
    own = seeded.master.get(f"/page/logs?task={seeded.task}").json
    assert [line["text"] for line in own["lines"]] == ["of a command"]
    task = seeded.master.rows("SELECT task_id FROM trials WHERE id = ?", seeded.trial)[0]["task_id"]
    assert seeded.master.get(f"/page/logs?task={task}").json == seeded.logs()


@pytest.mark.parametrize("text", ["", "x", "é" * 999, "\x00a\x00", "é" * 4000, "a\n\n"])
def test_line_is_whole_or_truncated_with_length(seeded: Seeded, text: str) -> None:
    def fill(tx):
        task = add_bare_task(tx)
        add_lines(tx, task, None, [(None, None, text)])
        return task

    task = seeded.master.write(fill)
    (line,) = seeded.master.get(f"/page/logs?task={task}").json["lines"]
    shown = text.replace("\x00", r"\x00")
    if len(text.encode()) > logs.MAX_BYTES:
        assert shown.startswith(line["text"])
        assert line["bytes"] == len(text.encode()) + 1
    else:
        assert line["text"] == shown
        assert "bytes" not in line
    whole = seeded.master.get(f"/page/logs/file?task={task}")
    assert whole.content.decode().endswith(f"|| {shown}\n".replace(r"\x00", "\0"))
    assert whole.headers["content-disposition"].startswith("attachment")
    assert whole.headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ("", 400, "names no log"),
        ("trial=1&task=2", 400, "names no log"),
        ("trial=1&before=2&after=3", 400, "has before and after"),
        ("trial=1&before=-3", 400, "expected the id of a line"),
        ("trial=1&level=LOUD", 400, "expected one of TRACE"),
        ("trial=1&rank=one", 400, "expected whole numbers"),
        ("trial=999999", 404, "trial 999999 is not found"),
        ("task=%1b%5b31m", 404, r"task '\x1b[31m' is not found"),
    ],
)
def test_invalid_log_requests_return_errors(seeded: Seeded, query: str, status: int, words: str) -> None:
    answer = seeded.master.get(f"/page/logs?{query}")
    assert answer.status == status
    assert words in answer.error


def test_instruments_are_of_newest_report(seeded: Seeded) -> None:
    master = seeded.master
    master.write(lambda tx: add_instruments(tx, seeded.other, 100, num_reports=3))
    newest = master.get(f"/page/trials/{seeded.other}/instruments").json["report"]
    assert newest["batches"] == 30
    assert len(newest["ranks"]["forward_ms"]) == 100
    assert newest["values"]["timed_by"] == "host clock"
    master.write(lambda tx: add_metric(tx, seeded.other, "telemetry", [(40, {"ranks": "damaged"})]))
    assert master.get(f"/page/trials/{seeded.other}/instruments").json["report"]["ranks"] == {}


def test_experiment_is_compared_by_its_best_trial(seeded: Seeded) -> None:
    def fill(tx):
        best = add_experiment(tx, num_trials=3, seed=5)
        return best, add_experiment(tx, num_trials=1, num_points=0)

    best, without = seeded.master.write(fill)
    found = seeded.master.get(
        f"/page/compare?experiments={best}&experiments={without}&experiments=999999&trials={seeded.trial}"
    ).json
    (row,) = seeded.master.rows("SELECT best_trial_id FROM experiments WHERE id = ?", best)
    assert [trial["id"] for trial in found["trials"]] == [seeded.trial, row["best_trial_id"]]
    assert found["missing"] == [
        "experiment 999999 is not found",
        f"experiment {without} has no best trial yet",
    ]
    assert found["experiments"][0]["recordsPerEpoch"] == 6400
    many = "&".join(f"trials={idx}" for idx in range(101))
    assert seeded.master.get(f"/page/compare?{many}").status == 400
