"""When the ranks of a Trainer agree to stop, and why."""

from __future__ import annotations

from determined import core

from dstrial.loop.agreement import AgreementPoints, StopReason
from dstrial.ranks.stop import StopSignals

INTERVAL_S = 1.0
"""How long, in seconds, a wish to stop may wait for the ranks' next exchange; with longer steps it is the next step."""


class Stopping:
    """Asks for wishes to stop and lets all ranks take the same decision at the same beat.

    A beat is a training step, or a step of an evaluation that may be left. A single rank looks at every beat; several talk
    at points that rank 0 places about ``INTERVAL_S`` apart, and do nothing at the beats between.

    Args:
        core_context: whose ``preempt`` is asked, in whatever mode it was made.
        signals: requests that reached this process; None where nobody collects them.
    """

    def __init__(self, core_context: core.Context, signals: StopSignals | None) -> None:
        self._preempt = core_context.preempt
        self._signals = signals
        self._rank = core_context.distributed.rank
        self._mode = core.PreemptMode(self._preempt._preempt_mode)
        self._points = AgreementPoints(core_context.distributed, self._wish, interval_s=INTERVAL_S)
        self._beats = 0
        self._reason: StopReason | None = None
        self._points.start(0)

    @property
    def reason(self) -> StopReason | None:
        """Why training stops before its end, once all ranks have agreed to; None until then."""
        return self._reason

    def start(self) -> None:
        """Let the clock that places the exchanges begin anew, after a pause that was no training. Ranks: any."""
        self._points.start(self._beats)

    def beat(self) -> bool:
        """Count a step; say whether all ranks stop after it. Ranks: all (one exchange at some beats, else none)."""
        self._beats += 1
        if self._reason is not None:
            return True
        if self._points.is_alone:
            self._reason = self._wish()
        elif self._beats >= self._points.next_batch:
            self._reason = self._points.agree(self._beats).stop
        return self._reason is not None

    def ask(self) -> bool:
        """Say whether all ranks stop now, whatever the beat. Ranks: all, collectively (one exchange)."""
        if self._reason is None:
            self._reason = self._wish() if self._points.is_alone else self._points.agree(self._beats).stop
        return self._reason is not None

    def is_wished_here(self) -> bool:
        """Whether this rank alone knows of a wish to stop; for any thread, no communication."""
        if self._signals is not None and self._signals.requested is not None:
            return True
        if self._mode is core.PreemptMode.ChiefOnly and self._rank == 0:
            return bool(self._preempt.should_preempt(auto_ack=False))
        return False

    def acknowledge(self) -> None:
        """Tell the master that the trial wants to go on later. Ranks: any; the chief tells."""
        if self._rank == 0:
            self._preempt.acknowledge_preemption_signal()

    def _wish(self) -> StopReason | None:
        # In mode WorkersAskChief all ranks ask here, in the same exchange.
        if (self._rank == 0 or self._mode is not core.PreemptMode.ChiefOnly) and self._preempt.should_preempt(
            auto_ack=False
        ):
            return StopReason.PREEMPTED
        if self._signals is not None and self._signals.requested is not None:
            return StopReason.SIGNAL
        return None
