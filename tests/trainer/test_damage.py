"""Resume from checkpoints with a truncated, changed or removed file."""

import os
import pathlib
import re
import shutil

import pytest
from in_process_fits import fit, trial_class
from small_runs import deepspeed_config, experiment, train

from dstrial.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def remove(path):
    path.unlink()


DAMAGES = {"truncated": truncate, "one byte flipped": flip, "removed": remove}
NOT_IN_MANIFEST = ("manifest.json", "metadata.json", "COMPLETE")


def files_of(checkpoint):
    return sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())


def checkpoint_in(run_dir):
    (mark,) = pathlib.Path(run_dir).glob("checkpoints/*/COMPLETE")
    return mark.parent


def resume_damaged(run_dir, name, damage, scratch):
    """Resume a copy with a damaged file; return the error and ``train_batch`` calls."""
    copied = scratch / "copied"
    shutil.copytree(run_dir, copied)
    damage(checkpoint_in(copied) / name)
    calls = []

    def train_batch(self, *arguments):
        calls.append(arguments)
        raise AssertionError("trained")

    try:
        fit(
            trial_class(train_batch=train_batch),
            {"deepspeed_config": deepspeed_config(1)},
            run_dir=copied,
            latest_checkpoint="latest",
        )
    except CheckpointError as error:
        return error, len(calls)
    finally:
        shutil.rmtree(copied)
    return None, len(calls)


def damages_of_one_rank(scratch):
    """Yield (file, damage, error, ``train_batch`` calls) for a checkpoint's files."""
    done = fit(hparams={"deepspeed_config": deepspeed_config(1)}, run_dir=None)
    for name in files_of(checkpoint_in(done.directory.path)):
        for kind, damage in DAMAGES.items():
            yield name, kind, *resume_damaged(done.directory.path, name, damage, scratch)


@pytest.mark.ranks
def test_any_damaged_file_stops_resume_before_training(definitions_and_runs, tmp_path):
    table = list(damages_of_one_rank(tmp_path))
    names = {name for name, *_ in table}
    assert {*NOT_IN_MANIFEST, "dstrial_rank0.pt", "load_data.json"} < names
    assert {"model0/mp_rank_00_model_states.pt", "model0/zero_pp_rank_0_mp_rank_00_optim_states.pt"} < names
    for name, kind, error, calls in table:
        assert calls == 0, (name, kind)
        if (name, kind) == ("COMPLETE", "removed"):
            assert isinstance(error, CheckpointNotFoundError)
        elif (name, kind) == ("manifest.json", "removed"):
            assert isinstance(error, CheckpointNotFoundError)
            assert name in str(error)
        else:
            assert isinstance(error, CheckpointDamagedError), (name, kind, error)
            assert name in str(error)


@pytest.mark.ranks
def test_damaged_pipeline_file_stops_all_ranks(tmp_path):
    config = experiment(
        {"deepspeed_config": deepspeed_config(1)}, batches=4, report=2, validate=100, checkpoint=100
    )
    run = train(tmp_path, "PipelineTrial", config, ranks=2)
    assert run.returncode == 0, run.output
    reports = run.directory.metrics_path.read_bytes()
    longer = {**config, "searcher": {**config["searcher"], "max_length": {"batches": 8}}}
    flip(checkpoint_in(run.directory.path) / "dstrial_rank1.pt")
    resumed = train(tmp_path, "PipelineTrial", longer, ranks=2, run=run)
    assert resumed.returncode != 0
    assert re.search(r"CheckpointDamagedError: .*dstrial_rank1.pt is changed", resumed.output)
    assert run.directory.metrics_path.read_bytes() == reports
