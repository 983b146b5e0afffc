"""API requests of detached runs, and of users about detached runs."""

from __future__ import annotations

from typing import Any

import pytest
from determined.common.api import bindings
from serving import Master

from dstrial.master.clock import now_us
from dstrial.master.lifecycle import detached_runs

pytestmark = pytest.mark.process

CONFIG = """
name: outside
searcher: {name: custom, metric: loss, smaller_is_better: true}
checkpoint_storage: {type: shared_fs, host_path: /nonexistent}
"""


def send(master: Master, method: str, path: str, body: Any = None) -> dict[str, Any]:
    answer = master.send(method, f"/api/v1{path}", body, token="determined")
    assert answer.status == 200, answer.content
    found: dict[str, Any] = answer.json
    return found


def refused(master: Master, method: str, path: str, body: Any = None) -> str:
    answer = master.send(method, f"/api/v1{path}", body, token="determined")
    assert answer.status in (400, 404), answer.content
    return answer.error


def experiment(master: Master, external_id: str | None = None, config: str = CONFIG) -> int:
    body = {"config": config, "unmanaged": True}
    if external_id is None:
        return int(send(master, "POST", "/experiments", body)["experiment"]["id"])
    found = send(master, "PUT", f"/experiments/by-external-id/{external_id}", body)
    return int(bindings.v1PutExperimentResponse.from_json(found).experiment.id)


def trial(master: Master, experiment_id: int, external_id: str | None = None, **hparams: Any) -> int:
    inner = {"experimentId": experiment_id, "hparams": hparams or None, "unmanaged": True}
    if external_id is None:
        found = send(master, "POST", "/trials", inner)
    else:
        found = send(master, "PUT", "/trials", {"createTrialRequest": inner, "externalTrialId": external_id})
    return int(bindings.v1CreateTrialResponse.from_json(found).trial.id)


def started(master: Master, trial_id: int, *, resume: bool = True) -> tuple[int, str | None, int]:
    found = send(master, "POST", f"/trials/{trial_id}/start", {"trialId": trial_id, "resume": resume})
    return found["trialRunId"], found["latestCheckpoint"], found["stepsCompleted"]


def say(master: Master, trial_id: int, state: str | None) -> str:
    body = {"trialId": trial_id, "state": state and f"STATE_{state}"}
    return str(send(master, "PATCH", f"/trials/{trial_id}", body)["trial"]["state"]).removeprefix("STATE_")


def report(run_id: int, steps: int, loss: float) -> dict[str, Any]:
    values = {"trialRunId": run_id, "stepsCompleted": steps, "metrics": {"avgMetrics": {"loss": loss}}}
    return {"metrics": values, "group": "validation"}


def state_of(master: Master, experiment_id: int) -> str:
    found = send(master, "GET", f"/experiments/{experiment_id}")["experiment"]["state"]
    return str(found).removeprefix("STATE_")


def test_external_id_finds_existing_experiment_and_trial(fresh_master: Master) -> None:
    number = experiment(fresh_master, "a%20b")
    assert experiment(fresh_master, "a%20b", CONFIG.replace("outside", "renamed")) == number
    assert experiment(fresh_master) != number

    one = trial(fresh_master, number, "t", lr=1)
    assert trial(fresh_master, number, "t") == one
    assert send(fresh_master, "GET", f"/trials/{one}")["trial"]["hparams"] == {"lr": 1}
    assert trial(fresh_master, number, "t", lr=2) == one
    assert send(fresh_master, "GET", f"/trials/{one}")["trial"]["hparams"] == {"lr": 2}
    assert trial(fresh_master, number, "u") != one
    assert trial(fresh_master, experiment(fresh_master, "c"), "t") != one
    assert "the external id is empty" in refused(
        fresh_master,
        "PUT",
        "/trials",
        {"createTrialRequest": {"experimentId": number}, "externalTrialId": ""},
    )


def test_experiment_state_follows_its_trials(fresh_master: Master) -> None:
    number = experiment(fresh_master, "e")
    assert state_of(fresh_master, number) == "QUEUED"
    one, two = trial(fresh_master, number, "1"), trial(fresh_master, number, "2")
    for each in (one, two):
        assert started(fresh_master, each) == (1, None, 0)
    assert say(fresh_master, one, "RUNNING") == "RUNNING"
    assert say(fresh_master, one, "COMPLETED") == "COMPLETED"
    assert state_of(fresh_master, number) == "RUNNING"
    assert say(fresh_master, two, "ERROR") == "ERROR"
    assert state_of(fresh_master, number) == "ERROR"

    assert started(fresh_master, two)[0] == 2
    assert state_of(fresh_master, number) == "RUNNING"
    assert say(fresh_master, two, "COMPLETED") == "COMPLETED"
    assert state_of(fresh_master, number) == "COMPLETED"
    assert fresh_master.rows("SELECT * FROM work") == [], "its checkpoints are not collected"


def test_new_run_archives_and_rejects_old_reports(fresh_master: Master) -> None:
    number = experiment(fresh_master)
    one = trial(fresh_master, number)
    started(fresh_master, one)
    for steps in range(1, 5):
        send(fresh_master, "POST", f"/trials/{one}/metrics", report(1, steps, 1 / steps))
    task = send(fresh_master, "GET", f"/trials/{one}")["trial"]["taskId"]
    uuid = "b3b4a7b8-0000-4000-8000-000000000002"
    saved = {"uuid": uuid, "taskId": task, "resources": {"a": "1"}, "metadata": {"steps_completed": 2}}
    send(fresh_master, "POST", "/checkpoints", {**saved, "state": "STATE_COMPLETED"})

    assert started(fresh_master, one, resume=False) == (2, None, 0)
    assert started(fresh_master, one) == (3, uuid, 2)

    assert "expected 3, the current run" in refused(
        fresh_master, "POST", f"/trials/{one}/metrics", report(1, 5, 0.1)
    )
    send(fresh_master, "POST", f"/trials/{one}/metrics", report(3, 3, 0.5))
    shown = send(fresh_master, "GET", f"/trials/{one}")["trial"]
    assert (shown["totalBatchesProcessed"], shown["searcherMetricValue"]) == (3, 0.5)
    kept = fresh_master.rows("SELECT steps FROM metrics WHERE archived = 0 ORDER BY steps")
    assert [row["steps"] for row in kept] == [1, 2, 3]


def test_silent_run_is_failed_and_can_resume(fresh_master: Master) -> None:
    silent, talks, empty = (experiment(fresh_master) for _ in range(3))
    one, two = trial(fresh_master, silent), trial(fresh_master, talks)
    started(fresh_master, one)
    started(fresh_master, two)
    before_us = now_us()
    task = send(fresh_master, "GET", f"/trials/{two}")["trial"]["taskId"]
    lines = [
        {"task_id": task, "log": "WARNING: here\n", "rank": "1", "timestamp": "2020-01-01T00:00:00+00:00"}
    ]
    assert fresh_master.send("POST", "/task-logs", lines, token="determined").status == 200

    count = fresh_master.services.database.write(lambda tx: detached_runs.give_up_silent(tx, before_us))

    assert count == 1
    assert [state_of(fresh_master, each) for each in (silent, talks, empty)] == ["ERROR", "RUNNING", "ERROR"]
    (line,) = fresh_master.rows("SELECT * FROM logs WHERE source = 'task'")
    assert (line["log"], line["level"], line["rank"]) == ("here\n", "WARNING", 1)
    assert line["time_us"] > before_us
    assert say(fresh_master, one, None) == "RUNNING"
    assert state_of(fresh_master, silent) == "RUNNING"
    assert say(fresh_master, one, "COMPLETED") == "COMPLETED"


@pytest.mark.parametrize("end", ["COMPLETED", "ERROR"])
def test_report_reopens_run_closed_by_earlier_script(fresh_master: Master, end: str) -> None:
    number = experiment(fresh_master)
    one = trial(fresh_master, number)
    started(fresh_master, one)
    assert started(fresh_master, one)[0] == 2
    assert say(fresh_master, one, end) == end

    # Neither a heartbeat nor a refused report shows that the current run is alive.
    assert say(fresh_master, one, None) == end
    assert "current run" in refused(fresh_master, "POST", f"/trials/{one}/metrics", report(1, 1, 1.0))
    assert state_of(fresh_master, number) == end
    send(fresh_master, "POST", f"/trials/{one}/metrics", report(2, 1, 0.5))

    shown = send(fresh_master, "GET", f"/trials/{one}")["trial"]
    assert (shown["state"], shown["endTime"], state_of(fresh_master, number)) == (
        "STATE_RUNNING",
        None,
        "RUNNING",
    )
    assert shown["searcherMetricValue"] == 0.5
    assert say(fresh_master, one, "COMPLETED") == "COMPLETED"
    send(fresh_master, "POST", f"/trials/{one}/metrics", report(2, 1, 0.5))
    assert state_of(fresh_master, number) == "COMPLETED", "a report that is sent again says nothing new"


def test_report_does_not_undo_user_action(fresh_master: Master) -> None:
    kept, going, failed, canceled = (experiment(fresh_master) for _ in range(4))
    ones = {number: trial(fresh_master, number) for number in (kept, going, failed, canceled)}
    for one in ones.values():
        started(fresh_master, one)
    send(fresh_master, "POST", f"/experiments/{canceled}/cancel")
    fresh_master.services.database.write(lambda tx: detached_runs.give_up_silent(tx, now_us()))
    send(fresh_master, "POST", f"/experiments/{kept}/archive")
    for number, state in ((going, "DELETING"), (failed, "DELETE_FAILED")):
        fresh_master.change("UPDATE experiments SET state = ? WHERE id = ?", state, number)

    for one in ones.values():
        send(fresh_master, "POST", f"/trials/{one}/metrics", report(1, 1, 0.5))
        say(fresh_master, one, None)

    def stored() -> list[tuple[str, int]]:
        rows = fresh_master.rows("SELECT id, state, archived FROM experiments")
        found = {row["id"]: (row["state"], row["archived"]) for row in rows}
        return [found[number] for number in ones]

    kept_ends = [("DELETING", 0), ("DELETE_FAILED", 0), ("CANCELED", 0)]
    assert stored() == [("ACTIVE", 1), *kept_ends]
    for one in ones.values():
        say(fresh_master, one, "COMPLETED")
    assert stored() == [("COMPLETED", 1), *kept_ends]


@pytest.mark.parametrize("verb", ["pause", "activate"])
def test_detached_experiment_cannot_be_paused_or_continued(fresh_master: Master, verb: str) -> None:
    number = experiment(fresh_master)
    assert "has detached runs" in refused(fresh_master, "POST", f"/experiments/{number}/{verb}")
    started(fresh_master, trial(fresh_master, number))
    send(fresh_master, "POST", f"/experiments/{number}/kill")
    assert "has detached runs" in refused(fresh_master, "POST", "/experiments/continue", {"id": number})


def test_managed_trials_reject_detached_run_requests(fresh_master: Master) -> None:
    for method, path, body in (
        ("POST", "/trials", {"experimentId": 1, "unmanaged": True}),
        ("POST", "/trials/1/start", {"trialId": 1}),
        ("PATCH", "/trials/1", {"trialId": 1, "state": "STATE_COMPLETED"}),
    ):
        assert "is not one of detached runs" in refused(fresh_master, method, path, body)
    number = experiment(fresh_master)
    wrong = {"trialId": trial(fresh_master, number), "state": "STATE_PAUSED"}
    assert "state is STATE_PAUSED" in refused(fresh_master, "PATCH", f"/trials/{wrong['trialId']}", wrong)


def test_invalid_detached_config_lists_its_problems(fresh_master: Master) -> None:
    body = {"config": "name: x\nsearcher: {name: custom}\nlabels: [1]", "unmanaged": True}
    error = refused(fresh_master, "POST", "/experiments", body)
    assert "searcher.metric" in error
    assert "labels[0]" in error


def test_task_logs_must_belong_to_task(fresh_master: Master) -> None:
    for body in ({"a": 1}, [1], [{"log": "x"}]):
        assert fresh_master.send("POST", "/task-logs", body, token="determined").status == 400
    lines = [{"task_id": "none", "log": "x"}]
    assert fresh_master.send("POST", "/task-logs", lines, token="determined").status == 404
    own, other = ([{"task_id": f"{number}.request", "log": "x\n"}] for number in (1, 2))
    assert fresh_master.send("POST", "/task-logs", own, token="trial-1").status == 200
    assert fresh_master.send("POST", "/task-logs", other, token="trial-1").status == 403
