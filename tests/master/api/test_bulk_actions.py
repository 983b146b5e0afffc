"""Bulk actions on experiments, log cleanup and durations."""

from __future__ import annotations

from typing import Any

import pytest
from determined.common import api
from determined.common.api import bindings
from serving import Master

pytestmark = pytest.mark.process


def session_of(master: Master, username: str = "determined") -> api.Session:
    return api.Session(master.address, username, master.tokens[username], None)


@pytest.fixture
def session(fresh_master: Master) -> api.Session:
    """Session of user determined; experiments 1, 2 active, 3 paused, 4 in project p."""
    body = {
        "config": "entrypoint: 'true'\nsearcher: {name: single, metric: loss}\nlabels: [mine]\n",
        "activate": False,
    }
    for name in ("third", "fourth"):
        given = {**body, "config": f"{body['config']}name: {name}\n"}
        assert fresh_master.send("POST", "/api/v1/experiments", given, token="determined").status == 200
    assert fresh_master.send("POST", "/api/v1/workspaces", {"name": "w"}, token="determined").status == 200
    made = fresh_master.send("POST", "/api/v1/workspaces/2/projects", {"name": "p"}, token="determined")
    move = {"destinationProjectId": made.json["project"]["id"]}
    assert fresh_master.send("POST", "/api/v1/experiments/4/move", move, token="determined").status == 200
    fresh_master.change("UPDATE allocations SET state = 'TERMINATED', end_us = 2, exit_code = 0")
    return session_of(fresh_master)


def states(master: Master) -> dict[int, str]:
    return {row["id"]: row["state"] for row in master.rows("SELECT id, state FROM experiments ORDER BY id")}


def test_bulk_actions_reject_filters(fresh_master: Master) -> None:
    body = {"projectId": 1, "experimentIds": [], "filters": {"userIds": [1]}}
    answer = fresh_master.send("POST", "/api/v1/projects/-1/experiments/pause", body, token="determined")
    assert answer.status == 400
    assert "filters is" in answer.error


def test_bulk_actions_return_result_per_experiment(session: api.Session, fresh_master: Master) -> None:
    ids = {"projectId": -1, "experimentIds": [1, 2, 99, 4]}

    def act(verb: str, method: str = "POST", token: str = "determined", **body: Any) -> dict[int, str]:
        path = f"/api/v1/projects/-1/experiments/{verb}"
        answer = fresh_master.send(method, path, {**ids, **body}, token=token)
        return {one["id"]: one["error"] for one in answer.json["results"]}

    found = act("pause")
    assert list(found) == [1, 2, 99, 4]
    assert (found[1], found[2], found[4]) == ("", "", "")
    assert "experiment 99 is not found" in found[99]
    assert states(fresh_master) == {1: "PAUSED", 2: "PAUSED", 3: "PAUSED", 4: "PAUSED"}
    assert act("activate", experimentIds=[1]) == {1: ""}
    assert act("kill", experimentIds=[2]) == {2: ""}
    assert act("cancel", experimentIds=[3]) == {3: ""}
    assert states(fresh_master) == {1: "ACTIVE", 2: "CANCELED", 3: "CANCELED", 4: "PAUSED"}
    found = act("archive", experimentIds=[1, 2])
    assert found[2] == ""
    assert "expected one that has ended" in found[1]
    assert act("unarchive", experimentIds=[2]) == {2: ""}

    found = act("delete", "DELETE", token="other", experimentIds=[2, 3])
    assert all("another user's" in error for error in found.values())
    found = act("delete", "DELETE", experimentIds=[2, 3, 4])
    assert (found[2], found[3]) == ("", "")
    assert "expected one that has ended" in found[4]
    assert states(fresh_master) == {1: "ACTIVE", 2: "DELETING", 3: "DELETING", 4: "PAUSED"}


def test_cleanup_logs_deletes_expired_logs(session: api.Session, fresh_master: Master) -> None:
    for trial_id in (1, 2):
        fresh_master.change(
            "INSERT INTO logs (task_id, trial_id, time_us, source, log) VALUES ('t', ?, 1, 'task', 'x')",
            trial_id,
        )
    fresh_master.change("UPDATE trials SET end_us = 3 WHERE id IN (1, 2)")
    bindings.put_PutTrialRetainLogs(
        session, body=bindings.v1PutTrialRetainLogsRequest(trialId=1, numDays=1), trialId=1
    )
    assert fresh_master.send("POST", "/api/v1/cleanup_logs", token="determined").status == 403
    removed = bindings.post_CleanupLogs(session_of(fresh_master, "admin")).removedCount
    assert int(removed) == 1
    assert [
        row["trial_id"]
        for row in fresh_master.rows("SELECT DISTINCT trial_id FROM logs WHERE source = 'task'")
    ] == [2]


def test_experiment_duration_and_trial_runner_state(session: api.Session, fresh_master: Master) -> None:
    fresh_master.change("UPDATE trials SET start_us = 1, end_us = 90500001 WHERE id = 1")
    fresh_master.change("UPDATE experiments SET start_us = 1, end_us = 91500001 WHERE id = 1")
    started = "CAST(strftime('%s', 'now') AS INTEGER) * 1000000 - 3600000000"
    fresh_master.change(f"UPDATE trials SET start_us = {started} WHERE id = 2")
    fresh_master.change(f"UPDATE experiments SET start_us = {started} WHERE id = 2")
    state = bindings.v1TrialRunnerMetadata(state="validating")
    bindings.post_PostTrialRunnerMetadata(session, body=state, trialId=1)

    assert bindings.get_GetExperiment(session, experimentId=1).experiment.duration == 91
    assert 3600 <= (bindings.get_GetExperiment(session, experimentId=2).experiment.duration or 0) < 7200
    # `det experiment create --test` reads runnerState.
    assert bindings.get_GetTrial(session, trialId=1).trial.runnerState == "validating"
    assert bindings.get_GetTrial(session, trialId=2).trial.runnerState == "UNSPECIFIED"
