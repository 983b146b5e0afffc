"""Lines for a terminal: the end of a trial, and a summary of the search."""

from __future__ import annotations

from collections.abc import Sequence

from dstrial.dsat.core.journal import BEST_NAMES, SearchRecord
from dstrial.dsat.core.outcome import Failure, Measured, TrialResult, best_of, gain_over, own_of, with_means
from dstrial.dsat.report import formatting


def summary(
    record: SearchRecord, trials: Sequence[TrialResult], metric: str, *, reason: str, is_finished: bool
) -> str:
    """Return the final text: trials, best configuration, its gain, paths of files."""
    trials = with_means(trials)
    best = best_of(trials, metric)
    state = "finished" if is_finished else "not finished"
    lines = [*_trial_table(trials, metric), "", f"search:        {state} ({reason})"]
    if best is None:
        lines.append("best:          nothing was measured")
    else:
        value = formatting.amount(abs(best.score(metric) or 0.0))
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
    shown = "nothing" if value is None else formatting.amount(value)
    within = "" if half_width is None else f" ± {half_width:.1%}"
    return f"trial {trial.trial_id} measured {metric} {shown}{within}"


def _trial_table(trials: Sequence[TrialResult], metric: str) -> list[str]:

    def rank(trial: TrialResult) -> tuple[float, int]:
        value = trial.score(metric)
        return (float("inf") if value is None else -value), trial.trial_id

    rows = [("trial", metric, "time", "why", "configuration")]
    for trial in sorted(trials, key=rank):
        took = "" if trial.seconds is None else formatting.format_duration(trial.seconds)
        rows.append((str(trial.trial_id), _value(trial, metric), took, trial.why, trial.description))
    widths = [max(len(row[idx]) for row in rows) for idx in range(4)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in rows
    ]


def _value(trial: TrialResult, metric: str) -> str:
    if trial.outcome is None:
        return "not finished"
    if isinstance(trial.outcome, Failure):
        phase = trial.outcome.phase
        return f"{trial.outcome.kind.value} in {phase}" if phase else trial.outcome.kind.value
    value = trial.outcome.value(metric)
    return "not measured" if value is None else formatting.amount(value)


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
