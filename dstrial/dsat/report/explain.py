"""Explain the best configuration: its time, the knobs, what more needs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dstrial.config import check_deepspeed
from dstrial.dsat.core.candidate import HYPERPARAMETERS, value_at
from dstrial.dsat.core.outcome import (
    Failure,
    FailureKind,
    Measured,
    Outcome,
    TrialResult,
    best_of,
    own_of,
    relative_gain,
)
from dstrial.dsat.space.space import Space

_PREDICTED = (
    ("compute", ("compute", "unfilled", "overhead")),
    ("exposed communication", ("transfer", "reduce", "calls", "unhidden", "gradient_copies")),
    ("host copies", ("host_copies",)),
    ("optimizer", ("optimizer", "host_optimizer")),
)
_MODEL = ("num_params", "num_trainable_params", "activation_bytes_per_record", "device_memory_bytes")


def model_facts(trials: Sequence[TrialResult]) -> dict[str, float]:
    """Return facts about the model and its device, of the first measured trial."""
    for trial in trials:
        if isinstance(trial.outcome, Measured):
            metrics = trial.outcome.metrics
            return {name: metrics[name] for name in _MODEL if name in metrics}
    return {}


def own_and_best(trials: Sequence[TrialResult], metric: str) -> list[TrialResult]:
    """Return the user's own configuration and the best one, once if they are the same."""
    own, best = own_of(trials), best_of(trials, metric)
    return [*([] if own is None or own is best else [own]), *([] if best is None else [best])]


def step_shares(outcome: Outcome | None, parts: Mapping[str, float] | None) -> dict[str, Any] | None:
    """Return where the time of a step goes, seconds; None if nothing was measured.

    ``measured``: forward, backward, optimizer step, and what is between them (loading data, logging). ``explained``: the
    predicted ``parts``, scaled where they exceed the measured time, and ``idle``, the rest. Both add up to ``step_s``.
    """
    if not isinstance(outcome, Measured) or (latency := outcome.value("latency")) is None:
        return None
    step_s = latency * 1e-6
    phases = {name: (outcome.value(name) or 0.0) * 1e-6 for name in ("forward", "backward", "step")}
    result: dict[str, Any] = {"step_s": step_s, "measured": {}, "explained": {}}
    if any(phases.values()):
        # Phases are timed apart, with the device synchronised between them, which takes time of its own.
        factor = min(1.0, step_s / sum(phases.values()))
        named = {
            "forward": phases["forward"],
            "backward": phases["backward"],
            "optimizer step": phases["step"],
        }
        result["measured"] = _completed(
            {name: seconds * factor for name, seconds in named.items()}, step_s, "between"
        )
    if parts:
        sums = {name: sum(float(parts.get(one, 0.0)) for one in group) for name, group in _PREDICTED}
        factor = min(1.0, step_s / sum(sums.values())) if sum(sums.values()) else 1.0
        result["explained"] = _completed(
            {name: seconds * factor for name, seconds in sums.items()}, step_s, "idle"
        )
    return result


def _completed(parts: dict[str, float], whole: float, rest: str) -> dict[str, float]:
    """Return parts and what is left of the whole, without parts too small to see."""
    parts = {**parts, rest: max(whole - sum(parts.values()), 0.0)}
    return {name: value for name, value in parts.items() if value > 0.0005 * whole}


def sensitivity(trials: Sequence[TrialResult], space: Space, metric: str) -> list[dict[str, Any]]:
    """Return each value's best measurement by knob, the most effective knob first.

    Settings are compared as they take effect, DeepSpeed's defaults included. The effect of knobs that were changed together
    is not told apart.
    """
    best = best_of(trials, metric)
    top = None if best is None else best.score(metric)
    if top is None:
        return []
    levels: dict[str, dict[Any, list[float]]] = {}
    for trial in trials:
        value = trial.score(metric)
        if value is None:
            continue
        candidate = trial.candidate
        settings: dict[str, Any] = {
            "ZeRO stage": candidate.stage,
            "micro batch": candidate.batch.micro_batch_size,
            "accumulation": candidate.batch.accumulation,
        }
        if not space.batch_size_grid.is_free:
            del settings["accumulation"]  # follows from the micro batch
        config = space.base if candidate.is_own else space.config(candidate)
        effective = check_deepspeed(config, space.sizes, auto="warning").effective
        for knob in space.knobs(candidate.stage):
            if knob.path.startswith(HYPERPARAMETERS):
                settings[knob.path] = space.hyperparameter(candidate, knob.path)
            else:
                settings[knob.path] = value_at(effective, knob.path)
            if knob.path.endswith(".device") and settings[knob.path] is None:
                settings[knob.path] = "none"
        for name, setting in settings.items():
            levels.setdefault(name, {}).setdefault(setting, []).append(value)
    found = []
    for name, values in levels.items():
        if len(values) < 2:
            continue
        rows: list[dict[str, Any]] = [
            {
                "value": "default" if value is None else value,
                "loss": -relative_gain(max(scores), top),
                "count": len(scores),
            }
            for value, scores in values.items()
        ]
        rows.sort(key=lambda row: row["loss"])
        effect = rows[-1]["loss"] - rows[0]["loss"]
        found.append({"knob": name, "effect": effect, "values": rows})
    return sorted(found, key=lambda row: -row["effect"])


def device_needs(
    trials: Sequence[TrialResult], space: Space, metric: str, margins: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Return what larger micro batches of the best and own structure would need.

    As the method predicts it (``margins``), else from the measured peak and what one record keeps for backward.
    """
    of_trials = {trial.trial_id: trial for trial in trials}
    predicted = [one for one in margins if one["trial_id"] in of_trials]
    if predicted:
        return [
            {**one, "was_tried": _tried(trials, of_trials[one["trial_id"]], one["micro_batch_size"])}
            for one in sorted(predicted, key=lambda one: of_trials[one["trial_id"]].candidate.is_own)
        ]
    found = []
    for trial in reversed(own_and_best(trials, metric)):
        if not isinstance(trial.outcome, Measured):
            continue
        metrics = trial.outcome.metrics
        peak = metrics.get("peak_reserved_bytes", metrics.get("peak_memory_bytes"))
        capacity, record = metrics.get("device_memory_bytes"), metrics.get("activation_bytes_per_record")
        if peak is None or capacity is None or record is None:
            continue
        micro = trial.candidate.batch.micro_batch_size
        ladder = space.batch_size_grid
        at = ladder.position(micro)
        for position in range(at + 1, min(at + 3, ladder.last + 1)):
            larger = ladder.split(position).micro_batch_size
            missing = peak + (larger - micro) * record - capacity
            found.append(
                {
                    "trial_id": trial.trial_id,
                    "micro_batch_size": larger,
                    "missing_bytes": missing,
                    "was_tried": _tried(trials, trial, larger),
                }
            )
    return found


def _tried(trials: Sequence[TrialResult], like: TrialResult, micro_batch_size: int) -> str | None:
    """Return how the structure ended at another micro batch; None if not tried."""
    for trial in trials:
        same = (
            trial.candidate.stage == like.candidate.stage
            and trial.candidate.settings == like.candidate.settings
        )
        if same and trial.candidate.batch.micro_batch_size == micro_batch_size and trial.outcome is not None:
            if isinstance(trial.outcome, Failure):
                kind = trial.outcome.kind
                return "out of memory" if kind is FailureKind.DEVICE_OOM else kind.value
            return "measured"
    return None
