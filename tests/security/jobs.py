"""Two-rank jobs, started as users start them, that wait for the file ``go``."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import warm_start
import yaml
from listening import tree_around
from waiting import wait_for

HERE = Path(__file__).parent
DEADLINE_S = 240
ATTACK = HERE / "c10d_attack.py"


def experiment(directory: Path) -> dict[str, Any]:
    return {
        "name": "held",
        "entrypoint": "held_trials:HeldTrial",
        "hyperparameters": {
            "held_in": str(directory),
            "deepspeed_config": "ds.json",
        },
        "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 4}},
        "resources": {"slots_per_trial": 2},
        "max_restarts": 0,
    }


def write_project(directory: Path) -> Path:
    """Write the trial and its configs into a new context directory; return its path."""
    context = directory / "context"
    context.mkdir()
    shutil.copy(HERE / "held_trials.py", context)
    ds_config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    }
    (context / "ds.json").write_text(json.dumps(ds_config))
    (context / "exp.yaml").write_text(yaml.safe_dump(experiment(directory)))
    return context


@contextlib.contextmanager
def held(
    command: Sequence[str], directory: Path, context: Path, *, is_fork: bool = False, **variables: str
) -> Iterator[set[int]]:
    """Run a job, yield its pids while both ranks wait, and assert that it succeeds."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **variables}
    log = directory / "output.log"
    with log.open("wb") as output:
        popen = warm_start.Popen if is_fork else subprocess.Popen
        process = popen(command, cwd=context, env=env, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield wait_until_held(directory, process)
        (directory / "go").touch()
        assert process.wait(DEADLINE_S) == 0, log.read_text()[-4000:]
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_until_held(directory: Path, process: subprocess.Popen[bytes]) -> set[int]:
    """Block until both ranks wait; return the pids of their job."""
    files = [directory / f"held.{rank}.pid" for rank in range(2)]

    def are_held() -> bool:
        log = directory / "output.log"
        assert process.poll() is None, log.read_text()[-4000:]
        return all(file.exists() for file in files)

    wait_for(are_held, "both ranks hold", deadline_s=DEADLINE_S)
    found: set[int] = set()
    for file in files:
        found |= tree_around(int(file.read_text()))
    return found


def attack(targets: Sequence[str], directory: Path) -> str:
    """Run the rendezvous attack on these addresses; return its output."""
    done = warm_start.run_command(
        [sys.executable, str(ATTACK), str(directory / "owned"), *targets],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
