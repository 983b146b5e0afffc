"""How long a trial may run before it is ended. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dstrial.dsat.methods.method import Measure
from dstrial.dsat.outcome import Failure
from dstrial.dsat.results import TrialResult

_SHORTEST_DEADLINE_S = 120.0
_DEADLINE_FACTOR = 5.0
# For starting a worker, for ending its ranks at the deadline, and for measuring the best one again.
_SLACK_S = 300.0
_SLACK_FACTOR = 2.0


def deadline_of(measure: Measure, trials: Sequence[TrialResult], trial_timeout_s: float) -> float:
    """Return how long a trial may run: five times what is expected, or ``--trial-timeout`` where nothing is.

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
