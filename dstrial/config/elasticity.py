"""With how many slots a trial may go on. Pure.

These are ``min_slots``, ``max_slots`` and ``resize_period`` of ``data.dstrial``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dstrial.config.diagnostics import Diagnostics, render

KEYS = ("min_slots", "max_slots", "resize_period")
DEFAULT_RESIZE_PERIOD_S = 600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Elasticity:
    """The numbers of slots on which a trial may go on once it has a checkpoint."""

    wish: int  # `resources.slots_per_trial`, with which it begins
    at_least: int | None  # `min_slots`; None for any number that works, where more slots do not exist
    at_most: int  # `max_slots`, or the wish
    period_s: float  # how long it keeps a number of slots before it grows

    @property
    def is_asked_for(self) -> bool:
        return self.at_least is not None or self.at_most > self.wish


def elasticity_of(section: Mapping[str, Any], wish: int) -> Elasticity:
    """Read a checked ``data.dstrial``; a value that is no number counts as not given."""
    at_least, at_most = (_count(section.get(key)) for key in KEYS[:2])
    given = section.get("resize_period")
    period_s = DEFAULT_RESIZE_PERIOD_S if given is None or not _is_number(given) else float(given)
    return Elasticity(wish, at_least, max(at_most or wish, wish), period_s)


def check_elasticity(section: Mapping[str, Any], wish: Any, findings: Diagnostics) -> None:
    """Report what is wrong with the three keys, and with ``slots_per_trial``."""
    counts: dict[str, int] = {}
    for key in KEYS[:2]:
        value = section.get(key)
        count = _count(value)
        if count is not None:
            counts[key] = count
        elif value is not None:
            findings.problem(
                f"data.dstrial.{key}", render(value), "an integer of at least 1", "Set it to 1 or more."
            )
    period_s = section.get("resize_period")
    if period_s is not None and not (_is_number(period_s) and period_s > 0):
        findings.problem(
            "data.dstrial.resize_period",
            render(period_s),
            "a number of seconds",
            "Write 600 for ten minutes.",
        )
    if not isinstance(wish, int):
        return
    at_least, at_most = counts.get("min_slots"), counts.get("max_slots")
    if at_least is not None and at_least > max(wish, 1):
        findings.problem(
            "data.dstrial.min_slots",
            str(at_least),
            f"at most {max(wish, 1)}, the slots_per_trial",
            "Lower it.",
        )
    if at_most is not None and at_most < wish:
        findings.problem(
            "data.dstrial.max_slots",
            str(at_most),
            f"at least {wish}, the slots_per_trial",
            "Raise it, or lower resources.slots_per_trial to what the trial is to begin with.",
        )


def check_shared_batch(
    section: Mapping[str, Any],
    wish: int,
    train_batch_size: int,
    ranks_per_replica: int,
    findings: Diagnostics,
) -> None:
    """Report that a batch leaves no choice of slots although the user asked for one."""
    elasticity = elasticity_of(section, wish)
    most = elasticity.at_most
    least = elasticity.at_least if elasticity.at_least is not None else wish
    if least >= most:
        return
    if any(n != wish and shares(n, train_batch_size, ranks_per_replica) for n in range(least, most + 1)):
        return
    key = "min_slots" if elasticity.at_least is not None else "max_slots"
    sizes = [
        n
        for n in range(1, train_batch_size * ranks_per_replica + 1)
        if n != wish and shares(n, train_batch_size, ranks_per_replica)
    ]
    below, above = [n for n in sizes if n < wish][-2:], [n for n in sizes if n > wish][:2]
    findings.problem(
        f"data.dstrial.{key}",
        f"{least} to {most} slots, none of which but {wish} can share a batch of {train_batch_size} records",
        f"a range with one of {', '.join(map(str, below + above)) or 'them'}",
        "Widen the range, or choose a train_batch_size with more divisors.",
    )


def shares(num_slots: int, train_batch_size: int, ranks_per_replica: int) -> bool:
    """Say whether the replicas of so many slots can share a batch evenly."""
    replicas, rest = divmod(num_slots, ranks_per_replica)
    return rest == 0 and replicas > 0 and train_batch_size % replicas == 0


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
