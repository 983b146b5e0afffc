"""A stall across two nodes, each with its own launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import warm_start
import yaml
from small_runs import DEFINITIONS, deepspeed_config, experiment

from dstrial.local.run_directory import RunDirectory
from dstrial.ranks.sockets import free_port

pytestmark = [pytest.mark.ranks, pytest.mark.process]

LAUNCHER = """
import sys
from pathlib import Path
from dstrial.launch.local_ranks import Placement, run_ranks
from dstrial.launch.rank_main import trial_command
from dstrial.launch.stalls.diagnosis import StallSettings
# argv[1] is dstrial.launch: the test fork server recognises launchers by it, and forks their ranks.
node, port, trial, config, definitions = sys.argv[2:]
outcome = run_ranks(
    trial_command(trial, context_dir=Path(definitions), config=Path(config)),
    num_ranks=2 - int(node),
    placement=Placement((2, 1), int(node), "127.0.0.1", int(port)),
    serves_store=False,
    on_start=lambda line: print(line, flush=True),
    stalls=StallSettings(2.0, "restart"),
    shutdown_timeout_s=10,
)
if outcome.first_failure is not None:
    print("failed first:", outcome.first_failure.rank, outcome.first_failure.summary, flush=True)
sys.exit(outcome.exit_code)
"""


def launch_both(directory: Path, trial: str, stall_at: int = 5) -> list[str]:
    """Train on ranks 0 and 1 of node 0 and rank 2 of node 1; return both outputs."""
    given = {
        "deepspeed_config": deepspeed_config(1),
        "num_records": 96,
        "stall_at": stall_at,
        "stall_rank": 2,
        "pid_file": str(directory / "pids"),
    }
    config = experiment(given, 30, report=5, validate=1000, checkpoint=1000)
    (directory / "experiment.yaml").write_text(yaml.safe_dump(config))
    (directory / "launcher.py").write_text(LAUNCHER)
    run = RunDirectory.create(
        directory / "runs", name="small", context_dir=DEFINITIONS, command=["test"], config=config
    )
    variables = {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "DSTRIAL_RUN_DIR": str(run.path),
        "DSTRIAL_TIMEOUT_S": "100",
        "DSTRIAL_SECRET": "of both",
    }
    words = [trial, str(directory / "experiment.yaml"), str(DEFINITIONS)]
    port = str(free_port())
    launchers = [
        warm_start.Popen(
            [sys.executable, "-m", "launcher", "dstrial.launch", str(node), port, *words],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=directory,
        )
        for node in range(2)
    ]
    try:
        outputs = [launcher.communicate(timeout=150)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
    assert all(launcher.returncode for launcher in launchers), outputs
    return outputs


def test_stall_ends_ranks_of_both_launchers(tmp_path: Path) -> None:
    waiting, stopped = launch_both(tmp_path, "stalling_trials:StoppedTrial")
    line = re.findall("(stalled: .*Nothing has moved.*)", waiting)[0]
    assert line.startswith("stalled: all 2 ranks are in all")
    assert "Look at a rank on another machine" in line
    assert "stalled: the ranks are ended, as data.dstrial.stall_action says" in waiting, stopped
