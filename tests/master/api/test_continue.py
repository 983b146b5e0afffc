"""``det experiment continue`` and the config of the continued experiment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from det_here import DetHere
from serving import Master

pytestmark = pytest.mark.process

SEARCHERS = {
    "single": {"name": "single", "metric": "loss"},
    "random": {"name": "random", "metric": "loss", "max_trials": 2},
    "grid": {"name": "grid", "metric": "loss"},
}
SUBMITTED = """\
# mine
name: first
entrypoint: "true"
labels: [submitted]
hyperparameters: {lr: {type: categorical, vals: [0.1, 0.2]}}
environment: {environment_variables: [COLOUR=red]}
log_policies: [{name: CUDA OOM, pattern: null}]
checkpoint_storage: {save_trial_latest: 1}
max_restarts: 3
"""


def killed_experiment(det: DetHere, master: Master, directory: Path, searcher: str) -> tuple[int, str]:
    """Create, edit and kill an experiment; return its ID and submitted config."""
    text = SUBMITTED + yaml.safe_dump({"searcher": SEARCHERS[searcher]})
    path = directory / "submitted.yaml"
    path.write_text(text)
    det.ok("e", "create", str(path), "--paused")
    (row,) = master.rows("SELECT max(id) AS id FROM experiments")
    number = str(row["id"])
    det.ok("e", "label", "add", number, "later")
    det.ok("e", "set", "name", number, "second")
    det.ok("e", "set", "priority", number, "7")
    det.ok("e", "set", "gc-policy", number, "--yes", *_policy(5, 6, 7))
    det.ok("e", "kill", number)
    return int(number), text


def _policy(experiment_best: int, trial_best: int, trial_latest: int) -> list[str]:
    names = ("--save-experiment-best", "--save-trial-best", "--save-trial-latest")
    values = (experiment_best, trial_best, trial_latest)
    return [str(word) for pair in zip(names, values, strict=True) for word in pair]


def stored(master: Master, experiment_id: int) -> dict[str, Any]:
    (row,) = master.rows("SELECT * FROM experiments WHERE id = ?", experiment_id)
    return {**row, "config": json.loads(row["config"]), "labels": json.loads(row["labels"])}


@pytest.mark.parametrize("searcher", SEARCHERS)
def test_continue_uses_current_config(
    det: DetHere, fresh_master: Master, tmp_path: Path, searcher: str
) -> None:
    experiment_id, submitted = killed_experiment(det, fresh_master, tmp_path, searcher)
    before = stored(fresh_master, experiment_id)

    det.ok("e", "continue", str(experiment_id))

    after = stored(fresh_master, experiment_id)
    assert after["state"] == "ACTIVE"
    assert after["config"] == before["config"]
    assert after["original_config"] == submitted
    assert (after["name"], after["labels"], after["priority"]) == ("second", ["later", "submitted"], 7)
    storage = after["config"]["checkpoint_storage"]
    assert [storage[f"save_{kind}"] for kind in ("experiment_best", "trial_best", "trial_latest")] == [
        5,
        6,
        7,
    ]


def test_continue_merges_override_into_current_config(
    det: DetHere, fresh_master: Master, tmp_path: Path
) -> None:
    experiment_id, submitted = killed_experiment(det, fresh_master, tmp_path, "single")
    before = stored(fresh_master, experiment_id)["config"]
    changes = {
        "max_restarts": 1,
        "labels": ["third"],
        "environment": {"environment_variables": ["SHAPE=round"]},
        "description": "again",
    }
    (tmp_path / "changes.yaml").write_text(yaml.safe_dump(changes))

    det.ok("e", "continue", str(experiment_id), "--config-file", str(tmp_path / "changes.yaml"))

    after = stored(fresh_master, experiment_id)
    config = after["config"]
    assert config["max_restarts"] == 1
    assert config["labels"] == after["labels"] == ["later", "submitted", "third"]
    assert config["description"] == after["description"] == "again"
    assert config["environment"]["environment_variables"]["cpu"] == ["COLOUR=red", "SHAPE=round"]
    for name in ("name", "checkpoint_storage", "log_policies", "reproducibility", "resources"):
        assert config[name] == before[name], name
    assert after["original_config"] == submitted
    shown = fresh_master.get(f"/api/v1/experiments/{experiment_id}").json["experiment"]
    assert shown["originalConfig"] == submitted


@pytest.mark.parametrize(
    ("searcher", "changes", "error"),
    [
        ("random", ["max_restarts=9"], "has the searcher random; expected single to continue with another"),
        ("single", ["workspace=w", "project=p"], "det experiment move"),
    ],
)
def test_continue_rejects_override_it_cannot_apply(
    det: DetHere, fresh_master: Master, tmp_path: Path, searcher: str, changes: list[str], error: str
) -> None:
    experiment_id, _ = killed_experiment(det, fresh_master, tmp_path, searcher)
    options = [word for change in changes for word in ("--config", change)]

    assert error in det.refused("e", "continue", str(experiment_id), *options)

    assert stored(fresh_master, experiment_id)["state"] == "CANCELED"
