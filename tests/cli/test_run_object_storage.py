"""``dstrial run`` with ``checkpoint_storage`` of type s3."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from object_store import Bucket, assert_nowhere

from dstrial.local.checkpoint_directory import list_checkpoints
from dstrial.local.run_directory import RunDirectory
from dstrial.testing.master import MasterForTest

PROGRAMS = Path(__file__).parents[1] / "programs"
DEADLINE_S = 240


@pytest.mark.timeout(600)
@pytest.mark.ranks
def test_killed_run_resumes_from_bucket(
    tmp_path: Path,
    shared_master: MasterForTest,
    bucket: Bucket,
) -> None:
    """The storage keys of the config appear in no output and no file of the run."""
    variables = ["KILL_AT=1:5", f"KILL_MARKER={tmp_path / 'killed'}"]
    config = {
        "name": "bucket",
        "entrypoint": "small_trials:DataParallelTrial",
        "hyperparameters": {
            "deepspeed_config": {
                "train_micro_batch_size_per_gpu": 4,
                "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
                "zero_optimization": {"stage": 1},
            }
        },
        "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 6}},
        "resources": {"slots_per_trial": 2},
        "min_checkpoint_period": {"batches": 2},
        "environment": {"environment_variables": variables},
        "checkpoint_storage": bucket.storage(save_trial_latest=2, save_trial_best=0) | bucket.keys_in_config,
    }
    (tmp_path / "exp.yaml").write_text(yaml.safe_dump(config))
    command = ["run", "exp.yaml", str(PROGRAMS)]

    killed = shared_master.dstrial(*command, cwd=tmp_path, deadline_s=DEADLINE_S)

    assert killed.returncode != 0, killed.stdout + killed.stderr
    (record,) = (tmp_path / "runs").glob("*/*/run.json")
    run = RunDirectory(record.parent)
    assert [found.steps_completed for found in list_checkpoints(run.checkpoints_path)] == [2, 4]
    assert "does not use" not in killed.stderr
    assert f"stored in:   s3://{bucket.name}/of/mine at {bucket.url}" in killed.stdout
    resumed = shared_master.dstrial(*command, "--resume", "latest", cwd=tmp_path, deadline_s=DEADLINE_S)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "at batch 4" in resumed.stdout + resumed.stderr
    # Each attempt is a separate experiment, which keeps its two latest checkpoints.
    found = list_checkpoints(run.checkpoints_path)
    assert [one.steps_completed for one in found] == [2, 4, 6]
    assert bucket.uuids() == {one.uuid for one in found}
    for text in (killed.stdout, killed.stderr, resumed.stdout, resumed.stderr):
        assert bucket.secret_key not in text
    assert_nowhere(bucket.secret_key, run.path)
    # The command has no credentials, so the master transfers the files.
    target = tmp_path / "copy"
    done = shared_master.dstrial("checkpoint", "download", str(run.path), "-o", str(target))
    assert done.returncode == 0, done.stderr
    assert (target / "dstrial_rank1.pt").is_file()
