"""Determined's preemption interface, answered by a function of this process instead of a master."""

from __future__ import annotations

from collections.abc import Callable

from determined import core

from dstrial.errors import RankError


class LocalPreemptContext(core.PreemptContext):  # type: ignore[misc]  # mypy does not follow determined
    """Ask a function whether to stop, with the calling conventions of ``determined.core``.

    Args:
        dist: the ranks of the job.
        stop_requested: returns why the job should stop, or None to go on; called without
            communication, on the chief only unless the mode is ``WorkersAskMaster``.
        preempt_mode: who calls ``should_preempt`` and whether the answer is broadcast.
    """

    def __init__(
        self,
        dist: core.DistributedContext,
        stop_requested: Callable[[], str | None],
        preempt_mode: core.PreemptMode = core.PreemptMode.WorkersAskChief,
    ) -> None:
        self._dist = dist
        self._stop_requested = stop_requested
        self._preempt_mode = core.PreemptMode(preempt_mode)
        self._started = False

    def start(self) -> LocalPreemptContext:
        """Allow ``should_preempt``.

        Raises:
            RankError: it was started before.
        """
        if self._started:
            raise RankError(
                "PreemptContext.start() is called a second time; expected one call per context. "
                "Remove the second call."
            )
        self._started = True
        return self

    def close(self) -> None:
        """Do nothing: no thread waits for anything."""

    def should_preempt(self, auto_ack: bool = True) -> bool:  # noqa: ARG002 - nobody awaits an acknowledgement
        """Say whether the job should save a checkpoint and exit.

        Args:
            auto_ack: accepted for Determined's signature; there is no master to acknowledge to.

        Raises:
            RankError: called before ``start()``, or on a worker in mode ``ChiefOnly``.

        Ranks: all, in step, in mode ``WorkersAskChief`` (one broadcast); rank 0 in mode ``ChiefOnly``;
        any in mode ``WorkersAskMaster``.
        """
        if not self._started:
            raise RankError(
                "PreemptContext.should_preempt() is called before start(); expected a started context. "
                "Use the core context inside its with block."
            )
        if self._preempt_mode is core.PreemptMode.WorkersAskMaster:
            return self._stop_requested() is not None
        if self._preempt_mode is core.PreemptMode.ChiefOnly:
            if self._dist.rank != 0:
                raise RankError(
                    f"PreemptContext.should_preempt() is called on rank {self._dist.rank} in mode ChiefOnly; "
                    "expected rank 0. Broadcast the chief's answer to the workers."
                )
            return self._stop_requested() is not None
        answer = self._stop_requested() is not None if self._dist.rank == 0 else None
        return bool(self._dist.broadcast(answer))

    def acknowledge_preemption_signal(self) -> None:
        """Do nothing: there is no master that would wait for it."""
