"""Sync points: batches after which all ranks exchange payloads and stop requests.

A sync point is one all-gather of payloads (metrics if a report is due), stop requests, and rank 0's choice of the next sync
point.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from determined import core

from dstrial.errors import PeerFailedError
from dstrial.visible_text import cut_text

T = TypeVar("T")

INTERVAL_S = 5.0  # intended time between sync points; a stop request takes effect at the next one

# The number of batches between sync points grows by at most this factor at a time. Otherwise, one fast batch could delay the
# next sync point by minutes.
_MAX_GROWTH = 8


class StopReason(enum.Enum):
    """Why training stopped before its last batch."""

    SIGNAL = "signal"
    PREEMPTED = "preempted"
    REQUESTED = "requested"


@dataclasses.dataclass(frozen=True, slots=True)
class SyncResult:
    """What a rank learns at a sync point: all ranks' payloads, and the reason to stop.

    Equal on all ranks. ``stop`` is None if no rank has requested a stop.
    """

    payloads: list[Any]  # by rank
    stop: StopReason | None


class SyncPoints:
    """Schedules sync points after the same batches on all ranks, and runs them.

    The first sync point is after the first batch. At each one, rank 0 chooses the number of batches to the next, from
    the measured time per batch.

    Args:
        stop_request: function that returns this rank's reason to stop, or None. The function must be fast, because it is called
            at sync points and, with a single rank, after every batch.
        clock: function that returns monotonic seconds.
        interval_s: intended time between sync points, in seconds.
    """

    def __init__(
        self,
        distributed: core.DistributedContext,
        stop_request: Callable[[], StopReason | None],
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._interval_s = interval_s
        self._distributed = distributed
        self._stop_request = stop_request
        self._clock = clock
        self.is_single_rank = bool(distributed.size == 1)
        self._distance = 1
        self._next: int | None = None
        self._mark: tuple[int, float] | None = None

    def start(self, batches_trained: int) -> None:
        """Start timing batches; call at the start of training and after each pause."""
        if self._next is None:
            self._next = batches_trained + 1
        self._mark = (batches_trained, self._clock())

    @property
    def next_batch(self) -> int:
        """Number of finished batches at the next sync point; equal on all ranks."""
        assert self._next is not None, "start() comes first"
        return self._next

    def is_stop_requested(self) -> bool:
        return self._stop_request() is not None

    def agree(self, batches_trained: int, payload: Any = None) -> SyncResult:
        """Exchange payloads and stop requests with all ranks. Ranks: all, collectively."""
        proposal = self._proposed_distance(batches_trained) if self._distributed.rank == 0 else 0
        self._mark = (batches_trained, self._clock())
        gathered = self._distributed.allgather((payload, self._stop_request(), proposal))
        self._distance = gathered[0][2]
        self._next = batches_trained + self._distance
        stop_requests = [request for _, request, _ in gathered if request is not None]
        return SyncResult(
            [payload for payload, _, _ in gathered], stop_requests[0] if stop_requests else None
        )

    def _proposed_distance(self, batches_trained: int) -> int:
        if self._mark is None or batches_trained <= self._mark[0]:
            return self._distance
        marked_batches, marked_time_s = self._mark
        elapsed_s = max(self._clock() - marked_time_s, 1e-9)
        wanted = int(self._interval_s * (batches_trained - marked_batches) / elapsed_s)
        return max(1, min(wanted, self._distance * _MAX_GROWTH))


def result_of_chief(distributed: core.DistributedContext, where: str, call: Callable[[], T]) -> T:
    """Return on every rank the result of ``call()``, which only rank 0 executes.

    Args:
        distributed: context for communication between the ranks.
        where: name of the call for the error message.
        call: function without arguments.

    Raises:
        Exception: on rank 0, the error of ``call``.
        PeerFailedError: on the other ranks, if ``call`` has raised an error on rank 0.

    Ranks: all, collectively.
    """
    result: T | None = None
    error: Exception | None = None
    if distributed.rank == 0:
        try:
            result = call()
        except Exception as caught:  # noqa: BLE001  # raised again below, after the other ranks were informed
            error = caught
    text = None if error is None else cut_text(f"{type(error).__name__}: {error}".splitlines()[0], 2000)
    result, failure = distributed.broadcast((result, text))
    if error is not None:
        raise error
    if failure is not None:
        raise peer_failed(where, [(0, failure)])
    return cast("T", result)


def peer_failed(where: str, failures: list[tuple[int, str]]) -> PeerFailedError:
    """Return the error that this rank raises because other ranks failed.

    ``where`` is the method that failed; ``failures`` has (rank, error text).
    """
    rank, text = failures[0]
    # By the words about a peer, the launcher recognises that another rank's failure is the cause (launch/failures.py).
    return PeerFailedError(
        f"{where} has failed on rank {rank} ({text}), and a peer of this rank exited for it; expected it to return on all "
        f"ranks. Look at the traceback of rank {rank}."
    )
