"""How far ``predict`` has come, and what it tells the report. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.outcome import Failure, FailureKind, Measured
from dstrial.dsat.predictor.predictor import Predictor, structure_of
from dstrial.dsat.space.filters import Observation

_TIE = 1.01
"""What is not better than the best so far by this is no progress."""

_NEXT_SIZES = 2


def incumbent(
    observations: Mapping[int, Observation], predictor: Predictor
) -> tuple[Candidate, float] | None:
    """Return the best measured configuration and its cost; None before anything ran."""
    best: tuple[Candidate, float] | None = None
    for one in observations.values():
        cost = None if one.outcome is None else predictor.cost(one.candidate, one.outcome)
        if cost is not None and (best is None or cost < best[1]):
            best = one.candidate, cost
    return best


def smoothed_incumbent(
    observations: Mapping[int, Observation], predictor: Predictor
) -> tuple[Candidate, float] | None:
    """Return the best measured configuration and its cost by all measurements.

    The best of many measurements is in part the luckiest one.
    """
    best = incumbent(observations, predictor)
    if best is None:
        return None
    predicted = predictor.times([best[0]])
    return best[0], max(best[1], predicted[0].cost) if predicted else best[1]


def trials_since_improvement(
    order: Sequence[int], observations: Mapping[int, Observation], predictor: Predictor
) -> int:
    """Return how many last measurements in a row beat all before by 1 % at most.

    ``order`` has the trials in the order in which they ended.
    """
    number, best = 0, None
    for trial_id in order:
        one = observations[trial_id]
        cost = None if one.outcome is None else predictor.cost(one.candidate, one.outcome)
        if cost is not None and (best is None or cost * _TIE < best):
            number = 0
        elif best is not None:
            number += 1
        if cost is not None:
            best = cost if best is None else min(best, cost)
    return number


def time_breakdowns(
    observations: Mapping[int, Observation], best: tuple[Candidate, float] | None, predictor: Predictor
) -> dict[int, dict[str, float]]:
    """Return trial -> seconds of each part of a step, of the own and the best one."""
    found = {}
    for trial_id, one in _own_and_best(observations, best):
        point = predictor.features.time_point(one.candidate)
        if isinstance(one.outcome, Measured) and point is not None:
            found[trial_id] = predictor.time.parts(point)
    return found


def memory_margins(
    observations: Mapping[int, Observation], best: tuple[Candidate, float] | None, predictor: Predictor
) -> list[dict[str, Any]]:
    """Return the bytes that larger micro batches of the own and the best one lack.

    If the own one ran out of memory, its own size counts as well.
    """
    space = predictor.space
    ladder = space.batch_size_grid
    found: list[dict[str, Any]] = []
    for trial_id, observation in _own_and_best(observations, best):
        if observation.outcome is None:
            continue
        at = ladder.position(observation.candidate.batch.micro_batch_size)
        outcome = observation.outcome
        has_run_out = isinstance(outcome, Failure) and outcome.kind is FailureKind.DEVICE_OOM
        for position in range(at + (not has_run_out), min(at + 1 + _NEXT_SIZES, ladder.last + 1)):
            one = space.candidate(structure_of(observation.candidate), position)
            margin, memory = predictor.margin_bytes(one), predictor.memory_of(one)
            if margin is not None and memory is not None:
                found.append(
                    {
                        "trial_id": trial_id,
                        "micro_batch_size": one.batch.micro_batch_size,
                        "missing_bytes": -margin,
                        "phase": memory.phase,
                    }
                )
    return found


def _own_and_best(
    observations: Mapping[int, Observation], best: tuple[Candidate, float] | None
) -> Iterator[tuple[int, Observation]]:
    for trial_id, one in observations.items():
        if one.candidate.is_own or (best is not None and one.candidate == best[0]):
            yield trial_id, one
