"""What a search found: which trial is best, the files that say so, and the table for a person."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dstrial.dsat.candidate import Candidate
from dstrial.dsat.durations import format_duration
from dstrial.dsat.outcome import Failure, FailureKind, Measured, Outcome, outcome_to_json, score
from dstrial.dsat.record import SearchRecord
from dstrial.dsat.space import Space
from dstrial.local.json_files import write_json_atomically

TIE = 0.01
"""Share by which another configuration has to be better than the user's own to be called better."""

_RATES = {
    "end_to_end_throughput": "end to end (all steps, with the data loader)",
    "throughput": "by the median step",
    "bare_throughput": "bare (one batch again and again)",
}


@dataclasses.dataclass(frozen=True, slots=True)
class TrialResult:
    """One trial of a search.

    Attributes:
        trial_id: its number.
        candidate: what was measured.
        description: the same for a person.
        why: why it was.
        outcome: how it ended; None while it runs.
        seconds: how long it took on its slots; None if unknown.
        handle: how the backend calls it, its experiment's number for example.
    """

    trial_id: int
    candidate: Candidate
    description: str
    why: str
    outcome: Outcome | None = None
    seconds: float | None = None
    handle: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "trial_id": self.trial_id,
            "description": self.description,
            "candidate": self.candidate.to_json(),
            "why": self.why,
            "seconds": self.seconds,
            "handle": self.handle,
            **({} if self.outcome is None else outcome_to_json(self.outcome)),
        }


def best_of(trials: Sequence[TrialResult], metric: str) -> TrialResult | None:
    """Return the best trial: the user's own configuration unless another one is better by more than ``TIE``."""
    scored = [
        (value, trial)
        for trial in trials
        if trial.outcome is not None and (value := score(trial.outcome, metric)) is not None
    ]
    if not scored:
        return None
    best_value, best = max(scored, key=lambda pair: (pair[0], -pair[1].trial_id))
    own = next(((value, trial) for value, trial in scored if trial.candidate.is_own), None)
    return own[1] if own is not None and gain(best_value, own[0]) <= TIE else best


def highest(trials: Sequence[TrialResult], metric: str) -> tuple[TrialResult, Measured] | None:
    """Return what was measured best so far, ties not considered; None before anything was measured."""
    best: tuple[float, TrialResult, Measured] | None = None
    for trial in trials:
        if isinstance(trial.outcome, Measured):
            value = score(trial.outcome, metric)
            if value is not None and (best is None or value > best[0]):
                best = value, trial, trial.outcome
    return None if best is None else best[1:]


def gain(value: float, own: float) -> float:
    """Return by which share a score is better than another one; scores of times are negative."""
    return value / own - 1 if own > 0 else own / value - 1


def write_results(
    record: SearchRecord, space: Space, trials: Sequence[TrialResult], metric: str
) -> TrialResult | None:
    """Write the files of the results so far; returns the best trial.

    Raises:
        OSError: the disk is full, for example.
    """
    write_json_atomically(record.trials_path, [trial.to_json() for trial in trials], sync=False)
    best = best_of(trials, metric)
    if best is not None and isinstance(best.outcome, Measured):
        write_json_atomically(record.best_config_path, space.config(best.candidate))
        write_json_atomically(record.best_metrics_path, dict(best.outcome.metrics))
    return best


def summary(
    record: SearchRecord, trials: Sequence[TrialResult], metric: str, *, reason: str, is_finished: bool
) -> str:
    """Return what is printed at the end: the trials, the best one, the gain over the user's own, and the files."""
    best = best_of(trials, metric)
    lines = trial_table(trials, metric)
    lines.append("")
    state = "finished" if is_finished else "not finished"
    lines.append(f"search:        {state} ({reason})")
    if best is None or best.outcome is None:
        lines.append("best:          nothing was measured")
    else:
        value = score(best.outcome, metric) or 0.0
        lines.append(f"best:          trial {best.trial_id}: {best.description}")
        lines.append(f"{metric + ':':<15}{_number(abs(value))}{_over_own(trials, best, metric)}")
        if isinstance(best.outcome, Measured) and (told := rates(best.outcome.metrics)):
            lines.append(f"samples/s:     {told}")
        lines.append(f"config:        {record.best_config_path}")
        lines.append(f"metrics:       {record.best_metrics_path}")
        lines.append(f"experiment:    {record.best_experiment_path}")
    lines.append(f"all trials:    {record.trials_path}")
    lines.append(f"report:        {record.path / 'report.html'}")
    failed = [trial.outcome.kind for trial in trials if isinstance(trial.outcome, Failure)]
    is_over = any(kind in (FailureKind.USER_ERROR, FailureKind.CANCELED) for kind in failed)
    if is_finished and failed and (best is None or is_over):
        lines.append("to begin anew: correct what failed, and pass --fresh")
    if not is_finished:
        lines.append("to go on:      the same command, without --fresh")
    return "\n".join(lines) + "\n"


def rates(metrics: Mapping[str, float]) -> str:
    """Say which of the measured throughputs is which; empty where none was measured.

    Args:
        metrics: of one configuration.
    """
    return ", ".join(
        f"{_number(metrics[name])} {meaning}" for name, meaning in _RATES.items() if metrics.get(name)
    )


def trial_table(trials: Sequence[TrialResult], metric: str) -> list[str]:
    """Return one line per trial, the best first, failures last."""
    unmeasured = float("-inf")

    def rank(trial: TrialResult) -> tuple[float, int]:
        value = None if trial.outcome is None else score(trial.outcome, metric)
        return -(unmeasured if value is None else value), trial.trial_id

    rows = [("trial", metric, "time", "why", "configuration")]
    for trial in sorted(trials, key=rank):
        took = "" if trial.seconds is None else format_duration(trial.seconds)
        rows.append((str(trial.trial_id), _shown(trial, metric), took, trial.why, trial.description))
    widths = [max(len(row[idx]) for row in rows) for idx in range(4)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in rows
    ]


def ended_line(trial: TrialResult, metric: str) -> str:
    """Say in one line how a trial has ended."""
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
    return "not measured" if value is None else _number(value)


def _over_own(trials: Sequence[TrialResult], best: TrialResult, metric: str) -> str:
    own = next((trial for trial in trials if trial.candidate.is_own), None)
    if own is None or own.outcome is None or best.outcome is None:
        return ""
    own_value, value = score(own.outcome, metric), score(best.outcome, metric)
    if best.candidate.is_own:
        return " (your own configuration)"
    if own_value is None or value is None:
        return " (your own configuration could not be measured)"
    return f" ({gain(value, own_value):+.1%} over your own configuration)"


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.4e}"
