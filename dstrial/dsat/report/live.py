"""A search on a terminal: what happens scrolls above, and below stand progress, the best so far and the time left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dstrial.dsat.durations import format_duration
from dstrial.dsat.outcome import Failure, Measured, score
from dstrial.dsat.report import numbers
from dstrial.dsat.report.document import UNITS, memory_bytes
from dstrial.dsat.results import TrialResult, best_of, gain

_NUM_ROWS = 8
_REFRESHES_PER_S = 2.0


class LiveTable:
    """Shows a search while the ``with`` block lasts; on anything but a terminal it prints lines and nothing else.

    Args:
        metric: that is searched for.
        max_trials: at most so many.
        num_parallel: how many run at the same time.
        budget_s: seconds that the search may take; None without a limit.
        console: where to show it; standard output if None.
    """

    def __init__(
        self,
        metric: str,
        *,
        max_trials: int,
        num_parallel: int = 1,
        budget_s: float | None = None,
        console: Console | None = None,
    ) -> None:
        self._metric, self._max_trials = metric, max_trials
        self._num_parallel, self._budget_s = num_parallel, budget_s
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._began_s = self._shown_s = time.monotonic()
        self._is_shown = False

    def __enter__(self) -> LiveTable:
        if self._console.is_terminal:
            self._live.start()
            self._is_shown = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_shown:
            self._live.stop()
            self._is_shown = False

    def tell(self, line: str) -> None:
        """Print a line above the table."""
        self._console.print(Text(line))

    def show(self, trials: Sequence[TrialResult]) -> None:
        """Show the trials so far; called as often as one likes, drawn twice a second at most."""
        now_s = time.monotonic()
        if self._is_shown and now_s - self._shown_s >= 1 / _REFRESHES_PER_S:
            self._shown_s = now_s
            self._live.update(self.drawn(trials, now_s - self._began_s), refresh=True)

    def drawn(self, trials: Sequence[TrialResult], running_s: float) -> Group:
        """Return what is shown.

        Args:
            trials: so far.
            running_s: seconds since this process began.
        """
        best = best_of(trials, self._metric)
        num_ended = sum(1 for trial in trials if trial.outcome is not None)
        table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
        for name in ("trial", self._metric, "memory", "time"):
            width = 22 if name == self._metric else None
            table.add_column(
                name, justify="right" if name in ("trial", "time") else "left", no_wrap=True, min_width=width
            )
        table.add_column("configuration", no_wrap=True, overflow="ellipsis", ratio=1)
        ranked = sorted(trials, key=lambda trial: (trial.outcome is not None, -_worth(trial, self._metric)))
        for trial in ranked[:_NUM_ROWS]:
            style = "bold" if trial is best else ("dim" if isinstance(trial.outcome, Failure) else "")
            table.add_row(*self._cells(trial), style=style)
        if len(ranked) > _NUM_ROWS:
            table.add_row("", f"and {len(ranked) - _NUM_ROWS} more", style="dim")
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            ProgressBar(total=self._max_trials, completed=num_ended, width=30),
            f"{num_ended} of at most {self._max_trials} trials",
            self.time_left(trials, running_s),
        )
        line = Text(self.best_line(trials), style="bold", no_wrap=True, overflow="ellipsis")
        return Group(table, bar, line)

    def best_line(self, trials: Sequence[TrialResult]) -> str:
        """Return the best so far, and what it gains."""
        best = best_of(trials, self._metric)
        if best is None or best.outcome is None:
            return "best so far: nothing was measured yet"
        value = abs(score(best.outcome, self._metric) or 0.0)
        line = f"best so far: {numbers.amount(value)} {UNITS[self._metric]}"
        own = next((trial for trial in trials if trial.candidate.is_own), None)
        if best.candidate.is_own:
            return f"{line} (yours)"
        before = None if own is None or own.outcome is None else score(own.outcome, self._metric)
        after = score(best.outcome, self._metric)
        if before is None or after is None:
            return f"{line}: {best.description}"
        return f"{line} ({numbers.share(gain(after, before), signed=True)} over yours): {best.description}"

    def time_left(self, trials: Sequence[TrialResult], running_s: float) -> str:
        """Return how long it may still take at most, from the median trial and from the budget."""
        took = sorted(trial.seconds for trial in trials if trial.outcome is not None and trial.seconds)
        num_ended = sum(1 for trial in trials if trial.outcome is not None)
        estimates = []
        if took:
            left = (self._max_trials - num_ended) * took[len(took) // 2] / self._num_parallel
            estimates.append(left)
        if self._budget_s is not None:
            estimates.append(max(self._budget_s - running_s, 0.0))
        return f"at most {format_duration(min(estimates))} left" if estimates else ""

    def _cells(self, trial: TrialResult) -> tuple[str, str, str, str, str]:
        took = "" if trial.seconds is None else format_duration(trial.seconds)
        value, memory = "running", ""
        if isinstance(trial.outcome, Failure):
            value = trial.outcome.kind.value
        elif isinstance(trial.outcome, Measured):
            found = trial.outcome.value(self._metric)
            value = "not measured" if found is None else numbers.amount(found)
            held = memory_bytes(trial.outcome)
            memory = "" if held is None else numbers.gibibytes(held)
        return str(trial.trial_id), value, memory, took, trial.description


def _worth(trial: TrialResult, metric: str) -> float:
    value = None if trial.outcome is None else score(trial.outcome, metric)
    return float("-inf") if value is None else value
