from __future__ import annotations

import logging
import types
from typing import Any

import pytest
from determined.core import _profiler as determineds

from dstrial.local import profiler
from dstrial.local.profiler import GROUPS, Devices, Rates, SystemSampler, average


def names(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: names(value) if isinstance(value, dict) else None for name, value in metrics.items()}


def test_groups_and_names_are_those_of_determineds_profiler() -> None:
    sampler = SystemSampler([])
    sampler.sample()
    found = sampler.take()
    sampler.close()

    expected = {}
    for collector in (determineds._CPU(), determineds._Memory(), determineds._Disk(), determineds._Network()):
        collector.sample_metrics()
        expected[collector.group] = collector.aggregate()
    assert names(found) == names(expected)
    assert set(found) == set(GROUPS) - {"gpu"}
    assert 0 <= found["cpu"]["cpu_util_simple"] <= 100
    assert found["memory"]["memory_free"] > 0
    assert 0 < found["disk"]["/"]["disk_util"] <= 100


def test_rates_are_growth_by_seconds() -> None:
    times = iter([10.0, 12.0, 12.0, 14.0])
    rates = Rates(lambda: next(times))

    assert rates.take({"bytes": 100}) == {}, "nothing is known of the time before"
    assert rates.take({"bytes": 150}) == {"bytes": 25.0}
    assert rates.take({"bytes": 170}) == {}, "no time has passed"
    assert rates.take({"bytes": 180, "new": 1}) == {"bytes": 5.0}


def test_samples_are_averaged_also_inside_and_by_those_that_have_a_number() -> None:
    samples = [{"a": 1.0, "/": {"used": 10.0}}, {"a": 3.0, "/": {"used": 20.0}, "b": 5.0}]

    assert average(samples) == {"a": 2.0, "/": {"used": 15.0}, "b": 5.0}
    assert average([]) == {}


def test_a_group_that_cannot_be_read_is_told_of_once_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise NotImplementedError("no /proc/net/dev")

    monkeypatch.setattr(profiler.psutil, "net_io_counters", broken)
    with caplog.at_level(logging.WARNING):
        sampler = SystemSampler([])
        sampler.sample()
        sampler.sample()

    assert set(sampler.take()) == {"cpu", "memory", "disk"}
    assert [record.getMessage() for record in caplog.records] == [
        "system metrics of the group 'network' are not collected: NotImplementedError: no /proc/net/dev"
    ]


def test_a_container_without_disks_and_networks_has_the_other_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(profiler.psutil, "disk_io_counters", lambda: None)
    monkeypatch.setattr(profiler.psutil, "net_io_counters", lambda: None)
    sampler = SystemSampler([])
    sampler.sample()

    found = sampler.take()
    assert set(found) == {"cpu", "memory", "disk"}
    assert set(found["disk"]) == {"/"}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A driver with three devices, one of which is another trial's, as ``pynvml`` shows it; what was asked for."""
    import pynvml

    asked: list[str] = []

    def handle(uuid: str) -> str:
        asked.append(uuid)
        if uuid not in ("GPU-0", "GPU-1", "MIG-2"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    def utilisation(of: str) -> Any:
        if of.startswith("MIG-"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return types.SimpleNamespace(gpu=50)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: asked.append("init"))
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: asked.append("shutdown"))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", handle)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", utilisation)
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetMemoryInfo", lambda of: types.SimpleNamespace(free=len(of) * 100)
    )
    return asked


def test_only_the_devices_of_the_trial_are_looked_at(
    driver: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    sampler = SystemSampler(["GPU-1", "MIG-2", "GPU-away"])
    sampler.sample()
    sampler.sample()
    found = sampler.take()["gpu"]
    sampler.close()

    assert found == {
        "GPU-1": {"gpu_util": 50.0, "gpu_free_memory": 500.0},
        "MIG-2": {"gpu_free_memory": 500.0},
    }
    assert driver == ["init", "GPU-1", "MIG-2", "GPU-away", "shutdown"]
    assert "NVML does not know GPU GPU-away" in caplog.text


def test_without_devices_of_nvidias_the_driver_is_left_alone(driver: list[str]) -> None:
    for uuids in ([], ["cpu-0"], ["amd-1"]):
        devices = Devices(uuids)
        assert devices.read() == {}
        devices.close()
    assert driver == []


def test_a_machine_without_a_driver_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        pass
    else:
        pytest.skip("Requires: no NVIDIA driver")
    assert Devices(["GPU-1"]).read() == {}
    assert "NVML cannot be used" in caplog.text
