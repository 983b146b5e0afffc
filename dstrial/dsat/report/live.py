"""A search on a terminal: a live table, and what is printed at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dstrial.dsat.core.journal import SearchRecord
from dstrial.dsat.core.outcome import (
    Failure,
    Measured,
    TrialResult,
    best_of,
    gain_over,
    own_of,
)
from dstrial.dsat.report import formatting
from dstrial.dsat.report.document import UNITS, memory_bytes

_NUM_ROWS = 8
_REFRESHES_PER_S = 2.0


class LiveTable:
    """Shows a search during the ``with`` block: a table on a terminal, else lines."""

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

    def print_line(self, line: str) -> None:
        self._console.print(Text(line))

    def show(self, trials: Sequence[TrialResult]) -> None:
        """Show the trials so far; draws at most twice a second however often called."""
        now_s = time.monotonic()
        if self._is_shown and now_s - self._shown_s >= 1 / _REFRESHES_PER_S:
            self._shown_s = now_s
            self._live.update(self.drawn(trials, now_s - self._began_s), refresh=True)

    def drawn(self, trials: Sequence[TrialResult], running_s: float) -> Group:
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
        best = best_of(trials, self._metric)
        if best is None:
            return "best so far: nothing was measured yet"
        value = abs(best.score(self._metric) or 0.0)
        line = f"best so far: {formatting.amount(value)} {UNITS[self._metric]}"
        if best.candidate.is_own:
            return f"{line} (yours)"
        gain = gain_over(best, own_of(trials), self._metric)
        over = "" if gain is None else f" ({formatting.share(gain, signed=True)} over yours)"
        return f"{line}{over}: {best.description}"

    def time_left(self, trials: Sequence[TrialResult], running_s: float) -> str:
        """Return the most time it may still take, by the median trial and the budget."""
        took = sorted(trial.seconds for trial in trials if trial.outcome is not None and trial.seconds)
        num_ended = sum(1 for trial in trials if trial.outcome is not None)
        estimates = []
        if took:
            left = (self._max_trials - num_ended) * took[len(took) // 2] / self._num_parallel
            estimates.append(left)
        if self._budget_s is not None:
            estimates.append(max(self._budget_s - running_s, 0.0))
        return f"at most {formatting.format_duration(min(estimates))} left" if estimates else ""

    def _cells(self, trial: TrialResult) -> tuple[str, str, str, str, str]:
        took = "" if trial.seconds is None else formatting.format_duration(trial.seconds)
        value, memory = "running", ""
        if isinstance(trial.outcome, Failure):
            value = trial.outcome.kind.value
        elif isinstance(trial.outcome, Measured):
            found = trial.outcome.value(self._metric)
            value = "not measured" if found is None else formatting.amount(found)
            held = memory_bytes(trial.outcome)
            memory = "" if held is None else formatting.gibibytes(held)
        return str(trial.trial_id), value, memory, took, trial.description


def _worth(trial: TrialResult, metric: str) -> float:
    value = trial.score(metric)
    return float("-inf") if value is None else value


def summary(
    record: SearchRecord, trials: Sequence[TrialResult], metric: str, *, reason: str, is_finished: bool
) -> str:
    """Return the final lines: trials, the best, its gain over the own, and files."""
    best = best_of(trials, metric)
    lines = trial_table(trials, metric)
    lines.append("")
    state = "finished" if is_finished else "not finished"
    lines.append(f"search:        {state} ({reason})")
    if best is None:
        lines.append("best:          nothing was measured")
    else:
        value = best.score(metric) or 0.0
        lines.append(f"best:          trial {best.trial_id}: {best.description}")
        lines.append(
            f"{metric + ':':<15}{formatting.four_digits(abs(value))}{_over_own(trials, best, metric)}"
        )
        if isinstance(best.outcome, Measured) and (told := formatting.rates(best.outcome.metrics)):
            lines.append(f"samples/s:     {told}")
        lines.append(f"config:        {record.best_config_path}")
        lines.append(f"metrics:       {record.best_metrics_path}")
        lines.append(f"experiment:    {record.best_experiment_path}")
    lines.append(f"all trials:    {record.trials_path}")
    lines.append(f"report:        {record.path / 'report.md'}")
    failed = [trial.outcome.kind for trial in trials if isinstance(trial.outcome, Failure)]
    is_over = any(kind.ends_search for kind in failed)
    if is_finished and failed and (best is None or is_over):
        lines.append("to begin anew: correct what failed, and pass --fresh")
    if not is_finished:
        lines.append("to go on:      the same command, without --fresh")
    return "\n".join(lines) + "\n"


def trial_table(trials: Sequence[TrialResult], metric: str) -> list[str]:
    """Return one line per trial, the best first, failures last."""
    rows = [("trial", metric, "time", "why", "configuration")]
    for trial in sorted(trials, key=lambda trial: (-_worth(trial, metric), trial.trial_id)):
        took = "" if trial.seconds is None else formatting.format_duration(trial.seconds)
        rows.append((str(trial.trial_id), _shown(trial, metric), took, trial.why, trial.description))
    widths = [max(len(row[idx]) for row in rows) for idx in range(4)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in rows
    ]


def ended_line(trial: TrialResult, metric: str) -> str:
    if isinstance(trial.outcome, Failure):
        return f"trial {trial.trial_id} failed ({trial.outcome.kind.value}): {trial.outcome.message}"
    value = None if trial.outcome is None else trial.outcome.value(metric)
    half_width = None if trial.outcome is None else trial.outcome.value("half_width")
    shown = "nothing" if value is None else f"{value:.5g}"
    within = "" if half_width is None else f" ± {half_width:.1%}"
    return f"trial {trial.trial_id} measured {metric} {shown}{within}"


def _shown(trial: TrialResult, metric: str) -> str:
    if trial.outcome is None:
        return "not finished"
    if isinstance(trial.outcome, Failure):
        phase = f" in {trial.outcome.phase}" if trial.outcome.phase else ""
        return f"{trial.outcome.kind.value}{phase}"
    value = trial.outcome.value(metric)
    return "not measured" if value is None else formatting.four_digits(value)


def _over_own(trials: Sequence[TrialResult], best: TrialResult, metric: str) -> str:
    own = own_of(trials)
    if own is None or own.outcome is None:
        return ""
    if best.candidate.is_own:
        return " (your own configuration)"
    gain = gain_over(best, own, metric)
    if gain is None:
        return " (your own configuration could not be measured)"
    return f" ({gain:+.1%} over your own configuration)"
