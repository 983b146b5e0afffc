"""The guide's other two ways, as the examples have them: a Core API script and a script of the Trainer."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dstrial.testing.master import MasterForTest

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 560


@pytest.mark.parametrize("name", ["dsat_core_api", "dsat_hf"])
def test_an_examples_readme_shows_its_whole_difference_to_a_plain_script(name: str) -> None:
    folder = ROOT / "model_defs" / name
    plain, train = ((folder / file).read_text().splitlines() for file in ("plain.py", "train.py"))

    difference = list(difflib.unified_diff(plain, train, "plain.py", "train.py", lineterm="", n=1))

    assert "```diff\n" + "\n".join(difference) + "\n```" in (folder / "README.md").read_text()


@pytest.mark.ranks
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["dsat_core_api", "dsat_hf"])
def test_an_example_script_is_measured_and_reported(
    name: str, tmp_path: Path, shared_master: MasterForTest
) -> None:
    config = yaml.safe_load((ROOT / "experiment_configs" / f"{name}.yaml").read_text())
    config["name"] = f"{name} measured"
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(config))
    output = tmp_path / "out"
    command = [
        *(sys.executable, "-m", "dstrial.dsat", "asha", str(path), str(ROOT / "model_defs" / name)),
        *("--output", str(output), "--metric", "throughput", "--max-trials", "1", "--measure-seconds", "0.1"),
        *(["--local"] if name == "dsat_hf" else []),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **shared_master.env}

    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads((output / "report.json").read_text())
    (row,) = report["trials"]
    assert row["state"] == "measured"
    assert row["throughput"] > 0
    assert report["best"] == report["own"] == 1
    assert report["best_config"]["train_batch_size"] == row["train_batch_size"]
    assert "Your own configuration is the best" in (output / "report.html").read_text()
