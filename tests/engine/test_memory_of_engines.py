"""Measured memory of real engines against values computed by hand."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from deepspeed_release import needs_0_19_8
from forked_ranks import RunningProgram

from dstrial.dsat.predictor.closed_form import zero_run
from dstrial.dsat.predictor.features import ZeroFeatures
from dstrial.engine.dryrun.process import dry_run
from dstrial.engine.dryrun.values import DryRunRequest, ModelTrace

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

NUM = 2 * 64 * 256
"""Weights of the two layers; each matrix has half of them, as each rank does."""
HALF = NUM // 2
GATE = 2 * 64
"""Weights of the gate that chooses between two experts."""
BUCKET = 4096
RECORDS, WIDTH = 32, 64

BF16 = {"bf16": {"enabled": True}}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
TORCH_ADAM = {**BF16, "zero_force_ds_cpu_optimizer": False}
CUT_ALL = {"stage3_param_persistence_threshold": 0}
TENSOR_PARALLEL = {
    "tensor_parallel": {
        "autotp_size": 2,
        "partition_config": {
            "use_default_specs": False,
            "layer_specs": [
                {"patterns": [".*down_proj.*"], "partition_type": "row"},
                {"patterns": [".*up_proj.*"], "partition_type": "column"},
            ],
        },
    }
}

# Options of the program, and bytes by part. Adam keeps two numbers of 4 bytes for each weight; with weights of 2 bytes, or
# with ZeRO, also a 4-byte master weight. A pair is the least and the most: it depends on the order of a rank's matrices.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16": (
        {"stage": 0, "more": BF16},
        {"parameters": 2 * NUM, "optimizer": 12 * NUM, "gradients": (2 * NUM, 2 * NUM), "buffers": 0},
    ),
    "bf16, ZeRO 1": (
        {"stage": 1, "more": BF16},
        {
            "parameters": 2 * NUM,
            "optimizer": 12 * HALF,
            "gradients": (2 * NUM, 2 * NUM),
            "buffers": 2 * BUCKET,
        },
    ),
    "bf16, ZeRO 1, gradients in float32": (
        {"stage": 1, "more": {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}},
        {"parameters": 2 * NUM, "optimizer": 12 * HALF, "gradients": (6 * NUM, 6 * NUM), "buffers": 0},
    ),
    # The gradient of a matrix waits for its reduction in addition to the rank's partition of all gradients.
    "bf16, ZeRO 2": (
        {"stage": 2, "more": BF16},
        {
            "parameters": 2 * NUM,
            "optimizer": 12 * HALF,
            "gradients": (2 * HALF, 6 * HALF),
            "buffers": 2 * BUCKET,
        },
    ),
    # Both matrices may be gathered at once.
    "bf16, ZeRO 3": (
        {"stage": 3, "more": BF16, "zero": CUT_ALL},
        {
            "parameters": 2 * HALF,
            "optimizer": 12 * HALF,
            "gradients": (2 * HALF, 6 * HALF),
            "buffers": (2 * BUCKET, 2 * BUCKET + 2 * NUM),
        },
    ),
    # Includes gradients of master weights. Buffers: a matrix on device and host each, and the rank's host weights.
    "offloaded, ZeRO 2": (
        {"stage": 2, "more": TORCH_ADAM, "zero": OFFLOADED},
        {
            "parameters": 2 * NUM,
            "optimizer": 12 * HALF,
            "gradients": (4 * HALF + 2 * HALF, 4 * HALF + 4 * HALF),
            "buffers": 2 * BUCKET + 3 * 2 * HALF,
        },
    ),
    "offloaded, ZeRO 3": (
        {"stage": 3, "more": TORCH_ADAM, "zero": {**OFFLOADED, **CUT_ALL}},
        {
            "parameters": 2 * HALF,
            "optimizer": 12 * HALF,
            "gradients": (4 * HALF + 2 * HALF, 4 * HALF + 6 * HALF),
            "buffers": (2 * BUCKET, 2 * BUCKET + 2 * NUM),
        },
    ),
    # Each rank holds one of the two experts without partitioning; ZeRO partitions the other weights.
    "mixture": (
        {"stage": 0, "is_mixture": True},
        {
            "parameters": 4 * (2 * NUM + GATE),
            "optimizer": 8 * (2 * NUM + GATE),
            "gradients": (4 * (2 * NUM + GATE), 4 * (2 * NUM + GATE)),
            "buffers": 0,
        },
    ),
    "mixture, bf16, ZeRO 2": (
        {"stage": 2, "is_mixture": True, "more": BF16},
        {
            "parameters": 2 * (2 * NUM + GATE),
            "optimizer": 12 * (NUM + (NUM + GATE) // 2),
            "gradients": (2 * (NUM + HALF), 2 * (3 * NUM + GATE)),
            "buffers": 2 * BUCKET,
        },
    ),
    "tensor parallel": (
        {"stage": 0, "more": TENSOR_PARALLEL},
        {"parameters": 4 * HALF, "optimizer": 8 * HALF, "gradients": (4 * HALF, 4 * HALF), "buffers": 0},
    ),
    "tensor parallel, bf16, ZeRO 1": (
        {"stage": 1, "more": {**BF16, **TENSOR_PARALLEL}},
        {
            "parameters": 2 * HALF,
            "optimizer": 12 * HALF,
            "gradients": (2 * HALF, 2 * HALF),
            "buffers": 2 * BUCKET,
        },
    ),
}


PROGRAM = ("memory_program", {"cases": {name: options for name, (options, _) in CASES.items()}})


@pytest.mark.parametrize("case", CASES)
def test_measured_memory_parts_match_expected_bytes(program: RunningProgram, case: str) -> None:
    _, expected = CASES[case]
    for rank, measured in enumerate(program.result(case)):
        assert "error" not in measured, measured["message"] + measured["traceback"]
        found = measured["bytes"]
        assert measured["found_by"] == "storages of tensors; activations and peak operation by operation"
        for part, size in expected.items():
            least, most = size if isinstance(size, tuple) else (size, size)
            # The tolerance is for step counters, losses and norms.
            assert least <= found[f"{part}_bytes"] <= most + 256, (rank, part, found)
        assert found["tensors_peak_bytes"] >= found["parameters_bytes"] + found["optimizer_bytes"]


@pytest.mark.parametrize(
    ("case", "num_bytes", "hidden"),
    [
        ("bf16", 2, 256),
        # DeepSpeed 0.19.0 keeps a gathered weight until backward.
        pytest.param("bf16, ZeRO 3", 2, 256, marks=needs_0_19_8),
        ("tensor parallel", 4, 128),
    ],
)
def test_activation_bytes_match_tensors_kept_for_backward(
    program: RunningProgram, case: str, num_bytes: int, hidden: int
) -> None:
    for measured in program.result(case):
        # The records, the output of tanh, and the input of the square.
        expected = num_bytes * RECORDS * (WIDTH + hidden + WIDTH)
        assert expected <= measured["bytes"]["activations_bytes"] <= expected + 64


TRACE_PATH = str(Path(__file__).parents[1] / "programs")


@functools.cache
def trace(model: str) -> ModelTrace:
    """Return the dry run of a model of ``memory_program`` in bf16."""
    request = DryRunRequest(
        workload="model_workload:ModelWorkload",
        options={
            "model": f"memory_program:{model}",
            "batch": "memory_program:records",
            "config": {"optimizer": {"type": "Adam", "params": {"torch_adam": True}}, **BF16},
        },
        world_size=2,
        micro_batch_sizes=(RECORDS, 2 * RECORDS),
        module_paths=(TRACE_PATH,),
    )
    return dry_run(request, deadline_s=300)


@pytest.mark.parametrize(
    "case",
    [
        *("bf16", "bf16, ZeRO 1", "bf16, ZeRO 2", "bf16, ZeRO 3"),
        *("offloaded, ZeRO 2", "offloaded, ZeRO 3", "mixture, bf16, ZeRO 2"),
    ],
)
def test_closed_form_memory_matches_engines(program: RunningProgram, case: str) -> None:
    options, _ = CASES[case]
    zero = {"stage": options["stage"], "reduce_bucket_size": BUCKET, **options.get("zero", {})}
    features = ZeroFeatures.from_config({"zero_optimization": zero}, replicas=2, bytes_per_value=2)
    model = trace("mixture" if options.get("is_mixture") else "layers")
    run = zero_run(model, features, is_accumulating=False, is_cpu=True)
    for measured in program.result(case):
        found = measured["bytes"]
        if "offloaded" not in case:
            for part in ("parameters", "optimizer"):
                assert run.device_parts[part] == pytest.approx(found[f"{part}_bytes"], abs=256)
        assert run.device.peak(RECORDS) == pytest.approx(found["tensors_peak_bytes"], rel=0.15)
