from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from dstrial.cli.run_display import BarDisplay, PlainDisplay, make_display
from dstrial.cli.streams import LastingStream
from dstrial.local.run_monitor import Report, RunView

TRAINING = Report("training", 10, {"loss": 0.123456, "samples_per_second": 2000.0})
VALIDATION = Report("validation", 10, {"loss": 0.5, "accuracy": 0.75})
OTHER = Report("system", 10, {"free": 1.0})


def view(batches_trained: int = 10, reports: tuple[Report, ...] = ()) -> RunView:
    return RunView(batches_trained, 100, ("loss", 0.123456), ("accuracy", 0.75), 2000.0, reports)


def streams() -> tuple[LastingStream, LastingStream]:
    return LastingStream(sys.stdout), LastingStream(sys.stderr)


def test_without_a_terminal_there_is_one_line_per_report(capsys: pytest.CaptureFixture[str]) -> None:
    display = make_display(*streams(), num_ranks=1, metric="accuracy", is_plain=False)
    display.view(view(reports=(TRAINING, VALIDATION, OTHER)))
    display.view(view())
    display.close()
    assert capsys.readouterr().out.splitlines() == [
        "batch 10/100  loss 0.1235  2000 samples/s",
        "batch 10/100  validation  accuracy 0.75",
    ]


def test_lines_of_ranks_keep_their_stream_and_have_a_prefix_if_there_are_several(
    capsys: pytest.CaptureFixture[str],
) -> None:
    PlainDisplay(*streams(), num_ranks=1, metric=None).rank_line(0, "stdout", "[alone]")
    display = PlainDisplay(*streams(), num_ranks=2, metric=None)
    display.rank_line(0, "stdout", "a")
    display.rank_line(1, "stderr", "b")
    captured = capsys.readouterr()
    assert captured.out == "[alone]\n[rank 0] a\n"
    assert captured.err == "[rank 1] b\n"


def test_the_bar_shows_batches_loss_validation_speed_and_time_left_below_the_lines_of_ranks() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=200, color_system=None)
    display = BarDisplay(console, num_ranks=2, metric="accuracy")
    display.view(RunView())
    display.rank_line(1, "stderr", "[bold]not markup[/bold]")
    display.view(view(40))
    display.view(view(41))
    display.close()
    text = screen.getvalue()
    assert "[rank 1] [bold]not markup[/bold]" in text
    last = text[text.rindex("training") :]
    assert "41/100 batches  loss 0.1235  val accuracy 0.75  2000 samples/s" in last
    assert "time left" in last
