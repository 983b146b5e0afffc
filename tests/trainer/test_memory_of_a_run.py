"""A run measures where its memory went, by rank, and a dry run predicts the same numbers."""

import json

import pytest
from deepspeed_release import needs_0_19_8
from small_runs import DEFINITIONS, deepspeed_config, experiment, train

from dstrial.cli.app import main

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

BUCKETS = {"reduce_bucket_size": 5000, "allgather_bucket_size": 5000}
PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers")


def zero(stage):
    config = deepspeed_config(stage) | {"train_micro_batch_size_per_gpu": 32}
    config["zero_optimization"] |= BUCKETS
    return {"deepspeed_config": config, "num_records": 256}


CASES = {
    "zero 0": ("DataParallelTrial", zero(0), {}),
    "zero 1": ("DataParallelTrial", zero(1), {}),
    "zero 2": ("DataParallelTrial", zero(2), {}),
    "zero 3": ("DataParallelTrial", zero(3), {}),
    "pipeline": ("PipelineTrial", zero(1), {"pipeline_stages": 2}),
}


# A dry run of 0.19.0 does not foresee the gathered weights that its ZeRO 3 keeps until backward.
NEWER = {"zero 3": needs_0_19_8}


@pytest.mark.exhaustive("[zero 3]", "[pipeline]")
@pytest.mark.parametrize("case", [pytest.param(case, marks=NEWER.get(case, ())) for case in CASES])
def test_what_two_ranks_measure_is_what_a_dry_run_predicts(tmp_path, capsys, case):
    trial, hyperparameters, section = CASES[case]
    config = experiment(
        hyperparameters,
        4,
        report=2,
        entrypoint=f"small_trials:{trial}",
        resources={"slots_per_trial": 2},
        data={"dstrial": section},
    )
    done = train(tmp_path / "run", trial, config, ranks=2)
    assert done.returncode == 0, done.output
    metrics = done.rows("telemetry")[-1]["metrics"]
    assert metrics["memory_found_by"] == "storages of tensors; activations and peak operation by operation"
    for name in (*(f"{part}_bytes" for part in PARTS), "tensors_peak_bytes"):
        assert len(metrics["ranks"][name]) == 2
        assert metrics[name] == max(metrics["ranks"][name])

    capsys.readouterr()
    path = str(done.directory.path)
    assert main(["memory", path, str(DEFINITIONS), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["problem"] is None
    assert len(told["predicted"]) == section.get("pipeline_stages", 1)
    for rank, counters in enumerate(told["ranks"]):
        predicted = told["predicted"][rank * len(told["predicted"]) // 2]
        for part in ("parameters", "gradients", "optimizer"):
            # What is predicted is the first rank of a stage; others have other weights in their share of so few.
            uneven = 16 if rank == 0 or len(told["predicted"]) > 1 else 400
            assert counters[f"{part}_bytes"] == pytest.approx(predicted[part], rel=0.01, abs=uneven), (
                rank,
                part,
            )
        # A loader has another micro batch and the order of its 256 records, which a dry run has not.
        more = counters["activations_bytes"] - predicted["activations"]
        assert -100 < more < 32 * (8 + 4) * 4 + 256 * 8 + 1000, rank
        assert counters["buffers_bytes"] == pytest.approx(predicted["buffers"], rel=0.25, abs=2000)
        assert counters["tensors_peak_bytes"] == pytest.approx(predicted["peak"], rel=0.1, abs=4000)

    assert main(["memory", path, str(DEFINITIONS)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "memory,",
        "rank",
        "predicted",
        "rank",
        "predicted",
        "measured",
    ]
    assert json.loads(done.directory.memory_path.read_text())["stages"] == told["predicted"]


def test_zero_divides_what_it_says_it_divides(tmp_path):
    measured = {}
    for stage in (0, 1, 3):
        done = train(
            tmp_path / str(stage), "DataParallelTrial", experiment(zero(stage), 2, report=2), ranks=2
        )
        assert done.returncode == 0, done.output
        measured[stage] = done.rows("telemetry")[-1]["metrics"]

    whole = measured[0]
    # float32: Adam keeps two numbers for each weight, ZeRO a master copy besides, which it divides with them.
    assert whole["gradients_bytes"] == whole["parameters_bytes"]
    assert whole["optimizer_bytes"] == pytest.approx(2 * whole["parameters_bytes"], rel=0.05)
    assert measured[1]["parameters_bytes"] == whole["parameters_bytes"]
    assert measured[1]["optimizer_bytes"] == pytest.approx(1.5 * whole["parameters_bytes"], rel=0.05)
    assert measured[3]["parameters_bytes"] == pytest.approx(whole["parameters_bytes"] / 2, rel=0.05)
    assert measured[3]["optimizer_bytes"] == pytest.approx(1.5 * whole["parameters_bytes"], rel=0.05)
    assert measured[3]["gradients_bytes"] == pytest.approx(whole["gradients_bytes"] / 2, rel=0.05)


def test_a_run_that_has_measured_nothing_says_what_to_do(tmp_path, capsys):
    config = experiment(zero(1), 2, report=2, data={"dstrial": {"telemetry": False}})
    done = train(tmp_path, "DataParallelTrial", config)
    assert done.returncode == 0, done.output

    assert main(["memory", str(done.directory.path)]) == 1
    assert "data.dstrial.telemetry on" in capsys.readouterr().err
