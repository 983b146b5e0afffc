from __future__ import annotations

import io
import sys
import time

import pytest
from rich.console import Console

from dstrial.cli.run_display import BarDisplay, PlainDisplay, make_display
from dstrial.cli.streams import LossTolerantStream
from dstrial.local.run_monitor import Report, RunView

TRAINING = Report("training", 10, {"loss": 0.123456, "samples_per_second": 2000.0})
VALIDATION = Report("validation", 10, {"loss": 0.5, "accuracy": 0.75})
OTHER = Report("system", 10, {"free": 1.0})


def view(batches_trained: int = 10, reports: tuple[Report, ...] = ()) -> RunView:
    return RunView(batches_trained, 100, ("loss", 0.123456), ("accuracy", 0.75), 2000.0, reports)


def streams() -> tuple[LossTolerantStream, LossTolerantStream]:
    return LossTolerantStream(sys.stdout), LossTolerantStream(sys.stderr)


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


def test_a_phase_of_the_start_is_told_once_and_other_words_of_the_launcher_always(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    display = PlainDisplay(*streams(), num_ranks=1, metric=None)
    now_s = time.monotonic()
    display.starting("importing model_def", 1.0)
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 5)
    display.starting("importing model_def", 5.0)
    display.starting("importing model_def", 6.0)
    display.message("dstrial.launch: starting: importing model_def, for 7 s")
    for _ in range(2):
        display.message("dstrial.launch: SIGTERM received: the ranks were asked to stop")
    display.message("dstrial.launch: starting: compiling operator x since 10:00:00; ranks that use it wait.")
    display.starting("compiling operator x", 9.0)
    assert capsys.readouterr().out.splitlines() == [
        "importing model_def, for 5 s",
        "dstrial.launch: SIGTERM received: the ranks were asked to stop",
        "dstrial.launch: SIGTERM received: the ranks were asked to stop",
        "dstrial.launch: starting: compiling operator x since 10:00:00; ranks that use it wait.",
    ]


def test_the_bar_names_the_phase_and_keeps_what_else_the_launcher_says() -> None:
    screen = io.StringIO()
    display = BarDisplay(
        Console(file=screen, force_terminal=True, width=200, color_system=None), num_ranks=1, metric=None
    )
    display.starting("compiling operator x", 9.0)
    display.message("dstrial.launch: starting: importing model_def, for 7 s")
    display.message("dstrial.launch: starting: compiling operator x since 10:00:00")
    display.message("dstrial.launch: SIGTERM received")
    display.close()
    text = screen.getvalue()
    assert "compiling operator x, 9 s" in text
    assert "importing model_def" not in text
    assert "compiling operator x since 10:00:00" in text
    assert "SIGTERM received" in text
