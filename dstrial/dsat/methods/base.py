"""The contract of a search method: results in, actions out. Pure and seeded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.outcome import Outcome
from dstrial.dsat.predictor.inputs import PredictInputs
from dstrial.dsat.space.filters import Filters
from dstrial.dsat.space.space import Space

NEED_SMALLEST = "You may need to specify a configuration which can successfully run with train_micro_batch_size_per_gpu = 1."


@dataclasses.dataclass(frozen=True, slots=True)
class Measure:
    """Measure a candidate."""

    trial_id: int  # from 1, never used twice
    candidate: Candidate
    why: str
    predicted_s: float | None = None  # of all its steps; None if unknown


@dataclasses.dataclass(frozen=True, slots=True)
class Skip:
    """Record that a candidate is not measured, and why."""

    candidate: Candidate
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    """A line for a person."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Finish:
    """The search is over; what is still being measured is ended."""

    reason: str
    is_failure: bool = False


Action: TypeAlias = Measure | Skip | Note | Finish


@dataclasses.dataclass(frozen=True, slots=True)
class ReportFacts:
    """What a method knows beyond measurements, as JSON; empty if it does not predict."""

    # trial -> prediction before it was measured
    forecasts: Mapping[int, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    # trial -> seconds of each part of a step
    explained: Mapping[int, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    # bytes that larger micro batches of the own and the best one lack
    margins: Sequence[Mapping[str, Any]] = ()
    left: Sequence[Mapping[str, Any]] = ()  # what could be measured next, the most promising first


class ConfigSearch(Protocol):
    """Decides what is measured next.

    Every ``Measure`` must at last be answered by one ``on_result``, in any order; equal calls give equal actions.
    After ``Finish`` nothing more is asked for.
    """

    def start(self) -> list[Action]:
        """Begin; called once."""

    def on_result(self, trial_id: int, outcome: Outcome) -> list[Action]:
        """Process the outcome of a measurement."""

    def report_facts(self) -> ReportFacts:
        """Return what a report says beyond the measurements."""


@dataclasses.dataclass(frozen=True, slots=True)
class MethodOptions:
    """Options of all methods."""

    metric: str = "FLOPS_per_gpu"
    max_trials: int = 64
    num_parallel: int = 1
    thorough: bool = False  # spend up to twice the trials (predict)
    seed: int = 42
    early_stopping: int | None = None  # end after so many trials without a new best
    search_range_factor: float = 1.0  # multiplies the first guess at the largest micro batch (binary, asha)
    trials_per_random_config: int = 5  # most trials of one structure (random)
    max_rungs: int = 5
    min_binary_search_trials: int = 3  # of a lineage in the lowest rung, ASHA's *r*
    divisor: int = 2  # one of so many lineages is promoted, ASHA's *eta*
    asha_early_stopping: int = 0  # ASHA's *s*, the rungs that are left out below


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """A flag that only some methods have."""

    name: str
    kind: type[int] | type[float] | type[bool]
    default: int | float | None
    help: str
    least: int | None  # smallest value; None for anything above 0, and for a switch

    @property
    def dest(self) -> str:
        """The field of ``MethodOptions`` that it sets."""
        return self.name.removeprefix("--").replace("-", "_")


@dataclasses.dataclass(frozen=True, slots=True)
class MethodEntry:
    """A method; its module declares it, the package lists it."""

    name: str
    summary: str
    make: Callable[[Space, MethodOptions, Filters, PredictInputs | None], ConfigSearch]
    flags: tuple[Flag, ...] = ()
    zero_stages: tuple[int, ...] = (1, 2, 3)
    predicts: bool = False  # starts from dry runs, and wants the machine benchmarked


def measures(actions: Sequence[Action]) -> list[Measure]:
    return [action for action in actions if isinstance(action, Measure)]
