"""Loggers in `dstrial check` and `dstrial run`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import stores
import yaml
from small_runs import DEFINITIONS, deepspeed_config, experiment

from dstrial.cli.app import main as dstrial
from dstrial.local.run_directory import RunDirectory
from dstrial.testing.master import MasterForTest


def written(tmp_path: Path, loggers: Any, **fields: Any) -> Path:
    config = experiment({"deepspeed_config": deepspeed_config()}, batches=8, report=2, checkpoint=4, **fields)
    config["data"] = {"dstrial": {"loggers": loggers}}
    path = tmp_path / "exp.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_check_reports_missing_logger_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Hide installed logger packages; the check must not import them.
    monkeypatch.setattr(sys, "path", [place for place in sys.path if not Path(place, "wandb").is_dir()])
    imported = {"wandb", "mlflow"} & sys.modules.keys()
    path = written(tmp_path, ["wandb", {"mlflow": {"uri": "x"}}])
    assert dstrial(["check", str(path), str(DEFINITIONS)]) == 1
    problems = capsys.readouterr().err
    assert "exp.yaml:" in problems
    assert "data.dstrial.loggers is wandb, which is not installed" in problems
    assert "Run: pip install 'DSTRIAL_CHECKOUT_OR_WHEEL[wandb]'" in problems
    assert "data.dstrial.loggers[1].mlflow.uri is not a key of data.dstrial.loggers[1].mlflow" in problems
    assert {"wandb", "mlflow"} & sys.modules.keys() == imported


@pytest.mark.loggers
@pytest.mark.ranks
@pytest.mark.process
@pytest.mark.timeout(600)
def test_run_uses_all_loggers_and_continues_on_resume(
    shared_master: MasterForTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"sqlite:///{tmp_path / 'own.db'}"
    path = written(tmp_path, ["wandb", {"mlflow": {"tracking_uri": uri}}], resources={"slots_per_trial": 1})
    runs = tmp_path / "runs"
    words = ["run", str(path), str(DEFINITIONS), "--runs-dir", str(runs)]
    first = shared_master.dstrial(*words, deadline_s=300)
    assert first.returncode == 0, first.stdout + first.stderr
    longer = ["--config", "searcher.max_length={batches: 12}", "--resume", "latest"]
    again = shared_master.dstrial(*words, *longer, deadline_s=300)
    assert again.returncode == 0, again.stdout + again.stderr
    (directory,) = runs.glob("small/*")
    lines = RunDirectory.open(directory).metrics_path.read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["group"] == "training"]
    expected = {(row["steps_completed"], row["metrics"]["loss"]) for row in rows}
    assert {steps for steps, _ in expected} == {2, 4, 6, 8, 10, 12}

    (of_mlflow,) = stores.read("mlflow", uri)
    losses = {
        (step, metrics["training/loss"]) for step, metrics in of_mlflow["rows"] if "training/loss" in metrics
    }
    assert losses == expected
    attempts = stores.read("wandb", directory / "wandb")
    assert len({attempt["id"] for attempt in attempts}) == 1
    assert len(attempts) == 2
    kept = [row for attempt in attempts for row in attempt["rows"]]
    assert {(step, row["training/loss"]) for step, row in kept if "training/loss" in row} == expected
    assert "logger wandb: there is no WANDB_API_KEY" in first.stdout + first.stderr
