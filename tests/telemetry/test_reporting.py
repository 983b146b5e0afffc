"""What the chief makes of samples, and when it has the device's peak measured."""

from __future__ import annotations

import dataclasses

import pytest
from test_samples import sample

from dstrial.telemetry.reporting import TelemetryReports
from dstrial.telemetry.samples import Peak

SLOW, FAST = (Peak(rate, "a processor", "float32", 1024, 2) for rate in (1e-6, 1e18))


@pytest.mark.parametrize(
    ("known", "load", "is_measured"),
    [
        (None, 9.0, True),
        (dataclasses.replace(FAST, load=0.1), 0.0, False),
        (dataclasses.replace(FAST, load=2.0), 1.9, True),
        (dataclasses.replace(FAST, load=2.0), 2.0, False),
        (dataclasses.replace(FAST, load=2.0), 9.0, False),
        (dataclasses.replace(FAST, load=None), 9.0, True),
        (dataclasses.replace(SLOW, load=0.1), 9.0, True),
    ],
    ids=[
        "unknown",
        "trusted",
        "doubtful, and less busy now",
        "doubtful, and as busy now",
        "doubtful, and busier now",
        "of another release",
        "beaten",
    ],
)
def test_the_peak_is_measured_at_the_end_where_that_can_be_trusted_more(
    known: Peak | None, load: float, is_measured: bool
) -> None:
    asked: list[str] = []
    kept: list[object] = []

    def measure() -> Peak:
        asked.append("measured")
        return dataclasses.replace(FAST, load=load)

    reports = TelemetryReports(lambda batches, metrics: None, kept.append, known)
    reports.write([sample(flops=(1e9, 0.0))], 10, 80, 0)
    reports.finish(measure, lambda: load)
    assert bool(asked) is is_measured
