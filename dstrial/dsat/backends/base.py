"""The interface of the driver to the place where measuring trials run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from dstrial.dsat.backends.trial_spec import TrialSpec
from dstrial.dsat.core.outcome import Outcome


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """A measuring trial that has ended."""

    trial_id: int
    outcome: Outcome
    seconds: float | None = None  # since its start on slots; None if unknown


class SearchPlace(Protocol):
    """Where a search or its trials run. Not thread-safe."""

    @property
    def num_parallel(self) -> int:
        """How many trials can run at once without disturbing each other; at least 1."""

    def finish(self, results: Mapping[str, str]) -> None:
        """End the search; this or :meth:`close` ends trials that still run.

        Args:
            results: its files, name -> text, to be kept beside the trials where there is a place for them.
        """

    def close(self) -> None:
        """End every trial that is left."""

    def describe(self) -> str:
        """Return where trials run, for a person."""


class Backend(SearchPlace, Protocol):
    """Runs measuring trials.

    Attributes:
        shows_reports: whether others can see there what :meth:`publish` is given.
    """

    shows_reports: bool

    def start(self, spec: TrialSpec) -> dict[str, Any]:
        """Start a trial, or find the one of this label that was started before.

        Returns:
            A handle, JSON values, for :meth:`adopt`.

        Raises:
            DstrialError: it cannot be started, and no other one could.
            OSError: the disk is full; it may be tried again.
            KeyboardInterrupt: the process was asked to stop while it waited for a master that is away.
        """

    def adopt(self, spec: TrialSpec, handle: Mapping[str, Any]) -> bool:
        """Take over a trial that an earlier process started; False if it is lost."""

    def poll(self) -> list[Ended]:
        """Return the trials that have ended since the last call."""

    def running_s(self, trial_id: int) -> float:
        """Return for how many seconds a trial has had its slots; 0 while it waits."""

    def kill(self, trial_id: int) -> None:
        """End a trial at once and forget it."""

    def publish(self, report: Mapping[str, Any]) -> bool:
        """Replace the search's report so far, without blocking.

        Args:
            report: JSON values.

        Returns:
            Whether nothing is left to do; False where it may be tried again.
        """


@runtime_checkable
class RemoteSearch(SearchPlace, Protocol):
    """A search whose journal another process keeps; the driver follows it."""

    def begin(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Begin the search where a journal ends, or find it."""

    def new_events(self, num_known: int) -> list[dict[str, Any]]:
        """Return the journal's events after the first ``num_known``."""

    def why_ended(self) -> str:
        """Return how the other process has ended; empty while it lives or that is unknown."""
