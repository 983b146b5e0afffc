"""The points of a run at which all ranks decide together whether to go on.

Everything that crosses ranks at such a point travels in one exchange: each rank's share of the metrics if a report is due,
each rank's stop request, and rank 0's choice of the next point. Between its beginning, which waits for nobody, and its end
the loop may train the next batch.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Callable
from typing import Any

from determined import core

from dstrial.errors import PeerFailedError
from dstrial.ranks.channel import PendingGather
from dstrial.ranks.control_channel import ControlChannel
from dstrial.visible_text import cut_text

INTERVAL_S = 5.0
"""How long, in seconds, a request to stop may wait for the next point of agreement."""

_MAX_GROWTH = 8

FAST_BATCHES = 8
"""Where so many batches or more lie between points of agreement, training goes on for one while ranks exchange."""


class StopReason(enum.Enum):
    """Why training stopped before its length."""

    SIGNAL = "signal"
    PREEMPTED = "preempted"
    REQUESTED = "requested"


@dataclasses.dataclass(frozen=True, slots=True)
class SyncResult:
    """What all ranks know after an exchange.

    Attributes:
        shares: index = rank: what each rank handed in.
        stop: why to stop after this batch; None to go on.
    """

    shares: list[Any]
    stop: StopReason | None


class SyncPoints:
    """Keeps the schedule of agreements, identical on all ranks.

    The first is after the first batch. Rank 0 then sets the distance from how long batches take, at most
    eight times the distance before, so that one fast batch does not postpone the next point by minutes.

    Args:
        stop_request: returns this rank's reason to stop, or None; cheap, called at points of agreement and, with a single
            rank, after every batch.
        clock: seconds, monotonic.
        interval_s: how long a stop request may wait for the next point.
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
        self._is_single_rank = bool(distributed.size == 1)
        self._distance = 1
        self._next: int | None = None
        self._mark: tuple[int, float] | None = None
        self._own: Any = None
        self._gather: PendingGather | None = None
        self._begun_at = 0

    def start(self, batches_trained: int) -> None:
        """Begin counting: at a start, a resume, or after a validation or a checkpoint."""
        if self._next is None:
            self._next = batches_trained + 1
        self._mark = (batches_trained, self._clock())

    @property
    def next_batch(self) -> int:
        """Finished batches at which ranks agree next, the same everywhere."""
        assert self._next is not None, "start() comes first"
        return self._next

    @property
    def may_wait(self) -> bool:
        """Whether an agreement may come one batch late; the same on all ranks.

        Not with slow batches: a stop request would wait long, and an exchange costs next to nothing.
        """
        is_channel = self._is_single_rank or isinstance(self._distributed, ControlChannel)
        return self._distance >= FAST_BATCHES and is_channel

    @property
    def is_single_rank(self) -> bool:
        return self._is_single_rank

    def is_stop_requested(self) -> bool:
        return self._stop_request() is not None

    def agree(self, batches_trained: int, share: Any = None) -> SyncResult:
        """Exchange shares and stop requests, and decide. Ranks: all, collectively."""
        self._own = self._payload(batches_trained, share)
        return self.end()

    def begin(self, batches_trained: int, share: Any = None) -> None:
        """Start the exchange; does not block on a control channel. Ranks: all."""
        self._own = self._payload(batches_trained, share)
        if isinstance(self._distributed, ControlChannel):
            self._gather = self._distributed.begin_allgather(self._own)

    def end(self) -> SyncResult:
        """Wait for the exchange and return its result. Ranks: all, collectively."""
        gather, self._gather = self._gather, None
        return self._decide(self._distributed.allgather(self._own) if gather is None else gather.wait())

    def _payload(self, batches_trained: int, share: Any) -> tuple[Any, StopReason | None, int]:
        is_chief = self._distributed.rank == 0
        proposal = self._proposed_distance(batches_trained) if is_chief else 0
        self._begun_at = batches_trained
        self._mark = (batches_trained, self._clock())
        return share, self._stop_request(), proposal

    def _decide(self, gathered: list[Any]) -> SyncResult:
        self._distance = gathered[0][2]
        self._next = self._begun_at + self._distance
        stop_requests = [request for _, request, _ in gathered if request is not None]
        return SyncResult([share for share, _, _ in gathered], stop_requests[0] if stop_requests else None)

    def _proposed_distance(self, batches_trained: int) -> int:
        if self._mark is None or batches_trained <= self._mark[0]:
            return self._distance
        marked_batches, marked_time_s = self._mark
        elapsed_s = max(self._clock() - marked_time_s, 1e-9)
        wanted = int(self._interval_s * (batches_trained - marked_batches) / elapsed_s)
        return max(1, min(wanted, self._distance * _MAX_GROWTH))


def described(error: BaseException | None) -> str | None:
    """Return an error in one line for other ranks; None for none."""
    if error is None:
        return None
    return cut_text(f"{type(error).__name__}: {error}".splitlines()[0], 2000)


def peer_failed(where: str, failures: list[tuple[int, str]]) -> PeerFailedError:
    """Return what other ranks raise for ``failures`` (rank, error) at ``where``."""
    rank, text = failures[0]
    # The launcher knows a consequence by the words about a peer (launch/failures.py).
    return PeerFailedError(
        f"{where} has failed on rank {rank} ({text}), and a peer of this rank exited for it; expected it to return on all "
        f"ranks. Look at the traceback of rank {rank}."
    )
