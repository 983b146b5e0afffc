"""No foreign checkpoint runs code: a real one with a real payload, whose manifest matches, in every tool and in resuming."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import foreign
import pytest

from dstrial.local.run_directory import RunDirectory
from dstrial.testing.master import MasterForTest

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

DEADLINE_S = 240


@pytest.fixture(scope="module")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of this account with two checkpoints."""
    return foreign.make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def home(tmp_path: Path) -> Mapping[str, str]:
    """Variables of another account, which has signed nothing."""
    return {"XDG_DATA_HOME": str(tmp_path / "data")}


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """What the payload makes."""
    return tmp_path / "code-was-run"


@pytest.fixture
def poisoned(run_path: Path, tmp_path: Path, marker: Path) -> Callable[[str], Path]:
    """Return a foreign copy of the newest checkpoint with the payload in one file."""

    def make(name: str) -> Path:
        path = foreign.foreign_copy(foreign.latest(run_path), tmp_path / "foreign-checkpoint")
        foreign.poison(path, name, foreign.Payload(marker))
        return path

    return make


def dstrial(*words: object, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dstrial.cli", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )


def refused(output: str, name: str) -> bool:
    """Whether a message names the file, the class, and how to go on."""
    return name in output and "posix.mkdir" in output and "--trust-code" in output


TOOLS = {
    "inspect": ((), foreign.ENGINE_FILE),
    "inspect optimizer": ((), foreign.OPTIMIZER_FILE),
    "diff": ((), foreign.ENGINE_FILE),
    "export": (("--no-verify",), foreign.ENGINE_FILE),
    "reshape": (("--slots", "1"), foreign.ENGINE_FILE),
    "reshape rank state": (("--slots", "1"), foreign.RANK_FILE),
    "verify": ((), foreign.ENGINE_FILE),
}


def words_of(tool: str, checkpoint: Path, run_path: Path, tmp_path: Path) -> list[object]:
    options, _ = TOOLS[tool]
    action = tool.split()[0]
    more: dict[str, list[object]] = {
        "diff": [foreign.earliest(run_path)],
        "export": [tmp_path / "model.safetensors"],
        "reshape": [tmp_path / "reshaped", "--context", foreign.DEFINITIONS],
    }
    return ["checkpoint", action, checkpoint, *more.get(action, []), *options]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_runs_no_code_of_a_checkpoint(
    tool: str,
    poisoned: Callable[[str], Path],
    run_path: Path,
    marker: Path,
    tmp_path: Path,
    home: Mapping[str, str],
) -> None:
    name = TOOLS[tool][1]
    checkpoint = poisoned(name)

    ended = dstrial(*words_of(tool, checkpoint, run_path, tmp_path), env=home)

    output = ended.stdout + ended.stderr
    assert not marker.exists(), output
    if tool == "verify":
        assert ended.returncode == 0, output  # it reads no pickle; its files are as its manifest says
    elif tool.startswith("inspect"):
        assert ended.returncode == 0, output  # what can be shown is shown
        assert refused(output, name), output
    else:
        assert ended.returncode == (2 if tool == "diff" else 1), output
        assert refused(output, name), output


@pytest.mark.parametrize("name", [foreign.ENGINE_FILE, foreign.OPTIMIZER_FILE, foreign.RANK_FILE])
def test_fit_runs_no_code_of_a_checkpoint(
    name: str, poisoned: Callable[[str], Path], marker: Path, tmp_path: Path, home: Mapping[str, str]
) -> None:
    checkpoint = poisoned(name)
    config = foreign.write_experiment(tmp_path / "e.yaml", foreign.experiment_config(3))
    run = RunDirectory.create(
        tmp_path / "runs", name="new", context_dir=foreign.DEFINITIONS, command=["test"], config={}
    )

    code, output = foreign.fit(config, run.path, checkpoint, **home)

    assert not marker.exists(), output
    assert code != 0
    assert refused(output, name), output


def test_run_resume_runs_no_code_of_a_checkpoint(
    poisoned: Callable[[str], Path], marker: Path, tmp_path: Path, shared_master: MasterForTest
) -> None:
    checkpoint = poisoned(foreign.ENGINE_FILE)
    config = foreign.write_experiment(
        tmp_path / "e.yaml", foreign.experiment_config(3, resources={"slots_per_trial": 2})
    )
    context = shutil.copytree(foreign.DEFINITIONS, tmp_path / "context")

    ended = dstrial(
        "run", config, context, "--runs-dir", tmp_path / "runs", "--resume", checkpoint, env=shared_master.env
    )

    output = ended.stdout + ended.stderr
    assert not marker.exists(), output
    assert ended.returncode != 0
    assert refused(output, foreign.ENGINE_FILE), output
