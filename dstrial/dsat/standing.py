"""Where a search stands: the best so far, and how long nothing was better. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dstrial.dsat.candidate import Candidate
from dstrial.dsat.forecast import Forecaster
from dstrial.dsat.gates import Known

_TIE = 1.01
"""What is not better than the best so far by this is no progress."""


def incumbent(known: Mapping[int, Known], forecaster: Forecaster) -> tuple[Candidate, float] | None:
    """Return the best measured configuration and its cost; None before anything ran.

    Args:
        known: trial -> what was or is being measured.
        forecaster: knows what a cost is.
    """
    best: tuple[Candidate, float] | None = None
    for one in known.values():
        cost = None if one.outcome is None else forecaster.cost(one.candidate, one.outcome)
        if cost is not None and (best is None or cost < best[1]):
            best = one.candidate, cost
    return best


def incumbent_smoothed(known: Mapping[int, Known], forecaster: Forecaster) -> tuple[Candidate, float] | None:
    """Return the best measured configuration and its cost as all measurements together have it.

    The best of many measurements is in part the luckiest one.

    Args:
        known: trial -> what was or is being measured.
        forecaster: that has learned from them.
    """
    best = incumbent(known, forecaster)
    if best is None:
        return None
    predicted = forecaster.times([best[0]])
    return best[0], max(best[1], predicted[0].cost) if predicted else best[1]


def num_disappointed(order: Sequence[int], known: Mapping[int, Known], forecaster: Forecaster) -> int:
    """Return how many of the last measurements in a row were not better than all before them by more than 1 %.

    Args:
        order: trials in the order in which they ended.
        known: trial -> what was measured.
        forecaster: knows what a cost is.
    """
    number, best = 0, None
    for trial_id in order:
        one = known[trial_id]
        cost = None if one.outcome is None else forecaster.cost(one.candidate, one.outcome)
        if cost is not None and (best is None or cost * _TIE < best):
            number = 0
        elif best is not None:
            number += 1
        if cost is not None:
            best = cost if best is None else min(best, cost)
    return number
