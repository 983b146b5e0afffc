"""Interfaces of backends, which run the trials of a search for the search driver."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from dstrial.dsat.backends.trial_spec import TrialSpec
from dstrial.dsat.core.outcome import Outcome


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """A trial that has ended: its measurement or failure, and how long it ran."""

    trial_id: int
    outcome: Outcome
    seconds: float | None = None  # since the trial got its slots; None if unknown


class Place(Protocol):
    """Where trials run: the common part of :class:`Backend` and :class:`RemoteSearch`.

    Attributes:
        num_parallel: number of trials that can run at once without slowing each other down; at least 1.
    """

    @property
    def num_parallel(self) -> int: ...

    def publish(self, report: Callable[[], Mapping[str, Any]]) -> bool:
        """Replace the report that users see while the search runs, without blocking.

        Args:
            report: function that returns the report as JSON values; not called if the backend shows no reports.

        Returns:
            False if the caller should retry later, else True.
        """

    def finish(self, results: Mapping[str, str]) -> None:
        """Store the results of an ended search; trials may run until :meth:`close`.

        Args:
            results: the search's result files: name -> text. A backend that stores no results ignores them.
        """

    def close(self) -> None:
        """End all trials that still run."""

    def describe(self) -> str:
        """Return a text that tells the user where trials run."""


@runtime_checkable
class RemoteSearch(Place, Protocol):
    """A whole search that runs in a trial on a master; this process copies its events."""

    def events(self) -> list[dict[str, Any]]:
        """Return the events since the last call; the first call starts the search.

        Raises:
            DstrialError: the search cannot run on the master, or ended without a ``finished`` event.
            KeyboardInterrupt: the process was asked to stop while it waited for an unreachable master.
        """


class Backend(Place, Protocol):
    """Runs the trials that a search in this process asks for; not thread-safe."""

    def start(self, spec: TrialSpec) -> dict[str, Any]:
        """Start a trial, or take over an earlier trial that has the label of ``spec``.

        Returns:
            JSON values by which :meth:`adopt` finds the trial after a restart of the search.

        Raises:
            DstrialError: the backend cannot run trials.
            OSError: the disk is full.
            KeyboardInterrupt: the process was asked to stop while it waited for an unreachable master.
        """

    def adopt(self, spec: TrialSpec, handle: Mapping[str, Any]) -> bool:
        """Take over a trial that an earlier process of the same search started.

        ``handle`` is what :meth:`start` returned in that process. If the trial is lost, returns False, and the caller must call
        :meth:`start` again.
        """

    def poll(self) -> list[Ended]:
        """Return the trials that have ended since the last call."""

    def running_s(self, trial_id: int) -> float:
        """Return the seconds since a trial got its slots; 0 while it waits for slots."""

    def kill(self, trial_id: int) -> None:
        """Kill a trial; :meth:`poll` may still return it if it has already measured."""
