"""Progress of ``Trainer.fit`` in lines."""

from __future__ import annotations

from typing import Any

import pytest

from dstrial.loop.metric_sinks import LiveProgress

REPORTS: list[tuple[str, int, dict[str, Any]]] = [
    ("training", 10, {"loss": 0.5, "samples_per_second": 100.0}),
    ("validation", 10, {"accuracy": 0.5, "<b>": 1.0}),
    ("training", 20, {"loss": 0.25, "samples_per_second": 100.0}),
    ("validation", 20, {"accuracy": 0.75, "confusion": [[1]]}),
]


def test_live_progress_prints_lines_and_keeps_newest(capsys: pytest.CaptureFixture[str]) -> None:
    live = LiveProgress(20, "accuracy", is_silent=False)
    live.open(None)  # type: ignore[arg-type]  # the context is not read
    for report in REPORTS:
        live.report(*report)

    assert capsys.readouterr().out.splitlines()[1:3] == [
        "batch 10/20  validation  accuracy 0.5",
        "batch 20/20  loss 0.25  100 samples/s",
    ]
    assert live.newest == {group: metrics for group, _, metrics in REPORTS}


def test_broken_pipe_does_not_end_training(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def write(self, text: str) -> None:
            raise BrokenPipeError(text)

    monkeypatch.setattr("sys.stdout", Gone())
    live = LiveProgress(20, None, is_silent=False)
    for report in REPORTS:
        live.report(*report)

    assert live.newest["training"] == REPORTS[2][2]
