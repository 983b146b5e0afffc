"""Show a search on a terminal: a live table, and a summary at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dstrial.dsat.core.journal import BEST_NAMES, SearchRecord
from dstrial.dsat.core.outcome import Failure, Measured, TrialResult, best_of, gain_over, own_of
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
        """Draw the trials so far; calls within half a second of a drawing do nothing."""
        now_s = time.monotonic()
        if self._is_shown and now_s - self._shown_s >= 1 / _REFRESHES_PER_S:
            self._shown_s = now_s
            self._live.update(self.drawn(trials, now_s - self._began_s), refresh=True)

    def drawn(self, trials: Sequence[TrialResult], running_s: float) -> Group:
        best = best_of(trials, self._metric)
        num_ended = sum(1 for trial in trials if trial.outcome is not None)
        table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
        table.add_column("trial", justify="right", no_wrap=True)
        table.add_column(self._metric, no_wrap=True, min_width=22)
        table.add_column("memory", no_wrap=True)
        table.add_column("time", justify="right", no_wrap=True)
        table.add_column("configuration", no_wrap=True, overflow="ellipsis", ratio=1)
        ranked = sorted(trials, key=lambda trial: (trial.outcome is not None, -_rank(trial, self._metric)))
        for trial in ranked[:_NUM_ROWS]:
            style = "bold" if trial is best else ("dim" if isinstance(trial.outcome, Failure) else "")
            memory = memory_bytes(trial.outcome) if isinstance(trial.outcome, Measured) else None
            table.add_row(
                str(trial.trial_id),
                _value(trial, self._metric),
                "" if memory is None else formatting.gibibytes(memory),
                _took(trial),
                trial.description,
                style=style,
            )
        if len(ranked) > _NUM_ROWS:
            table.add_row("", f"and {len(ranked) - _NUM_ROWS} more", style="dim")
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            ProgressBar(total=self._max_trials, completed=num_ended, width=30),
            f"{num_ended} of at most {self._max_trials} trials",
            self._time_left(trials, running_s),
        )
        line = "best so far: nothing was measured yet"
        if best is not None:
            amount = formatting.amount(abs(best.score(self._metric) or 0.0))
            over = _over_own(trials, best, self._metric)
            line = f"best so far: {amount} {UNITS[self._metric]}{over}: {best.description}"
        return Group(table, bar, Text(line, style="bold", no_wrap=True, overflow="ellipsis"))

    def _time_left(self, trials: Sequence[TrialResult], running_s: float) -> str:
        ended = [trial for trial in trials if trial.outcome is not None]
        took = sorted(trial.seconds for trial in ended if trial.seconds)
        estimates = []
        if took:
            num_left = self._max_trials - len(ended)
            estimates.append(num_left * took[len(took) // 2] / self._num_parallel)
        if self._budget_s is not None:
            estimates.append(max(self._budget_s - running_s, 0.0))
        return f"at most {formatting.format_duration(min(estimates))} left" if estimates else ""


def summary(
    record: SearchRecord, trials: Sequence[TrialResult], metric: str, *, reason: str, is_finished: bool
) -> str:
    """Return the final text: trials, best configuration, its gain, paths of files."""
    best = best_of(trials, metric)
    state = "finished" if is_finished else "not finished"
    lines = [*_trial_table(trials, metric), "", f"search:        {state} ({reason})"]
    if best is None:
        lines.append("best:          nothing was measured")
    else:
        value = formatting.four_digits(abs(best.score(metric) or 0.0))
        lines.append(f"best:          trial {best.trial_id}: {best.description}")
        lines.append(f"{metric + ':':<15}{value}{_over_own(trials, best, metric)}")
        if isinstance(best.outcome, Measured) and (rates := formatting.rates(best.outcome.metrics)):
            lines.append(f"samples/s:     {rates}")
        for title, name in zip(("config:", "metrics:", "experiment:"), BEST_NAMES, strict=True):
            lines.append(f"{title:<15}{record.path / name}")
    lines.append(f"all trials:    {record.path / 'trials.json'}")
    lines.append(f"report:        {record.path / 'report.md'}")
    failures = [trial.outcome.kind for trial in trials if isinstance(trial.outcome, Failure)]
    if is_finished and failures and (best is None or any(kind.ends_search for kind in failures)):
        lines.append("to begin anew: correct what failed, and pass --fresh")
    if not is_finished:
        lines.append("to go on:      the same command, without --fresh")
    return "\n".join(lines) + "\n"


def ended_line(trial: TrialResult, metric: str) -> str:
    if isinstance(trial.outcome, Failure):
        return f"trial {trial.trial_id} failed ({trial.outcome.kind.value}): {trial.outcome.message}"
    value = None if trial.outcome is None else trial.outcome.value(metric)
    half_width = None if trial.outcome is None else trial.outcome.value("half_width")
    shown = "nothing" if value is None else f"{value:.5g}"
    within = "" if half_width is None else f" ± {half_width:.1%}"
    return f"trial {trial.trial_id} measured {metric} {shown}{within}"


def _trial_table(trials: Sequence[TrialResult], metric: str) -> list[str]:
    """Return one line per trial, the best first, failures last."""
    rows = [("trial", metric, "time", "why", "configuration")]
    for trial in sorted(trials, key=lambda trial: (-_rank(trial, metric), trial.trial_id)):
        shown = "not finished" if trial.outcome is None else _value(trial, metric)
        if isinstance(trial.outcome, Failure) and trial.outcome.phase:
            shown = f"{shown} in {trial.outcome.phase}"
        elif isinstance(trial.outcome, Measured) and (value := trial.outcome.value(metric)) is not None:
            shown = formatting.four_digits(value)
        rows.append((str(trial.trial_id), shown, _took(trial), trial.why, trial.description))
    widths = [max(len(row[idx]) for row in rows) for idx in range(4)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in rows
    ]


def _value(trial: TrialResult, metric: str) -> str:
    if trial.outcome is None:
        return "running"
    if isinstance(trial.outcome, Failure):
        return trial.outcome.kind.value
    value = trial.outcome.value(metric)
    return "not measured" if value is None else formatting.amount(value)


def _took(trial: TrialResult) -> str:
    return "" if trial.seconds is None else formatting.format_duration(trial.seconds)


def _rank(trial: TrialResult, metric: str) -> float:
    value = trial.score(metric)
    return float("-inf") if value is None else value


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
