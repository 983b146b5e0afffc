"""Launchers start one rank per slot under a real master."""

from __future__ import annotations

from pathlib import Path

import pytest
from submitting import config, log_of, steps_of, submit, trials, wait_until

from dstrial.testing.master import MasterForTest

pytestmark = [pytest.mark.process, pytest.mark.ranks]

ROOT = Path(__file__).parents[3]
SCRIPT = """
import determined as det

distributed = det.core.DistributedContext.from_torch_distributed()
mode = det.core.TensorboardMode.MANUAL  # imports no torch
with det.core.init(distributed=distributed, tensorboard_mode=mode) as core:
    ranks = distributed.allgather(distributed.rank)
    if distributed.rank == 0:
        core.train.report_training_metrics(len(ranks), {"sum": sum(ranks)})
    print("of", len(ranks))
"""
ENTRYPOINTS = [
    "python3 -m dstrial.launch train.py",
    "python3 -m determined.launch.torch_distributed python3 train.py",
]


@pytest.mark.parametrize("entrypoint", ENTRYPOINTS)
def test_script_runs_once_per_slot(shared_master: MasterForTest, entrypoint: str) -> None:
    experiment_id = submit(shared_master, config(entrypoint, resources={"slots_per_trial": 2}), SCRIPT)

    wait_until(shared_master, experiment_id, "COMPLETED")

    text = log_of(shared_master, experiment_id)
    assert steps_of(shared_master, trials(shared_master, experiment_id)[0]["id"]) == [2]
    assert "[rank=0] || of 2" in text
    assert "[rank=1] || of 2" in text
    of_rank = shared_master.det("e", "logs", str(experiment_id), "--rank-id", "0").stdout
    assert "[rank=0] || of 2" in of_rank
    assert "[rank=1]" not in of_rank
    assert "Scheduling" not in of_rank
