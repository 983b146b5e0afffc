"""The interface of search methods, and the actions that they return."""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from dstrial.config.experiment_config.hyperparameters import is_searched
from dstrial.search.sampling import SearchRandom, sample


@dataclasses.dataclass(frozen=True, slots=True)
class Create:
    """Action that creates a trial; events refer to the trial by ``request_id``."""

    request_id: str
    trial_seed: int
    hparams: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """Action that makes a trial save a checkpoint and exit, as if fully trained."""

    request_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class Shutdown:
    """Action that ends the search, because all its trials have exited."""

    cancel: bool = False  # whether a user cancelled every trial
    failure: bool = False  # whether every trial failed


Action: TypeAlias = Create | Stop | Shutdown


class ExitReason(str, enum.Enum):
    """Why a trial exited before its training was complete."""

    ERRORED = "ERRORED"
    USER_CANCELED = "USER_CANCELED"
    INVALID_HP = "INVALID_HP"


@dataclasses.dataclass(frozen=True, slots=True)
class PreviewedTrials:
    """A number of trials with the same training length."""

    count: int
    unit: str | None = None  # the time metric; None if the trials train their full length
    value: int | None = None  # training length in `unit`


class SearchMethod(abc.ABC):
    """Base of all search methods; methods that handle events return actions.

    A search cannot pause or resume a trial, or set the length of its training. A trial trains its full length unless the search
    returns a ``Stop`` after one of the trial's validations. ``trial_exited`` is called for stopped trials, too. A trial that
    exits with ``INVALID_HP`` is replaced by a new trial up to ``max_replaced`` times per search, but never in a grid.
    """

    @abc.abstractmethod
    def __init__(self, config: Mapping[str, Any]) -> None:
        """Create the method from an experiment config in which defaults are filled in."""

    @classmethod
    @abc.abstractmethod
    def previewed(cls, config: Mapping[str, Any]) -> tuple[PreviewedTrials, ...]:
        """Return the expected number of trials for each training length, shortest first."""
        # The preview assumes that no two validations are equal and no trial fails.

    @abc.abstractmethod
    def initial_trials(self, random: SearchRandom) -> list[Create | Stop]:
        """Return the actions that create the first trials."""

    def validation_completed(
        self, random: SearchRandom, request_id: str, metrics: Mapping[str, Any]
    ) -> list[Create | Stop]:
        """Handle the metrics of a running trial's validation.

        Raises:
            SearchError: a metric that the search needs is missing or not a number.
        """
        return []

    def trial_exited_early(
        self, random: SearchRandom, request_id: str, reason: ExitReason
    ) -> list[Create | Stop]:
        """Handle a trial that failed, was cancelled or has invalid hyperparameters.

        The caller must call :meth:`trial_exited` afterwards.
        """
        return []

    @abc.abstractmethod
    def trial_exited(self, random: SearchRandom, request_id: str) -> list[Create | Stop]:
        """Handle the exit of a trial, for any reason."""

    @abc.abstractmethod
    def progress(self, trial_progress: Mapping[str, float], closed: Collection[str]) -> float:
        """Return the progress of the search, 0 to 1.

        ``trial_progress``: request id -> progress of a trial, 0 to 1. ``closed``: request ids of exited trials.
        """

    @abc.abstractmethod
    def snapshot(self) -> dict[str, Any]:
        """Return the method's state as JSON values, for :meth:`restore`."""

    @abc.abstractmethod
    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`snapshot` returned."""


_MAX_REPLACED_MIN = 100  # a search of any size may replace this number of invalid trials
_MAX_REPLACED_PER_TRIAL = 10  # a larger search may replace this number for each of its trials


def max_replaced(hyperparameters: Mapping[str, Any], max_trials: int) -> int:
    """Return how many trials with invalid hyperparameters a search replaces at most.

    Without this limit, a search with only invalid hyperparameters would never end. The result is 0 if no hyperparameter is
    sampled, because a replacement would be identical.
    """
    if not is_searched(hyperparameters):
        return 0
    return max(_MAX_REPLACED_MIN, _MAX_REPLACED_PER_TRIAL * max_trials)


def create(hyperparameters: Mapping[str, Any], random: SearchRandom) -> Create:
    """Return an action that creates a trial with random hyperparameters, id and seed."""
    return complete(sample(hyperparameters, random), random)


def complete(hparams: dict[str, Any], random: SearchRandom) -> Create:
    """Return an action that creates a trial with ``hparams`` and a random id and seed."""
    request_id = random.request_id()
    return Create(request_id, random.trial_seed(), hparams)
