"""The training step that all loops of the loop-overhead benchmark share, and the turns they take.

One loop runs at a time. Threads serve only to leave a loop in the middle of its ``fit`` and come back to it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from loop_overhead_timing import Plan, Stamps
from torch import nn


class Turns:
    """Lets one of several threads run at a time, round and round."""

    def __init__(self, count: int) -> None:
        self._may_run = [threading.Semaphore(int(idx == 0)) for idx in range(count)]
        self._present = [True] * count

    def wait(self, own_idx: int) -> None:
        self._may_run[own_idx].acquire()

    def leave(self, own_idx: int) -> None:
        self._present[own_idx] = False
        self._start_next(own_idx)

    def pass_on(self, own_idx: int) -> None:
        self._start_next(own_idx)
        self.wait(own_idx)

    def _start_next(self, own_idx: int) -> None:
        count = len(self._present)
        for next_idx in ((own_idx + offset) % count for offset in range(1, count + 1)):
            if self._present[next_idx]:
                self._may_run[next_idx].release()
                return


class Step:
    """Trains one micro batch for one of the loops and notes when; ``turn_over`` is called where a turn ends."""

    def __init__(
        self, engine: Any, device: torch.device, plan: Plan, turn_over: Callable[[int], None]
    ) -> None:
        self.engine = engine
        self.device = device
        self.stamps = Stamps()
        self._period, self._turn_starts = plan.period, plan.turn_starts
        self._turn_over = turn_over

    def __call__(self, iterator: Iterator[Any]) -> torch.Tensor:
        """Draw, forward, backward, step. Ranks: all, collectively."""
        stamps = self.stamps
        micro_batch_idx = len(stamps.entered)
        if micro_batch_idx % self._period in self._turn_starts:
            self._turn_over(micro_batch_idx)
        stamps.entered.append(time.perf_counter_ns())
        features, targets = next(iterator)
        stamps.drawn.append(time.perf_counter_ns())
        features, targets = features.to(self.device), targets.to(self.device)
        loss = nn.functional.mse_loss(self.engine(features), targets)
        self.engine.backward(loss)
        self.engine.step()
        stamps.left.append(time.perf_counter_ns())
        return loss
