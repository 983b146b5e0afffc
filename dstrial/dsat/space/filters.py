"""Reject duplicate, illegal and hopeless candidates; measure effects of settings.

The effect of a hyperparameter of ``--space`` on a trial is unknown (an *unproven knob*). So measurements that differ only in one
such knob are compared by these metrics: number of modules and other facts about the engines (``dstrial.dsat.rank.step_timer``),
FLOPs and saved activations of a micro batch, and time of a step. If none of these differs, the knob is *dead*.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from dstrial.dsat.core.candidate import HYPERPARAMETERS, Candidate, value_at
from dstrial.dsat.core.outcome import Failure, FailureKind, Measured, Outcome
from dstrial.dsat.space.knobs import KNOBS, KNOWN_PATHS
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
"""Metric of a measurement -> meaning. If no such metric differs between two values of a knob, the knob may be dead."""

_GROWING = {knob.path for knob in KNOBS if knob.grows_memory}
_MIN_CHANGE = 0.005  # relative; a smaller difference of a probe counts as none
_MIN_TIME_CHANGE = 0.02  # relative; times differ by this much without a cause
_MAX_NOISE = 0.15  # relative; noisier times do not prove a knob dead

Pair = tuple[Candidate, Outcome | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """A configuration and its outcome, which is None during the measurement."""

    candidate: Candidate
    outcome: Outcome | None


@dataclasses.dataclass(frozen=True, slots=True)
class Rejection:
    """The reason why a candidate is not measured.

    ``again``: a candidate that is equal, or differs only in a setting without effect, was measured. ``open``: an equal
    candidate is being measured. ``hopeless``: a candidate that needs less memory ran out of memory. ``outcome`` is the
    candidate's presumed outcome; None if unknown.
    """

    kind: Literal["again", "open", "illegal", "hopeless"]
    reason: str
    outcome: Outcome | None = None


class Filters:
    """Decides which candidates are measured: all if ``disabled`` (``--no-gates``)."""

    def __init__(self, space: Space, *, disabled: bool = False) -> None:
        self._space = space
        self.disabled = disabled
        self._identities: dict[Candidate, str] = {}
        self._num_params: float | None = None

    def note_params(self, num_params: float) -> None:
        """Set the model's number of parameters; bucket sizes above it count as equal."""
        self._num_params = num_params
        self._identities.clear()

    def check(self, candidate: Candidate, observations: Sequence[Observation]) -> Rejection | None:
        """Return why a candidate is not to be measured; None if it is to be measured."""
        if self.disabled:
            return None
        reason = self._space.illegal_reason(candidate)
        if reason is not None:
            return Rejection("illegal", reason, Failure(FailureKind.BAD_CONFIG, reason, "check"))
        known = [(one.candidate, one.outcome) for one in observations]
        effects = best_knob_effects(self._space, known, self._identity)
        dead = [one for one in effects if one.is_dead]
        identity = self._identity(_without_dead(candidate, dead, self._space))
        for other, outcome in known:
            if self._identity(_without_dead(other, dead, self._space)) != identity:
                continue
            if outcome is None:
                return Rejection("open", "an equal configuration is being measured")
            if _is_oom(outcome) and self._has_smaller_size(candidate, other):
                continue  # DeepSpeed also reserves memory for sizes above the model's
            if not isinstance(outcome, Failure) or outcome.kind is not FailureKind.COMMUNICATION:
                return Rejection("again", "an equal configuration was measured", outcome)
        for other, outcome in known:
            if (
                isinstance(outcome, Failure)
                and outcome.kind.is_out_of_memory
                and needs_no_less_memory(candidate, other, self._space)
            ):
                reason = (
                    f"it needs at least the memory of one that ran out of it ({self._space.describe(other)})"
                )
                return Rejection("hopeless", reason, Failure(outcome.kind, reason, "predicted"))
        return None

    def _has_smaller_size(self, candidate: Candidate, other: Candidate) -> bool:
        mine, theirs = (self._space.checked(one).effective for one in (candidate, other))
        return any(
            (value_at(mine, knob.path) or 0) < (value_at(theirs, knob.path) or 0)
            for knob in self._space.knobs(candidate.stage)
            if knob.counts_params
        )

    def _identity(self, candidate: Candidate) -> str:
        if candidate not in self._identities:
            self._identities[candidate] = self._space.identity(self._clamped(candidate))
        return self._identities[candidate]

    def _clamped(self, candidate: Candidate) -> Candidate:
        if self._num_params is None:
            return candidate
        effective = self._space.checked(candidate).effective
        most = 2 * math.ceil(self._num_params / 2)  # DeepSpeed takes even sizes only
        large = {
            knob.path: most
            for knob in self._space.knobs(candidate.stage)
            if knob.counts_params and (value_at(effective, knob.path) or 0) > most
        }
        return _with_settings(candidate, {**dict(candidate.settings), **large})


def _is_oom(outcome: Outcome) -> bool:
    return isinstance(outcome, Failure) and outcome.kind.is_out_of_memory


def _with_settings(candidate: Candidate, settings: dict[str, Any]) -> Candidate:
    return dataclasses.replace(candidate, settings=tuple(sorted(settings.items())))


def needs_no_less_memory(candidate: Candidate, other: Candidate, space: Space) -> bool:
    """Return whether ``candidate`` surely needs at least as much memory as ``other``.

    True if the stage is the same, micro batch and buckets are no smaller, and nothing else differs.
    """
    if candidate.stage != other.stage or candidate.batch.micro_batch_size < other.batch.micro_batch_size:
        return False
    mine, theirs = dict(candidate.settings), dict(other.settings)
    for path in mine.keys() | theirs.keys():
        left, right = (known.get(path, value_at(space.base, path)) for known in (mine, theirs))
        if left != right and (path not in _GROWING or left is None or right is None or left < right):
            return False
    return True


# ---- knobs whose effect only measurements show -----------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class KnobEffect:
    """The measured difference between two values of a setting."""

    path: str
    values: tuple[Any, Any]
    # (meaning of the metric, with the first value, with the second value); empty for a dead knob
    changes: tuple[tuple[str, float, float], ...]
    noise: float = 0.0  # relative difference of times that may be chance

    @property
    def is_dead(self) -> bool:
        """Whether the setting is known to have no effect.

        True if no metric differs, and the step times are precise enough to show a difference.
        """
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
        changes = ", ".join(f"{what} {before:.6g} -> {after:.6g}" for what, before, after in self.changes)
        return f"{self.path} proved with {first} -> {second}: {changes}"


def unproven_knobs(space: Space) -> tuple[str, ...]:
    """Return the keys of ``--space`` whose effect DeepSpeed's rules do not determine."""
    return tuple(path for path, values in space.extra.items() if path not in KNOWN_PATHS or "nvme" in values)


def trials_for_effects(space: Space) -> list[Candidate]:
    """Return candidates to measure the effect of ``--space`` settings.

    Each differs from the user's own configuration in one setting of unknown effect. Illegal candidates are left out.
    """
    own = space.own()
    found = []
    for path in unproven_knobs(space):
        for value in space.extra[path]:
            candidate = Candidate(own.stage, ((path, value),), own.batch)
            if path in space.axes:
                position = space.batch_size_grid.position(own.batch.micro_batch_size)
                candidate = space.candidate(Structure(own.stage, candidate.settings), position)
            found.append(candidate)
    return [candidate for candidate in found if space.illegal_reason(candidate) is None]


def best_knob_effects(
    space: Space, observations: Sequence[Pair], identity: Callable[[Candidate], str] | None = None
) -> list[KnobEffect]:
    """Return the clearest measured effect of each setting and pair of its values.

    Compares measurements that differ only in one ``--space`` setting of unknown effect. Of several comparisons for the same
    setting and values, the one in which most metrics differ is returned. ``identity`` is a faster substitute for
    ``space.identity``.
    """
    found: dict[tuple[str, str], KnobEffect] = {}
    for path in unproven_knobs(space):
        groups: dict[str, list[tuple[Any, Measured]]] = {}
        for candidate, outcome in observations:
            value = _effective_value(space, candidate, path)
            if (
                not isinstance(outcome, Measured)
                or value is None
                or not PROBES.keys() & outcome.metrics.keys()
            ):
                continue
            rest = _with_settings(
                candidate, {other: one for other, one in candidate.settings if other != path}
            )
            if path in space.axes:
                # Another parallel dimension has other replicas, so the batch is divided differently.
                key = json.dumps([rest.stage, rest.settings, rest.batch.micro_batch_size])
            else:
                key = (identity or space.identity)(rest)
            groups.setdefault(key, []).append((value, outcome))
        for group in groups.values():
            for (value, one), (other_value, other) in itertools.combinations(group, 2):
                if value == other_value:
                    continue
                effect = KnobEffect(
                    path, (value, other_value), tuple(_changes(one, other)), _noise(one, other)
                )
                name = (path, str(sorted(map(str, effect.values))))
                if name not in found or len(effect.changes) > len(found[name].changes):
                    found[name] = effect
    return list(found.values())


def _without_dead(candidate: Candidate, dead: Sequence[KnobEffect], space: Space) -> Candidate:
    settings = dict(candidate.settings)
    for effect in dead:
        if _effective_value(space, candidate, effect.path) in effect.values:
            settings[effect.path] = min(effect.values, key=str)
    return _with_settings(candidate, settings)


def _effective_value(space: Space, candidate: Candidate, path: str) -> Any:
    if path.startswith(HYPERPARAMETERS):
        return space.hyperparameter(candidate, path)
    return value_at(space.effective(candidate), path)


def _changes(one: Measured, other: Measured) -> Iterator[tuple[str, float, float]]:
    for name, meaning in PROBES.items():
        before, after = one.value(name), other.value(name)
        if before is not None and after is not None and _relative(before, after) > _MIN_CHANGE:
            yield meaning, before, after
    before, after = one.value("latency"), other.value("latency")
    if before and after and _relative(before, after) > _noise(one, other):
        yield "time of a step, ms", before / 1e3, after / 1e3


def _noise(one: Measured, other: Measured) -> float:
    widths = (measured.value("half_width") or 0.0 for measured in (one, other))
    return max(sum(widths), _MIN_TIME_CHANGE)


def _relative(before: float, after: float) -> float:
    return abs(after - before) / max(abs(before), abs(after), 1e-12)
