"""``dsat_reporting_context`` around a script's training loop, on real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from core_api_program import train

from dstrial.dsat.core.outcome import FailureKind, failure_from_log
from dstrial.testing.ranks import run_function

pytestmark = pytest.mark.ranks

NUM_FORWARD_FLOPS = 2 * 4 * (32 * 64 + 64)  # one micro batch of 4 records


def test_script_ranks_are_measured_and_exit_together(tmp_path: Path) -> None:
    found = [result.value["measured"] for result in run_function(train, 2, str(tmp_path), ["measured"])]

    assert [one["left"] for one in found] == ["by exit 0"] * 2
    assert len({one["steps"] for one in found}) == 1
    assert all(one["is_restored"] for one in found)
    assert [one["is_completed"] for one in found] == [True, False]
    metrics = json.loads((tmp_path / "measured.json").read_text())["metrics"]
    assert metrics["train_batch_size"] == 16
    assert metrics["throughput"] == pytest.approx(16e6 / metrics["latency"])
    assert metrics["num_params"] == 32 * 64 + 64 + 64 + 1
    step_s = metrics["latency"] / 1e6
    # Forward, both gradients of layer 2, and the weight gradient of layer 1, whose input needs no gradient.
    counted = NUM_FORWARD_FLOPS + 2 * 4 * (2 * 64 + 32 * 64)
    assert metrics["hardware_FLOPS_per_gpu"] * step_s / 2 == pytest.approx(counted)
    assert metrics["FLOPS_per_gpu"] == metrics["hardware_FLOPS_per_gpu"]
    # The search compares these values with the requested configuration.
    assert (metrics["zero_stage"], metrics["num_engines"]) == (2, 1)
    assert (metrics["train_micro_batch_size_per_gpu"], metrics["gradient_accumulation_steps"]) == (4, 2)
    # Kept for backward: the input of layer 1, and the output of ReLU, which is the input of layer 2.
    assert 4 * (32 + 64) <= metrics["activation_bytes_per_record"] <= 4 * (32 + 2 * 64 + 2)


def test_loop_failures_are_reported_and_propagate(tmp_path: Path) -> None:
    failures = {
        "nan": ("NumericError", FailureKind.NUMERIC),
        "error": ("KeyError", FailureKind.USER_ERROR),
        "memory": ("RuntimeError", FailureKind.HOST_OOM),
    }
    (result,) = run_function(train, 1, str(tmp_path), ["off", "short", *failures, "fit"])

    told = [line for line in result.stderr.splitlines() if "DSTRIAL_DSAT_FAILURE" in line]
    assert {case: one["left"] for case, one in result.value.items()} == {
        "off": "by its end",
        "short": "by exit 0",
        "fit": "by exit 0",
        **{case: left for case, (left, _) in failures.items()},
    }
    assert all(one["is_restored"] for one in result.value.values())
    assert result.value["off"]["steps"] == 2
    # Outside a search the context is a no-op; a short loop still has a result, a failed loop has none.
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["fit.json", "short.json"]
    assert json.loads((tmp_path / "fit.json").read_text())["metrics"]["train_batch_size"] == 8
    assert result.value["short"]["is_completed"]
    found = [failure_from_log([line]) for line in told]
    assert [(failure.kind, failure.rank) for failure in found] == [(kind, 0) for _, kind in failures.values()]
    assert found[2].requested_bytes == 4 * 2**50


def test_context_per_micro_batch_measures_like_whole_loop(tmp_path: Path) -> None:
    found = [result.value["each"] for result in run_function(train, 2, str(tmp_path), ["each"])]

    assert [one["left"] for one in found] == ["by exit 0"] * 2
    assert len({one["steps"] for one in found}) == 1
    assert all(one["is_restored"] for one in found)
    assert found[0]["is_completed"]
    metrics = json.loads((tmp_path / "each.json").read_text())["metrics"]
    assert metrics["train_batch_size"] == 16
    assert metrics["num_steps"] >= 4
    assert metrics["throughput"] == pytest.approx(16e6 / metrics["latency"])
    assert metrics["FLOPS_per_gpu"] > 0
