"""What ``dstrial run`` shows of training: a bar on a terminal, else plain lines."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from dstrial.cli.streams import LossTolerantStream
from dstrial.local.run_monitor import Report, RunView, named_metric
from dstrial.visible_text import visible

_POLL_PERIOD_S = 0.2
_SILENCE_S = 4.0
_OF_LAUNCHER = "dstrial.launch: starting: "


class Display(Protocol):
    """Shows one attempt at a run; thread-safe."""

    def rank_line(self, rank: int, stream: str, line: str) -> None:
        """Show a line that a rank wrote to ``stdout`` or ``stderr``."""

    def message(self, text: str) -> None:
        """Show a line of ``dstrial run`` itself."""

    def starting(self, text: str, age_s: float) -> None:
        """Show the phase before the first batch, and its age in seconds."""

    def view(self, view: RunView) -> None:
        """Show progress and new reports."""

    def close(self) -> None:
        """End the display; later output is printed below it."""


def make_display(
    out: LossTolerantStream, err: LossTolerantStream, *, num_ranks: int, metric: str | None, is_plain: bool
) -> Display:
    """Choose the display for a terminal, a pipe or a file."""
    if is_plain or not out.isatty():
        return PlainDisplay(out, err, num_ranks=num_ranks, metric=metric)
    console = Console(file=cast(TextIO, out), highlight=False)
    return BarDisplay(console, num_ranks=num_ranks, metric=metric)


def _prefixed(rank: int, num_ranks: int, line: str) -> str:
    return line if num_ranks == 1 else f"[rank {rank}] {line}"


def number(value: float) -> str:
    """Write a metric with four significant digits."""
    return f"{value:.4g}"


def report_line(report: Report, batches_total: int | None, metric: str | None) -> str:
    """Return a report's line, like ``batch 100/1000  loss 0.52  1834 samples/s``."""
    total = "" if batches_total is None else f"/{batches_total}"
    place = f"batch {report.steps_completed}{total}"
    preferred = metric if report.group == "validation" else "loss"
    shown = named_metric(report, preferred)
    parts = [place] if report.group == "training" else [f"{place}  {report.group}"]
    if shown is not None:
        parts.append(f"{shown[0]} {number(shown[1])}")
    speed = report.metrics.get("samples_per_second")
    if report.group == "training" and speed is not None:
        parts.append(f"{number(speed)} samples/s")
    return "  ".join(parts)


def _phase_of(line: str) -> str | None:
    """Return the phase in a line of ``launch.start_watch``; None for other lines."""
    told = line.removeprefix(_OF_LAUNCHER)
    return None if told == line else re.split(", for | since ", told)[0].removeprefix("still ")


class PlainDisplay:
    """One line per report; lines of several ranks have their rank as a prefix."""

    def __init__(
        self, out: LossTolerantStream, err: LossTolerantStream, *, num_ranks: int, metric: str | None
    ) -> None:
        self._out = out
        self._err = err
        self._num_ranks = num_ranks
        self._metric = metric
        self._lock = threading.Lock()
        self._told: set[str] = set()
        self._written_s = time.monotonic()

    def rank_line(self, rank: int, stream: str, line: str) -> None:
        target = self._err if stream == "stderr" else self._out
        with self._lock:
            self._written_s = time.monotonic()
            target.write(_prefixed(rank, self._num_ranks, visible(line)) + "\n")

    def message(self, text: str) -> None:
        """Write the text, unless it repeats a line on the start."""
        phase = _phase_of(text)
        if phase is not None and phase in self._told and " since " not in text and "still " not in text:
            return
        if phase is not None or text.startswith("waiting for "):
            self._told.add(phase or text)
        with self._lock:
            self._written_s = time.monotonic()
            self._out.write(visible(text) + "\n")

    def starting(self, text: str, age_s: float) -> None:
        """Write a line, once, when nothing else has been written for long."""
        if text not in self._told and time.monotonic() - self._written_s >= _SILENCE_S:
            self.message(text + (f", for {age_s:.0f} s" if age_s >= 1 else ""))
            self._told.add(text)

    def view(self, view: RunView) -> None:
        for report in view.new_reports:
            if report.group in ("training", "validation"):
                self.message(report_line(report, view.batches_total, self._metric))

    def close(self) -> None:
        """Do nothing: every line is written already."""


class BarDisplay:
    """A progress bar in the terminal's last line; all else is printed above it."""

    def __init__(self, console: Console, *, num_ranks: int, metric: str | None) -> None:
        self._num_ranks = num_ranks
        self._metric = metric
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("time left"),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=5,
        )
        self._task: TaskID = self._progress.add_task("starting", total=None, numbers="")
        self._has_begun = False
        self._progress.start()

    def rank_line(self, rank: int, stream: str, line: str) -> None:  # noqa: ARG002 - a terminal shows both
        self.message(_prefixed(rank, self._num_ranks, line))

    def message(self, text: str) -> None:
        """Print above the bar, but no phase of the start, which the bar names."""
        if _phase_of(text) is not None and " since " not in text:
            return
        self._progress.console.print(Text(visible(text)), soft_wrap=True)

    def starting(self, text: str, age_s: float) -> None:
        if not self._has_begun:
            self._progress.update(self._task, description=f"{text[:60]}, {age_s:.0f} s")

    def view(self, view: RunView) -> None:
        if view.batches_trained is None or view.batches_total is None:
            return
        parts = [f"{view.batches_trained}/{view.batches_total} batches"]
        parts += [
            f"{name} {number(value)}"
            for name, value in (_named(view.loss), _named(view.validation, "val "))
            if name
        ]
        if view.samples_per_second is not None:
            parts.append(f"{number(view.samples_per_second)} samples/s")
        if not self._has_begun:
            # The batches before a resume must not count as speed.
            self._has_begun = True
            self._progress.reset(
                self._task, total=view.batches_total, completed=view.batches_trained, description="training"
            )
        self._progress.update(
            self._task, total=view.batches_total, completed=view.batches_trained, numbers="  ".join(parts)
        )

    def close(self) -> None:
        self._progress.stop()


def _named(pair: tuple[str, float] | None, prefix: str = "") -> tuple[str, float]:
    return ("", 0.0) if pair is None else (prefix + pair[0], pair[1])


class Refresher:
    """Shows a new view every fifth of a second while a block runs, and at its end."""

    def __init__(self, poll: Callable[[], RunView], show: Callable[[RunView], None]) -> None:
        self._poll = poll
        self._show = show
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dstrial-run-display", daemon=True)

    def __enter__(self) -> Refresher:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_done.set()
        self._thread.join()
        self._show(self._poll())

    def _run(self) -> None:
        while not self._is_done.wait(_POLL_PERIOD_S):
            self._show(self._poll())
