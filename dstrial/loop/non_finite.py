"""Detect training that makes no progress: no finite loss, or no optimizer step.

At a report all ranks have the same values, so that they decide equally without communication.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dstrial.engine.finite_weights import StepCounts
from dstrial.errors import NonFiniteError

logger = logging.getLogger("dstrial.loop")

_LOWER = "Lower the learning rate, look at the records of that batch"


@dataclasses.dataclass(slots=True)
class _Streak:
    """Consecutive bad reports: their number, and their first batch, counted from 1."""

    length: int = 0
    since: int | None = None
    has_warned: bool = False


class NonFiniteGuard:
    """Raises an error or warns after ``patience`` consecutive bad reports.

    A report is bad if no loss was finite on any rank, if no engine took an optimizer step, or if an engine skipped all of its
    steps.

    Args:
        mode: ``fail`` raises an error, ``warn`` logs a warning, ``ignore`` does nothing.
        counts: step counts of every engine before the first batch of this process.
        is_resumed: whether batches were trained before a resume; their losses and steps count as good.
    """

    def __init__(
        self,
        mode: Literal["fail", "warn", "ignore"],
        patience: int,
        *,
        is_chief: bool,
        counts: Sequence[StepCounts],
        is_resumed: bool,
    ) -> None:
        self._mode = mode
        self._patience = patience
        self._is_chief = is_chief
        self._counts = tuple(counts)
        self._losses = _Streak()
        self._steps = _Streak()
        self._has_good_loss = is_resumed
        self._has_step = is_resumed

    def judge(
        self,
        finite: Sequence[Mapping[str, bool]],
        averages: Mapping[str, Any],
        counts: Sequence[StepCounts],
        start: int,
        *,
        is_last: bool,
    ) -> None:
        """Check one report. Ranks: all, with the same arguments; no communication.

        Args:
            finite: for each rank that reports metrics: loss name -> whether any of its values is finite.
            averages: metric name -> reported value.
            counts: step counts of every engine; empty if unknown.
            start: finished batches at the previous report.
            is_last: whether this is the run's last report. Then a run without any good report fails even below ``patience``,
                and a run whose last reports are bad gets a warning.

        Raises:
            NonFiniteError: ``mode`` is ``fail``, and the run fails; raised on all ranks.
        """
        self._judge_losses(finite, start)
        self._judge_steps(counts, start)
        if self._mode == "ignore" or not (self._losses.length or self._steps.length):
            return
        name = _shown_loss(finite)
        self._act(
            self._losses,
            f"no finite loss ({name} is {averages.get(name)!r})",
            is_last=is_last,
            is_hopeless=is_last and not self._has_good_loss,
        )
        skipped = sum(count.num_skipped for count in counts)
        why = f"{skipped} of {sum(count.num_steps for count in counts)} were skipped, as gradients were not finite"
        self._act(
            self._steps,
            f"no optimizer step ({why if skipped else 'engine.step() ends no accumulation'})",
            is_last=is_last,
            is_hopeless=is_last and not self._has_step,
            fix=_LOWER if skipped else "Call engine.step() after every engine.backward() in train_batch",
        )

    def _judge_losses(self, finite: Sequence[Mapping[str, bool]], start: int) -> None:
        every = [has_finite for of_rank in finite for has_finite in of_rank.values()]
        if not every or any(every):
            self._has_good_loss = True
            self._losses = _Streak()
            return
        if self._losses.since is None:
            self._losses.since = start + 1
        self._losses.length += 1

    def _judge_steps(self, counts: Sequence[StepCounts], start: int) -> None:
        if not counts:
            return  # the step counts are unknown
        before, self._counts = self._counts, tuple(counts)
        changes = [
            (now.num_steps - then.num_steps, now.num_skipped - then.num_skipped)
            for then, now in zip(before, counts, strict=True)
        ]
        has_none = not any(num_steps > num_skipped for num_steps, num_skipped in changes)
        is_bad = has_none or any(num_steps and num_steps == num_skipped for num_steps, num_skipped in changes)
        # Dynamic loss scaling begins with too large a scale, and skips steps until the scale is low enough.
        is_scaling = any(now.loss_scale < then.loss_scale for then, now in zip(before, counts, strict=True))
        if not is_bad or is_scaling:
            self._has_step = True
            self._steps = _Streak()
            return
        if self._steps.since is None:
            self._steps.since = start + 1
        self._steps.length += 1

    def _act(
        self, streak: _Streak, what: str, *, is_last: bool, is_hopeless: bool, fix: str = _LOWER
    ) -> None:
        is_over = streak.length >= self._patience or (is_hopeless and streak.length > 0)
        if not streak.length or not (is_over or is_last):
            return
        rows = "1 report" if streak.length == 1 else f"{streak.length} reports in a row"
        found = f"training has {what} since batch {streak.since}: {rows}"
        if self._mode == "fail" and is_over:
            raise NonFiniteError(
                f"{found}; expected at least one in every {self._patience} reports. {fix}, or set "
                "data.dstrial.non_finite to warn or ignore; the checkpoints before it are kept."
            )
        if self._is_chief and not streak.has_warned:
            logger.warning("%s", found)
        streak.has_warned = True


def _shown_loss(finite: Sequence[Mapping[str, bool]]) -> str:
    names = [name for of_rank in finite[:1] for name in of_rank]
    return "loss" if "loss" in names or not names else names[0]


@dataclasses.dataclass(frozen=True, slots=True)
class StateEvidence:
    """Whether one rank's weights and newest losses are finite, before a checkpoint.

    Attributes:
        lost_weight: name of a weight of this rank that is not finite; None if all are finite.
        loss_is_finite: whether any loss's newest value is finite; None on a rank without losses.
    """

    lost_weight: str | None
    loss_is_finite: bool | None


def lost_weight(found: Sequence[StateEvidence]) -> str | None:
    """Return text on the first weight that is not finite, with its rank; or None."""
    for rank, evidence in enumerate(found):
        if evidence.lost_weight is not None:
            return f"the weights are not finite ({evidence.lost_weight} on rank {rank})"
    return None


def unsafe_to_save_reason(found: Sequence[StateEvidence]) -> str | None:
    """Return why a checkpoint of the state would be unsafe; None if it is safe."""
    known = [evidence.loss_is_finite for evidence in found if evidence.loss_is_finite is not None]
    return lost_weight(found) or ("no loss is finite" if known and not any(known) else None)
