"""Telemetry on a GPU: CUDA events without synchronisation, and allocator counters."""

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from programs import needs_cuda

from dstrial.telemetry.instruments import timed_events
from dstrial.telemetry.memory import memory_now
from dstrial.telemetry.phase_timer import PhaseTimer

pytestmark = [pytest.mark.gpu, needs_cuda]


def test_device_events_time_phases_without_sync():
    timer = PhaseTimer(timed_events(get_accelerator()))
    assert timer.clock_name == "device events"
    matrix = torch.randn(2048, 2048, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        timer.switch(True)
        for _ in range(8):
            timer.run("forward", timer, lambda: matrix @ matrix)
            timer.stepped(timer)
        early = timer.take()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    late = timer.take()

    assert early or late
    assert all(0 < found["forward"] < 1 for found in (early, late) if found)


def test_memory_now_reports_allocator_and_process_memory():
    kept = torch.empty(2**20, device="cuda")
    found = memory_now(get_accelerator())

    assert found["device_memory_bytes"] >= kept.nbytes
    assert found["device_reserved_memory_bytes"] >= found["device_peak_memory_bytes"] > 0
    assert found["process_memory_bytes"] > 0
