"""The summary at the end of a run: speed, step time, FLOPS and the memory table."""

from __future__ import annotations

from typing import Any

from dstrial.telemetry.summary import memory_rows, summary_rows

MIB = 2**20


def document(**changes: Any) -> dict[str, Any]:
    usual = {
        "num_batches": 100,
        "seconds": 10.0,
        "clock": "host clock",
        "records_per_second": 320.0,
        "records_per_batch": 32.0,
        "tokens_per_second": 163840.0,
        "ranks": [
            {"batch_ms": 100.0, "data_wait_ms": 5.0, "forward_ms": 30.0, "backward_ms": 40.0, "step_ms": 20.0}
        ],
        "model_tflops_per_device": 300.0,
        "hardware_tflops_per_device": 360.0,
        "mfu": 0.5,
        "hfu": 0.6,
        "peak_flops_per_s": 600e12,
        "memory_bytes": [{"process_peak_memory_bytes": 512 * 2**20}],
    }
    return {name: value for name, value in {**usual, **changes}.items() if value is not None}


def test_summary_shows_known_values_with_sources() -> None:
    assert summary_rows(document()) == [
        (
            "speed",
            "320 records/s, 163,840 tokens/s; 100 ms per batch of 32 records (without the first batch)",
        ),
        ("step time", "data wait 5 %, forward 30 %, backward 40 %, step 20 %, other 5 % (by host clock)"),
        (
            "compute",
            "300 TFLOPS per device, FLOPs counted in the first batch; MFU 50 % of 600 TFLOPS (data sheet); 360 TFLOPS with "
            "recomputation",
        ),
        ("memory", "process, peak 512 MiB"),
    ]


def test_unknown_flops_are_shown_with_reason() -> None:
    rows = dict(
        summary_rows(
            document(
                model_tflops_per_device=None,
                flops_unknown="GPT is compiled, which hides its operations",
                tokens_per_second=None,
            )
        )
    )

    assert rows["compute"] == "FLOPs unknown: GPT is compiled, which hides its operations"
    assert "tokens" not in rows["speed"]


def test_memory_names_rank_with_most() -> None:
    gib = 2**30
    device = [
        {"device_peak_memory_bytes": 2 * gib, "device_reserved_memory_bytes": 3 * gib},
        {"device_peak_memory_bytes": 4 * gib},
    ]
    rows = dict(summary_rows(document(memory_bytes=device)))
    assert rows["memory"] == "device, peak 4.00 GiB (rank 1; least 2.00 GiB); reserved 3.00 GiB"


def test_small_models_have_small_units() -> None:
    flops = {"model_tflops_per_device": 4.2e-6, "hardware_tflops_per_device": 4.2e-6}
    rows = dict(summary_rows(document(**flops, mfu=None)))

    assert rows["compute"] == "4.2 MFLOPS per device, FLOPs counted in the first batch"


def test_summary_is_empty_without_measured_batches() -> None:
    assert summary_rows({}) == []
    assert summary_rows({"num_batches": 0, "seconds": 0.0, "memory_bytes": []}) == []


def rank(peak: float, **more: float) -> dict[str, float]:
    parts = {"parameters": 100.0, "gradients": 100.0, "optimizer": 0.5, "activations": 1200.0, "buffers": 0.0}
    return {
        **{f"{part}_bytes": value * MIB for part, value in {**parts, **more}.items()},
        "tensors_peak_bytes": peak * MIB,
        "process_peak_memory_bytes": 1.0,
    }


def test_memory_rows_show_rank_0_and_largest() -> None:
    rows = memory_rows([rank(1500), rank(1400), rank(1600, parameters=55.0), rank(1550)])

    assert rows == [
        ("tensors, MiB", "parameters  gradients  optimizer  activations  buffers   peak"),
        ("  rank 0", "       100        100        0.5        1,200        0  1,500"),
        ("  rank 2, most", "        55        100        0.5        1,200        0  1,600"),
    ]


def test_unmeasured_memory_has_no_row_or_column() -> None:
    assert memory_rows([{"process_peak_memory_bytes": 1}]) == []
    unknown = {
        name: value for name, value in rank(1).items() if "activations" not in name and "peak" not in name
    }
    heads, *_ = memory_rows([unknown])
    assert heads[1].split() == ["parameters", "gradients", "optimizer", "buffers"]
