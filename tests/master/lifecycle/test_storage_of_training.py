"""Real DeepSpeed training whose checkpoint storage disappears and returns."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from kept_batch import create, project, wait_for_end
from submitting import checkpoints_of, log_of, reports_of, trials
from waiting import wait_for

from dstrial.storage_guard import STORAGE_MARKER
from dstrial.testing.master import MasterForTest, master_for_test

pytestmark = pytest.mark.process

DEEPSPEED = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}
NUM_BATCHES = 40


def created(master: MasterForTest, directory: Path, name: str, storage: Path) -> int:
    """Submit training with dropout that saves a checkpoint every second batch."""
    paths = project(
        directory,
        name,
        batches=NUM_BATCHES,
        sleep_s=0.15,
        entrypoint="small_trials:DataParallelTrial",
        hyperparameters={"deepspeed_config": DEEPSPEED, "batch_sleep_s": 0.15},
        min_checkpoint_period={"batches": 2},
        reproducibility={"experiment_seed": 5},
        checkpoint_storage={"type": "shared_fs", "host_path": str(storage), "save_trial_latest": 99},
    )
    return create(master, paths)


def losses(master: MasterForTest, experiment_id: int) -> dict[int, float]:
    [trial] = trials(master, experiment_id)
    return {
        int(report["totalBatches"]): report["metrics"]["avg_metrics"]["loss"]
        for report in reports_of(master, trial["id"])
    }


def completed(master: MasterForTest, experiment_id: int) -> list[dict[str, Any]]:
    return [one for one in checkpoints_of(master, experiment_id) if one["state"] == "STATE_COMPLETED"]


@pytest.mark.timeout(500)
def test_training_resumes_bitwise_equal_after_storage_returns(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    with master_for_test(tmp_path, num_slots=2) as master:
        disturbed = created(master, tmp_path, "disturbed", storage)
        wait_for(lambda: len(completed(master, disturbed)) >= 3, deadline_s=120)
        storage.rename(tmp_path / "away")
        wait_for(
            lambda: "waiting for its checkpoint storage" in log_of(master, disturbed),
            "it does not wait",
            deadline_s=120,
        )
        assert not (storage / STORAGE_MARKER).exists()
        assert len(losses(master, disturbed)) < NUM_BATCHES
        shutil.rmtree(storage, ignore_errors=True)  # An unfinished save may have created its directory.
        (tmp_path / "away").rename(storage)
        wait_for_end(master, disturbed)
        undisturbed = created(master, tmp_path, "undisturbed", storage)
        wait_for_end(master, undisturbed)

        assert losses(master, disturbed) == losses(master, undisturbed)
        assert len(losses(master, disturbed)) == NUM_BATCHES
        [trial] = trials(master, disturbed)
        assert int(trial["restarts"]) == 0
