"""Runs without a master, with checkpoints in an S3 bucket or another directory."""

import sys

import pytest
import warm_start
from object_store import assert_nowhere
from small_runs import deepspeed_config, experiment, train

pytestmark = pytest.mark.ranks


def config_of(storage, batches=12, **fields):
    hyperparameters = {"deepspeed_config": deepspeed_config(1), "num_records": 70}
    return experiment(
        hyperparameters,
        batches=batches,
        report=4,
        validate=12,
        checkpoint=3,
        checkpoint_storage=storage,
        **fields,
    )


def dstrial(*words):
    command = [sys.executable, "-m", "dstrial.cli", *map(str, words)]
    done = warm_start.run_command(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_killed_run_resumes_from_bucket(tmp_path, bucket, monkeypatch):
    for name, value in bucket.variables.items():
        monkeypatch.setenv(name, value)
    storage = bucket.storage(save_trial_latest=2, save_trial_best=0)
    kill = {"KILL_AT": "1:10", "KILL_MARKER": str(tmp_path / "killed")}
    killed = train(tmp_path, "DataParallelTrial", config_of(storage), ranks=2, env=kill)
    assert killed.returncode != 0
    # The checkpoint of batch 3 may or may not have been deleted by the keep policy before the kill.
    assert killed.checkpoints()[-2:] == [6, 9]
    # The run directory has only the records of checkpoints; their other files are in the bucket.
    records = {path.parent.name: path.parent for path in killed.directory.checkpoints_path.glob("*/COMPLETE")}
    for record in records.values():
        assert sorted(path.name for path in record.iterdir()) == [
            "COMPLETE",
            "manifest.json",
            "metadata.json",
        ]
    assert bucket.uuids() >= set(records)

    resumed = train(tmp_path, "DataParallelTrial", config_of(storage), ranks=2, run=killed)

    assert resumed.returncode == 0, resumed.output
    assert resumed.checkpoints() == [9, 12]
    kept = {path.parent.name for path in resumed.directory.checkpoints_path.glob("*/COMPLETE")}
    assert {key.split("/")[2] for key in bucket.objects()} == bucket.uuids() == kept
    whole = train(tmp_path / "whole", "DataParallelTrial", config_of({}), ranks=2)
    assert resumed.reports("training") == whole.reports("training")
    assert resumed.reports("validation") == whole.reports("validation")
    assert_nowhere(bucket.secret_key, resumed.directory.path)
    assert not list(tmp_path.rglob("*.saving"))
    _check_commands(resumed, bucket, tmp_path)


def _check_commands(run, bucket, tmp_path):
    """Verify and download the newest checkpoint; resume a new run from its UUID."""
    newest = max(
        run.directory.checkpoints_path.glob("*/COMPLETE"), key=lambda path: path.stat().st_mtime
    ).parent
    assert "is intact" in dstrial("checkpoint", "verify", run.directory.path)
    assert "verified" in dstrial("checkpoint", "download", newest, "-o", tmp_path / "copy")
    assert (tmp_path / "copy" / "dstrial_rank1.pt").is_file()
    resumed = {"DSTRIAL_RESUME": newest.name}
    config = config_of(bucket.storage(), batches=14)
    other = train(tmp_path / "elsewhere", "DataParallelTrial", config, ranks=2, env=resumed)
    assert other.returncode == 0, other.output
    assert f"resumed from checkpoint {newest.name} at batch 12" in other.output


def test_storage_check_errors_hide_secret_key(tmp_path, bucket):
    secret = "hunter2/with+signs"
    wrong = bucket.storage(access_key=bucket.access_key, secret_key=secret)
    missing = bucket.storage(**bucket.keys_in_config) | {"bucket": "missing"}
    for storage, told in ((wrong, "SignatureDoesNotMatch"), (missing, "NoSuchBucket")):
        run = train(tmp_path / told, "DataParallelTrial", config_of(storage), ranks=2)
        assert run.returncode != 0
        assert "the check of checkpoint storage s3://" in run.output
        assert told in run.output
        assert not run.directory.metrics_path.exists()
        for hidden in (secret, bucket.secret_key):
            assert hidden not in run.output
            assert_nowhere(hidden, run.directory.path)


def test_run_resumes_from_directory_storage(tmp_path):
    storage = {"type": "directory", "container_path": str(tmp_path / "elsewhere"), "save_trial_latest": 1}
    first = train(tmp_path, "DataParallelTrial", config_of(storage, batches=3), ranks=2)
    assert first.returncode == 0, first.output
    resumed = train(tmp_path, "DataParallelTrial", config_of(storage), ranks=2, run=first)
    assert resumed.returncode == 0, resumed.output
    assert "resumed from checkpoint" in resumed.output
    (record,) = resumed.directory.checkpoints_path.iterdir()
    (files,) = (path for path in (tmp_path / "elsewhere").iterdir())
    assert files.name == record.name
    assert (files / "dstrial_rank1.pt").is_file()
    assert not (record / "dstrial_rank1.pt").exists()
    assert f"{files} is intact" in dstrial("checkpoint", "verify", resumed.directory.path)
