"""Token counts, memory counters, and when rank 0 measures the device's peak FLOPS."""

from __future__ import annotations

import collections

import pytest
import torch
from test_samples import sample

from dstrial.telemetry.instruments import TelemetryReports
from dstrial.telemetry.memory import memory_now, process_memory
from dstrial.telemetry.samples import Peak
from dstrial.trial.trial import tokens_in

IDS = torch.zeros(2, 8, dtype=torch.long)


@pytest.mark.parametrize(
    ("micro_batch", "tokens"),
    [
        ({"input_ids": IDS}, 16),
        (collections.UserDict(input_ids=IDS, labels=IDS), 16),
        (({"input_ids": IDS}, IDS), 16),
        ((IDS, IDS), None),
        (IDS, None),
        ({"pixel_values": IDS}, None),
        ({"input_ids": "text"}, None),
        ([], None),
        (None, None),
    ],
)
def test_tokens_in_counts_input_ids_only(micro_batch: object, tokens: int | None) -> None:
    assert tokens_in(micro_batch) == tokens


STATUS = "Name:\tpython\nVmPeak:\t  900 kB\nVmHWM:\t  300 kB\nVmRSS:\t  200 kB\nThreads:\t4\n"


class Device:
    """Fake DeepSpeed accelerator without a counter of reserved memory."""

    def device_name(self) -> str:
        return "npu"

    def memory_allocated(self) -> int:
        return 10

    def max_memory_allocated(self) -> int:
        return 20

    def max_memory_reserved(self) -> int:
        raise NotImplementedError


def test_process_memory_parses_status_in_bytes() -> None:
    assert process_memory(STATUS) == {
        "process_memory_bytes": 200 * 1024,
        "process_peak_memory_bytes": 300 * 1024,
    }
    assert process_memory("") == {}


def test_memory_now_omits_unsupported_device_counters() -> None:
    found = memory_now(Device())

    assert found["device_memory_bytes"] == 10
    assert found["device_peak_memory_bytes"] == 20
    assert "device_reserved_memory_bytes" not in found
    assert found["process_peak_memory_bytes"] >= found["process_memory_bytes"] > 2**20


SLOW, FAST = (Peak(rate, "a processor", "float32", 1024, 2) for rate in (1e-6, 1e18))


@pytest.mark.parametrize(
    ("known", "is_measured"), [(None, True), (FAST, False), (SLOW, True)], ids=["unknown", "known", "beaten"]
)
def test_peak_is_measured_if_unknown_or_exceeded(known: Peak | None, is_measured: bool) -> None:
    asked: list[str] = []
    kept: list[object] = []

    def measure() -> Peak:
        asked.append("measured")
        return FAST

    reports = TelemetryReports(lambda batches, metrics: None, kept.append, known)
    reports.write([sample(flops=(1e9, 0.0))], 10, 80, 0)
    reports.finish(measure)
    assert bool(asked) is is_measured
