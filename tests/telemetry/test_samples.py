"""Reports and run totals computed from the telemetry samples of all ranks."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from dstrial.telemetry.samples import (
    HOST_CLOCK,
    RankSample,
    RunTotals,
    report_metrics,
    tokens_of,
)

PEAK = 100e12


def sample(**changes: object) -> RankSample:
    usual = RankSample(
        num_batches=10,
        seconds=1.0,
        data_wait_s=0.2,
        phase_s={"forward": 0.02, "backward": 0.04, "step": 0.01},
        clock=HOST_CLOCK,
        num_tokens=1000,
        replica=0,
        memory_bytes={"process_peak_memory_bytes": 100},
        flops=(4e12, 1e12),
        learning_rate=0.01,
        gradient_norm=2.0,
    )
    return dataclasses.replace(usual, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("flops", [(4e12, 1e12), None])
def test_sample_pack_round_trips(flops: tuple[float, float] | None) -> None:
    one = sample(flops=flops, num_tokens=np.int64(7), gradient_norm=math.inf)
    assert RankSample.unpack(one.pack()) == one


def test_report_divides_batch_time_into_phases() -> None:
    metrics = report_metrics([sample()], num_records=80, num_skipped=1, peak_flops_per_s=PEAK)

    times = {name: metrics[name] for name in metrics if name.endswith("_ms")}
    assert times == pytest.approx(
        {
            "batch_ms": 100,
            "data_wait_ms": 20,
            "forward_ms": 20,
            "backward_ms": 40,
            "step_ms": 10,
            "other_ms": 10,
        }
    )
    assert metrics["records_per_second"] == 80
    assert metrics["tokens_per_second"] == 1000
    assert (metrics["skipped_steps"], metrics["learning_rate"], metrics["gradient_norm"]) == (1, 0.01, 2.0)
    assert metrics["timed_by"] == "host clock"
    json.dumps(metrics)


def test_model_flops_exclude_recomputation_and_mfu_uses_peak() -> None:
    metrics = report_metrics([sample(), sample(flops=(2e12, 1e12), replica=1)], 160, 0, PEAK)

    assert metrics["hardware_tflops_per_device"] == pytest.approx((4 + 2) * 10 / 2)
    assert metrics["model_tflops_per_device"] == pytest.approx((3 + 1) * 10 / 2)
    assert metrics["mfu"] == pytest.approx(0.20)
    assert metrics["hfu"] == pytest.approx(0.30)


def test_metrics_unknown_to_any_rank_are_omitted() -> None:
    metrics = report_metrics(
        [sample(), sample(flops=None, flops_unknown="a reason", replica=1, num_tokens=None)], 160, 0, PEAK
    )

    assert not {"mfu", "hfu", "model_tflops_per_device", "tokens_per_second"} & metrics.keys()
    assert "mfu" not in report_metrics([sample()], 80, 0, None)


def test_report_has_overall_and_per_rank_values() -> None:
    slow = sample(
        phase_s={"forward": 0.04, "stages": 0.01}, replica=1, memory_bytes={"process_peak_memory_bytes": 300}
    )
    metrics = report_metrics([sample(), slow], 160, 0, None)

    assert metrics["forward_ms"] == pytest.approx(30)
    assert metrics["stages_ms"] == pytest.approx(5)
    assert metrics["ranks"]["forward_ms"] == pytest.approx([20, 40])
    assert metrics["ranks"]["stages_ms"] == [None, pytest.approx(10)]
    assert metrics["process_peak_memory_bytes"] == 300
    assert metrics["ranks"]["process_peak_memory_bytes"] == [100, 300]


def test_report_of_first_batch_has_no_times() -> None:
    metrics = report_metrics([sample(num_batches=0, seconds=0.0)], 0, 0, PEAK)

    assert not [name for name in metrics if name.endswith(("_ms", "_per_second", "mfu"))]
    assert metrics["process_peak_memory_bytes"] == 100


def test_tokens_are_counted_once_per_replica() -> None:
    stages = [sample(num_tokens=tokens, replica=replica) for replica in (0, 1) for tokens in (500, None, 500)]

    assert tokens_of(stages) == 1000
    assert tokens_of([sample(num_tokens=None)]) is None


def test_totals_weight_reports_by_number_of_batches() -> None:
    totals = RunTotals()
    totals.add([sample(num_batches=0, seconds=0.0, phase_s={}, data_wait_s=0.0)], 0)
    totals.add([sample()], 80)
    totals.add([sample(num_batches=30, seconds=6.0, phase_s={"forward": 0.1}, data_wait_s=0.0)], 240)
    found = totals.to_json(PEAK)

    assert found["num_batches"] == 40
    assert found["records_per_second"] == pytest.approx(320 / 7)
    assert found["records_per_batch"] == 8
    assert found["tokens_per_second"] == pytest.approx(2000 / 7)
    assert found["ranks"][0]["forward_ms"] == pytest.approx((10 * 20 + 30 * 100) / 40)
    assert found["ranks"][0]["data_wait_ms"] == pytest.approx(200 / 40)
    assert found["model_tflops_per_device"] == pytest.approx(3 * 40 / 7)
    assert found["peak_flops_per_s"] == PEAK
    json.dumps(found)
