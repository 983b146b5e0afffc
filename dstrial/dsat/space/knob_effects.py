"""Compare measurements that differ in one knob of ``--space`` only. Pure.

What DeepSpeed reads of its own keys is known from the rules. What a trial makes of a hyperparameter is not, so its values
have to prove themselves: by what the engine is (``dstrial.dsat.rank.step_timer``), what a micro batch computes and keeps, or
the time of a step.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dstrial.config import check_deepspeed
from dstrial.dsat.core.candidate import HYPERPARAMETERS, Candidate, value_at
from dstrial.dsat.core.outcome import Measured, Outcome
from dstrial.dsat.space.knobs import KNOWN_PATHS
from dstrial.dsat.space.space import Space, Structure

PROBES = {
    "probe_modules": "modules",
    "probe_compiled": "compiled modules",
    "probe_pipeline_stages": "pipeline stages",
    "probe_nvme": "states on NVMe",
    "probe_operations": "operations of a micro batch",
    "num_params": "parameters",
    "num_trainable_params": "trainable parameters",
    "activation_bytes_per_record": "bytes kept for backward, of a record",
    "probe_flops_per_record": "FLOPs of a record",
}
"""Metric of a measured configuration -> what it counts. Which of them differ is the proof."""

_STEP = "time of a step"
_LEAST = 0.005
_MIN_TIME = 0.02
_MAX_NOISE = 0.15
Pair = tuple[Candidate, Outcome | None]


@dataclasses.dataclass(frozen=True, slots=True)
class KnobEffect:
    """Two values of a knob, compared."""

    path: str
    values: tuple[Any, Any]
    # (what, with the first value, with the second); empty for a dead knob
    changes: tuple[tuple[str, float, float], ...]
    noise: float = 0.0  # relative; by so much times may differ without a cause

    @property
    def is_dead(self) -> bool:
        """Whether nothing observed has changed, and times are certain enough to say so."""
        return not self.changes and self.noise <= _MAX_NOISE

    def __str__(self) -> str:
        first, second = (str(value).lower() if isinstance(value, bool) else value for value in self.values)
        if self.is_dead:
            return (
                f"{self.path} is dead: with {first} and {second} the engine, its computation and the time of a step (within "
                f"{self.noise:.0%}) are the same; measured with one of them only"
            )
        if not self.changes:
            return (
                f"{self.path} is not proved: with {first} and {second} the engine and its computation are the same; times may "
                f"differ by {self.noise:.0%} without a cause"
            )
        told = ", ".join(f"{what} {before:.6g} -> {after:.6g}" for what, before, after in self.changes)
        return f"{self.path} proved with {first} -> {second}: {told}"


def knobs_without_effect(space: Space) -> tuple[str, ...]:
    """Return the paths that DeepSpeed's rules say nothing about and need a proof."""
    return tuple(path for path, values in space.extra.items() if path not in KNOWN_PATHS or "nvme" in values)


def trials_for_effects(space: Space) -> list[Candidate]:
    """Return the user's configuration with each value of each knob that needs a proof."""
    own = space.own()
    found = []
    for path in knobs_without_effect(space):
        for value in space.extra[path]:
            candidate = Candidate(own.stage, ((path, value),), own.batch)
            if path == space.stages_path:
                position = space.batch_size_grid.position(own.batch.micro_batch_size)
                candidate = space.candidate(Structure(own.stage, candidate.settings), position)
            found.append(candidate)
    return [candidate for candidate in found if space.illegal_reason(candidate) is None]


def knob_effects(
    space: Space, observations: Sequence[Pair], identity: Callable[[Candidate], str] | None = None
) -> Iterator[KnobEffect]:
    """Compare every two measured candidates that differ in one unproven knob only.

    ``identity`` is a faster ``space.identity``.
    """
    same_as = identity or space.identity
    for path in knobs_without_effect(space):
        groups: dict[str, list[tuple[Any, Measured]]] = {}
        for candidate, outcome in observations:
            settings = dict(candidate.settings)
            value = _value(space, candidate, path)
            if isinstance(outcome, Measured) and value is not None:
                settings.pop(path, None)
                rest = dataclasses.replace(candidate, settings=tuple(sorted(settings.items())))
                key = same_as(rest)
                if path == space.stages_path:
                    # Another number of stages has other replicas, between which the batch is divided otherwise.
                    key = json.dumps([rest.stage, rest.settings, rest.batch.micro_batch_size])
                groups.setdefault(key, []).append((value, outcome))
        for group in groups.values():
            for (value, one), (other_value, other) in itertools.combinations(group, 2):
                if value != other_value and any(name in one.metrics for name in PROBES):
                    yield KnobEffect(
                        path, (value, other_value), tuple(_changes(one, other)), _noise(one, other)
                    )


def best_knob_effects(space: Space, observations: Sequence[Pair]) -> list[KnobEffect]:
    """Return the proof with most changes for each two values of each unproven knob."""
    found: dict[tuple[str, str], KnobEffect] = {}
    for proof in knob_effects(space, observations):
        key = (proof.path, str(sorted(map(str, proof.values))))
        if key not in found or len(proof.changes) > len(found[key].changes):
            found[key] = proof
    return list(found.values())


def without_dead(candidate: Candidate, dead: Sequence[KnobEffect], space: Space) -> Candidate:
    """Return a candidate with one same value for all those that have equal effect."""
    settings = dict(candidate.settings)
    for proof in dead:
        if _value(space, candidate, proof.path) in proof.values:
            settings[proof.path] = min(proof.values, key=str)
    return dataclasses.replace(candidate, settings=tuple(sorted(settings.items())))


def _value(space: Space, candidate: Candidate, path: str) -> Any:
    """Return a knob's value as it takes effect; None where nothing is known of it."""
    if path.startswith(HYPERPARAMETERS):
        return space.hyperparameter(candidate, path)
    config = space.base if candidate.is_own else space.config(candidate)
    return value_at(check_deepspeed(config, space.sizes_of(candidate), auto="warning").effective, path)


def _changes(one: Measured, other: Measured) -> Iterator[tuple[str, float, float]]:
    for name, meaning in PROBES.items():
        before, after = one.value(name), other.value(name)
        if before is not None and after is not None and _apart(before, after) > _LEAST:
            yield meaning, before, after
    before, after = one.value("latency"), other.value("latency")
    if before and after and _apart(before, after) > _noise(one, other):
        yield f"{_STEP}, ms", before / 1e3, after / 1e3


def _noise(one: Measured, other: Measured) -> float:
    return max(sum(measured.value("half_width") or 0.0 for measured in (one, other)), _MIN_TIME)


def _apart(before: float, after: float) -> float:
    return abs(after - before) / max(abs(before), abs(after), 1e-12)
