"""API of checkpoints and experiments: permissions, metrics and downloads."""

from __future__ import annotations

import base64
import http.client
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from determined.common import api
from determined.experimental.client import Checkpoint
from serving import Master

pytestmark = pytest.mark.process

_LARGE_BYTES = 2**24  # larger than all buffers between server and client
NEW_UUID = "b3b4a7b8-0000-4000-8000-000000000001"


def test_trial_reads_start_checkpoint_but_deletes_only_own(fresh_master: Master) -> None:
    own, warm = fresh_master.checkpoints[1], fresh_master.checkpoints[2]
    fresh_master.change("UPDATE allocations SET checkpoint_uuid = ? WHERE trial_id = 1", warm)

    def delete(uuid: str) -> int:
        body = {"checkpoints": [{"uuid": uuid, "resources": {"resources": {}}}]}
        return fresh_master.send("PATCH", "/api/v1/checkpoints", body, token="trial-1").status

    assert fresh_master.get(f"/api/v1/checkpoints/{warm}", "trial-1").status == 200
    assert (delete(warm), delete(own)) == (403, 200)
    states = fresh_master.rows("SELECT trial_id, state FROM checkpoints ORDER BY trial_id")
    assert [row["state"] for row in states] == ["DELETED", "COMPLETED"]


@pytest.mark.parametrize(
    ("allocation_id", "status"), [("1.request.1", 200), (None, 200), ("2.request.1", 403)]
)
def test_trial_reports_only_for_own_allocation(
    fresh_master: Master, allocation_id: str | None, status: int
) -> None:
    made = {"uuid": NEW_UUID, "taskId": "1.request", "allocationId": allocation_id, "metadata": {}}

    assert fresh_master.send("POST", "/api/v1/checkpoints", made, token="trial-1").status == status


@pytest.mark.parametrize(
    ("told", "status"),
    [
        ("0001-01-01T00:00:00Z", 200),
        ("9999-12-31T23:59:59.999999Z", 200),
        ("9999-12-31T23:59:59-23:00", 400),
        ("0001-01-01T00:00:00+23:00", 400),
    ],
)
def test_time_of_report_is_within_calendar(fresh_master: Master, told: str, status: int) -> None:
    body = {"uuid": NEW_UUID, "taskId": "1.request", "metadata": {}, "reportTime": told}
    assert fresh_master.send("POST", "/api/v1/checkpoints", body, token="trial-1").status == status


@pytest.mark.parametrize(
    "name",
    [
        "<cluster id>",
        "..",
        "logs",
        ".dstrial-storage",
        NEW_UUID.upper(),
        NEW_UUID.replace("-", ""),
        f"{NEW_UUID}\n",
    ],
)
def test_report_checkpoint_invalid_uuid_is_rejected(fresh_master: Master, name: str) -> None:
    uuid = fresh_master.services.cluster_id if name == "<cluster id>" else name
    body = {"uuid": uuid, "taskId": "1.request", "metadata": {}}

    answer = fresh_master.send("POST", "/api/v1/checkpoints", body, token="trial-1")

    assert answer.status == 400
    assert "expected a new UUID in lower case with hyphens" in answer.error
    assert fresh_master.rows("SELECT uuid FROM checkpoints WHERE uuid = ?", uuid) == []


def test_checkpoint_metrics_come_from_dependent_trials(fresh_master: Master, session: api.Session) -> None:
    uuid = fresh_master.checkpoints[1]
    for group, steps in (("training", 1), ("validation", 2)):
        report = {"trialRunId": 1, "stepsCompleted": steps, "metrics": {"avgMetrics": {"loss": steps}}}
        body = {"group": group, "metrics": report}
        assert fresh_master.send("POST", "/api/v1/trials/2/metrics", body, token="trial-2-user").status == 200
    used = Checkpoint(session, uuid)
    assert list(used.get_metrics()) == []

    source = {"trialId": 2, "checkpointUuid": uuid, "trialSourceInfoType": "TRIAL_SOURCE_INFO_TYPE_INFERENCE"}
    for _ in range(2):
        answer = fresh_master.send(
            "POST", "/api/v1/trial-source-info", {"trialSourceInfo": source}, token="trial-2"
        )
        assert answer.json == {"trialId": 2, "checkpointUuid": uuid}

    assert [(one.trial_id, one.metrics) for one in used.get_metrics("validation")] == [(2, {"loss": 2})]
    assert [one.metrics for one in used.get_metrics("training")] == [{"loss": 1}]
    assert [(one.group, one.metrics) for one in used.get_metrics()] == [
        ("training", {"loss": 1}), ("validation", {"loss": 2}),
    ]  # fmt: skip
    nothing = {"trialSourceInfo": {**source, "checkpointUuid": "none"}}
    assert fresh_master.send("POST", "/api/v1/trial-source-info", nothing, token="trial-2").status == 404


def test_preview_gc_lists_checkpoints_to_delete(served: Master) -> None:
    def preview(query: str) -> list[str]:
        answer = served.get(f"/experiments/1/preview_gc?{query}").json
        assert answer["metric_name"] == "loss"
        return [one["UUID"] for one in answer["checkpoints"]]

    best = "save_experiment_best=3&save_trial_best=3"
    assert preview(f"{best}&save_trial_latest=1") == []
    assert preview(f"{best}&save_trial_latest=0") == [served.checkpoints[1]]


def test_only_owner_or_admin_deletes_experiment(fresh_master: Master) -> None:
    fresh_master.change("UPDATE experiments SET state = 'COMPLETED'")
    refused = fresh_master.send("DELETE", "/api/v1/experiments/1", token="other")
    assert refused.status == 403
    assert "experiment 1 is another user's" in refused.error
    assert fresh_master.send("DELETE", "/api/v1/experiments/1", token="determined").status == 200
    assert fresh_master.send("DELETE", "/api/v1/experiments/2", token="admin").status == 200
    states = {row["state"] for row in fresh_master.rows("SELECT state FROM experiments")}
    assert states == {"DELETING"}


def test_unknown_project_is_404(served: Master) -> None:
    body = {"config": "entrypoint: 'true'", "projectId": 7, "validateOnly": True}
    answers = [
        served.send("POST", "/api/v1/experiments", body, token="determined"),
        served.get("/api/v1/experiments?projectId=7"),
    ]
    assert [answer.status for answer in answers] == [404, 404]
    assert all("project 7 is not found; expected one of" in answer.error for answer in answers)
    assert len(served.get("/api/v1/experiments?projectId=1").json["experiments"]) == 2


@pytest.mark.parametrize("path", ["a" * 300, "a/" * 3000 + "a"])
def test_model_definition_path_too_long_is_rejected(served: Master, path: str) -> None:
    file = {"path": path, "type": 48, "content": base64.b64encode(b"x").decode(), "mtime": "0", "mode": 420}
    body = {"config": "entrypoint: 'true'", "modelDefinition": [file], "validateOnly": True}

    answer = served.send("POST", "/api/v1/experiments", body, token="determined")

    assert answer.status == 400
    assert "path that is too long" in answer.error


def _large_checkpoint(master: Master, tmp_path: Path) -> Path:
    """Write a large file to trial 1's checkpoint and return its path."""
    master.change(
        "UPDATE experiments SET config = json_set(config, '$.checkpoint_storage.host_path', ?)", str(tmp_path)
    )
    directory = tmp_path / master.checkpoints[1]
    directory.mkdir()
    (directory / "large").write_bytes(os.urandom(_LARGE_BYTES))  # gzip cannot compress it
    return directory / "large"


def _download(master: Master) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", master.port, timeout=10)
    headers = {"Host": "localhost", "Authorization": f"Bearer {master.tokens['determined']}"}
    connection.request("GET", f"/checkpoints/{master.checkpoints[1]}", headers=headers)
    return connection, connection.getresponse()


def test_download_of_unusual_names_and_times_is_complete(fresh_master: Master, tmp_path: Path) -> None:
    directory = _large_checkpoint(fresh_master, tmp_path).parent
    (directory / "large").unlink()
    for name, time_s in ((b"caf\xe9", 0), ("café".encode(), 2**33), (b"now", 1_700_000_000)):
        path = Path(os.fsdecode(os.fsencode(directory) + b"/" + name))
        path.write_bytes(name)
        os.utime(path, (time_s, time_s))
    (directory / "d").mkdir()
    (directory / "d" / "deep").write_bytes(b"deep")
    (directory / "link").symlink_to("/etc/passwd")

    connection, answer = _download(fresh_master)
    content = io.BytesIO(answer.read())
    connection.close()

    with tarfile.open(fileobj=content) as tar:
        found = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr] # files only
    assert found == {
        "caf\udce9": b"caf\xe9",
        "café": "café".encode(),
        "now": b"now",
        "d/deep": b"deep",
    }


@pytest.mark.parametrize("change", ["pipe", "shorter"])
def test_download_of_changed_file_is_aborted(fresh_master: Master, tmp_path: Path, change: str) -> None:
    large = _large_checkpoint(fresh_master, tmp_path)
    small = large.with_name("small")
    small.touch()
    downloads = [_download(fresh_master) for _ in range(8)]
    for _, answer in downloads:
        answer.read(1024)  # the server has listed the files now
    if change == "pipe":
        small.unlink()
        os.mkfifo(small)
    else:
        os.truncate(large, 1024)

    for connection, answer in downloads:
        with pytest.raises(http.client.IncompleteRead):
            answer.read()
        connection.close()


def test_archived_project_or_workspace_archives_experiments(fresh_master: Master) -> None:
    """End-to-end tests of Determined 0.38.1 expect this of ``archived=false``."""

    def post(path: str, body: object = None) -> Any:
        answer = fresh_master.send("POST", f"/api/v1/{path}", body, token="determined")
        assert answer.status == 200, answer.content
        return answer.json

    def listed(query: str) -> set[int]:
        answer = fresh_master.get(f"/api/v1/experiments?{query}").json
        assert answer["pagination"]["total"] == len(answer["experiments"])
        return {one["id"] for one in answer["experiments"]}

    workspace = post("workspaces", {"name": "w"})["workspace"]["id"]
    project = post(f"workspaces/{workspace}/projects", {"name": "p"})["project"]["id"]
    fresh_master.change("UPDATE experiments SET project_id = ? WHERE id = 2", project)
    assert listed("archived=false") == {1, 2}

    for kind, number in (("projects", project), ("workspaces", workspace)):
        post(f"{kind}/{number}/archive")
        assert listed("archived=false") == {1}
        assert listed("archived=true") == {2}
        assert listed("") == {1, 2}
        assert listed(f"archived=false&projectId={project}") == {2}
        post(f"{kind}/{number}/unarchive")
    assert listed("archived=false") == {1, 2}
