"""Lets all ranks of a Trainer stop after the same step."""

from __future__ import annotations

from determined import core

from dstrial.loop.sync_point import StopReason, SyncPoints
from dstrial.ranks.stop_signals import StopSignals


class LeaveTrainingError(Exception):
    """Ends ``Trainer.train`` from a callback; this package's ``train`` catches it."""

    def __init__(self, step: int) -> None:
        super().__init__(
            f"training is left at step {step}; start it with dstrial.integrations.huggingface.train(trainer, callback), "
            "which ends it in good order"
        )
        self.step = step


class PreemptionHandler:
    """Polls for stop requests where all ranks are at the same step of training.

    A single rank polls after every step. Several ranks agree at each line of the log, before each evaluation or save, and about
    every five seconds (:class:`SyncPoints`).
    """

    def __init__(self, core_context: core.Context, signals: StopSignals | None) -> None:
        self._preempt = core_context.preempt
        self._is_chief = core_context.distributed.rank == 0
        self._signals = signals
        self._mode = core.PreemptMode(self._preempt._preempt_mode)
        self._sync_points = SyncPoints(core_context.distributed, self._stop_request)
        self.reason: StopReason | None = None
        """Why training stops before its end, once all ranks agree; None until then."""

    def start(self, step: int) -> None:
        """Begin to count steps, at a start and after a pause in training."""
        self._sync_points.start(step)

    def after_step(self, step: int, *, is_due: bool) -> bool:
        """Agree if due; say whether ranks stop after this step. Ranks: all, alike."""
        is_time = self._sync_points.is_single_rank or step >= self._sync_points.next_batch
        return self.agree(step) if is_due or is_time else self.reason is not None

    def agree(self, step: int) -> bool:
        """Say whether all ranks stop now. Ranks: all, collectively."""
        if self.reason is None:
            self.reason = self._sync_points.agree(step).stop
        return self.reason is not None

    def acknowledge(self) -> None:
        """Report to the master that the trial wants to resume later."""
        if self._is_chief:
            self._preempt.acknowledge_preemption_signal()

    def _stop_request(self) -> StopReason | None:
        # In mode WorkersAskChief every question is a broadcast, so all ranks ask.
        asks = self._is_chief or self._mode is not core.PreemptMode.ChiefOnly
        if asks and self._preempt.should_preempt(auto_ack=False):
            return StopReason.PREEMPTED
        is_signalled = self._signals is not None and self._signals.requested is not None
        return StopReason.SIGNAL if is_signalled else None
