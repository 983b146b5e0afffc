"""When the ranks of a Trainer agree to stop, and why."""

from __future__ import annotations

import uuid

from determined import core

from dstrial.integrations.huggingface.coordinated_stop import JointStop, own_store
from dstrial.loop.sync_point import StopReason
from dstrial.ranks.control_channel import timeout_from_environ
from dstrial.ranks.stop_signals import StopSignals


class LeaveTrainingError(Exception):
    """Ends ``Trainer.train`` from a callback; this package's ``train`` catches it.

    Args:
        step: batches trained.
    """

    def __init__(self, step: int) -> None:
        super().__init__(
            f"training is left at step {step}; start it with dstrial.integrations.huggingface.train(trainer, callback), "
            "which ends it in good order"
        )
        self.step = step


class Stopping:
    """Looks for wishes to stop; all ranks decide alike at the same beat.

    A beat is a training step, or a step of an evaluation that may be left. A wish is followed at the end of the beat in which
    the ranks learn of it: on a single rank that looks at every beat, on several within :data:`joint_stop.LOOK_S`.

    Args:
        core_context: whose ``preempt`` is asked, in whatever mode it was made.
        signals: requests that reached this process; None where nobody collects them.
    """

    def __init__(self, core_context: core.Context, signals: StopSignals | None) -> None:
        self._preempt = core_context.preempt
        self._distributed = core_context.distributed
        self._signals = signals
        self._mode = core.PreemptMode(self._preempt._preempt_mode)
        self._joint: JointStop | None = None
        self._reason: StopReason | None = None

    @property
    def reason(self) -> StopReason | None:
        """Why training stops before its end, once all ranks agree; None until then."""
        return self._reason

    def start(self) -> None:
        """Begin to look for wishes. Ranks: all, collectively (a broadcast if several)."""
        if self._joint is not None or self._distributed.size == 1:
            return
        name = self._distributed.broadcast(f"dstrial/stop/{uuid.uuid4()}")
        rank, size = self._distributed.rank, self._distributed.size
        self._joint = JointStop(own_store(name), rank, size, self.wish_here, timeout_from_environ())

    def close(self) -> None:
        """Look no more; safe to call again. Ranks: any."""
        joint, self._joint = self._joint, None
        if joint is not None:
            joint.close()

    def beat(self) -> bool:
        """Count a step; say if ranks stop after it. Ranks: all, in step, no exchange."""
        if self._reason is None:
            self._reason = self.wish_here() if self._joint is None else self._joint.beat()
        return self._reason is not None

    def ask(self) -> bool:
        """Say whether all ranks stop now. Ranks: all, collectively (one exchange)."""
        if self._reason is None:
            wishes = self._distributed.allgather(self.wish_here())
            self._reason = next((wish for wish in wishes if wish is not None), None)
        return self._reason is not None

    def wish_here(self) -> StopReason | None:
        """Return this rank's own reason to stop; for any thread, no communication."""
        if self._is_preempted_here():
            return StopReason.PREEMPTED
        if self._signals is not None and self._signals.requested is not None:
            return StopReason.SIGNAL
        return None

    def acknowledge(self) -> None:
        """Tell the master that the trial wants to go on later. Ranks: any; chief tells."""
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
