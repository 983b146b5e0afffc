"""The interface between the search driver and the backend that runs its trials."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from dstrial.dsat.backends.trial_spec import TrialSpec
from dstrial.dsat.core.outcome import Outcome


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """The outcome of a measuring trial that has ended."""

    trial_id: int
    outcome: Outcome
    seconds: float | None = None  # since the trial got its slots; None if unknown
    candidate: Mapping[str, Any] | None = None  # measured configuration, if another process chose it


class SearchEndedError(Exception):
    """Another process has ended the search; ``event`` is its ``finished`` event."""

    def __init__(self, event: Mapping[str, Any]) -> None:
        super().__init__(event["reason"])
        self.event = event


class Backend(Protocol):
    """Interface of the classes that run a search's measuring trials; not thread-safe.

    Attributes:
        num_parallel: number of trials that can run at once without disturbing each other; at least 1.
        is_sequential: whether only one trial can run at once, even if the user asks for more.
    """

    @property
    def num_parallel(self) -> int: ...

    @property
    def is_sequential(self) -> bool: ...

    def start(self, spec: TrialSpec) -> dict[str, Any]:
        """Start a trial, or find the trial that was started earlier with its label.

        Returns:
            A handle of JSON values, which :meth:`adopt` takes after a restart of the search.

        Raises:
            DstrialError: no trial can be started here.
            OSError: the disk is full.
            KeyboardInterrupt: the process was asked to stop while it waited for an unreachable master.
        """

    def adopt(self, spec: TrialSpec, handle: Mapping[str, Any]) -> bool:
        """Take over a trial by the ``handle`` of an earlier :meth:`start`; False if lost."""

    def poll(self) -> list[Ended]:
        """Return the trials that have ended since the last call.

        Raises:
            SearchEndedError: the search has ended in another process, without the trials that still run here.
        """

    def running_s(self, trial_id: int) -> float:
        """Return for how many seconds a trial has had its slots; 0 while it waits."""

    def kill(self, trial_id: int) -> None:
        """Kill a trial; :meth:`poll` returns it only if it already has a result."""

    def publish(self, report: Callable[[], Mapping[str, Any]]) -> bool:
        """Replace the published report of the search, without blocking.

        Args:
            report: returns the report as JSON values; not called if this backend cannot publish reports.

        Returns:
            True; False if the caller should retry later.
        """

    def finish(self, results: Mapping[str, str]) -> None:
        """End the search; trials that still run end here or in :meth:`close`.

        Args:
            results: files of the search, name -> text, to store beside the trials if the backend can do so.
        """

    def close(self) -> None:
        """End all remaining trials."""

    def describe(self) -> str:
        """Return a text for the user that says where trials run."""
