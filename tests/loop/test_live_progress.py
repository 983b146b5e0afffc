"""Progress of ``Trainer.fit``: lines in a script, a table in a notebook."""

from __future__ import annotations

import re
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


def test_notebook_display_has_curve_per_group() -> None:
    class Handle:
        shown = ""

        def update(self, live: LiveProgress) -> None:
            self.shown = live._repr_html_()

    live = LiveProgress(None, None, is_silent=False)
    live._handle = Handle()
    for report in REPORTS:
        live.report(*report)

    assert live._handle.shown.count("<polyline") == 2
    assert "batch 20  loss 0.25" in live._handle.shown
    assert "<b>" not in live._handle.shown


def test_broken_pipe_does_not_end_training(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def write(self, text: str) -> None:
            raise BrokenPipeError(text)

    monkeypatch.setattr("sys.stdout", Gone())
    live = LiveProgress(20, None, is_silent=False)
    for report in REPORTS:
        live.report(*report)

    assert live.newest["training"] == REPORTS[2][2]


def test_curve_omits_non_finite_values() -> None:
    live = LiveProgress(None, None, is_silent=False)
    live._handle = type("Handle", (), {"update": lambda *_: None})()
    for batch, loss in enumerate((0.5, float("nan"), float("inf"), 0.25)):
        live.report("training", batch, {"loss": loss})

    (points,) = re.findall('points="(.*?)"', live._repr_html_())
    assert points == "0.0,0.0 420.0,140.0"
