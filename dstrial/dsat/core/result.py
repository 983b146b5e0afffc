"""A trial's result, and which one is best. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.outcome import Measured, Outcome, outcome_to_json, score

TIE = 0.01
"""Share by which another configuration has to be better than the user's own to be called better."""


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
    """Return the best trial; the user's own unless another is better by over ``TIE``."""
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
    """Return the best measurement whatever the ties; None before there is one."""
    best: tuple[float, TrialResult, Measured] | None = None
    for trial in trials:
        if isinstance(trial.outcome, Measured):
            value = score(trial.outcome, metric)
            if value is not None and (best is None or value > best[0]):
                best = value, trial, trial.outcome
    return None if best is None else best[1:]


def gain(value: float, own: float) -> float:
    """Return by which share a score beats another; scores of times are negative."""
    return value / own - 1 if own > 0 else own / value - 1
