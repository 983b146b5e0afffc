"""A script trains equally under all supported launchers."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import warm_start
from small_runs import DEFINITIONS, TIMINGS

from dstrial.testing.ranks import free_port

pytestmark = pytest.mark.ranks

SCRIPT = str(DEFINITIONS / "train_script.py")
LAUNCH = [sys.executable, "-m", "dstrial.launch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
DEEPSPEED = [sys.executable, str(pathlib.Path(sys.executable).with_name("deepspeed"))]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable]


def has_slurm():
    return (
        shutil.which("srun") is not None
        and subprocess.run(["sinfo", "--noheader"], capture_output=True).returncode == 0
    )


def start(directory, command, **variables):
    """Run a command in a new directory; return the reports of each of its runs."""
    directory.mkdir()
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **variables}
    done = warm_start.run_command(
        command,
        cwd=directory,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return [reports(path.parent) for path in sorted(directory.glob("runs/*/*/metrics.jsonl"))]


def reports(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        (
            row["group"],
            row["steps_completed"],
            {k: v for k, v in row["metrics"].items() if k not in TIMINGS},
        )
        for row in rows
        if row["group"] != "telemetry"  # its times differ in every run
    ]


def require_two_ranks(directory, launcher):
    """Assert the ranks, sizes and launcher that each of two ranks has recorded."""
    told = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]
    assert [(one["rank"], one["local_rank"], one["world_size"], one["local_world_size"]) for one in told] == [
        (0, 0, 2, 2),
        (1, 1, 2, 2),
    ]
    assert [(one["node_rank"], one["num_nodes"], one["total"]) for one in told] == [(0, 1, 3)] * 2
    assert [one["launcher"] for one in told] == [launcher] * 2


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    (run,) = start(tmp_path_factory.mktemp("two") / "launch", [*LAUNCH, "--slots", "2", SCRIPT])
    return run


def test_dstrial_launch_reports_each_step_once(on_two_ranks):
    positions = [(group, step) for group, step, _ in on_two_ranks]
    assert positions == [
        ("training", 4),
        ("validation", 6),
        ("training", 8),
        ("training", 12),
        ("validation", 12),
    ]


@pytest.mark.exhaustive("tests/trainer/test_launchers.py::test_deepspeed_launcher_trains_as_dstrial_launch")
def test_torchrun_trains_as_dstrial_launch(tmp_path, on_two_ranks):
    assert start(tmp_path / "torchrun", [*TORCHRUN, SCRIPT], WHO_DIR=str(tmp_path)) == [on_two_ranks]
    require_two_ranks(tmp_path, "torchrun")


def test_deepspeed_launcher_trains_as_dstrial_launch(tmp_path, on_two_ranks):
    # On CPU, deepspeed takes the number of ranks from LOCAL_SIZE; its default port 29500 may be in use.
    command = [*DEEPSPEED, "--master_port", str(free_port()), SCRIPT]
    variables = {"LOCAL_SIZE": "2", "WHO_DIR": str(tmp_path)}
    assert start(tmp_path / "deepspeed", command, **variables) == [on_two_ranks]
    require_two_ranks(tmp_path, "deepspeed")


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Requires: [mpirun]")
def test_mpirun_trains_as_dstrial_launch(tmp_path, on_two_ranks):
    assert start(tmp_path / "mpirun", [*MPIRUN, SCRIPT]) == [on_two_ranks]


@pytest.mark.skipif(not has_slurm(), reason="Requires: [srun, a Slurm cluster]")
def test_srun_trains_as_dstrial_launch(tmp_path, on_two_ranks):
    assert start(tmp_path / "srun", ["srun", "-n", "2", sys.executable, SCRIPT]) == [on_two_ranks]


def test_repeated_notebook_run_equals_launched_rank(tmp_path):
    first, again = start(tmp_path / "cell", [sys.executable, SCRIPT, "--times", "2"])
    assert again == first
    assert start(tmp_path / "launch", [*LAUNCH, "--slots", "1", SCRIPT]) == [first]
