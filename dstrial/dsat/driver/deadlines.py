"""What a backend is asked to run for a measurement, and how long it may run. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from dstrial.dsat.backends.trial_spec import TrialSpec, measuring_spec
from dstrial.dsat.config import SearchConfig
from dstrial.dsat.core.outcome import Failure, TrialResult, highest
from dstrial.dsat.methods.base import Measure

_SHORTEST_DEADLINE_S = 120.0
_DEADLINE_FACTOR = 5.0
# For starting a worker, for ending its ranks at the deadline, and for measuring the best one again.
_SLACK_S = 300.0
_SLACK_FACTOR = 2.0


def deadline_of(measure: Measure, trials: Sequence[TrialResult], trial_timeout_s: float) -> float:
    """Return a trial's limit: 5 times what is expected, else ``--trial-timeout``.

    Expected is what was predicted, or the longest of the trials that have measured something. At least two minutes,
    because ranks may have to be started first, and one that is ended too early is lost to the search.

    Args:
        measure: what is measured.
        trials: every trial so far.
        trial_timeout_s: of the command line.
    """
    took = [
        trial.seconds
        for trial in trials
        if trial.seconds is not None and trial.outcome is not None and not isinstance(trial.outcome, Failure)
    ]
    expected_s = measure.predicted_s if measure.predicted_s is not None else max(took, default=None)
    if expected_s is None:
        return trial_timeout_s
    return max(_DEADLINE_FACTOR * expected_s, _SHORTEST_DEADLINE_S)


def longest_s(deadline_s: float, *, keeps_deadlines: bool) -> float:
    """Return after how long the driver ends a trial by itself.

    Args:
        deadline_s: of the trial.
        keeps_deadlines: whether the backend ends it at the deadline, so that the driver is the last resort.
    """
    return _SLACK_FACTOR * deadline_s + _SLACK_S if keeps_deadlines else deadline_s


def ordered_spec(
    settings: SearchConfig, measure: Measure, trials: Sequence[TrialResult], search_id: str
) -> TrialSpec:
    """Return the trial that a measurement needs.

    Args:
        settings: of the search.
        measure: what the method asks for.
        trials: every trial so far.
        search_id: of the search.
    """
    spec = measuring_spec(settings, measure.candidate, measure.trial_id, search_id)
    return dataclasses.replace(
        spec,
        deadline_s=deadline_of(measure, trials, settings.flags.trial_timeout),
        best=_best(settings, trials, search_id),
    )


def _best(
    settings: SearchConfig, trials: Sequence[TrialResult], search_id: str
) -> tuple[dict[str, Any], dict[str, float]] | None:
    """Return hyperparameters and metrics of what was measured best so far."""
    best = highest(trials, settings.flags.metric)
    if best is None:
        return None
    trial, measured = best
    spec = measuring_spec(settings, trial.candidate, trial.trial_id, search_id)
    return spec.hparams, dict(measured.metrics)
