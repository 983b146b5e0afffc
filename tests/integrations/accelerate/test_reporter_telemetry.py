"""Telemetry of an Accelerate loop on two ranks, which does not change training."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from launching import Launched, launch

PROGRAM = Path(__file__).with_name("telling_reporter.py")
TIMES = {"batch_ms", "forward_ms", "backward_ms", "step_ms", "other_ms"}
# Two micro batches of 4 records on each rank.
RECORDS, TOKENS = 16, 16 * 16

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        importlib.util.find_spec("accelerate") is None, reason="Requires: [accelerate, transformers]"
    ),
]

CONFIG: dict[str, Any] = {
    "name": "telling",
    "entrypoint": "python3 -m dstrial.launch telling_reporter.py",
    "hyperparameters": {
        "deepspeed_config": {
            "train_batch_size": RECORDS,
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": 1},
        },
    },
    "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 9}},
    "scheduling_unit": 3,
    "min_validation_period": {"batches": 2},
    "checkpoint_policy": "none",
}


def tell(directory: Path, *arguments: str, **changes: Any) -> Launched:
    directory.mkdir()
    return launch(directory, PROGRAM, {**CONFIG, **changes}, *arguments)


def totals_of(launched: Launched) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((launched.run / "telemetry.json").read_text())
    return found


def weights_of(launched: Launched) -> str:
    (found,) = set(re.findall("weights: ([0-9a-f]+)", launched.output))
    return found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """A run with system metrics."""
    return tell(tmp_path_factory.mktemp("told") / "run", profiling={"enabled": True})


def require_whole(row: dict[str, Any]) -> None:
    """Check that phase times sum to the batch time, which excludes validations."""
    parts = sum(row.get(name, 0.0) for name in TIMES | {"data_wait_ms"} if name != "batch_ms")
    assert parts == pytest.approx(row["batch_ms"], rel=0.01)


def test_telemetry_reports_times_memory_speed_per_rank(told: Launched) -> None:
    rows = told.rows("telemetry")
    assert sorted(rows) == [3, 6, 9]
    for row in rows.values():
        assert TIMES | {"data_wait_ms", "process_memory_bytes", "skipped_steps", "learning_rate"} <= set(row)
        assert row["timed_by"] == "host clock"
        for name in (*TIMES, "data_wait_ms", "process_peak_memory_bytes"):
            assert len(row["ranks"][name]) == 2
            assert None not in row["ranks"][name], name
        require_whole(row)
        assert row["forward_ms"] > 0
        assert row["backward_ms"] > 0
        assert row["learning_rate"] == 0.01
        assert row["tokens_per_second"] == pytest.approx(row["records_per_second"] * TOKENS / RECORDS)
    assert totals_of(told)["num_batches"] == 8, "the first is left out"
    assert len(totals_of(told)["ranks"]) == 2


def test_telemetry_flops_exclude_validation(told: Launched) -> None:
    row = told.rows("telemetry")[9]
    # The head's matmul: 1 forward and 2 backward, for 2 micro batches of 4 records of 16 tokens per device.
    flops = 3 * 2 * (2 * 4 * 16) * 16 * 32
    batches_per_second = row["records_per_second"] / RECORDS
    assert row["model_tflops_per_device"] == pytest.approx(flops * batches_per_second / 1e12, rel=1e-6)


def test_telemetry_includes_system_metrics(told: Launched) -> None:
    rows = [json.loads(line) for line in (told.run / "metrics.jsonl").read_text().splitlines()]
    assert {"cpu", "memory", "disk", "network"} <= {row["group"] for row in rows}


def test_training_without_telemetry_is_bitwise_equal(told: Launched, tmp_path: Path) -> None:
    silent = tell(tmp_path / "silent", data={"dstrial": {"telemetry": False}})

    assert not silent.rows("telemetry")
    assert not (silent.run / "telemetry.json").exists()
    assert weights_of(silent) == weights_of(told)
    assert silent.values("training", "loss") == told.values("training", "loss")


def test_telemetry_reports_data_wait(tmp_path: Path) -> None:
    slow = tell(tmp_path / "slow", "--pause-s", "0.01")

    row = slow.rows("telemetry")[9]
    # A rank sleeps 10 ms for each of 8 records; the loader prefetches one micro batch.
    assert row["data_wait_ms"] > 40


def test_telemetry_own_data_loop_omits_wait_and_flops(tmp_path: Path) -> None:
    own = tell(tmp_path / "own", "--draws-itself")

    rows = own.rows("telemetry")
    assert sorted(rows) == [3, 6, 9]
    for row in rows.values():
        assert set(row) >= TIMES
        assert not {"data_wait_ms", "tokens_per_second", "model_tflops_per_device"} & set(row)
        assert row["records_per_second"] > 0
        require_whole(row)
    assert totals_of(own)["flops_unknown"] == "the script draws its records itself"
    assert "data_wait_ms" not in totals_of(own)["ranks"][0]
