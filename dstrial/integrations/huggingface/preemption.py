"""Let all ranks of a Trainer stop after the same step, without exchange before.

A thread on each rank looks for a request to stop, its own or another rank's, in the process group's store. Once there is one, the
thread notes under a lock in which step its rank is and has the rank wait at that step's end. Rank 0 takes the furthest of these
steps: no rank has passed it, and every rank comes to it, since a rank waits for threads only and never for another rank's
training. Nothing is assumed of what the ranks exchange while they train, or when.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import torch.distributed
from determined import core
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from dstrial.errors import RankError, RankTimeoutError
from dstrial.loop.sync_point import StopReason
from dstrial.ranks.control_channel import timeout_from_environ
from dstrial.ranks.stop_signals import StopSignals

POLL_INTERVAL_S = 0.1
"""Seconds a request to stop may go unseen on another rank; in proportion on over 128 ranks, for rank 0 answers all."""

_RANKS_PER_POLL = 128
_ASKED, _DECIDED = "asked", "decided"


def own_store(name: str) -> PrefixStore:
    """Return the group's store under a name, with a connection that only it uses.

    Ranks: any, after the process group was made; no communication among them.
    """
    store: Any = _get_default_store()
    if hasattr(store, "clone"):  # torch 2.8
        return PrefixStore(name, store.clone())
    inner = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    tcp_store: Any = vars(torch.distributed)["TCPStore"]
    if isinstance(inner, tcp_store):
        return PrefixStore(name, tcp_store(inner.host, inner.port, is_master=False, wait_for_workers=False))
    return PrefixStore(name, store)


class CoordinatedStop:
    """One rank's part in the agreement on one training, through a store of all ranks.

    ``stop_request`` is called in the thread and must not communicate with ranks.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        stop_request: Callable[[], StopReason | None],
        timeout_s: float,
        poll_interval_s: float = POLL_INTERVAL_S,
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._stop_request = stop_request
        self._timeout_s = timeout_s
        self._poll_interval_s = poll_interval_s * max(1.0, size / _RANKS_PER_POLL)
        self._lock = threading.Lock()
        self._num_passed = 0
        self._is_held = False
        self._is_over = threading.Event()
        self._is_decided = threading.Event()
        self._stop: tuple[int, StopReason] | None = None
        self._failure: RankError | None = None
        self._thread = threading.Thread(target=self._watch, name="dstrial-joint-stop", daemon=True)
        self._thread.start()

    def step(self) -> StopReason | None:
        """Count a step; return why all ranks stop after it, or None. Ranks: all, in step.

        No communication here, and no wait unless a stop was asked for. RankTimeoutError names the ranks that do not answer.
        """
        with self._lock:
            if not self._is_held:
                self._num_passed += 1
                return None
        if not self._is_decided.wait(self._timeout_s + 2 * self._poll_interval_s):
            raise self._missing([])
        if self._failure is not None:
            raise self._failure
        assert self._stop is not None, "a decision without a failure"
        self._num_passed += 1
        step, reason = self._stop
        return reason if self._num_passed >= step else None

    def close(self) -> None:
        self._is_over.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        try:
            while not self._is_over.wait(self._poll_interval_s):
                request = self._stop_request()
                if request is not None:
                    self._store.set(_ASKED, request.value)
                if request is not None or self._store.check([_ASKED]):
                    self._agree()
                    return
        except RuntimeError as error:  # torch's errors of a store whose other end is gone
            self._failure = RankError(
                f"rank {self._rank} cannot agree with the other ranks on where to stop: {error}; expected the process group's "
                "store to be there. Look for the rank that failed first."
            )
        finally:
            self._is_decided.set()

    def _agree(self) -> None:
        with self._lock:
            self._is_held = True
            mine = self._num_passed + 1
        self._store.set(_place(self._rank), str(mine))
        if self._rank == 0:
            names = [_place(rank) for rank in range(self._size)]
            if not self._await(names):
                return
            steps = [int(self._store.get(name)) for name in names]
            reason = self._store.get(_ASKED).decode()
            self._store.set(_DECIDED, f"{max(steps)} {reason}")
        elif not self._await([_DECIDED]):
            return
        step, reason = self._store.get(_DECIDED).decode().split()
        self._stop = int(step), StopReason(reason)

    def _await(self, names: list[str]) -> bool:
        """Wait for keys of the store; False if training is over or the time is."""
        give_up_at_s = time.monotonic() + self._timeout_s
        while not self._store.check(names):
            if self._is_over.is_set():
                return False
            if time.monotonic() > give_up_at_s:
                absent = [rank for rank in range(self._size) if not self._store.check([_place(rank)])]
                self._failure = self._missing(absent)
                return False
            time.sleep(self._poll_interval_s / 10)
        return True

    def _missing(self, ranks: list[int]) -> RankTimeoutError:
        names = ", ".join(map(str, ranks)) or "rank 0's decision"
        return RankTimeoutError(
            f"the stop of training was asked for and is still without {'ranks ' if ranks else ''}{names} after "
            f"{self._timeout_s:g} s; expected all {self._size} ranks. Look at the output of those that are missing."
        )


class LeaveTrainingError(Exception):
    """Ends ``Trainer.train`` from a callback; this package's ``train`` catches it."""

    def __init__(self, step: int) -> None:
        super().__init__(
            f"training is left at step {step}; start it with dstrial.integrations.huggingface.train(trainer, callback), "
            "which ends it in good order"
        )
        self.step = step


class PreemptionHandler:
    """Polls for stop requests; all ranks decide alike at the same step.

    Steps belong to training, or to an evaluation that may be left. A single rank polls at every step; several ranks learn of a
    request within :data:`POLL_INTERVAL_S`.
    """

    def __init__(self, core_context: core.Context, signals: StopSignals | None) -> None:
        self._preempt = core_context.preempt
        self._distributed = core_context.distributed
        self._signals = signals
        self._mode = core.PreemptMode(self._preempt._preempt_mode)
        self._coordinated_stop: CoordinatedStop | None = None
        self._reason: StopReason | None = None

    @property
    def reason(self) -> StopReason | None:
        """Why training stops before its end, once all ranks agree; None until then."""
        return self._reason

    def start(self) -> None:
        """Start to poll for stop requests. Ranks: all, collectively."""
        if self._coordinated_stop is not None or self._distributed.size == 1:
            return
        name = self._distributed.broadcast(f"dstrial/stop/{uuid.uuid4()}")
        rank, size = self._distributed.rank, self._distributed.size
        self._coordinated_stop = CoordinatedStop(
            own_store(name), rank, size, self.stop_request, timeout_from_environ()
        )

    def close(self) -> None:
        coordinated_stop, self._coordinated_stop = self._coordinated_stop, None
        if coordinated_stop is not None:
            coordinated_stop.close()

    def step(self) -> bool:
        """Count a step; say if ranks stop after it. Ranks: all, in step, no exchange."""
        if self._reason is None:
            self._reason = (
                self.stop_request() if self._coordinated_stop is None else self._coordinated_stop.step()
            )
        return self._reason is not None

    def ask(self) -> bool:
        """Say whether all ranks stop now. Ranks: all, collectively."""
        if self._reason is None:
            requests = self._distributed.allgather(self.stop_request())
            self._reason = next((request for request in requests if request is not None), None)
        return self._reason is not None

    def stop_request(self) -> StopReason | None:
        """Return this rank's own reason to stop; from any thread, no communication."""
        if self._is_preempted_here():
            return StopReason.PREEMPTED
        if self._signals is not None and self._signals.requested is not None:
            return StopReason.SIGNAL
        return None

    def acknowledge(self) -> None:
        """Report to the master that the trial wants to resume later."""
        if self._distributed.rank == 0:
            self._preempt.acknowledge_preemption_signal()

    def _is_preempted_here(self) -> bool:
        is_chief = self._distributed.rank == 0
        if self._mode is core.PreemptMode.WorkersAskMaster or (
            is_chief and (self._mode is core.PreemptMode.ChiefOnly or self._distributed.size == 1)
        ):
            return bool(self._preempt.should_preempt(auto_ack=False))
        # In mode WorkersAskChief every question is a broadcast; what it would tell is known to the chief's watcher already.
        watcher = getattr(self._preempt, "_watcher", None)
        return watcher is not None and bool(watcher.should_preempt())


def _place(rank: int) -> str:
    return f"at/{rank}"
