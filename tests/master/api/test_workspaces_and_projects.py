"""Workspaces and projects through the ``det`` command, the SDK and the API."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from det_here import DetHere
from serving import Master

pytestmark = pytest.mark.process

CONFIG = "name: mine\nentrypoint: 'true'\nsearcher: {name: single, metric: loss}\n"


def places(master: Master) -> dict[int, int]:
    return {row["id"]: row["project_id"] for row in master.rows("SELECT id, project_id FROM experiments")}


def create(det: DetHere, path: Path, *options: str, config: str = CONFIG) -> None:
    path.write_text(config)
    det.ok("e", "create", str(path), "--paused", *options)


def test_invalid_workspaces_and_projects_are_refused(det: DetHere, fresh_master: Master) -> None:
    det.ok("workspace", "create", "team")
    storage = ("--checkpoint-storage-config", '{"type": "shared_fs"}')
    det.ok("project", "create", "team", "one", "--key", "ab1")
    det.ok("project", "create", "team", "one more")
    for words, text in {
        ("workspace", "create", "TEAM"): "workspace 'TEAM' exists",
        ("workspace", "create", "third", *storage): "host_path is not given",
        ("workspace", "create", "third", "--namespace", "n", "--cluster-name", "c"): "Kubernetes",
        ("project", "create", "team", "ONE"): "project 'ONE' exists",
        ("project", "create", "team", "x", "--key", "aB1"): "key 'aB1' is in use",
        ("project", "create", "team", "x", "--key", "toolong"): "1 to 5 letters",
    }.items():
        assert text in det.refused(*words), words
    keys = [row["key"][:3] for row in fresh_master.rows("SELECT key FROM projects ORDER BY id")]
    assert keys == ["UNC", "AB1", "ONE"]


def test_experiment_project_comes_from_request_or_config(
    det: DetHere, fresh_master: Master, tmp_path: Path
) -> None:
    det.ok("workspace", "create", "team")
    det.ok("project", "create", "team", "one")
    det.ok("project", "create", "team", "two")
    named = CONFIG + "workspace: TEAM\nproject: one\n"

    create(det, tmp_path / "c.yaml", config=named)
    create(det, tmp_path / "c.yaml", "--project_id", "3", config=named)
    create(det, tmp_path / "c.yaml", "--project_id", "1", config=named)
    create(det, tmp_path / "c.yaml")
    assert places(fresh_master) == {1: 1, 2: 1, 3: 2, 4: 3, 5: 2, 6: 1}

    path = tmp_path / "wrong.yaml"
    path.write_text(CONFIG + "workspace: team\n")
    assert "project is not given" in det.refused("e", "create", str(path))
    path.write_text(CONFIG + "workspace: team\nproject: none\n")
    assert "project 'none' in workspace 'team' is not found" in det.refused("e", "create", str(path))
    assert "project 9 is not found" in det.refused(
        "e", "create", str(tmp_path / "c.yaml"), "--project_id", "9"
    )


def test_experiments_move_and_list_by_project(det: DetHere, fresh_master: Master) -> None:
    det.ok("workspace", "create", "team")
    det.ok("project", "create", "team", "one")
    assert 'Moved experiment 1 to project "one"' in det.ok("e", "move", "1", "team", "one")
    assert places(fresh_master) == {1: 2, 2: 1}
    listed = fresh_master.get("/api/v1/experiments?projectId=2").json["experiments"]
    assert [(one["id"], one["workspaceName"], one["parentArchived"]) for one in listed] == [
        (1, "team", False)
    ]
    assert "team" in det.ok("e", "list", "--show_project")
    assert "project 'none' not found" in det.refused("e", "move", "2", "team", "none")
    jobs = [one["full"] for one in fresh_master.get("/api/v1/job-queues-v2").json["jobs"]]
    (job,) = (one for one in jobs if one["entityId"] == "1")
    assert job["workspaceId"] == 2


def test_archived_workspace_refuses_changes_and_marks_experiments(
    det: DetHere, fresh_master: Master, tmp_path: Path
) -> None:
    det.ok("workspace", "create", "team")
    det.ok("project", "create", "team", "one")
    det.ok("e", "move", "1", "team", "one")
    det.ok("workspace", "archive", "team")

    shown = fresh_master.get("/api/v1/experiments/1").json["experiment"]
    assert (shown["parentArchived"], shown["archived"]) == (True, False)
    assert fresh_master.get("/api/v1/projects/2").json["project"]["archived"] is True
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG)
    assert "is archived and cannot take" in det.refused("e", "create", str(path), "--project_id", "2")
    assert "is archived and cannot take" in det.refused("e", "move", "2", "team", "one")
    assert "is archived and cannot be changed" in det.refused(
        "e", "move", "1", "Uncategorized", "Uncategorized"
    )
    assert "archived" in det.refused("project", "create", "team", "two")
    assert "archived" in det.refused("project", "archive", "team", "one")
    assert "archived" in det.refused("model", "create", "m", "-w", "team")

    det.ok("workspace", "unarchive", "team")
    fresh_master.change("UPDATE experiments SET state = 'COMPLETED', end_us = 2")
    det.ok("e", "archive", "1")
    assert "is archived and cannot be moved" in det.refused(
        "e", "move", "1", "Uncategorized", "Uncategorized"
    )
    det.ok("e", "unarchive", "1")
    det.ok("e", "move", "1", "Uncategorized", "Uncategorized")
    assert places(fresh_master) == {1: 1, 2: 1}


@pytest.mark.parametrize(("query", "number"), [("", 1), ("?pinned=false", 1), ("?pinned=true", 0)])
def test_list_workspaces_applies_pinned_filter(served: Master, query: str, number: int) -> None:
    assert served.get("/api/v1/workspaces" + query).json["pagination"]["total"] == number


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PATCH", "workspaces/1", {"name": "x"}),
        ("POST", "workspaces/1/archive", {}),
        ("DELETE", "workspaces/1", {}),
        ("POST", "workspaces/1/projects", {"name": "x", "workspaceId": 1}),
        ("PATCH", "projects/1", {"name": "x"}),
        ("POST", "projects/1/archive", {}),
        ("DELETE", "projects/1", {}),
    ],
)
def test_default_workspace_and_project_are_immutable(
    served: Master, method: str, path: str, body: object
) -> None:
    answer = served.send(method, f"/api/v1/{path}", body, token="admin")
    assert (answer.status, "is immutable" in answer.error) == (400, True)
    assert served.send(method, f"/api/v1/{path}", body, token="other").status == 400


def test_other_users_cannot_change_workspace_or_project(fresh_master: Master) -> None:
    def send(method: str, path: str, body: object, token: str) -> int:
        return fresh_master.send(method, f"/api/v1/{path}", body, token=token).status

    assert send("POST", "workspaces", {"name": "team"}, "determined") == 200
    assert send("POST", "workspaces/2/projects", {"name": "p"}, "determined") == 200
    for method, path in (
        ("PATCH", "workspaces/2"),
        ("POST", "workspaces/2/archive"),
        ("DELETE", "workspaces/2"),
        ("PATCH", "projects/2"),
        ("POST", "projects/2/archive"),
        ("DELETE", "projects/2"),
    ):
        assert send(method, path, {"name": "x"}, "other") == 403
    assert send("PATCH", "workspaces/2", {"name": "ours"}, "admin") == 200


def test_workspace_storage_is_default_for_its_experiments(
    det: DetHere, fresh_master: Master, tmp_path: Path
) -> None:
    storage = {"type": "directory", "container_path": str(tmp_path), "save_trial_best": 3}
    det.ok("workspace", "create", "team", "--checkpoint-storage-config", json.dumps(storage))
    det.ok("project", "create", "team", "one")
    create(det, tmp_path / "c.yaml", "--project_id", "2")
    own = CONFIG + "checkpoint_storage: {type: shared_fs, host_path: /own, save_trial_latest: 4}\n"
    create(det, tmp_path / "c.yaml", "--project_id", "2", config=own)
    det.ok("workspace", "edit", "team", "--checkpoint-storage-config", "{}")
    create(det, tmp_path / "c.yaml", "--project_id", "2")

    rows = fresh_master.rows("SELECT config FROM experiments WHERE id > 2 ORDER BY id")
    found = [json.loads(row["config"])["checkpoint_storage"] for row in rows]
    assert found[0] == {**storage, "save_experiment_best": 0, "save_trial_latest": 1}
    assert (found[1]["host_path"], found[1]["save_trial_best"], found[1]["save_trial_latest"]) == (
        "/own",
        3,
        4,
    )
    assert found[2]["host_path"] == str(fresh_master.services.state_dir / "checkpoints")


def test_delete_workspace_with_models_is_refused(det: DetHere) -> None:
    det.ok("workspace", "create", "team")
    det.ok("model", "create", "net", "-w", "team")
    assert "has the model 'net'" in det.refused("workspace", "delete", "team", "--yes")
    det.ok("model", "move", "net", "-w", "Uncategorized")
    det.ok("workspace", "delete", "team", "--yes")
