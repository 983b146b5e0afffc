"""Resuming with other ranks keeps the global batch and the order of records."""

import json

import pytest
from in_process_fits import EXP_CONF
from small_runs import experiment, train

from dstrial import Batch, Trainer, init
from dstrial.errors import CheckpointLayoutError, ConfigError

NUM_RECORDS = 84
SECTIONS = {
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
}


def config(
    batches, record_log, sizes, stage=1, num_stages=0, is_own=False, report=20, checkpoint=20, **fields
):
    own = {"own_sizes": sizes, "own_stage": stage, "own_num_stages": num_stages}
    named = {"deepspeed_config": {**SECTIONS, "zero_optimization": {"stage": stage}, **sizes}}
    hyperparameters = {
        **(own if is_own else named),
        "dropout": 0.0,
        "num_records": NUM_RECORDS,
        "num_validation_records": 12,
        "record_log": str(record_log),
    }
    return experiment(
        hyperparameters, batches=batches, report=report, validate=20, checkpoint=checkpoint, **fields
    )


def run_trial(
    tmp_path,
    trial,
    given,
    ranks,
    run=None,
):
    done = train(tmp_path, trial, given, ranks=ranks, run=run, module="kept_batch_trials")
    assert done.returncode == 0, done.output
    return done


def sizes_in(run):
    line = next(line for line in run.output.splitlines() if "sizes [" in line)
    return json.loads(line[line.index("[", line.index("sizes")) :])


def records(record_log):
    found = {}
    for log in sorted(record_log.parent.glob(record_log.name + ".*")):
        for line in log.read_text().splitlines():
            batch_idx, numbers = json.loads(line)
            found.setdefault(batch_idx, []).extend(numbers)
    return {batch_idx: sorted(numbers) for batch_idx, numbers in sorted(found.items())}


def numbers_in(batches):
    return sorted(number for numbers in batches.values() for number in numbers)


@pytest.mark.ranks
def test_changed_rank_counts_train_every_record_once(definitions_and_runs, tmp_path):
    # An epoch has 84 records, which are 7 batches of 12; the run changes its ranks after batches 4 and 10.
    given = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    log = tmp_path / "log"
    first = run_trial(tmp_path / "run", "Noted", config(4, log, given), 3)
    second = run_trial(tmp_path / "run", "Noted", config(10, log, given), 2, run=first)
    third = run_trial(tmp_path / "run", "Noted", config(14, log, given), 4, run=first)

    assert [sizes_in(run) for run in (first, second, third)] == [[12, 4, 1, 3], [12, 3, 2, 2], [12, 3, 1, 4]]
    found = records(log)
    for epoch_idx in range(2):
        epoch = {batch_idx: found[batch_idx] for batch_idx in range(7 * epoch_idx, 7 * epoch_idx + 7)}
        assert numbers_in(epoch) == list(range(NUM_RECORDS))
    loss, whole = uninterrupted(tmp_path, 14)
    assert found == whole
    assert third.reports("validation")[14]["validation_loss"] == pytest.approx(loss, rel=1e-6)
    assert (
        "the batch of engine 0 stays as it was: train_batch_size 12 = train_micro_batch_size_per_gpu 3 x "
        "gradient_accumulation_steps 2 x 2 data-parallel replicas (it was 4 x 1 x 3)"
    ) in second.output


@pytest.mark.ranks
def test_engine_config_from_code_keeps_global_batch(definitions_and_runs, tmp_path):
    given = {"train_micro_batch_size_per_gpu": 6, "gradient_accumulation_steps": 1}
    log = tmp_path / "log"
    first = run_trial(tmp_path / "run", "OwnConfig", config(3, log, given, stage=2, is_own=True), 2)
    second = run_trial(
        tmp_path / "run", "OwnConfig", config(7, log, given, stage=2, is_own=True), 3, run=first
    )
    assert [sizes_in(run) for run in (first, second)] == [[12, 6, 1, 2], [12, 4, 1, 3]]
    assert records(log) == uninterrupted(tmp_path, 7)[1]


@pytest.mark.ranks
def test_pipeline_resumes_with_other_stages_and_replicas(definitions_and_runs, tmp_path):
    """From three stages, of which the middle reads no data, to two replicas of two."""
    sizes = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}
    log = tmp_path / "log"
    three = config(3, log, sizes, stage=0, num_stages=3, is_own=True)
    first = run_trial(tmp_path / "run", "NotedPipeline", three, 3)
    data = {"dstrial": {"pipeline_stages": 2}}
    two = config(7, log, sizes, stage=0, num_stages=2, is_own=True, data=data)
    second = run_trial(tmp_path / "run", "NotedPipeline", two, 4, run=first)
    assert [sizes_in(run) for run in (first, second)] == [[12, 4, 3, 3], [12, 3, 2, 4]]
    assert records(log) == uninterrupted(tmp_path, 7)[1]


@pytest.mark.ranks
def test_unshareable_or_changed_batch_starts_no_ranks(tmp_path):
    log = tmp_path / "log"
    first = run_trial(tmp_path / "run", "Noted", config(2, log, {"train_batch_size": 12}, stage=0), 1)
    for ranks, total, said in (
        (5, 12, "Go on with 4 or 6 slots"),
        (2, 16, "train_batch_size is 16; expected 12, the batch of checkpoint"),
    ):
        given = config(4, log, {"train_batch_size": total}, stage=0)
        refused = train(tmp_path / "run", "Noted", given, ranks=ranks, run=first, module="kept_batch_trials")
        assert refused.returncode == 2, refused.output
        assert said in refused.output
        assert "sizes" not in refused.output


def uninterrupted(tmp_path, batches):
    """Train on one rank; return the last validation loss and the records by batch."""
    log = tmp_path / "whole" / "log"
    log.parent.mkdir()
    sizes = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 12}
    checkpoint, _ = fit(hyperparameters(log, **sizes), batches=batches)
    lines = (checkpoint.parent.parent / "metrics.jsonl").read_text().splitlines()
    losses = [row["metrics"] for row in map(json.loads, lines) if row["group"] == "validation"]
    return losses[-1]["validation_loss"], records(log)


def fit(hparams, latest_checkpoint=None, named=True, batches=4):
    import kept_batch_trials

    with init(
        hparams=hparams, exp_conf=EXP_CONF, latest_checkpoint=latest_checkpoint if named else None
    ) as context:
        trial = kept_batch_trials.Noted(context)
        result = Trainer(trial, context).fit(
            max_length=Batch(batches), latest_checkpoint=latest_checkpoint, checkpoint_policy="none"
        )
        path = context._core.run_directory.checkpoints_path / str(result.checkpoint_uuid)
        return path, trial


def hyperparameters(record_log, **sizes):
    return {**config(1, record_log, sizes)["hyperparameters"]}


@pytest.mark.ranks
def test_changed_batch_is_refused_by_init_and_fit(definitions_and_runs, tmp_path):
    checkpoint, _ = fit(hyperparameters(tmp_path / "log", train_batch_size=12), batches=2)
    changed = hyperparameters(tmp_path / "log", train_batch_size=16)
    with pytest.raises(ConfigError, match="train_batch_size is 16; expected 12, the batch of checkpoint"):
        fit(changed, str(checkpoint))
    with pytest.raises(
        CheckpointLayoutError, match=r"dstrial\.init\(latest_checkpoint=\.\.\.\), which keeps"
    ):
        fit(changed, str(checkpoint), named=False)
    metadata = json.loads((checkpoint / "metadata.json").read_text())
    (engine,) = metadata["engines"]
    assert (metadata["format"], metadata["trial_id"]) == ("dstrial", 0)
    assert engine["given"] == {"train_batch_size": 12, "optimizer": "Adam", "scheduler": "WarmupLR"}
    sizes = [engine[key] for key in ("train_batch_size", "micro_batch_limit", "expert_parallel_size")]
    assert sizes == [12, 12, 0]
