"""Which trials get slots next; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Waiting:
    """A trial that waits for slots.

    Attributes:
        trial_id: the trial.
        experiment_id: its experiment.
        num_slots: how many it needs.
        max_slots: how many its experiment may use at once, None for any number.
    """

    trial_id: int
    experiment_id: int
    num_slots: int
    max_slots: int | None


def assignments(
    waiting: Sequence[Waiting], free: Collection[int], num_enabled: int, used_by: Mapping[int, int]
) -> list[tuple[int, list[int]]]:
    """Return the trials that start now, with their slots.

    The first trial that does not fit holds what comes after it, so that small ones do not starve a large one. Three kinds
    hold nobody: a trial without slots, one whose experiment is at its ``max_slots``, and one that no enabled set of
    slots could ever hold.

    Args:
        waiting: the most urgent first.
        free: ids of slots that are enabled and unused.
        num_enabled: how many slots are enabled.
        used_by: slots in use by experiment.
    """
    left = sorted(free)
    used = dict(used_by)
    chosen: list[tuple[int, list[int]]] = []
    is_held = False
    for trial in waiting:
        if trial.num_slots == 0:
            chosen.append((trial.trial_id, []))
            continue
        in_use = used.get(trial.experiment_id, 0)
        if trial.max_slots is not None and in_use + trial.num_slots > trial.max_slots:
            continue
        if is_held or trial.num_slots > num_enabled:
            continue
        if trial.num_slots > len(left):
            is_held = True
            continue
        chosen.append((trial.trial_id, left[: trial.num_slots]))
        left = left[trial.num_slots :]
        used[trial.experiment_id] = in_use + trial.num_slots
    return chosen
