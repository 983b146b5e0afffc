"""Everything that a report says, as JSON values; renderings add nothing. Pure."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dstrial.dsat.core.outcome import (
    TIE,
    Failure,
    Measured,
    TrialResult,
    best_of,
    gain_over,
    outcome_to_json,
    own_of,
    smaller_is_better,
)
from dstrial.dsat.methods.base import ReportFacts
from dstrial.dsat.report.explain import (
    device_needs,
    model_facts,
    own_and_best,
    sensitivity,
    step_shares,
)
from dstrial.dsat.space.knob_effects import best_knob_effects
from dstrial.dsat.space.space import Space

FORMAT = 1
UNITS = {
    "throughput": "samples/s",
    "FLOPS_per_gpu": "FLOP/s per device",
    "latency": "µs",
    "forward": "µs",
    "backward": "µs",
}
_NUM_RUNNERS_UP = 3
# What stands in a report while the search goes on: it is sent again with every result, and others may read it.
_LIVE_FACTS = (
    *(
        "format",
        "name",
        "method",
        "metric",
        "unit",
        "smaller_is_better",
        "reason",
        "is_finished",
        "is_failure",
        "num_slots",
    ),
    *("notes", "best", "own", "gain", "is_gain_certain", "pareto"),
)
_LIVE_ROW = (
    *("trial_id", "description", "is_own", "state", "why", "seconds", "value", "throughput", "step_s"),
    *("memory_bytes", "predicted", "experiment"),
)
_MAX_LIVE_ROWS = 200
_LONGEST_LIVE_TEXT = 500


@dataclasses.dataclass(frozen=True, slots=True)
class SearchFacts:
    """What a report says about the search itself."""

    name: str
    method: str
    metric: str
    reason: str  # why it ended, or the signal that interrupted it
    is_finished: bool
    num_slots: int
    predicted: ReportFacts = dataclasses.field(default_factory=ReportFacts)
    notes: tuple[str, ...] = ()
    is_failure: bool = False


def report_document(facts: SearchFacts, space: Space, trials: Sequence[TrialResult]) -> dict[str, Any]:
    """Return the report as JSON values, of trials that have ended or not."""
    metric = facts.metric
    predicted = facts.predicted
    rows = [_row(trial, metric, predicted.forecasts.get(trial.trial_id)) for trial in trials]
    best = best_of(trials, metric)
    own = own_of(trials)
    ranked = sorted(
        (trial for trial in trials if trial.score(metric) is not None),
        key=lambda trial: -(trial.score(metric) or 0.0),
    )
    return {
        "format": FORMAT,
        "name": facts.name,
        "method": facts.method,
        "metric": metric,
        "unit": UNITS[metric],
        "smaller_is_better": smaller_is_better(metric),
        "reason": facts.reason,
        "is_finished": facts.is_finished,
        "is_failure": facts.is_failure,
        "num_slots": facts.num_slots,
        "notes": _notes(facts, space, trials),
        "model": model_facts(trials),
        "best": None if best is None else best.trial_id,
        "own": None if own is None else own.trial_id,
        "gain": gain_over(best, own, metric),
        "is_gain_certain": _is_certain(best, own, metric),
        "tie": TIE,
        "best_config": None if best is None else space.config(best.candidate),
        "runners_up": [trial.trial_id for trial in ranked if trial is not best][:_NUM_RUNNERS_UP],
        "pareto": pareto(rows),
        "failures": _failures(trials),
        "step_time": [
            {"trial_id": trial.trial_id, **shares}
            for trial in own_and_best(trials, metric)
            if (shares := step_shares(trial.outcome, predicted.explained.get(trial.trial_id))) is not None
        ],
        "sensitivity": sensitivity(trials, space, metric),
        "needs": device_needs(trials, space, metric, predicted.margins),
        "left": [dict(one) for one in predicted.left][:5],
        "trials": rows,
    }


def live_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the small part of a report that is shown while the search goes on.

    It has no configs, which may hold secrets.
    """
    kept = {*document["pareto"], document["best"], document["own"]}
    newest = document["trials"][-_MAX_LIVE_ROWS:]
    rows = [row for row in document["trials"][: -len(newest) or None] if row["trial_id"] in kept]
    found = []
    for row in (*rows, *newest):
        failure = row.get("failure")
        found.append(
            {
                **{name: row[name] for name in _LIVE_ROW if row[name] is not None},
                **(
                    {}
                    if failure is None
                    else {"failure": {"message": failure["message"][:_LONGEST_LIVE_TEXT]}}
                ),
            }
        )
    facts = {name: document[name] for name in _LIVE_FACTS}
    return {**facts, "num_trials": len(document["trials"]), "trials": found}


def _notes(facts: SearchFacts, space: Space, trials: Sequence[TrialResult]) -> list[str]:
    """Return the notes, and the proved effects of the knobs of ``--space``."""
    proved = [
        str(proof) for proof in best_knob_effects(space, [(one.candidate, one.outcome) for one in trials])
    ]
    return [*facts.notes, *(line for line in proved if line not in facts.notes)]


def pareto(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return trials beaten by none in throughput and memory, by ascending memory."""
    front: list[int] = []
    most = 0.0
    known = [row for row in rows if row["memory_bytes"] and row["throughput"]]
    for row in sorted(known, key=lambda each: (each["memory_bytes"], -each["throughput"])):
        if row["throughput"] > most:
            most = row["throughput"]
            front.append(row["trial_id"])
    return front


def _row(trial: TrialResult, metric: str, forecast: Mapping[str, Any] | None) -> dict[str, Any]:
    outcome = trial.outcome
    measured = outcome if isinstance(outcome, Measured) else None
    value = None if measured is None else measured.value(metric)
    latency = None if measured is None else measured.value("latency")
    batch = trial.candidate.batch
    row: dict[str, Any] = {
        "trial_id": trial.trial_id,
        "description": trial.description,
        "is_own": trial.candidate.is_own,
        "stage": trial.candidate.stage,
        "micro_batch_size": batch.micro_batch_size,
        "accumulation": batch.accumulation,
        "train_batch_size": batch.train_batch_size,
        "settings": dict(trial.candidate.settings),
        "why": trial.why,
        "seconds": trial.seconds,
        "experiment": trial.handle.get("experiment_id"),
        "state": "running"
        if outcome is None
        else (outcome.kind.value if isinstance(outcome, Failure) else "measured"),
        "value": value,
        "half_width": None if measured is None else measured.value("half_width"),
        "throughput": None if measured is None else measured.value("throughput"),
        "step_s": None if latency is None else latency * 1e-6,
        "memory_bytes": None if measured is None else memory_bytes(measured),
        "predicted": None,
        **({} if outcome is None else outcome_to_json(outcome)),
    }
    if forecast is not None:
        row["predicted"] = {
            # Before anything is measured, nothing is known of the machine; that was no prediction.
            "step_s": None if forecast.get("is_guess") else forecast.get("median_s"),
            "spread": None if forecast.get("is_guess") else forecast.get("spread"),
            "memory_bytes": forecast.get("memory_median_bytes"),
            "probability_to_fit": forecast.get("probability_to_fit"),
        }
    return row


def memory_bytes(measured: Measured) -> float | None:
    """Return a device's peak memory: the allocator's, else tensors'; a CPU rank's own."""
    for name in ("peak_reserved_bytes", "peak_memory_bytes", "host_peak_memory_bytes"):
        if (value := measured.value(name)) is not None:
            return value
    return None


def _is_certain(best: TrialResult | None, own: TrialResult | None, metric: str) -> bool:
    """Return whether the intervals of the two are apart."""
    found = gain_over(best, own, metric)
    if found is None or best is None or own is None:
        return False
    widths = [
        trial.outcome.value("half_width") or 0.0
        for trial in (best, own)
        if isinstance(trial.outcome, Measured)
    ]
    return found > sum(widths)


def _failures(trials: Sequence[TrialResult]) -> list[dict[str, Any]]:
    failed: dict[str, list[TrialResult]] = collections.defaultdict(list)
    for trial in trials:
        if isinstance(trial.outcome, Failure):
            failed[trial.outcome.kind.value].append(trial)
    found = []
    for kind, those in sorted(failed.items(), key=lambda pair: -len(pair[1])):
        first = those[0].outcome
        assert isinstance(first, Failure)
        found.append(
            {
                "kind": kind,
                "count": len(those),
                "trials": [trial.trial_id for trial in those],
                "example": first.message,
            }
        )
    return found
