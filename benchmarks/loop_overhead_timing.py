"""What the loop-overhead benchmark measures and how it sums it up; pure, no torch."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

LOOPS = ("bare", "dstrial", "silent", "huggingface", "determined")

NS_PER_US = 1000.0


TURN_LENGTH = 50
"""About how many micro batches a loop trains before the next one has its turn."""

SETTLING = 5
"""Micro batches after a change of turns that do not count."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Which micro batches each loop trains, where the loops take turns, and what counts.

    A block is one reporting period, shifted by half a turn so that its report is inside. One period before
    the first block and the rest of one after the last do not count: every loop starts and ends there.
    """

    report_every: int  # batches, at least 4
    num_blocks: int
    micro_batches_per_batch: int  # gradient accumulation steps
    num_metrics: int  # tensors that each step returns

    @property
    def num_batches(self) -> int:
        return (self.num_blocks + 2) * self.report_every

    @property
    def num_micro_batches(self) -> int:
        return self.num_batches * self.micro_batches_per_batch

    @property
    def period(self) -> int:
        return self.report_every * self.micro_batches_per_batch

    @property
    def turn_starts(self) -> frozenset[int]:
        """Places in a reporting period before which the next loop has its turn.

        Always between two batches, because the loops share the engine's accumulated gradients, and never right
        after a report.
        """
        num_turns = max(1, min(self.period // TURN_LENGTH, self.report_every // 2))
        return frozenset(
            (2 * turn_idx + 1) * self.report_every // (2 * num_turns) * self.micro_batches_per_batch
            for turn_idx in range(num_turns)
        )

    @property
    def metric_names(self) -> tuple[str, ...]:
        return ("loss", *(f"metric_{idx}" for idx in range(1, self.num_metrics)))

    def is_report(self, micro_batch_idx: int) -> bool:
        return (micro_batch_idx + 1) % self.period == 0

    def counted(self, block_idx: int) -> list[int]:
        """Return the micro batches of one block whose time counts, from their start to that of the next."""
        starts = self.turn_starts
        first = (1 + block_idx) * self.period + min(starts)
        disturbed = {
            (start + offset) % self.period
            for start in starts
            for offset in range(-1, min(SETTLING, self.period // 2 - 1))
        }
        return [idx for idx in range(first, first + self.period) if idx % self.period not in disturbed]


@dataclasses.dataclass(slots=True)
class Stamps:
    """Times of ``perf_counter_ns`` in one block, one of each per micro batch."""

    entered: list[int] = dataclasses.field(default_factory=list)  # the step was called
    drawn: list[int] = dataclasses.field(default_factory=list)  # it had its records
    left: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """One block of one loop, microseconds per micro batch."""

    loop: str
    block_idx: int  # blocks of the same number ran at the same time, turn by turn
    mean_us: float  # start to start, nothing left out; a disturbed machine shows in it
    step_us: float  # start to start without a report: the median at each place in a batch, averaged
    draw_us: float  # of that, waiting for the records
    between_us: float  # of that, between two steps: the loop itself
    report_us: float  # added to the time between; 0 for the bare loop
    report_share_us: float
    whole_us: float

    @classmethod
    def from_stamps(cls, loop: str, block_idx: int, stamps: Stamps, plan: Plan) -> Block:
        if len(stamps.left) != plan.num_micro_batches:
            raise ValueError(
                f"the loop {loop} trained {len(stamps.left)} micro batches; expected {plan.num_micro_batches}. "
                "Choose periods under which all loops train equally many."
            )
        entered, drawn, left = stamps.entered, stamps.drawn, stamps.left
        counted = plan.counted(block_idx)
        quiet = [idx for idx in counted if not plan.is_report(idx)]
        places = plan.micro_batches_per_batch

        def typical(durations_ns: dict[int, int]) -> float:
            by_place: dict[int, list[int]] = {}
            for idx, duration_ns in durations_ns.items():
                by_place.setdefault(idx % places, []).append(duration_ns)
            return statistics.fmean(map(statistics.median, by_place.values())) / NS_PER_US

        between_us = typical({idx: entered[idx + 1] - left[idx] for idx in quiet})
        step_us = typical({idx: entered[idx + 1] - entered[idx] for idx in quiet})
        report_us = 0.0
        if loop != "bare":
            report = next(idx for idx in counted if plan.is_report(idx))
            report_us = (entered[report + 1] - left[report]) / NS_PER_US - between_us
        return cls(
            loop=loop,
            block_idx=block_idx,
            mean_us=statistics.fmean(entered[idx + 1] - entered[idx] for idx in counted) / NS_PER_US,
            step_us=step_us,
            draw_us=typical({idx: drawn[idx] - entered[idx] for idx in quiet}),
            between_us=between_us,
            report_us=report_us,
            report_share_us=report_us / plan.period,
            whole_us=step_us + report_us / plan.period,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """A number measured in several blocks, microseconds: its median, quartiles and extremes."""

    median: float
    low: float
    high: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        low, high = (values[0], values[0])
        if len(values) > 1:
            low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), low, high, min(values), max(values))


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """One loop over all its blocks, microseconds per micro batch. Differences are taken within each block."""

    loop: str
    whole: Spread
    added: Spread
    direct: Spread
    draw: Spread
    between: Spread
    report_share: Spread
    report: Spread


def summarize(blocks: Sequence[Block]) -> dict[str, Summary]:
    by_loop = {
        loop: sorted((block for block in blocks if block.loop == loop), key=lambda block: block.block_idx)
        for loop in LOOPS
    }
    summaries = {}
    for loop, own in by_loop.items():
        pairs = list(zip(own, by_loop["bare"], strict=True))
        draw = [block.draw_us - bare.draw_us for block, bare in pairs]
        between = [block.between_us - bare.between_us for block, bare in pairs]
        share = [block.report_share_us for block in own]
        summaries[loop] = Summary(
            loop=loop,
            whole=Spread.of([block.whole_us for block in own]),
            added=Spread.of([block.whole_us - bare.whole_us for block, bare in pairs]),
            direct=Spread.of([sum(parts) for parts in zip(draw, between, share, strict=True)]),
            draw=Spread.of(draw),
            between=Spread.of(between),
            report_share=Spread.of(share),
            report=Spread.of([block.report_us for block in own]),
        )
    return summaries


def heartbeat_costs(blocks: Sequence[Block]) -> list[float]:
    """Return what saying where a rank is costs in each block, microseconds per micro batch.

    It is what dstrial's loop does outside of the training step, less what the same loop does there without a word.
    """
    outside = {
        (block.loop, block.block_idx): block.draw_us + block.between_us
        for block in blocks
        if block.loop in ("dstrial", "silent")
    }
    return [
        outside["dstrial", block_idx] - outside["silent", block_idx]
        for loop, block_idx in outside
        if loop == "dstrial"
    ]
