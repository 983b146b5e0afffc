"""Config templates, and experiments created with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from det_here import DetHere
from serving import Master

pytestmark = pytest.mark.process

CONFIG = {"name": "mine", "entrypoint": "true", "searcher": {"name": "single", "metric": "loss"}}


def write(path: Path, config: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(config))
    return str(path)


def last_experiment(master: Master) -> dict[str, Any]:
    (row,) = master.rows("SELECT * FROM experiments ORDER BY id DESC LIMIT 1")
    return {**row, "config": json.loads(row["config"])}


def test_template_fills_missing_experiment_fields(det: DetHere, fresh_master: Master, tmp_path: Path) -> None:
    template = {
        "max_restarts": 2,
        "labels": ["t"],
        "searcher": {"smaller_is_better": False, "metric": "other"},
        "environment": {"environment_variables": ["A=1"]},
    }
    given = {**CONFIG, "labels": ["mine"], "environment": {"environment_variables": ["B=2"]}}
    det.ok("template", "create", "base", write(tmp_path / "t.yaml", template))
    path = write(tmp_path / "c.yaml", given)

    det.ok("e", "create", path, "--template", "base", "--paused")

    made = last_experiment(fresh_master)
    config = made["config"]
    assert (config["max_restarts"], config["labels"]) == (2, ["mine", "t"])
    assert (config["searcher"]["metric"], config["searcher"]["smaller_is_better"]) == ("loss", False)
    assert config["environment"]["environment_variables"]["cpu"] == ["A=1", "B=2"]
    assert made["original_config"] == Path(path).read_text()
    assert "template 'none' is not found" in det.refused("e", "create", path, "--template", "none")


def test_template_completes_incomplete_config(det: DetHere, fresh_master: Master, tmp_path: Path) -> None:
    det.ok("template", "create", "all", write(tmp_path / "t.yaml", CONFIG))
    det.ok("e", "create", write(tmp_path / "c.yaml", {"name": "short"}), "--template", "all", "--paused")

    assert last_experiment(fresh_master)["config"]["searcher"]["metric"] == "loss"
    assert last_experiment(fresh_master)["name"] == "short"


def test_template_errors_are_reported_at_experiment_creation(det: DetHere, tmp_path: Path) -> None:
    det.ok("template", "create", "wrong", write(tmp_path / "t.yaml", {"max_restarts": "many", "nmae": "x"}))
    text = det.refused("e", "create", write(tmp_path / "c.yaml", CONFIG), "--template", "wrong")

    assert "max_restarts" in text
    assert "Write name instead" in text


def test_fork_and_continue_keep_deleted_template(det: DetHere, fresh_master: Master, tmp_path: Path) -> None:
    det.ok("template", "create", "base", write(tmp_path / "t.yaml", {"max_restarts": 2}))
    det.ok("e", "create", write(tmp_path / "c.yaml", CONFIG), "--template", "base", "--paused")
    det.ok("template", "remove", "base")
    experiment_id = last_experiment(fresh_master)["id"]

    body = {"parentId": experiment_id, "activate": False}
    assert fresh_master.send("POST", "/api/v1/experiments", body, token="determined").status == 200
    fork = last_experiment(fresh_master)
    assert (fork["parent_id"], fork["config"]["max_restarts"]) == (experiment_id, 2)

    det.ok("e", "kill", str(experiment_id))
    det.ok("e", "continue", str(experiment_id), "--config", "description=again")
    (row,) = fresh_master.rows("SELECT config FROM experiments WHERE id = ?", experiment_id)
    config = json.loads(row["config"])
    assert (config["max_restarts"], config["description"]) == (2, "again")


def test_invalid_templates_are_rejected(fresh_master: Master) -> None:
    def send(method: str, path: str, body: object) -> int:
        return fresh_master.send(method, f"/api/v1/{path}", body, token="determined").status

    one = {"name": "a b", "config": {"labels": ["x"]}, "workspaceId": 0}
    assert send("POST", "templates/a%20b", one) == 200
    assert send("POST", "templates/a%20b", one) == 409
    assert send("PATCH", "templates/a%20b", ["no mapping"]) == 400
    assert send("POST", "templates/d", {"name": "d", "config": {}, "workspaceId": 99}) == 404
    answer = fresh_master.get("/api/v1/templates?name=A").json
    assert [(one["name"], one["config"]) for one in answer["templates"]] == [("a b", {"labels": ["x"]})]
