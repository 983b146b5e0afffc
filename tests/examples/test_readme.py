"""What the README shows is what a reader gets: its trial trains, goes on, and passes the check as it stands there."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dstrial.testing.master import MasterForTest

README = Path(__file__).resolve().parents[2] / "README.md"
TIMEOUT_S = 280


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory with the files of the README, and nothing else."""
    files = re.findall(
        r"^`([\w.]+)`.*?:\n\n```\w+\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL
    )
    assert [name for name, _ in files] == ["model_def.py", "exp.yaml"]
    project = tmp_path / "project"
    project.mkdir()
    for name, text in files:
        (project / name).write_text(text)
    return project


@pytest.fixture
def _master(shared_master: MasterForTest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DSTRIAL_STATE_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, shared_master.env[name])


def dstrial(*arguments: str, cwd: Path) -> str:
    command = [str(Path(sys.executable).with_name("dstrial")), *arguments]
    finished = subprocess.run(
        command,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert finished.returncode == 0, f"{command} exited {finished.returncode}:\n{finished.stdout}"
    return finished.stdout


def test_the_trial_of_the_readme_has_40_lines(project: Path) -> None:
    assert len((project / "model_def.py").read_text().splitlines()) <= 40


@pytest.mark.process
def test_the_experiment_of_the_readme_passes_the_check(project: Path) -> None:
    assert "exp.yaml: ok" in dstrial("check", "exp.yaml", ".", cwd=project)


@pytest.mark.ranks
@pytest.mark.usefixtures("_master")
def test_the_trial_of_the_readme_trains_and_goes_on_with_another_number_of_slots(
    project: Path,
) -> None:
    def trained(num_batches: int, *arguments: str) -> list[dict[str, Any]]:
        length = f'searcher.max_length={{"batches": {num_batches}}}'
        dstrial("run", "exp.yaml", ".", "--config", length, "--runs-dir", "runs", *arguments, cwd=project)
        (metrics,) = project.glob("runs/circle/*/metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        return [row for row in rows if row["group"] != "telemetry"]

    first = trained(4)
    both = trained(6, "--resume", "latest", "--slots", "1")

    assert both[: len(first)] == first
    assert [report["steps_completed"] for report in both] == [4, 4, 6, 6]
    assert all(math.isfinite(value) for report in both for value in report["metrics"].values())
    assert all(0 <= report["metrics"]["accuracy"] <= 1 for report in both if report["group"] == "validation")
