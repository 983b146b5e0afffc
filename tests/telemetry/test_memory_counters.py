"""Memory counters: the process's on the CPU, called so, and the device's own elsewhere."""

from __future__ import annotations

from dstrial.telemetry.memory import memory_now, process_memory

STATUS = "Name:\tpython\nVmPeak:\t  900 kB\nVmHWM:\t  300 kB\nVmRSS:\t  200 kB\nThreads:\t4\n"


class Device:
    """Answers as an accelerator of DeepSpeed's that does not count what it has reserved."""

    def device_name(self) -> str:
        return "npu"

    def memory_allocated(self) -> int:
        return 10

    def max_memory_allocated(self) -> int:
        return 20

    def max_memory_reserved(self) -> int:
        raise NotImplementedError


def test_the_kernels_text_is_read_in_bytes() -> None:
    assert process_memory(STATUS) == {
        "process_memory_bytes": 200 * 1024,
        "process_peak_memory_bytes": 300 * 1024,
    }
    assert process_memory("") == {}


def test_a_device_is_asked_for_its_counters_and_one_that_it_lacks_is_missing() -> None:
    found = memory_now(Device())

    assert found["device_memory_bytes"] == 10
    assert found["device_peak_memory_bytes"] == 20
    assert "device_reserved_memory_bytes" not in found
    assert found["process_peak_memory_bytes"] >= found["process_memory_bytes"] > 2**20
