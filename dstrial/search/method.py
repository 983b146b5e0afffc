"""What a search method is: the part that differs between searchers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from dstrial.search.actions import Create, ExitReason, Stop
from dstrial.search.hyperparameters import sample
from dstrial.search.random_state import SearchRandom


class SearchMethod(Protocol):
    """One kind of search. Every method returns what to do now; the order of actions matters."""

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
        """Take the failure, cancellation or invalid hyperparameters of a trial, before its exit."""

    def trial_exited(self, random: SearchRandom, request_id: str) -> list[Create | Stop]:
        """Take the end of a trial, whatever its reason."""

    def progress(self, trial_progress: Mapping[str, float], closed: Collection[str]) -> float:
        """Return the share of the search that is done, 0 to 1, from that of its trials."""

    def snapshot(self) -> dict[str, Any]:
        """Return the state as JSON values."""

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take the state of :meth:`snapshot`."""


def create(hyperparameters: Mapping[str, Any], random: SearchRandom) -> Create:
    """Draw a trial: its hyperparameters, then its id, then its seed."""
    return complete(sample(hyperparameters, random), random)


def complete(hparams: dict[str, Any], random: SearchRandom) -> Create:
    """Make a trial of given hyperparameters: draw its id, then its seed."""
    request_id = random.request_id()
    return Create(request_id, random.trial_seed(), hparams)
