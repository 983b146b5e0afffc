"""What the chief makes of samples, and when it has the device's peak measured."""

from __future__ import annotations

import pytest
from test_samples import sample

from dstrial.telemetry.instruments import TelemetryReports
from dstrial.telemetry.samples import Peak

SLOW, FAST = (Peak(rate, "a processor", "float32", 1024, 2) for rate in (1e-6, 1e18))


@pytest.mark.parametrize(
    ("known", "is_measured"), [(None, True), (FAST, False), (SLOW, True)], ids=["unknown", "known", "beaten"]
)
def test_the_peak_is_measured_at_the_end_if_unknown_or_beaten(known: Peak | None, is_measured: bool) -> None:
    asked: list[str] = []
    kept: list[object] = []

    def measure() -> Peak:
        asked.append("measured")
        return FAST

    reports = TelemetryReports(lambda batches, metrics: None, kept.append, known)
    reports.write([sample(flops=(1e9, 0.0))], 10, 80, 0)
    reports.finish(measure)
    assert bool(asked) is is_measured
