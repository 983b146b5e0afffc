"""Several ranks under a real master: what the launchers tell of them, and when a dstrial trial validates."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
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
def test_a_script_runs_once_per_slot(shared_master: MasterForTest, entrypoint: str) -> None:
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


def test_a_dstrial_trial_validates_and_saves_as_often_as_its_config_says(
    shared_master: MasterForTest, tmp_path: Path
) -> None:
    context = tmp_path / "context"
    shutil.copytree(
        ROOT / "model_defs" / "digits", context, ignore=shutil.ignore_patterns("__pycache__", "README.md")
    )
    given = yaml.safe_load((ROOT / "experiment_configs" / "digits.yaml").read_text())
    given["searcher"]["max_length"] = {"batches": 14}
    given |= {
        "min_validation_period": {"batches": 6},
        "min_checkpoint_period": {"batches": 4},
        "checkpoint_policy": "none",
        "checkpoint_storage": {"save_trial_best": 0, "save_trial_latest": 9},
        "perform_initial_validation": True,
    }
    (context / "exp.yaml").write_text(yaml.safe_dump(given))

    created = shared_master.det("e", "create", str(context / "exp.yaml"), str(context), "-f", deadline_s=200)

    assert created.returncode == 0, created.stdout + created.stderr
    experiment_id = int(created.stdout.split("Created experiment ")[1].split()[0])
    wait_until(shared_master, experiment_id, "COMPLETED")
    (trial,) = trials(shared_master, experiment_id)
    client = shared_master.client()
    path = f"/api/v1/trials/metrics/trial_metrics?group=validation&trialIds={trial['id']}"
    validated = [report["totalBatches"] for line in client.stream(path) for report in line["metrics"]]
    found = client.get(f"/api/v1/experiments/{experiment_id}/checkpoints")["checkpoints"]
    assert validated == [0, 6, 12, 14]
    assert sorted(one["metadata"]["steps_completed"] for one in found) == [4, 8, 12, 14]
