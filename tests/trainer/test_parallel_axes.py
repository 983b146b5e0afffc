"""Tensor-, sequence- and expert-parallel trials: training, resume, layout changes."""

import json

import pytest
from small_runs import deepspeed_config, experiment, train

from dstrial.testing.ranks import run_function

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

LAYERS = [
    {"patterns": [".*up_proj.weight"], "partition_type": "column"},
    {"patterns": [".*down_proj.weight"], "partition_type": "row"},
]
LENGTH = 8
SGD = {
    "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_max_lr": 0.05}},
    "gradient_clipping": 0,
    "zero_allow_untested_optimizer": True,
}
"""SGD's steps, unlike Adam's, are proportional to gradients: wrong scaling shows."""


def ds_config(axis, size, stage, **sections):
    if axis == "tensor":
        partition = {"use_default_specs": False, "layer_specs": LAYERS}
        sections["tensor_parallel"] = {"autotp_size": size, "partition_config": partition}
    elif axis == "llama" and size > 1:
        sections["tensor_parallel"] = {"autotp_size": size}
    elif axis in ("sequence", "tiled", "sharded", "mesh", "no groups"):
        sections["sequence_parallel_size"] = size
    return deepspeed_config(stage, **sections)


def run_trial(folder, axis, size, ranks, batches, stage=1, run=None, fails_at=None, sections=None, **periods):
    folder.mkdir(exist_ok=True)
    hparams = {
        "deepspeed_config": ds_config(axis, size, stage, **(sections or {})),
        "axis": axis,
        "size": size,
        "fails_at": fails_at,
    }
    given = experiment(
        {**hparams, "log": str(folder / "log")},
        batches,
        **{"report": 1, "validate": 4, "checkpoint": 4, **periods},
        checkpoint_policy="none",
    )
    return train(folder, "AxisTrial", given, ranks=ranks, run=run, module="axis_trials")


def trained(*arguments, **options):
    run = run_trial(*arguments, **options)
    assert run.returncode == 0, run.output
    return run


def log_of(folder, rank):
    return [json.loads(line) for line in (folder / f"log.{rank}").read_text().splitlines()]


def losses(run):
    return [row["loss"] for row in run.reports("training").values()]


@pytest.mark.parametrize(("axis", "stage"), [("tensor", 1), *(("sequence", stage) for stage in range(4))])
@pytest.mark.exhaustive("[tensor-1]", "[sequence-1]")
def test_parallel_groups_train_as_plain_replicas(tmp_path, axis, stage):
    """Ranks of a group read the same records; losses equal those of plain replicas."""
    plain = trained(tmp_path / "plain", "plain", 1, 2, 5, sections=SGD)
    split = trained(tmp_path / axis, axis, 2, 4, 5, stage=stage, sections=SGD)
    assert losses(split) == pytest.approx(losses(plain), rel=1e-5)
    validation, expected = (run.reports("validation")[4] for run in (split, plain))
    assert validation["validation_loss"] == pytest.approx(expected["validation_loss"], rel=1e-5)
    assert expected["num_records"] == 6
    if axis == "tensor":
        assert validation["num_records"] == 6
    for rank in range(4):
        assert [line["records"] for line in log_of(tmp_path / axis, rank)] == [
            line["records"] for line in log_of(tmp_path / "plain", rank // 2)
        ]
    if axis == "sequence":
        handling = "averages" if stage == 3 else "adds"
        assert f"sequence_parallel_size is 2: DeepSpeed {handling} the gradients" in split.output
        assert (
            len({str([line["weights"] for line in log_of(tmp_path / axis, rank)]) for rank in range(4)}) == 1
        )
    for run in (plain, split):
        told = run.rows("telemetry")[-1]["metrics"]
        assert told["tokens_per_second"] == pytest.approx(LENGTH * told["records_per_second"])


@pytest.mark.exhaustive
def test_hugging_face_tp_plan_trains_as_replicas(tmp_path):
    """Without ``partition_config``, AutoTP partitions Llama by its ``tp_plan``."""
    plain = trained(tmp_path / "plain", "llama", 1, 2, 4)
    split = trained(tmp_path / "split", "llama", 2, 4, 4)
    assert losses(split) == pytest.approx(losses(plain), rel=1e-5)


@pytest.mark.parametrize(
    ("axis", "size", "ranks", "stage"),
    [
        ("tensor", 2, 4, 1),
        ("sequence", 2, 4, 3),
        ("expert", 2, 2, 1),
        ("expert", 2, 4, 1),
        ("expert", 1, 2, 1),
        ("sharded", 2, 4, 1),
    ],
)
@pytest.mark.exhaustive("[tensor-2-4-1]", "[expert-2-2-1]")
def test_resumed_parallel_run_is_bitwise_equal(tmp_path, axis, size, ranks, stage):
    whole = trained(tmp_path / "whole", axis, size, ranks, 8, stage=stage)
    first = trained(tmp_path / "parts", axis, size, ranks, 4, stage=stage)
    second = trained(tmp_path / "parts", axis, size, ranks, 8, stage=stage, run=first)
    assert losses(second) == losses(whole)
    for rank in range(ranks):
        assert log_of(tmp_path / "parts", rank) == log_of(tmp_path / "whole", rank)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(("sequence", 2, 4, 1), ("sequence", 1, 4, 3), id="sequence 2 to 1"),
        pytest.param(("sequence", 1, 2, 3), ("sequence", 2, 4, 1), id="sequence 1 to 2"),
        pytest.param(("tensor", 2, 4, 1), ("tensor", 2, 2, 3), id="tensor on fewer ranks"),
        pytest.param(("tensor", 2, 4, 1), ("tensor", 1, 2, 3), id="tensor 2 to 1"),
        pytest.param(("tensor", 1, 2, 2), ("tensor", 2, 4, 0), id="tensor 1 to 2"),
        pytest.param(("tensor", 2, 2, 0), ("tensor", 4, 4, 1), id="tensor 2 to 4"),
    ],
)
@pytest.mark.exhaustive("[sequence 2 to 1]", "[tensor on fewer ranks]", "[tensor 2 to 1]")
def test_layout_change_at_resume_keeps_losses(tmp_path, before, after):
    """The records and the global batch stay the same; losses differ by rounding only."""
    whole = trained(tmp_path / "whole", *before[:3], 8, stage=before[3])
    first = trained(tmp_path / "parts", *before[:3], 4, stage=before[3])
    second = trained(tmp_path / "parts", *after[:3], 8, stage=after[3], run=first)
    assert "is brought into another layout" in second.output
    if before[1] != after[1]:
        assert f"{before[0]}-parallel size was {before[1]}, is {after[1]}" in second.output
    assert losses(second) == pytest.approx(losses(whole), rel=1e-5)


@pytest.mark.parametrize(
    ("before", "after", "exit_code", "said"),
    [
        (("expert", 2, 2), ("expert", 2, 4), 2, "whose experts are spread over its ranks"),
        # The expert-parallel size is known only to the trial's code, so the ranks must start.
        (("expert", 2, 2), ("expert", 1, 2), 1, "expert-parallel size was 2, is 1"),
    ],
    ids=["experts on more ranks", "expert 2 to 1"],
)
@pytest.mark.exhaustive("[experts on more ranks]")
def test_unsupported_layout_change_is_refused(tmp_path, before, after, exit_code, said):
    first = trained(tmp_path / "run", *before, 4)
    refused = run_trial(tmp_path / "run", *after, 8, run=first)
    assert refused.returncode == exit_code, refused.output
    assert said in refused.output


@pytest.mark.parametrize(
    ("axis", "said"),
    [("mesh", "reduces no gradients over the ranks of a sequence"), ("no groups", "has 1 rank per sequence")],
)
def test_sequence_parallel_size_without_its_groups_is_refused(tmp_path, axis, said):
    refused = run_trial(tmp_path / "run", axis, 2, 2, 4)
    assert refused.returncode == 1, refused.output
    assert said in refused.output
    assert "mpu=parallel_state_sp" in refused.output


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("axis", "size", "ranks"),
    [
        ("tensor", 2, 4),
        ("sequence", 2, 4),
        ("tiled", 2, 2),
        ("expert", 1, 2),
        ("expert", 2, 2),
        ("expert", 2, 4),
    ],
)
def test_trial_equals_plain_deepspeed_bitwise(tmp_path, axis, size, ranks):
    """Each rank's losses of 20 batches equal those of code without dstrial."""
    trained(tmp_path / "run", axis, size, ranks, 20)
    from axis_trials import plain_losses

    config = ds_config(axis, size, 1)
    log = str(tmp_path / "run" / "log")
    results = run_function(plain_losses, ranks, config, axis, size, log, deadline_s=400)
    for result in results:
        assert result.value == [line["loss"] for line in log_of(tmp_path / "run", result.rank)]
