"""Trials whose checkpoints are stored in a bucket of a real S3 server."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from object_store import Bucket, assert_nowhere
from submitting import checkpoints_of, log_of, trials, wait_until
from waiting import wait_for

from dstrial.testing.master import MasterForTest, master_for_test

pytestmark = [pytest.mark.process, pytest.mark.ranks, pytest.mark.timeout(600)]

PROGRAMS = Path(__file__).parents[2] / "programs"
NO_MACHINE_ROLE = {"AWS_EC2_METADATA_DISABLED": "true"}


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory, bucket: Bucket) -> Iterator[MasterForTest]:
    """A master whose environment has the credentials of the bucket."""
    env = {**NO_MACHINE_ROLE, **bucket.variables, "OMP_NUM_THREADS": "1"}
    with master_for_test(tmp_path_factory.mktemp("master"), num_slots=2, env=env) as running:
        yield running


def config_of(storage: dict[str, Any], **changes: Any) -> dict[str, Any]:
    deepspeed = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    return {
        "name": "bucket",
        "entrypoint": "small_trials:DataParallelTrial",
        "hyperparameters": {"deepspeed_config": deepspeed},
        "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 6}},
        "resources": {"slots_per_trial": 2},
        "min_checkpoint_period": {"batches": 2},
        "max_restarts": 1,
        "checkpoint_storage": storage,
        **changes,
    }


def create(master: MasterForTest, tmp_path: Path, config: dict[str, Any]) -> int:
    path = tmp_path / "exp.yaml"
    path.write_text(yaml.safe_dump(config))
    created = master.det("experiment", "create", str(path), str(PROGRAMS))
    assert created.returncode == 0, created.stdout + created.stderr
    return int(created.stdout.split("Created experiment ")[1].split()[0])


def of_experiment(master: MasterForTest, experiment_id: int) -> dict[str, dict[str, Any]]:
    return {one["uuid"]: one for one in checkpoints_of(master, experiment_id)}


def kept(master: MasterForTest, experiment_id: int) -> set[str]:
    rows = of_experiment(master, experiment_id).values()
    return {one["uuid"] for one in rows if one["state"] == "STATE_COMPLETED"}


def stored(bucket: Bucket) -> set[str]:
    return {key.split("/")[2] for key in bucket.objects() if "tensorboard" not in key}


@pytest.mark.exhaustive("tests/cli/test_run_object_storage.py::test_killed_run_resumes_from_bucket")
def test_search_with_killed_rank_resumes_from_bucket(
    master: MasterForTest,
    bucket: Bucket,
    tmp_path: Path,
) -> None:
    """A rank of one of four trials is killed; the trial resumes from the bucket."""
    marker = tmp_path / "killed"
    # The save of batch 4 begins after that of batch 2 has ended, so a checkpoint exists when the rank is killed.
    config = config_of(
        bucket.storage(save_trial_latest=1, save_trial_best=0),
        searcher={"name": "grid", "metric": "validation_loss", "max_length": {"batches": 6}},
        resources={"slots_per_trial": 1},
        environment={"environment_variables": ["KILL_AT=0:5", f"KILL_MARKER={marker}"]},
    )
    config["hyperparameters"]["dropout"] = {"type": "categorical", "vals": [0.1, 0.2, 0.3, 0.4]}
    experiment_id = create(master, tmp_path, config)

    wait_until(master, experiment_id, "COMPLETED", deadline_s=400)

    restarts = sorted(trial["restarts"] for trial in trials(master, experiment_id))
    assert restarts == [0, 0, 0, 1]
    assert "resumed from checkpoint" in log_of(master, experiment_id)
    wait_for(lambda: len(kept(master, experiment_id)) == 4, "nothing is collected")
    assert stored(bucket) == bucket.uuids() == kept(master, experiment_id)
    steps = [one["metadata"]["steps_completed"] for one in of_experiment(master, experiment_id).values()]
    assert steps.count(6) == 4
    database = tmp_path / "copy.db"
    shutil.copy2(master.state.database_path, database)
    assert_nowhere(bucket.secret_key, master.state.path, database)
    assert master.dstrial("down").returncode == 0
    master.up()
    deleted = master.det("experiment", "delete", str(experiment_id), "--yes")
    assert deleted.returncode == 0, deleted.stderr
    wait_for(lambda: not bucket.objects(), "objects are left of a deleted experiment")


def test_config_keys_are_used_but_never_shown(
    master: MasterForTest,
    bucket: Bucket,
    tmp_path: Path,
) -> None:
    """A client without credentials downloads checkpoints through the master."""
    storage = bucket.storage(save_trial_latest=1, save_trial_best=0) | bucket.keys_in_config
    experiment_id = create(master, tmp_path, config_of(storage))
    wait_until(master, experiment_id, "COMPLETED", deadline_s=200)
    wait_for(lambda: len(kept(master, experiment_id)) == 1, "nothing is collected")
    (uuid,) = kept(master, experiment_id)
    assert stored(bucket) == {uuid}
    log = log_of(master, experiment_id)
    shown = master.det("experiment", "config", str(experiment_id)).stdout
    for text in (log, shown, json.dumps(of_experiment(master, experiment_id))):
        assert bucket.secret_key not in text
        assert bucket.access_key not in text
    for words in (["det"], ["det", "--mode", "master"], ["dstrial"]):
        target = tmp_path / "-".join(words)
        command = ["checkpoint", "download", uuid, "-o", str(target), *words[1:]]
        without = MasterForTest(
            master.state, {k: v for k, v in master.env.items() if k not in bucket.variables}, ()
        )
        done = without.dstrial(*command) if words == ["dstrial"] else without.det(*command)
        assert done.returncode == 0, done.stdout + done.stderr
        assert (target / "dstrial_rank1.pt").is_file()
    assert master.det("checkpoint", "rm", uuid, "--glob", "model0/**", "--yes").returncode == 0
    wait_for(lambda: not any("/model0/" in key for key in bucket.objects()), "the objects are not deleted")
    wait_for(lambda: kept(master, experiment_id) == set(), "the checkpoint is still complete")
    assert any(key.endswith(f"{uuid}/dstrial_rank0.pt") for key in bucket.objects())


def test_wrong_bucket_key_fails_before_training(
    master: MasterForTest,
    bucket: Bucket,
    tmp_path: Path,
) -> None:
    secret = "hunter2/with+signs"
    storage = bucket.storage(access_key=bucket.access_key, secret_key=secret)
    experiment_id = create(master, tmp_path, config_of(storage, max_restarts=0))
    wait_until(master, experiment_id, "ERROR", deadline_s=100)
    log = log_of(master, experiment_id)
    assert "SignatureDoesNotMatch" in log
    assert secret not in log
    assert of_experiment(master, experiment_id) == {}
    assert secret not in database_without_configs(master)


def database_without_configs(master: MasterForTest) -> str:
    """Return a database dump without experiments, which store configs as submitted."""
    connection = sqlite3.connect(f"file:{master.state.database_path}?mode=ro", uri=True)
    lines = [line for line in connection.iterdump() if not line.startswith('INSERT INTO "experiments"')]
    connection.close()
    return "\n".join(lines)
