"""What need not be measured: the same again, the illegal, and the hopeless. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from dstrial.dsat.core.candidate import Candidate, value_at
from dstrial.dsat.core.outcome import Failure, FailureKind, Outcome
from dstrial.dsat.space.knob_effects import knob_effects, without_dead
from dstrial.dsat.space.knobs import KNOBS
from dstrial.dsat.space.space import Space

_GROWING = {knob.path: knob for knob in KNOBS if knob.grows_memory}


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """A candidate that has been measured, or is being measured (its outcome is None)."""

    candidate: Candidate
    outcome: Outcome | None


@dataclasses.dataclass(frozen=True, slots=True)
class Rejection:
    """Why a candidate is not measured.

    ``again``: an equal one was measured, or one that differs in a dead knob only; ``open``: an equal one is being measured;
    ``hopeless``: one that needs less memory ran out of it. ``outcome`` may be taken for its own.
    """

    kind: Literal["again", "open", "illegal", "hopeless"]
    reason: str
    outcome: Outcome | None = None


class Filters:
    """Decides which candidates are measured; all, where ``disabled`` (``--no-gates``)."""

    def __init__(self, space: Space, *, disabled: bool = False) -> None:
        self._space = space
        self.disabled = disabled
        self._identities: dict[Candidate, str] = {}
        self._num_params: float | None = None

    def note_params(self, num_params: float) -> None:
        """Take the model's number of parameters, above which sizes do not differ."""
        self._num_params = num_params
        self._identities.clear()

    def check(self, candidate: Candidate, observations: Sequence[Observation]) -> Rejection | None:
        """Return why a candidate is not measured; None if it is to be."""
        if self.disabled:
            return None
        reason = self._space.illegal_reason(candidate)
        if reason is not None:
            failure = Failure(FailureKind.BAD_CONFIG, reason, "check")
            return Rejection("illegal", reason, failure)
        found = knob_effects(
            self._space, [(one.candidate, one.outcome) for one in observations], self._identity
        )
        dead = [proof for proof in found if proof.is_dead]
        identity = self._identity(without_dead(candidate, dead, self._space))
        for one in observations:
            if self._identity(without_dead(one.candidate, dead, self._space)) != identity:
                continue
            if one.outcome is None:
                return Rejection("open", "an equal configuration is being measured")
            if (
                isinstance(one.outcome, Failure)
                and one.outcome.kind.is_out_of_memory
                and self._has_smaller_size(candidate, one.candidate)
            ):
                continue  # DeepSpeed sets aside memory for sizes above the model's, too
            if not isinstance(one.outcome, Failure) or one.outcome.kind is not FailureKind.COMMUNICATION:
                return Rejection("again", "an equal configuration was measured", one.outcome)
        for one in observations:
            if (
                isinstance(one.outcome, Failure)
                and one.outcome.kind.is_out_of_memory
                and needs_no_less_memory(candidate, one.candidate, self._space)
            ):
                reason = f"it needs at least the memory of one that ran out of it ({self._space.describe(one.candidate)})"
                return Rejection("hopeless", reason, Failure(one.outcome.kind, reason, "predicted"))
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
        """Return a candidate with one same value for all sizes above the model's."""
        if self._num_params is None:
            return candidate
        effective = self._space.checked(candidate).effective
        most = 2 * math.ceil(self._num_params / 2)  # DeepSpeed takes even sizes only
        large = {
            knob.path: most
            for knob in self._space.knobs(candidate.stage)
            if knob.counts_params and (value_at(effective, knob.path) or 0) > most
        }
        settings = tuple(sorted({**dict(candidate.settings), **large}.items()))
        return dataclasses.replace(candidate, settings=settings)


def needs_no_less_memory(candidate: Candidate, other: Candidate, space: Space) -> bool:
    """Return whether a candidate surely needs at least as much memory as another.

    That is so with the same stage, a micro batch that is no smaller, buckets that are no smaller, and nothing else different.
    """
    if candidate.stage != other.stage or candidate.batch.micro_batch_size < other.batch.micro_batch_size:
        return False
    mine, theirs = dict(candidate.settings), dict(other.settings)
    for path in mine.keys() | theirs.keys():
        left, right = (_value(settings, path, space) for settings in (mine, theirs))
        if left == right:
            continue
        if path not in _GROWING or left is None or right is None or left < right:  # type: ignore[operator]  # values of one knob
            return False
    return True


def _value(settings: dict[str, object], path: str, space: Space) -> object:
    """Return the value of a path, else that of the user's config; None if unknown."""
    if path in settings:
        return settings[path]
    found: object = value_at(space.base, path)
    return found
