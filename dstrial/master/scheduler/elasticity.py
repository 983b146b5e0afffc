"""Which trials change their number of slots; pure.

A trial that runs changes by stopping with a checkpoint and beginning again. Two things make it: somebody more urgent waits, or
its node is being drained (it makes room); slots are free and nobody waits (it grows).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from dstrial.master.scheduler.placement import by_node, could_ever_fit, place
from dstrial.master.scheduler.queue import Waiting, assignments


@dataclasses.dataclass(frozen=True, slots=True)
class Running:
    """A trial with slots that may change their number."""

    trial_id: int
    experiment_id: int
    urgency: tuple[int, float]  # of its experiment in the queue; the smaller, the more urgent
    slots: tuple[int, ...]
    choices: tuple[int, ...]  # slots for its newest checkpoint, the most first; not only fewer
    max_slots: int | None = None  # of its experiment at once; None for any number
    is_on_one_node: bool = False  # cannot be divided among nodes

    @property
    def num_slots(self) -> int:
        return len(self.slots)

    def waiting(self, choices: Sequence[int]) -> Waiting:
        """Return it as it would wait once it has stopped."""
        return Waiting(
            self.trial_id,
            self.experiment_id,
            choices[0],
            self.max_slots,
            is_on_one_node=self.is_on_one_node,
            choices=tuple(choices),
        )


def select_preemption_victims(
    first: Waiting,
    urgency: tuple[int, float],
    running: Sequence[Running],
    *,
    free: Collection[int],
    enabled: Collection[int],
    used_by: Mapping[int, int],
) -> list[Running]:
    """Return the trials that have to stop so that the first in the queue can begin.

    Only trials of a lower priority, the least urgent first, and only if each goes on with what is left; none, where that is not
    enough. ``free`` are ids of slots that are unused, or will be soon.
    """
    if _all_fit([first], free, enabled, used_by):
        return []  # it waits for what ends already
    chosen: list[Running] = []
    candidates = sorted(running, key=lambda one: one.urgency, reverse=True)
    for one in candidates:
        fewer = [count for count in one.choices if count < one.num_slots]
        if one.urgency[0] <= urgency[0] or not fewer:
            continue
        chosen.append(one)
        theirs = {slot for victim in chosen for slot in victim.slots}
        used = dict(used_by)
        for victim in chosen:
            used[victim.experiment_id] = used.get(victim.experiment_id, 0) - victim.num_slots
        wait = [
            victim.waiting([count for count in victim.choices if count <= victim.num_slots])
            for victim in sorted(chosen, key=lambda victim: victim.urgency)
        ]
        if _all_fit([first, *wait], {*free, *theirs}, enabled, used):
            return chosen
    return []


def _all_fit(
    waiting: Sequence[Waiting],
    free: Collection[int],
    enabled: Collection[int],
    used_by: Mapping[int, int],
) -> bool:
    return len(assignments(waiting, free, enabled, used_by)) == len(waiting)


def leaves_drained(one: Running, drained: Collection[int], free: Collection[int]) -> bool:
    """Say whether a trial on ``drained`` slots can go on elsewhere."""
    kept = [slot for slot in one.slots if slot not in drained]
    if len(kept) == one.num_slots:
        return False
    left = {*free, *kept}
    capacity = {node: len(slots) for node, slots in by_node(left).items()}
    return any(
        place(count, by_node(left), capacity, is_on_one_node=one.is_on_one_node) is not None
        for count in one.choices
        if count <= one.num_slots
    )


def grown(one: Running, *, free: Collection[int], enabled: Collection[int], used: int) -> int:
    """Return the slots of a trial that takes the free ones, at least its own number."""
    left = by_node({*free, *(slot for slot in one.slots if slot in set(enabled))})
    capacity = {node: len(slots) for node, slots in by_node(enabled).items()}
    for count in one.choices:
        if count <= one.num_slots:
            break
        if one.max_slots is not None and used - one.num_slots + count > one.max_slots:
            continue
        if not could_ever_fit(count, capacity, is_on_one_node=one.is_on_one_node):
            continue
        if place(count, left, capacity, is_on_one_node=one.is_on_one_node) is not None:
            return count
    return one.num_slots
