"""What is ordered of a backend to measure a candidate: its trial, with a deadline and the best one so far. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from dstrial.dsat.deadlines import deadline_of
from dstrial.dsat.methods.method import Measure
from dstrial.dsat.results import TrialResult, highest
from dstrial.dsat.settings import SearchSettings
from dstrial.dsat.trial_config import TrialSpec, measuring_spec


def ordered_spec(
    settings: SearchSettings, measure: Measure, trials: Sequence[TrialResult], search_id: str
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
        deadline_s=deadline_of(measure, trials, float(settings.args.trial_timeout)),
        best=_best(settings, trials, search_id),
    )


def _best(
    settings: SearchSettings, trials: Sequence[TrialResult], search_id: str
) -> tuple[dict[str, Any], dict[str, float]] | None:
    """Return hyperparameters and metrics of what was measured best so far."""
    best = highest(trials, settings.args.metric)
    if best is None:
        return None
    trial, measured = best
    spec = measuring_spec(settings, trial.candidate, trial.trial_id, search_id)
    return spec.hparams, dict(measured.metrics)
