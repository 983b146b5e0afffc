"""Build the report of a search as JSON values, which all formats render."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dstrial.dsat.core.candidate import HYPERPARAMETERS, Candidate, value_at
from dstrial.dsat.core.outcome import (
    TIE,
    Failure,
    FailureKind,
    Measured,
    TrialResult,
    best_of,
    gain_over,
    outcome_to_json,
    own_of,
    relative_gain,
    smaller_is_better,
)
from dstrial.dsat.methods.base import ReportFacts
from dstrial.dsat.space.filters import best_knob_effects
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
_NUM_LEFT = 5

# A live report is sent with every result, and other users may read it. So it is small and has no configs.
_LIVE_FACTS = (
    *("format", "name", "method", "metric", "unit", "smaller_is_better", "reason", "is_finished"),
    *("is_failure", "num_slots", "notes", "best", "own", "gain", "is_gain_certain", "pareto"),
)
_LIVE_ROW = (
    *("trial_id", "description", "is_own", "state", "why", "seconds", "value", "throughput", "step_s"),
    *("memory_bytes", "predicted", "experiment"),
)
_MAX_LIVE_ROWS = 200
_LONGEST_LIVE_TEXT = 500

_MODEL = ("num_params", "num_trainable_params", "activation_bytes_per_record", "device_memory_bytes")
_MEASURED_PHASES = {"forward": "forward", "backward": "backward", "step": "optimizer step"}
_PREDICTED_PARTS = {
    "compute": ("compute", "unfilled", "overhead"),
    "exposed communication": ("transfer", "reduce", "calls", "unhidden", "gradient_copies"),
    "host copies": ("host_copies",),
    "optimizer": ("optimizer", "host_optimizer"),
}
"""Name in a report -> parts of a predicted step (``predictor.features.PARTS``)."""
_VISIBLE = 0.0005  # share of a step below which a part is left out


@dataclasses.dataclass(frozen=True, slots=True)
class SearchFacts:
    """Facts about a search, besides its trials, that a report shows."""

    name: str
    method: str
    metric: str
    reason: str  # why the search ended, or the signal that interrupted it
    is_finished: bool
    num_slots: int
    predicted: ReportFacts = dataclasses.field(default_factory=ReportFacts)
    notes: tuple[str, ...] = ()
    is_failure: bool = False


def report_document(facts: SearchFacts, space: Space, trials: Sequence[TrialResult]) -> dict[str, Any]:
    """Return the report of a search as JSON values; trials may still run."""
    metric, predicted = facts.metric, facts.predicted
    best, own = best_of(trials, metric), own_of(trials)
    scored = [(value, trial) for trial in trials if (value := trial.score(metric)) is not None]
    ranked = [trial for _, trial in sorted(scored, key=lambda pair: -pair[0])]
    first: dict[Candidate, int] = {}
    for trial in trials:
        first.setdefault(trial.candidate, trial.trial_id)
    rows = [
        {
            **_row(trial, metric, predicted.forecasts.get(trial.trial_id)),
            "first_trial_id": first[trial.candidate],
        }
        for trial in trials
    ]
    # The user's own configuration and the best one, once if they are the same.
    shown = [trial for trial in (own, None if best is own else best) if trial is not None]
    effects = [str(one) for one in best_knob_effects(space, [(one.candidate, one.outcome) for one in trials])]
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
        "notes": [*facts.notes, *(line for line in effects if line not in facts.notes)],
        "model": _model_facts(trials),
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
            for trial in shown
            if (shares := _step_shares(trial, predicted.explained.get(trial.trial_id)))
        ],
        "sensitivity": [] if best is None else _sensitivity(scored, best, space, metric),
        "needs": _needs(trials, predicted.margins),
        "left": [dict(one) for one in predicted.left][:_NUM_LEFT],
        "trials": rows,
    }


def live_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the small part of a report that is shown while the search runs.

    It has no configs, because these may contain secrets.
    """
    kept = {*document["pareto"], document["best"], document["own"]}
    newest = document["trials"][-_MAX_LIVE_ROWS:]
    older = [row for row in document["trials"][: -len(newest) or None] if row["trial_id"] in kept]
    rows = []
    for row in (*older, *newest):
        found = {name: row[name] for name in _LIVE_ROW if row[name] is not None}
        if row.get("failure") is not None:
            found["failure"] = {"message": row["failure"]["message"][:_LONGEST_LIVE_TEXT]}
        rows.append(found)
    facts = {name: document[name] for name in _LIVE_FACTS}
    return {**facts, "num_trials": len(document["trials"]), "trials": rows}


def pareto(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return ids of the trials that no trial beats in both throughput and memory.

    ``rows`` are the report's trials. The ids are sorted by ascending memory.
    """
    front: list[int] = []
    most = 0.0
    known = [row for row in rows if row["memory_bytes"] and row["throughput"]]
    for row in sorted(known, key=lambda each: (each["memory_bytes"], -each["throughput"])):
        if row["throughput"] > most:
            most = row["throughput"]
            front.append(row["trial_id"])
    return front


def memory_bytes(measured: Measured) -> float | None:
    """Return peak bytes of the allocator, else of tensors, else of the rank's process.

    None if none of these was measured.
    """
    for name in ("peak_reserved_bytes", "peak_memory_bytes", "host_peak_memory_bytes"):
        if (value := measured.value(name)) is not None:
            return value
    return None


def _row(trial: TrialResult, metric: str, forecast: Mapping[str, Any] | None) -> dict[str, Any]:
    outcome, batch = trial.outcome, trial.candidate.batch
    measured = outcome if isinstance(outcome, Measured) else Measured({})
    latency = measured.value("latency")
    predicted = None
    if forecast is not None:
        # Before the first measurement the machine is unknown, so the forecast of times was only a guess.
        is_guess = forecast.get("is_guess")
        predicted = {
            "step_s": None if is_guess else forecast.get("median_s"),
            "spread": None if is_guess else forecast.get("spread"),
            "memory_bytes": forecast.get("memory_median_bytes"),
            "probability_to_fit": forecast.get("probability_to_fit"),
        }
    return {
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
        "state": outcome.kind.value if isinstance(outcome, Failure) else "measured" if outcome else "running",
        "value": measured.value(metric),
        "half_width": measured.value("half_width"),
        "throughput": measured.value("throughput"),
        "step_s": None if latency is None else latency * 1e-6,
        "memory_bytes": memory_bytes(measured),
        "predicted": predicted,
        **({} if outcome is None else outcome_to_json(outcome)),
    }


def _model_facts(trials: Sequence[TrialResult]) -> dict[str, float]:
    measured = [trial.outcome for trial in trials if isinstance(trial.outcome, Measured)]
    return {name: one.metrics[name] for one in measured[:1] for name in _MODEL if name in one.metrics}


def _is_certain(best: TrialResult | None, own: TrialResult | None, metric: str) -> bool:
    """Return whether ``best``'s gain exceeds the sum of both confidence half-widths."""
    gain = gain_over(best, own, metric)
    outcomes = [trial.outcome for trial in (best, own) if trial is not None]
    widths = [one.value("half_width") or 0.0 for one in outcomes if isinstance(one, Measured)]
    return gain is not None and gain > sum(widths)


def _failures(trials: Sequence[TrialResult]) -> list[dict[str, Any]]:
    found: dict[FailureKind, dict[str, Any]] = {}
    for trial in trials:
        if isinstance(trial.outcome, Failure):
            kind, message = trial.outcome.kind, trial.outcome.message
            row = found.setdefault(kind, {"kind": kind.value, "count": 0, "trials": [], "example": message})
            row["count"] += 1
            row["trials"].append(trial.trial_id)
    return sorted(found.values(), key=lambda row: -row["count"])


def _step_shares(trial: TrialResult, parts: Mapping[str, float] | None) -> dict[str, Any] | None:
    """Return the seconds of a step by part; None if nothing was measured.

    ``step_s``: the measured time. ``measured``: forward, backward, optimizer step, and ``between``, the rest (loading data,
    logging). ``explained``: the predicted ``parts``, scaled down if they exceed the measured time, and ``idle``, the rest.
    """
    measured = trial.outcome
    if not isinstance(measured, Measured) or (latency := measured.value("latency")) is None:
        return None
    step_s = latency * 1e-6
    # Phases are timed separately. Synchronising the device between them takes additional time.
    phases = {name: (measured.value(key) or 0.0) * 1e-6 for key, name in _MEASURED_PHASES.items()}
    predicted = {
        name: sum(float(parts.get(one, 0.0)) for one in group) if parts else 0.0
        for name, group in _PREDICTED_PARTS.items()
    }
    return {
        "step_s": step_s,
        "measured": _completed(phases, step_s, "between") if any(phases.values()) else {},
        "explained": _completed(predicted, step_s, "idle") if parts else {},
    }


def _completed(parts: dict[str, float], whole: float, rest: str) -> dict[str, float]:
    """Return ``parts`` and a ``rest`` that add up to ``whole``, without tiny parts."""
    total = sum(parts.values())
    factor = min(1.0, whole / total) if total else 1.0
    scaled = {name: value * factor for name, value in parts.items()}
    scaled[rest] = max(whole - sum(scaled.values()), 0.0)
    return {name: value for name, value in scaled.items() if value > _VISIBLE * whole}


def _sensitivity(
    scored: Sequence[tuple[float, TrialResult]], best: TrialResult, space: Space, metric: str
) -> list[dict[str, Any]]:
    """Return how much each value of each setting costs; largest effect first.

    ``loss`` is how much worse, relative to ``best``, the best trial with the value is. DeepSpeed's defaults are filled in.
    Effects of settings that were changed together are not separated.
    """
    top = best.score(metric)
    assert top is not None
    scores: dict[str, dict[Any, list[float]]] = {}
    for value, trial in scored:
        for name, setting in _effective_settings(trial, space).items():
            scores.setdefault(name, {}).setdefault(setting, []).append(value)
    found = []
    for name, values in scores.items():
        rows: list[dict[str, Any]] = [
            {
                "value": "default" if value is None else value,
                "loss": -relative_gain(max(of_value), top),
                "count": len(of_value),
            }
            for value, of_value in values.items()
        ]
        rows.sort(key=lambda row: row["loss"])
        if len(rows) > 1:
            found.append({"knob": name, "effect": rows[-1]["loss"] - rows[0]["loss"], "values": rows})
    return sorted(found, key=lambda row: -row["effect"])


def _effective_settings(trial: TrialResult, space: Space) -> dict[str, Any]:
    candidate = trial.candidate
    settings: dict[str, Any] = {
        "ZeRO stage": candidate.stage,
        "micro batch": candidate.batch.micro_batch_size,
    }
    if space.batch_size_grid.is_free:  # otherwise accumulation follows from the micro batch
        settings["accumulation"] = candidate.batch.accumulation
    effective = space.effective(candidate)
    for knob in space.knobs(candidate.stage):
        is_hyperparameter = knob.path.startswith(HYPERPARAMETERS)
        value = (
            space.hyperparameter(candidate, knob.path)
            if is_hyperparameter
            else value_at(effective, knob.path)
        )
        settings[knob.path] = "none" if value is None and knob.path.endswith(".device") else value
    return settings


def _needs(trials: Sequence[TrialResult], margins: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    by_id = {trial.trial_id: trial for trial in trials}
    known = [one for one in margins if one["trial_id"] in by_id]
    known.sort(key=lambda one: by_id[one["trial_id"]].candidate.is_own)
    return [
        {**one, "was_tried": _tried(trials, by_id[one["trial_id"]], one["micro_batch_size"])} for one in known
    ]


def _tried(trials: Sequence[TrialResult], like: TrialResult, micro_batch_size: int) -> str | None:
    """Return how the trial of this micro batch and ``like``'s settings ended, or None."""
    structure = like.candidate.stage, like.candidate.settings
    for trial in trials:
        candidate, outcome = trial.candidate, trial.outcome
        if (
            outcome is not None
            and (candidate.stage, candidate.settings) == structure
            and candidate.batch.micro_batch_size == micro_batch_size
        ):
            if isinstance(outcome, Measured):
                return "measured"
            is_oom = outcome.kind is FailureKind.DEVICE_OOM
            return "out of memory" if is_oom else outcome.kind.value
    return None
