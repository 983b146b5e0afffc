"""Compute the rungs of an ASHA search and their trials from the searcher's state."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypeAlias

from dstrial.search.halving import brackets, rung_units

WITH_RUNGS = ("adaptive_asha", "async_halving")
MAX_ENTRIES = 1000  # trials listed per rung, best first
_WORST = sys.float_info.max

Json: TypeAlias = dict[str, Any]


def rungs_of(
    searcher: Mapping[str, Any], method: Mapping[str, Any], closed: frozenset[str], trials: Mapping[str, int]
) -> list[Json]:
    """Return an ASHA search's brackets as JSON, each with its rungs, lowest first.

    Each rung has ``units`` (its length in the time metric), the number of trials that reached it (``total``, also by outcome),
    ``underWay`` (trials that train towards it), and ``entries`` (best trials with value and outcome).

    ``searcher`` is the config's searcher section. ``method`` is the search method's saved state, empty before the first trial.
    ``closed`` are request ids of exited trials. ``trials`` maps request id -> trial id.
    """
    sizes = [one.num_rungs for one in brackets(searcher)]
    states = method.get("brackets", [])
    sign = 1.0 if searcher["smaller_is_better"] else -1.0
    units = [rung_units(size, float(searcher["divisor"]), int(searcher["max_time"])) for size in sizes]
    return [
        {"rungs": _rungs(times, state, sign, closed, trials)}
        for times, state in zip(units, [*states, *[{}] * len(sizes)], strict=False)
    ]


def _rungs(
    units: list[int], state: Mapping[str, Any], sign: float, closed: frozenset[str], trials: Mapping[str, int]
) -> list[Json]:
    rung_of: Mapping[str, int] = state.get("rung_of", {})
    stopped = frozenset(state.get("stopped", ()))
    found: list[Json] = []
    for idx, time in enumerate(units):
        entries = [
            {
                "trial": trials.get(request_id),
                "value": None if value == _WORST else sign * value,
                "outcome": _outcome(
                    idx, len(units) - 1, value, rung_of.get(request_id, 0), request_id in stopped
                ),
            }
            for value, request_id in (state["rungs"][idx] if state else ())
        ]
        under_way = [
            trials[request_id]
            for request_id, rung in rung_of.items()
            if rung == idx and request_id in trials and request_id not in stopped and request_id not in closed
        ]
        count = [entry["outcome"] for entry in entries].count
        found.append(
            {
                "units": time,
                "total": len(entries),
                "wentOn": count("went on"),
                "stopped": count("stopped"),
                "finished": count("finished"),
                "failed": count("failed"),
                "underWay": under_way[:MAX_ENTRIES],
                "numUnderWay": len(under_way),
                "entries": entries[:MAX_ENTRIES],
            }
        )
    return found


def _outcome(idx: int, top: int, value: float, reached: int, is_stopped: bool) -> str:
    """Return "went on", "failed", "finished" or "stopped" for a trial at rung ``idx``.

    ``top`` is the bracket's highest rung, ``reached`` the trial's. ``value`` is ``_WORST`` if the trial failed at the rung.
    """
    if reached > idx or not is_stopped:
        return "went on"
    if value == _WORST:
        return "failed"
    return "finished" if idx == top else "stopped"
