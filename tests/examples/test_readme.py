"""The example in the README passes ``dstrial check``, trains and resumes."""

from __future__ import annotations

import json
import math
import re
import shutil
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
    """Return a directory that contains only the files shown in the README."""
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


def test_readme_trial_has_at_most_40_lines(project: Path) -> None:
    assert len((project / "model_def.py").read_text().splitlines()) <= 40


@pytest.mark.process
def test_readme_experiment_passes_check(project: Path) -> None:
    assert "exp.yaml: ok" in dstrial("check", "exp.yaml", ".", cwd=project)


@pytest.mark.ranks
@pytest.mark.usefixtures("_master")
def test_readme_trial_resumes_with_different_slots(
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


@pytest.mark.ranks
@pytest.mark.usefixtures("_master")
def test_checkpoints_hold_only_packed_code_files(project: Path) -> None:
    model = project / "model_def.py"
    model.write_text(model.read_text() + '\nopen("written_by_the_trial.txt", "w").close()\n')
    settings = {
        "min_checkpoint_period": {"batches": 2},
        "checkpoint_storage": {"type": "shared_fs", "host_path": "/", "save_trial_latest": 9},
    }
    given = [word for key, value in settings.items() for word in ("--config", f"{key}={json.dumps(value)}")]

    def trained(num_batches: int, *arguments: str) -> str:
        length = f'searcher.max_length={{"batches": {num_batches}}}'
        return dstrial(
            "run", "exp.yaml", ".", "--slots", "1", "--config", length, *given, *arguments, cwd=project
        )

    trained(4)
    said = trained(6, "--resume", "latest")
    checkpoints = sorted(project.glob("runs/circle/*/checkpoints/*/COMPLETE"))
    codes = [path.parent / "code" for path in checkpoints]
    assert len(codes) == 3
    for code in codes:
        assert {path.name for path in code.iterdir()} == {"exp.yaml", "model_def.py"}

    assert re.search(
        r"^context: +2 files, 2.\d+ KiB, most of it model_def.py .*; without runs/", said, re.MULTILINE
    )

    shutil.rmtree(codes[0].parent)
    dstrial("checkpoint", "verify", str(codes[1].parent), cwd=project)
    trained(2)
    (latest,) = set(project.glob("runs/circle/*/checkpoints/*/code")) - set(codes)
    assert {path.name for path in latest.iterdir()} == {"exp.yaml", "model_def.py"}
