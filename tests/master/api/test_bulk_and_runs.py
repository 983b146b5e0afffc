"""Many experiments or runs at once: by their numbers, by filters, each with its own result."""

from __future__ import annotations

import json
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
    """Of the user determined, on a master whose experiments 1 and 2 are active, 3 paused and 4 of another project."""
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


def results(answer: Any) -> dict[int, str]:
    return {one.id: one.error for one in answer.results}


def test_experiments_are_paused_and_activated_by_number(session: api.Session, fresh_master: Master) -> None:
    request = bindings.v1PauseExperimentsRequest(experimentIds=[1, 2, 99, 4], projectId=1)
    found = results(bindings.post_PauseExperiments(session, body=request, projectId=1))

    assert list(found) == [1, 2, 99, 4]
    assert (found[1], found[2]) == ("", "")
    assert "experiment 99 is not found" in found[99]
    assert "is in project 2; expected one of project 1" in found[4]
    assert states(fresh_master) == {1: "PAUSED", 2: "PAUSED", 3: "PAUSED", 4: "PAUSED"}

    again = bindings.v1ActivateExperimentsRequest(experimentIds=[1], projectId=1)
    assert results(bindings.post_ActivateExperiments(session, body=again, projectId=1)) == {1: ""}
    assert states(fresh_master)[1] == "ACTIVE"


def test_experiments_are_killed_archived_and_taken_back_by_filter(
    session: api.Session, fresh_master: Master
) -> None:
    wanted = bindings.v1BulkExperimentFilters(
        states=[bindings.experimentv1State.RUNNING], excludedExperimentIds=[2]
    )
    kill = bindings.v1KillExperimentsRequest(experimentIds=[2, 3], filters=wanted, projectId=1)
    assert results(bindings.post_KillExperiments(session, body=kill, projectId=1)) == {1: ""}
    cancel = bindings.v1CancelExperimentsRequest(
        experimentIds=[], filters=bindings.v1BulkExperimentFilters(labels=["mine"]), projectId=1
    )
    assert results(bindings.post_CancelExperiments(session, body=cancel, projectId=1)) == {3: ""}
    assert states(fresh_master) == {1: "CANCELED", 2: "ACTIVE", 3: "CANCELED", 4: "PAUSED"}

    everything = bindings.v1BulkExperimentFilters()
    archive = bindings.v1ArchiveExperimentsRequest(experimentIds=[], filters=everything, projectId=1)
    found = results(bindings.post_ArchiveExperiments(session, body=archive, projectId=1))
    assert (found[1], found[3]) == ("", "")
    assert "expected one that has ended" in found[2]
    archived = bindings.v1BulkExperimentFilters(archived=True)
    back = bindings.v1UnarchiveExperimentsRequest(experimentIds=[], filters=archived, projectId=1)
    assert results(bindings.post_UnarchiveExperiments(session, body=back, projectId=1)) == {1: "", 3: ""}


def test_experiments_are_moved_their_logs_kept_and_deleted_together(
    session: api.Session, fresh_master: Master
) -> None:
    keep = bindings.v1PutExperimentsRetainLogsRequest(experimentIds=[1, 2], numDays=5, projectId=1)
    assert results(bindings.put_PutExperimentsRetainLogs(session, body=keep, projectId=1)) == {1: "", 2: ""}
    move = bindings.v1MoveExperimentsRequest(experimentIds=[2, 3], destinationProjectId=2, projectId=1)
    assert results(bindings.post_MoveExperiments(session, body=move, projectId=1)) == {2: "", 3: ""}
    rows = fresh_master.rows("SELECT project_id, log_retention_days FROM experiments ORDER BY id")
    assert [tuple(row.values()) for row in rows] == [(1, 5), (2, 5), (2, None), (2, None)]

    fresh_master.change("UPDATE experiments SET state = 'COMPLETED', end_us = 2 WHERE id IN (2, 3)")
    delete = bindings.v1DeleteExperimentsRequest(experimentIds=[2, 3, 4], projectId=2)
    other = results(
        bindings.delete_DeleteExperiments(session_of(fresh_master, "other"), body=delete, projectId=2)
    )
    assert all("another user's" in error for error in other.values())
    found = results(bindings.delete_DeleteExperiments(session, body=delete, projectId=2))
    assert (found[2], found[3]) == ("", "")
    assert "expected one that has ended" in found[4]
    assert states(fresh_master) == {1: "ACTIVE", 2: "DELETING", 3: "DELETING", 4: "PAUSED"}


def field(name: str, operator: str, value: Any) -> dict[str, Any]:
    return {"kind": "field", "columnName": name, "operator": operator, "value": value}


def group(conjunction: str, *children: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "group", "conjunction": conjunction, "children": list(children)}


def search(session: api.Session, tree: dict[str, Any] | None = None, **fields: Any) -> list[int]:
    text = None if tree is None else json.dumps({"filterGroup": tree, "showArchived": False})
    answer = bindings.post_SearchRuns(session, body=bindings.v1SearchRunsRequest(filter=text, **fields))
    return [run.id for run in answer.runs]


FILTERS: list[tuple[dict[str, Any], list[int]]] = [
    (group("and"), [1, 2, 3, 4]),
    (group("and", field("id", ">", 1), field("id", "<=", 3)), [2, 3]),
    (group("or", field("id", "=", 1), field("experimentName", "contains", "THI")), [1, 3]),
    (group("and", field("tags", "=", "mine"), field("projectId", "!=", 1)), [4]),
    (group("and", field("state", "=", "paused")), [3, 4]),
    (group("and", field("hp.lr", ">=", 0.1)), [1, 2]),
    (group("and", field("hp.lr", "isEmpty", None)), [3, 4]),
    (group("and", field("metadata.note", "notEmpty", None)), [2]),
    (group("and", field("training.loss.last", "<", 1)), [1]),
    (group("and", field("user", "notContains", "deter")), []),
    (
        group("and", group("or", field("id", "=", 2), field("id", "=", 4)), field("numTrials", "=", 1)),
        [2, 4],
    ),
]


def test_runs_are_found_by_filter(session: api.Session, fresh_master: Master) -> None:
    metadata = bindings.v1PostRunMetadataRequest(runId=2, metadata={"note": "n"})
    bindings.post_PostRunMetadata(session, body=metadata, runId=2)
    summary = "INSERT OR REPLACE INTO metric_summaries (trial_id, group_name, name, summary) VALUES (1, 'training', 'loss', ?)"
    fresh_master.change(summary, json.dumps({"last": 0.5}))

    assert [search(session, tree) for tree, _ in FILTERS] == [found for _, found in FILTERS]


def test_runs_are_ordered_paged_and_of_a_project(session: api.Session) -> None:
    assert search(session, sort="state=asc,id=asc") == [1, 2, 3, 4]
    assert search(session, sort="state=desc,id=asc") == [3, 4, 1, 2]
    assert search(session, sort="hp.lr=desc,id=asc") == [1, 2, 3, 4]
    assert search(session, sort="id=desc", offset=1, limit=2) == [3, 2]
    assert search(session, projectId=2) == [4]
    run = bindings.post_SearchRuns(session, body=bindings.v1SearchRunsRequest(projectId=2)).runs[0]
    assert (run.projectName, run.workspaceName, run.labels) == ("p", "w", ["mine"])
    assert run.experiment is not None
    assert (run.experiment.id, run.experiment.isMultitrial) == (4, False)


@pytest.mark.parametrize(
    "body",
    [
        {"filter": "{"},
        {"filter": "[]"},
        {"filter": json.dumps({"filterGroup": field("none", "=", 1)})},
        {"filter": json.dumps({"filterGroup": field("id", "~", 1)})},
        {"filter": json.dumps({"filterGroup": {"kind": "group", "conjunction": "xor", "children": []}})},
        {"sort": "id"},
        {"sort": "none=asc"},
    ],
)
def test_a_filter_that_is_none_is_refused(served: Master, body: dict[str, str]) -> None:
    answer = served.send("POST", "/api/v1/runs", body, token="determined")
    assert (answer.status, "the filter or sort of runs has" in answer.error) == (400, True)


def test_runs_are_paused_resumed_moved_killed_archived_and_deleted(
    session: api.Session, fresh_master: Master
) -> None:
    def done(name: str, request: Any) -> dict[int, str]:
        return results(getattr(bindings, f"post_{name}Runs")(session, body=request))

    assert done("Pause", bindings.v1PauseRunsRequest(projectId=1, runIds=[1, 2])) == {1: "", 2: ""}
    chosen = json.dumps({"filterGroup": group("and", field("id", "=", 1))})
    assert done("Resume", bindings.v1ResumeRunsRequest(projectId=1, runIds=[], filter=chosen)) == {1: ""}
    assert states(fresh_master) == {1: "ACTIVE", 2: "PAUSED", 3: "PAUSED", 4: "PAUSED"}
    move = bindings.v1MoveRunsRequest(sourceProjectId=1, destinationProjectId=2, runIds=[3, 99])
    found = done("Move", move)
    assert found[3] == ""
    assert "run 99 is not found" in found[99]
    assert done("Kill", bindings.v1KillRunsRequest(runIds=[3, 4], projectId=2)) == {3: "", 4: ""}
    assert states(fresh_master)[3] == "CANCELED"
    assert done("Archive", bindings.v1ArchiveRunsRequest(projectId=2, runIds=[3])) == {3: ""}
    assert search(session, projectId=2) == [4]
    assert done("Unarchive", bindings.v1UnarchiveRunsRequest(projectId=2, runIds=[3])) == {3: ""}
    assert done("Delete", bindings.v1DeleteRunsRequest(runIds=[3, 4])) == {3: "", 4: ""}
    assert states(fresh_master) == {1: "ACTIVE", 2: "PAUSED", 3: "DELETING", 4: "DELETING"}


def test_one_of_several_runs_is_not_paused_alone(session: api.Session, fresh_master: Master) -> None:
    fresh_master.change("UPDATE trials SET experiment_id = 1 WHERE id = 2")
    request = bindings.v1PauseRunsRequest(projectId=1, runIds=[1])
    assert "is one of 2 of experiment 1" in results(bindings.post_PauseRuns(session, body=request))[1]
    skip = bindings.v1MoveRunsRequest(
        sourceProjectId=1, destinationProjectId=2, runIds=[1], skipMultitrial=True
    )
    assert results(bindings.post_MoveRuns(session, body=skip)) == {1: ""}
    assert fresh_master.rows("SELECT project_id FROM experiments WHERE id = 1") == [{"project_id": 1}]
    whole = bindings.v1MoveRunsRequest(sourceProjectId=1, destinationProjectId=2, runIds=[1, 2])
    assert results(bindings.post_MoveRuns(session, body=whole)) == {1: "", 2: ""}
    assert fresh_master.rows("SELECT project_id FROM experiments WHERE id = 1") == [{"project_id": 2}]


def test_old_logs_are_deleted_at_once_when_asked_for(session: api.Session, fresh_master: Master) -> None:
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


def test_runs_and_experiments_last_in_seconds_up_to_now_and_say_what_they_did_last(
    session: api.Session, fresh_master: Master
) -> None:
    fresh_master.change("UPDATE trials SET start_us = 1, end_us = 90500001 WHERE id = 1")
    fresh_master.change("UPDATE experiments SET start_us = 1, end_us = 91500001 WHERE id = 1")
    started = "CAST(strftime('%s', 'now') AS INTEGER) * 1000000 - 3600000000"
    fresh_master.change(f"UPDATE trials SET start_us = {started} WHERE id = 2")
    fresh_master.change(f"UPDATE experiments SET start_us = {started} WHERE id = 2")
    state = bindings.v1TrialRunnerMetadata(state="validating")
    bindings.post_PostTrialRunnerMetadata(session, body=state, trialId=1)

    runs = bindings.post_SearchRuns(session, body=bindings.v1SearchRunsRequest(sort="id=asc")).runs
    assert runs[0].duration == 90
    assert 3600 <= (runs[1].duration or 0) < 7200
    assert bindings.get_GetExperiment(session, experimentId=1).experiment.duration == 91
    assert 3600 <= (bindings.get_GetExperiment(session, experimentId=2).experiment.duration or 0) < 7200
    # What `det experiment create --test` compares with.
    assert bindings.get_GetTrial(session, trialId=1).trial.runnerState == "validating"
    assert bindings.get_GetTrial(session, trialId=2).trial.runnerState == "UNSPECIFIED"
