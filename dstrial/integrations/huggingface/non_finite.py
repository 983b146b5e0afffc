"""Whether a Trainer's logged losses are finite; logs are the same on all ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal

from dstrial.config.experiment_config.dstrial_section import TrainingChecks
from dstrial.loop.metrics import TrailingNonFinite
from dstrial.loop.non_finite import NonFiniteGuard

logger = logging.getLogger("dstrial.integrations.huggingface")


class LossWatch:
    """Counts logs in a row without a finite loss; acts by ``data.dstrial.non_finite``.

    Args:
        exp_conf: of the trial.
        is_chief: whether this rank warns.
        is_off: whether nothing is to be looked at.

    Raises:
        ConfigError: a setting is not one of those that are possible.
    """

    def __init__(self, exp_conf: Mapping[str, Any], *, is_chief: bool, is_off: bool) -> None:
        self._checks = TrainingChecks.from_config(exp_conf)
        self._is_chief = is_chief
        self._mode: Literal["fail", "warn", "ignore"] = "ignore" if is_off else self._checks.non_finite
        self._guard: NonFiniteGuard | None = None
        self._last_step = 0
        self._is_bad = False
        self._has_warned = False

    def start(self, step: int) -> None:
        self._last_step = step
        self._guard = NonFiniteGuard(
            self._mode,
            self._checks.non_finite_patience,
            1,
            is_chief=self._is_chief,
            counts=[],
            is_resumed=step > 0,
        )

    def take(self, logs: Mapping[str, Any], step: int, max_steps: int) -> None:
        """Judge a log line, the same on all ranks; NonFiniteError ends the patience."""
        loss = logs.get("loss")
        if self._guard is None or not isinstance(loss, (int, float)):
            return
        window, self._last_step = (self._last_step, step), step
        self._is_bad = not _is_finite(float(loss), logs.get("grad_norm"))
        tail = TrailingNonFinite(1 if self._is_bad else 0, 1)
        shown = {
            "loss": loss if not math.isfinite(loss) or not self._is_bad else "filtered out by transformers"
        }
        self._guard.judge([{"loss": tail}], shown, [], window, is_last=step >= max_steps > 0)

    def is_save_unsafe(self, step: int) -> bool:
        """Whether a save of the Trainer must not become a checkpoint. Ranks: all, alike."""
        if not self._is_bad or self._mode != "fail":
            self._has_warned = False
            return False
        if self._is_chief and not self._has_warned:
            logger.warning(
                "the state of step %d is not stored, and the checkpoints before it are kept: no loss is finite",
                step,
            )
        self._has_warned = True
        return True


def _is_finite(loss: float, grad_norm: Any) -> bool:
    """Say whether a logged loss stands for a finite one.

    With ``logging_nan_inf_filter``, its default, transformers logs the mean of finite losses, and 0 where there is none; the
    norm of the gradients tells that 0 from a real one (``Trainer._inner_training_loop`` of 5.23).
    """
    if loss == 0.0 and isinstance(grad_norm, (int, float)):
        return math.isfinite(grad_norm)
    return math.isfinite(loss)
