"""Fixtures of the CLI tests: checkpoints, and calls of the command line."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dstrial.local.run_directory import RunDirectory
from dstrial.testing.master import MasterForTest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Return the runs that ``checkpoint_maker`` trains on two ranks, by case name."""
    from checkpoint_maker import make_checkpoints

    return make_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture
def run_directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "runs", name="t", context_dir=tmp_path, command=["t"], config={})


@pytest.fixture
def dstrial_command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs ``dstrial`` here: (exit code, stdout, stderr)."""
    from dstrial.cli.app import main

    def call(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            exit_code = main([str(word) for word in words])
        except SystemExit as exit_:
            exit_code = int(exit_.code or 0)
        printed = capsys.readouterr()
        return exit_code, printed.out, printed.err

    return call


CORE_API_SCRIPT = """
import json, pathlib, shutil, sys
from determined import core

metadata = json.loads(pathlib.Path(sys.argv[1], "metadata.json").read_text())
with core.init() as context:
    with context.checkpoint.store_path(metadata) as (path, uuid):
        shutil.copytree(sys.argv[1], path, dirs_exist_ok=True)
"""


@pytest.fixture(scope="session")
def reported_checkpoint(
    checkpoints: dict, shared_master: MasterForTest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, int]:
    """Report a checkpoint without model definition; return its UUID and experiment."""
    from checkpoint_maker import DEFINITIONS

    scratch = tmp_path_factory.mktemp("reported")
    context = scratch / "context"
    shutil.copytree(DEFINITIONS, context)
    (context / "train.py").write_text(CORE_API_SCRIPT)
    (scratch / "experiment.yaml").write_text(
        f"name: reported\nentrypoint: python3 train.py {checkpoints['pipeline'].latest}\n"
        "resources: {slots_per_trial: 1}\nmax_restarts: 0\n"
        "searcher: {name: single, metric: loss, max_length: {batches: 3}}\n"
    )
    created = shared_master.det("e", "create", str(scratch / "experiment.yaml"), str(context), "-f")
    assert created.returncode == 0, created.stdout + created.stderr
    client = shared_master.client()
    experiments = client.get("/api/v1/experiments?limit=-1")["experiments"]
    experiment_id = max(row["id"] for row in experiments if row["name"] == "reported")
    (reported,) = client.get(f"/api/v1/experiments/{experiment_id}/checkpoints")["checkpoints"]
    return reported["uuid"], experiment_id
