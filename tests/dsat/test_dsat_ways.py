"""Searches over two example scripts: a Core API script and a Trainer script."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from searching import ROOT, command, require_measured, run

from dstrial.testing.master import MasterForTest


@pytest.mark.parametrize("name", ["dsat_core_api", "dsat_hf"])
def test_example_readme_shows_diff_to_plain_script(name: str) -> None:
    folder = ROOT / "model_defs" / name
    plain, train = ((folder / file).read_text().splitlines() for file in ("plain.py", "train.py"))

    difference = list(difflib.unified_diff(plain, train, "plain.py", "train.py", lineterm="", n=1))

    assert "```diff\n" + "\n".join(difference) + "\n```" in (folder / "README.md").read_text()


@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_local_core_api_script_is_tuned_and_trained(tmp_path: Path) -> None:
    output = tmp_path / "out"

    flags = ("--local", "--run-full-experiment", "-z", "1")
    ended = _search("dsat_core_api", output, "2", {}, *flags, method="predict")

    assert "described by:  fake tensors (1 of 1 kinds of graphs; a script's first batch)" in ended
    _require_report(output)
    (record,) = (output / "runs").glob("*/*/run.json")
    assert json.loads(record.read_text())["state"] == "completed", ended
    reports = [json.loads(line) for line in (record.parent / "metrics.jsonl").read_text().splitlines()]
    assert [(report["group"], report["steps_completed"]) for report in reports] == [("validation", 84)]
    assert f"full run:      {output / 'runs'}" in ended


@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_trainer_script_with_auto_batch_is_tuned(tmp_path: Path, shared_master: MasterForTest) -> None:
    output = tmp_path / "out"

    ended = _search("dsat_hf", output, "1", shared_master.env, "--run-full-experiment")

    _require_report(output, 1)
    best = json.loads((output / "best_ds_config.json").read_text())
    assert best["train_batch_size"] == 32  # as the arguments in the entrypoint say
    assert "autotuning" not in best
    number = int((output / "full_experiment_id.txt").read_text())
    assert f"Created experiment {number}" in ended
    waited = shared_master.det("experiment", "wait", "--polling-interval", "1", str(number))
    assert waited.returncode == 0, waited.stdout + waited.stderr
    client = shared_master.client()
    (trial,) = client.get(f"/api/v1/experiments/{number}/trials")["trials"]
    assert trial["totalBatchesProcessed"] == 40
    assert 0 < trial["bestValidation"]["metrics"]["avgMetrics"]["eval_loss"] < 5.5
    assert len(client.get(f"/api/v1/trials/{trial['id']}/checkpoints")["checkpoints"]) >= 4
    # While steps are timed no checkpoint is saved, although --save_steps asks for it.
    (measured,) = json.loads((output / "trials.json").read_text())
    (trial,) = client.get(f"/api/v1/experiments/{measured['handle']['experiment_id']}/trials")["trials"]
    assert measured["metrics"]["num_steps"] >= 4
    assert not client.get(f"/api/v1/trials/{trial['id']}/checkpoints")["checkpoints"]
    notes = client.get(f"/api/v1/experiments/{measured['handle']['experiment_id']}")["experiment"]["notes"]
    assert "report.json" in notes


def _search(
    name: str, output: Path, max_trials: str, env: Mapping[str, str], *flags: str, method: str = "asha"
) -> str:
    config = yaml.safe_load((ROOT / "experiment_configs" / f"{name}.yaml").read_text())
    config["name"] = f"{name} measured"
    config["entrypoint"] = config["entrypoint"].replace(
        "--save_strategy no", "--save_strategy steps --save_steps 4"
    )
    path = output.parent / "experiment.yaml"
    path.write_text(yaml.safe_dump(config))
    flags = ("--metric", "throughput", "--max-trials", max_trials, "--measure-seconds", "0.1", *flags)
    ended = run(command(method, output, *flags, config=path, model_dir=ROOT / "model_defs" / name), env)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def _require_report(output: Path, num_trials: int | None = None) -> None:
    require_measured(output, num_trials)
    report = json.loads((output / "report.json").read_text())
    assert {row["state"] for row in report["trials"]} == {"measured"}
    assert report["own"] == 1
    assert "## All trials" in (output / "report.md").read_text()
