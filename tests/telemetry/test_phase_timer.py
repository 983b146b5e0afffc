"""Timing of forward, backward and step by the host clock or by device events."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from dstrial.telemetry.phase_timer import MOST_TIMED, PhaseTimer

ENGINE = object()


class Device:
    """Fake device: calls are queued, take 1 ms, and end when a test raises ``done``."""

    def __init__(self) -> None:
        self.queued = 0
        self.done = 0
        self.num_events = 0

    def make_event(self) -> DeviceEvent:
        self.num_events += 1
        return DeviceEvent(self)

    def call(self) -> str:
        self.queued += 1
        return "result"


class DeviceEvent:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at = 0

    def record(self) -> None:
        self.at = self.device.queued

    def query(self) -> bool:
        return self.device.done >= self.at

    def elapsed_time(self, end: Any) -> float:
        assert self.query(), "elapsed_time would block: the event has not passed"
        assert end.query(), "elapsed_time would block: the event has not passed"
        return float(end.at - self.at)


def train(timer: PhaseTimer, call: Any, num_batches: int = 1, num_micro_batches: int = 1) -> None:
    timer.switch(True)
    for _ in range(num_batches):
        for _ in range(num_micro_batches):
            assert timer.run("forward", ENGINE, call) == "result"
            timer.run("backward", ENGINE, call)
        timer.run("step", ENGINE, call)
        timer.stepped(ENGINE)
    timer.switch(False)


def test_host_clock_times_batch_without_events() -> None:
    ticks = itertools.count()
    timer = PhaseTimer(None, clock=lambda: float(next(ticks)))
    train(timer, lambda: "result", num_batches=3, num_micro_batches=2)

    assert timer.clock_name == "host clock"
    assert timer.take() == {"forward": 2.0, "backward": 2.0, "step": 1.0}
    assert timer.take() == {}


def test_nested_calls_count_once() -> None:
    ticks = itertools.count()
    timer = PhaseTimer(None, clock=lambda: float(next(ticks)))
    timer.switch(True)
    timer.run("forward", ENGINE, lambda: timer.run("forward", ENGINE, lambda: timer.run("step", ENGINE, int)))
    timer.stepped(ENGINE)

    assert timer.take() == {"forward": 1.0}


def test_passed_events_are_read_without_waiting() -> None:
    device = Device()
    timer = PhaseTimer(device.make_event)
    train(timer, device.call, num_batches=4, num_micro_batches=2)
    assert timer.take() == {}, "the device has done nothing yet"

    device.done = device.queued
    train(timer, device.call, num_batches=1)
    assert timer.take() == pytest.approx({"forward": 2e-3, "backward": 2e-3, "step": 1e-3})

    device.done = device.queued
    assert timer.take() == pytest.approx({"forward": 1e-3, "backward": 1e-3, "step": 1e-3})
    assert timer.clock_name == "device events"


def test_events_are_reused_and_batches_sampled() -> None:
    device = Device()
    timer = PhaseTimer(device.make_event)
    for _ in range(4):
        train(timer, device.call, num_batches=1000)
        device.done = device.queued
        assert timer.take() == pytest.approx({"forward": 1e-3, "backward": 1e-3, "step": 1e-3})
    before = device.num_events
    train(timer, device.call, num_batches=1000)
    device.done = device.queued
    timer.take()

    assert device.num_events == before
    assert timer._stride == 1000 // MOST_TIMED
