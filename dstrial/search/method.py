"""A search method: what differs between searchers, and what it asks for."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Mapping
from typing import Any, Protocol, TypeAlias

from dstrial.config.experiment_config.hyperparameters import is_searched
from dstrial.search.hyperparameters import sample
from dstrial.search.random_state import SearchRandom


@dataclasses.dataclass(frozen=True, slots=True)
class Create:
    """Start a trial."""

    request_id: str
    trial_seed: int
    hparams: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """Ask a trial to save a checkpoint and end; it has trained as long as it should."""

    request_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class Shutdown:
    """The search is over: every trial that was asked for has exited."""

    cancel: bool = False  # every trial was cancelled by a user
    failure: bool = False  # every trial failed


Action: TypeAlias = Create | Stop | Shutdown


class ExitReason(str, enum.Enum):
    """Why a trial ended before its time."""

    ERRORED = "ERRORED"
    USER_CANCELED = "USER_CANCELED"
    INVALID_HP = "INVALID_HP"


@dataclasses.dataclass(frozen=True, slots=True)
class PreviewedTrials:
    """Trials that train equally long."""

    count: int
    unit: str | None = None  # the time metric; None for trials that train to their own end
    value: int | None = None  # in that unit


class SearchMethod(Protocol):
    """One kind of search; each method returns actions, in order.

    A trial cannot be paused, resumed or given a length: it trains to its own end unless a ``Stop`` follows one of its
    validations. ``trial_exited`` follows a ``Stop``, too. A trial that ends with ``INVALID_HP`` is replaced, except in a grid.
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> SearchMethod:
        """Make the method of an experiment config with defaults."""

    @classmethod
    def previewed(cls, config: Mapping[str, Any]) -> tuple[PreviewedTrials, ...]:
        """Return the trials by how long they train, shortest first."""
        # For a search in which no validations are equal and no trial fails.

    def initial_trials(self, random: SearchRandom) -> list[Create | Stop]:
        """Start the search."""

    def validation_completed(
        self, random: SearchRandom, request_id: str, metrics: Mapping[str, Any]
    ) -> list[Create | Stop]:
        """Take a validation of an open trial.

        Raises:
            SearchError: a metric that the method needs is missing or no number.
        """

    def trial_exited_early(
        self, random: SearchRandom, request_id: str, reason: ExitReason
    ) -> list[Create | Stop]:
        """Take that a trial failed, was cancelled or is invalid, before its exit."""

    def trial_exited(self, random: SearchRandom, request_id: str) -> list[Create | Stop]:
        """Take the end of a trial, whatever its reason."""

    def progress(self, trial_progress: Mapping[str, float], closed: Collection[str]) -> float:
        """Return the share of the search that is done, 0 to 1, from that of its trials."""

    def snapshot(self) -> dict[str, Any]:
        """Return the state as JSON values."""

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take the state of :meth:`snapshot`."""


_MAX_REPLACED_MIN = 100
_MAX_REPLACED_PER_TRIAL = 10


def max_replaced(hyperparameters: Mapping[str, Any], max_trials: int) -> int:
    """Return how many invalid trials a search replaces before they count.

    Without a bound, a search whose every point is invalid would start trials for ever; where nothing is drawn, another
    trial would have the very same hyperparameters.
    """
    if not is_searched(hyperparameters):
        return 0
    return max(_MAX_REPLACED_MIN, _MAX_REPLACED_PER_TRIAL * max_trials)


def create(hyperparameters: Mapping[str, Any], random: SearchRandom) -> Create:
    """Draw a trial: its hyperparameters, then its id, then its seed."""
    return complete(sample(hyperparameters, random), random)


def complete(hparams: dict[str, Any], random: SearchRandom) -> Create:
    """Make a trial of given hyperparameters: draw its id, then its seed."""
    request_id = random.request_id()
    return Create(request_id, random.trial_seed(), hparams)
