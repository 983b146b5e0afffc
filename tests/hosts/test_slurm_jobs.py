"""The documented batch script on a Slurm cluster: preemption."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts_runs import ENVIRON, batches, copy_into
from slurm_cluster import SlurmCluster, slurm_cluster
from waiting import wait_for

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]
_DOCUMENT = Path(__file__).parents[2] / "docs" / "how-to" / "slurm.md"
_ENVIRON = {**ENVIRON, "DSTRIAL_TIMEOUT_S": "60", "PAUSE_S": "0.2"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster(2, grace_s=20) as made:
        yield made


@pytest.fixture
def place(tmp_path: Path) -> Path:
    copy_into(tmp_path, "small_trial.py", "small_script.py")
    scripts = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", _DOCUMENT.read_text(), re.DOTALL)
    (script,) = (one for one in scripts if "scontrol requeue" in one)
    script = script.replace("python -m", f"{sys.executable} -m")
    script = script.replace("train.py", "small_script.py runs/mine 60 1").replace("train-%j.log", "train.log")
    (tmp_path / "train.sh").write_text(script)
    return tmp_path


def _log(place: Path) -> str:
    path = place / "train.log"
    return path.read_text() if path.exists() else ""


def test_batch_script_preempted_job_requeues_and_resumes(cluster: SlurmCluster, place: Path) -> None:
    job = int(cluster.run("sbatch", "--parsable", "train.sh", cwd=place, env=_ENVIRON).stdout)
    wait_for(lambda: 15 in batches(_log(place)), lambda: _log(place))
    urgent = cluster.popen(["srun", "-p", "high", "-N2", "-n4", "sleep", "3"])
    wait_for(lambda: cluster.job(job).get("Restarts") == "1", lambda: _log(place))
    assert urgent.wait(60) == 0
    done = cluster.wait_for_state(job, "COMPLETED", "FAILED", "CANCELLED", timeout=100)

    assert done["JobState"] == "COMPLETED", _log(place)
    text = _log(place)
    assert batches(text) == list(range(5, 61, 5)), (
        "each position once: nothing is trained twice, nothing is left out"
    )
    assert "SIGTERM received: the ranks were asked to stop" in text
    assert done["Restarts"] == "1"
