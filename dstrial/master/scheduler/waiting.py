"""Why a trial waits for slots, and who holds them; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

_MAX_NAMED = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Holder:
    """What runs on slots.

    Attributes:
        name: for example ``trial 3 of experiment 2 (gpt)``.
        experiment_id: of a trial; 0 for anything else.
        num_slots: how many it has.
    """

    name: str
    experiment_id: int
    num_slots: int


def waiting_text(
    num_slots: int,
    num_enabled: int,
    holders: Sequence[Holder],
    *,
    experiment_id: int,
    max_slots: int | None,
    before: str | None,
) -> str:
    """Say for what a trial waits and who holds it, one line that begins with ``waiting for``.

    Args:
        num_slots: how many it needs.
        num_enabled: how many there are.
        holders: what runs, on one slot or more each.
        experiment_id: its experiment.
        max_slots: how many its experiment may use at once, None for any number.
        before: what is first in the queue, None if that is the trial itself.
    """
    wanted = f"waiting for {_slots(num_slots)}"
    own = sum(holder.num_slots for holder in holders if holder.experiment_id == experiment_id)
    if max_slots is not None and own + num_slots > max_slots:
        return f"{wanted}: its experiment uses {own} of the {max_slots} that resources.max_slots allows"
    used = sum(holder.num_slots for holder in holders)
    if used + num_slots <= num_enabled and before is not None:
        return f"{wanted}: {before} is before it in the queue, and needs more than is free"
    named = [f"{holder.name} on {holder.num_slots}" for holder in holders[:_MAX_NAMED]]
    if len(holders) > _MAX_NAMED:
        named.append(f"{len(holders) - _MAX_NAMED} others")
    held = f", by {', '.join(named)}" if named else ""
    return f"{wanted}: {used} of {num_enabled} {'are' if used != 1 else 'is'} in use{held}"


def _slots(count: int) -> str:
    return f"{count} slot{'s' if count != 1 else ''}"
