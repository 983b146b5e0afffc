"""The interface of search methods: deterministic maps from results to actions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.outcome import Outcome

# Determined's advice if the first trial of a search fails.
NEED_SMALLEST = "You may need to specify a configuration which can successfully run with train_micro_batch_size_per_gpu = 1."


@dataclasses.dataclass(frozen=True, slots=True)
class Measure:
    """Action: measure a configuration in a new trial."""

    trial_id: int  # counted from 1
    candidate: Candidate
    why: str  # why this configuration was chosen, for the user
    predicted_s: float | None = None  # predicted seconds of the whole trial; None if unknown


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    """Action: show a line to the user."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Finish:
    """Action: end the search; the driver kills trials that still run."""

    reason: str
    is_failure: bool = False  # nothing could be measured


Action: TypeAlias = Measure | Note | Finish


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """A configuration and its outcome; the outcome is None until the trial has ended."""

    candidate: Candidate
    outcome: Outcome | None


class ConfigSearch(Protocol):
    """Interface of a search method, which decides what to measure next.

    The caller must call ``on_result`` exactly once for every ``Measure``, in any order. Equal sequences of calls return equal
    actions. After ``Finish``, a method returns no more actions.
    """

    @property
    def forecasts(self) -> Mapping[int, Mapping[str, Any]]:
        """Trial id -> prediction made before the trial ran, as JSON values; may be empty."""

    def start(self) -> list[Action]:
        """Return the first actions; called once, before any ``on_result``."""

    def on_result(self, trial_id: int, outcome: Outcome) -> list[Action]:
        """Handle the outcome of a trial; return the next actions."""


@dataclasses.dataclass(frozen=True, slots=True)
class MethodOptions:
    """The options of all methods; each method reads only its own."""

    metric: str = "FLOPS_per_gpu"
    max_trials: int = 64
    num_parallel: int = 1
    random_seed: int = 42
    thorough: bool = False  # spend up to twice the trials (predict)
    early_stopping: int | None = None  # trials without a new best after which a search ends
    search_range_factor: float = (
        1.0  # multiplies the first estimate of the largest micro batch (binary, asha)
    )
    trials_per_random_config: int = 5  # maximum number of trials with the same settings (random)
    max_rungs: int = 5  # number of ASHA's rungs
    min_binary_search_trials: int = 3  # trials with the same settings in the lowest rung, ASHA's *r*
    divisor: int = 2  # 1 / divisor of the settings is promoted to the next rung, ASHA's *eta*
    asha_early_stopping: int = 0  # number of lowest rungs that are left out, ASHA's *s*
