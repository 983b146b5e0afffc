"""Which trials and commands get slots next; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Waiting:
    """A trial or command that waits for slots.

    Attributes:
        key: the trial's number, or the command's task id.
        experiment_id: the trial's experiment; 0 for a command.
        num_slots: how many it needs.
        max_slots: how many its experiment may use at once, None for any number.
    """

    key: int | str
    experiment_id: int
    num_slots: int
    max_slots: int | None


def assignments(
    waiting: Sequence[Waiting], free: Collection[int], num_enabled: int, used_by: Mapping[int, int]
) -> list[tuple[int | str, list[int]]]:
    """Return the keys of what starts now, with their slots.

    The first one that does not fit holds what comes after it, so that small ones do not starve a large one. Three kinds
    hold nobody: one without slots, one whose experiment is at its ``max_slots``, and one that no enabled set of
    slots could ever hold.

    Args:
        waiting: the most urgent first.
        free: ids of slots that are enabled and unused.
        num_enabled: how many slots are enabled.
        used_by: slots in use by experiment.
    """
    left = sorted(free)
    used = dict(used_by)
    chosen: list[tuple[int | str, list[int]]] = []
    is_held = False
    for one in waiting:
        if one.num_slots == 0:
            chosen.append((one.key, []))
            continue
        in_use = used.get(one.experiment_id, 0)
        if one.max_slots is not None and in_use + one.num_slots > one.max_slots:
            continue
        if is_held or one.num_slots > num_enabled:
            continue
        if one.num_slots > len(left):
            is_held = True
            continue
        chosen.append((one.key, left[: one.num_slots]))
        left = left[one.num_slots :]
        used[one.experiment_id] = in_use + one.num_slots
    return chosen
