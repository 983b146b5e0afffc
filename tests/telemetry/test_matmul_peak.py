"""The device's peak FLOPS: measurement, cache file and data sheets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dstrial.telemetry import matmul_peak

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "dstrial" / "matmul_peaks.json"


def test_peak_is_cached_and_rng_state_unchanged(
    cache_file: Path,
) -> None:
    assert matmul_peak.known_peak(CPU, torch.float32) is None
    before = torch.get_rng_state()
    peak = matmul_peak.measured_peak(CPU, torch.float32)

    assert torch.equal(torch.get_rng_state(), before)
    assert peak.flops_per_s > 1e8
    assert (peak.dtype, peak.num_threads, peak.size) == ("float32", torch.get_num_threads(), 1024)
    assert matmul_peak.known_peak(CPU, torch.float32) == peak
    assert matmul_peak.known_peak(CPU, torch.bfloat16) is None
    (key,) = json.loads(cache_file.read_text())
    assert peak.device in key
    assert torch.__version__ in key
    assert [path.name for path in cache_file.parent.iterdir()] == [cache_file.name]


@pytest.mark.parametrize("content", ["{", "[1]", '{"x": 1}', '{"KEY": {"an old field": 1}}'])
def test_damaged_cache_is_measured_again(cache_file: Path, content: str) -> None:
    cache_file.parent.mkdir()
    cache_file.write_text(content.replace("KEY", matmul_peak._key(CPU, torch.float32)))

    assert matmul_peak.known_peak(CPU, torch.float32) is None
    peak = matmul_peak.measured_peak(CPU, torch.float32)
    assert matmul_peak.known_peak(CPU, torch.float32) == peak


@pytest.mark.parametrize(
    ("device", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756.0),
        ("NVIDIA A100-SXM4-80GB", "float16", 312.0),
        ("NVIDIA L40S", "bfloat16", 362.05),
        ("Tesla T4", "bfloat16", None),
        ("AMD EPYC 9654", "float32", None),
        ("NVIDIA A1000", "bfloat16", None),
    ],
)
def test_data_sheet_matches_whole_words_of_name(device: str, dtype: str, tflops: float | None) -> None:
    found = matmul_peak.data_sheet(device, dtype)
    assert found == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_slower_measurement_keeps_cached_peak(cache_file: Path) -> None:
    matmul_peak.measured_peak(CPU, torch.float32)
    ((key, fields),) = json.loads(cache_file.read_text()).items()
    fast = {**fields, "flops_per_s": 1e15}
    cache_file.write_text(json.dumps({key: fast}))

    assert matmul_peak.measured_peak(CPU, torch.float32).flops_per_s == 1e15
    assert json.loads(cache_file.read_text())[key]["flops_per_s"] == 1e15
