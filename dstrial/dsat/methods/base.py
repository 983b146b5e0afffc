"""The contract of a search method: results in, actions out. Pure and seeded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.outcome import Outcome
from dstrial.dsat.predictor.profiles import PredictInputs
from dstrial.dsat.space.filters import Filters
from dstrial.dsat.space.space import Space


@dataclasses.dataclass(frozen=True, slots=True)
class Measure:
    """Measure a candidate.

    Attributes:
        trial_id: the search's number of it, from 1, never used twice.
        candidate: what.
        why: for the table, such as ``your configuration`` or ``lineage 3, rung 1``.
        predicted_s: how long its steps are expected to take in all, seconds; None if nothing is known.
    """

    trial_id: int
    candidate: Candidate
    why: str
    predicted_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Skip:
    """Take note that a candidate is not measured, and why."""

    candidate: Candidate
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    """Tell a person something."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Finish:
    """The search is over; what is still being measured is ended.

    Attributes:
        reason: one line.
        is_failure: whether nothing could be measured.
    """

    reason: str
    is_failure: bool = False


Action: TypeAlias = Measure | Skip | Note | Finish


@dataclasses.dataclass(frozen=True, slots=True)
class ReportFacts:
    """What a method knows beyond measurements, as JSON; empty if it does not predict.

    Attributes:
        forecasts: trial -> what was predicted of it before it was measured.
        explained: trial -> where the time of its step goes, seconds for each part; of the own and the best one.
        margins: what a device lacks for larger micro batches of these two.
        left: what could be measured next, the most promising first.
    """

    forecasts: Mapping[int, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    explained: Mapping[int, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    margins: Sequence[Mapping[str, Any]] = ()
    left: Sequence[Mapping[str, Any]] = ()


class ConfigSearch(Protocol):
    """Decides what is measured next.

    Every ``Measure`` must at last be answered by one ``on_result``, in any order; equal calls give equal actions.
    After ``Finish`` nothing more is asked for.
    """

    def start(self) -> list[Action]:
        """Begin; called once."""

    def on_result(self, trial_id: int, outcome: Outcome) -> list[Action]:
        """Take how a measurement ended."""

    def snapshot(self) -> dict[str, Any]:
        """Return the state as JSON for people and tools; a resume replays results instead."""

    def report_facts(self) -> ReportFacts:
        """Return what a report says beyond the measurements."""


@dataclasses.dataclass(frozen=True, slots=True)
class MethodOptions:
    """What all methods are told.

    Attributes:
        metric: the searched metric.
        max_trials: how many candidates may be measured, the user's own included.
        num_parallel: how many may be measured at the same time.
        seed: of everything random.
        early_stopping: end after so many trials without a new best; None never.
        range_factor: multiplies the first guess at the largest micro batch (binary, asha).
        trials_per_random_config: most trials of one structure (random).
        max_rungs: number of rungs (asha).
        min_binary_search_trials: trials of a lineage in the lowest rung, ASHA's *r* (asha).
        divisor: one of so many lineages is promoted, ASHA's *eta* (asha).
        asha_early_stopping: ASHA's *s*, the rungs that are left out below (asha).
    """

    metric: str = "FLOPS_per_gpu"
    max_trials: int = 64
    num_parallel: int = 1
    seed: int = 42
    early_stopping: int | None = None
    range_factor: float = 1.0
    trials_per_random_config: int = 5
    max_rungs: int = 5
    min_binary_search_trials: int = 3
    divisor: int = 2
    asha_early_stopping: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """A flag that only some methods have.

    Attributes:
        name: as it is typed, ``--max-rungs``.
        kind: type of its value.
        default: where it is not given.
        help: for ``--help``.
        option: the field of ``MethodOptions`` that it sets.
        least: smallest value; None for anything above 0.
    """

    name: str
    kind: type[int] | type[float]
    default: int | float | None
    help: str
    option: str
    least: int | None

    @property
    def dest(self) -> str:
        """Its name among parsed arguments."""
        return self.name.removeprefix("--").replace("-", "_")


@dataclasses.dataclass(frozen=True, slots=True)
class MethodEntry:
    """What dsat knows of a method; its module declares it, the package lists it.

    Attributes:
        name: on the command line and on record.
        summary: for ``--help``.
        make: makes a new one; the inputs are given to one that predicts.
        flags: its own.
        zero_stages: the stages that it tries unless told otherwise.
        predicts: whether it starts from dry runs, and wants the machine benchmarked.
    """

    name: str
    summary: str
    make: Callable[[Space, MethodOptions, Filters, PredictInputs | None], ConfigSearch]
    flags: tuple[Flag, ...] = ()
    zero_stages: tuple[int, ...] = (1, 2, 3)
    predicts: bool = False


def measures(actions: Sequence[Action]) -> list[Measure]:
    """Return what is to be measured, of some actions."""
    return [action for action in actions if isinstance(action, Measure)]
