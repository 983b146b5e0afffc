"""``dstrial.runs``: metrics, best checkpoint and plot of runs and trials."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dstrial
from dstrial.cli.app import main
from dstrial.cli.checkpoint import find_checkpoint
from dstrial.errors import DstrialError
from dstrial.testing.master import MasterForTest


@pytest.mark.ranks
def test_runs_of_directory_and_master_have_equal_metrics(
    tmp_path: Path, shared_master: MasterForTest
) -> None:
    assert main(["init", str(tmp_path / "circle")]) == 0
    config = tmp_path / "circle" / "exp.yaml"
    config.write_text(config.read_text().replace("{epochs: 5}", "{epochs: 2}"))
    trained = shared_master.dstrial(
        "run", str(config), str(config.parent), "--runs-dir", str(tmp_path / "runs"), deadline_s=200
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr
    experiment = json.loads(shared_master.dstrial("list", "--json").stdout)[0]["id"]

    (local,) = dstrial.runs("circle", runs_dir=tmp_path / "runs")
    (stored,) = dstrial.runs(experiment=experiment, state_dir=shared_master.state.path)

    assert local.state == stored.state == "completed"
    assert local.hyperparameters["width"] == 32
    validations = local.metrics("validation")
    assert list(validations["steps_completed"]) == [64, 128]
    assert list(stored.metrics("validation")["accuracy"]) == list(validations["accuracy"])
    best, known = local.best(), stored.best()
    assert best is not None
    assert known is not None
    assert best.path is not None
    assert best.path.is_dir()
    assert (best.uuid, best.batches, best.value) == (known.uuid, known.batches, known.value)
    assert best.value == validations["accuracy"].max()
    assert find_checkpoint("best", runs_dir=str(tmp_path / "runs")).path == best.path


def test_plot_has_line_per_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    directory = tmp_path / "mine" / "one"
    directory.mkdir(parents=True)
    record = {
        "name": "mine",
        "context_dir": "/",
        "command": [],
        "started": "2026-01-01T00:00:00+00:00",
        "ended": None,
    }
    (directory / "run.json").write_text(
        json.dumps({**record, "state": "running", "num_attempts": 1, "failure": None, "allocation_id": None})
    )
    (directory / "experiment.yaml").write_text("name: mine\nsearcher: {name: single, metric: accuracy}\n")
    rows = [
        {"group": "training", "steps_completed": batch, "time": "t", "metrics": {"loss": 1.0 / batch}}
        for batch in (1, 2)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "metrics.jsonl").write_text(text + '{"group": "tra')  # a partially written report

    (run,) = dstrial.runs(runs_dir=tmp_path)

    assert [line.get_label() for line in run.plot().lines] == ["loss (training)"]
    assert list(run.metrics()["loss"]) == [1.0, 0.5]
    assert run.best() is None


def test_runs_without_master_names_up_command(tmp_path: Path) -> None:
    with pytest.raises(DstrialError, match="dstrial up"):
        dstrial.runs(experiment=1, state_dir=tmp_path)
