"""Token counts, memory counters, and a device's peak FLOPS."""

from __future__ import annotations

import collections

import pytest
import torch

from dstrial.telemetry.instruments import peak_flops
from dstrial.telemetry.memory import memory_now
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


def test_memory_now_omits_unsupported_device_counters() -> None:
    found = memory_now(Device())

    assert found["device_memory_bytes"] == 10
    assert found["device_peak_memory_bytes"] == 20
    assert "device_reserved_memory_bytes" not in found
    assert found["process_peak_memory_bytes"] >= found["process_memory_bytes"] > 2**20


@pytest.mark.parametrize(
    ("device", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756.0),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5),
        ("NVIDIA A10G", "bfloat16", None),
        ("Tesla T4", "bfloat16", None),
        ("AMD EPYC", "float32", None),
    ],
)
def test_peak_flops_matches_whole_words_of_name(device: str, dtype: str, tflops: float | None) -> None:
    found = peak_flops(device, dtype)
    assert found is None if tflops is None else found == pytest.approx(tflops * 1e12)
