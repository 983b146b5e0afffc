"""The interface of search methods: deterministic maps from results to actions."""

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
    """Action: measure a configuration in a new trial."""

    trial_id: int  # from 1, never used twice
    candidate: Candidate
    why: str
    predicted_s: float | None = None  # seconds of the whole trial; None if unknown


@dataclasses.dataclass(frozen=True, slots=True)
class Skip:
    """Action: log why a configuration is not measured."""

    candidate: Candidate
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    """Action: show a line to the user."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Finish:
    """Action: end the search, and kill trials that still run."""

    reason: str
    is_failure: bool = False


Action: TypeAlias = Measure | Skip | Note | Finish


@dataclasses.dataclass(frozen=True, slots=True)
class ReportFacts:
    """Predictions of a method, as JSON values for the report.

    All fields are empty if the method makes no predictions.
    """

    # trial -> prediction before it was measured
    forecasts: Mapping[int, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    # trial -> seconds of each part of a step
    explained: Mapping[int, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    # bytes missing for larger micro batches of the user's own configuration and of the best one
    margins: Sequence[Mapping[str, Any]] = ()
    left: Sequence[Mapping[str, Any]] = ()  # unmeasured candidates, the most promising first


class ConfigSearch(Protocol):
    """Interface of a search method, which decides what to measure next.

    The caller must call ``on_result`` once for every ``Measure``, in any order. Equal sequences of calls return equal actions.
    After ``Finish``, a method returns no more actions.
    """

    def start(self) -> list[Action]:
        """Return the first actions; called once, before any ``on_result``."""

    def on_result(self, trial_id: int, outcome: Outcome) -> list[Action]:
        """Handle the outcome of a trial; return the next actions."""

    def report_facts(self) -> ReportFacts:
        """Return the method's predictions, which the report shows beside measurements."""


@dataclasses.dataclass(frozen=True, slots=True)
class MethodOptions:
    """The options of all methods; each method reads only its own."""

    metric: str = "FLOPS_per_gpu"
    max_trials: int = 64
    num_parallel: int = 1
    thorough: bool = False  # spend up to twice the trials (predict)
    seed: int = 42
    early_stopping: int | None = None  # trials without a new best after which a search ends
    search_range_factor: float = 1.0  # multiplies the first guess at the largest micro batch (binary, asha)
    trials_per_random_config: int = 5  # most trials of one structure (random)
    max_rungs: int = 5
    min_binary_search_trials: int = 3  # trials of a lineage in the lowest rung, ASHA's *r*
    divisor: int = 2  # one of this many lineages is promoted, ASHA's *eta*
    asha_early_stopping: int = 0  # number of lowest rungs that are left out, ASHA's *s*


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """A command line option that only some search methods have."""

    name: str
    kind: type[int] | type[float] | type[bool]
    default: int | float | None
    help: str
    least: int | None  # smallest value; None for a switch, and if any value above 0 is valid

    @property
    def dest(self) -> str:
        """Name of the field of ``MethodOptions`` that the option sets."""
        return self.name.removeprefix("--").replace("-", "_")


@dataclasses.dataclass(frozen=True, slots=True)
class MethodEntry:
    """Name, options and constructor of a search method, for the table ``METHODS``."""

    name: str
    summary: str
    make: Callable[[Space, MethodOptions, Filters, PredictInputs | None], ConfigSearch]
    flags: tuple[Flag, ...] = ()
    zero_stages: tuple[int, ...] = (1, 2, 3)
    predicts: bool = False  # the method needs dry runs and a benchmark of the machine


def measures(actions: Sequence[Action]) -> list[Measure]:
    return [action for action in actions if isinstance(action, Measure)]
