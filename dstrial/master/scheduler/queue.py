"""Decides who gets slots next, and says why a trial waits; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from dstrial.master.scheduler.placement import by_node, could_ever_fit, place
from dstrial.master.store.nodes import node_of


@dataclasses.dataclass(frozen=True, slots=True)
class Waiting:
    """A trial or command that waits for slots.

    Attributes:
        key: the trial's number, or the command's task id.
        experiment_id: the trial's experiment; 0 for a command.
        num_slots: how many it needs.
        max_slots: how many its experiment may use at once, None for any number.
        is_on_one_node: whether it cannot be divided among machines, as a command.
        kept_off: nodes that a log policy keeps it from.
        choices: with how many it can begin, the best first, where it has a choice; empty for ``num_slots`` alone.
    """

    key: int | str
    experiment_id: int
    num_slots: int
    max_slots: int | None
    is_on_one_node: bool = False
    kept_off: frozenset[int] = frozenset()
    choices: tuple[int, ...] = ()


def assignments(
    waiting: Sequence[Waiting], free: Collection[int], enabled: Collection[int], used_by: Mapping[int, int]
) -> list[tuple[int | str, list[int]]]:
    """Return the keys of what starts now, with their slots.

    The first one that does not fit holds what comes after it, so that small ones do not starve a large one. Three kinds
    hold nobody: one without slots, one whose experiment is at its ``max_slots``, and one that no enabled set of
    slots could ever hold. One that has a choice leaves the least of theirs to those behind it that have one, too.

    Args:
        waiting: the most urgent first.
        free: ids of slots that are enabled and unused.
        enabled: ids of all slots that are enabled.
        used_by: slots in use by experiment.
    """
    left = by_node(free)
    capacity = {node: len(slots) for node, slots in by_node(enabled).items()}
    used = dict(used_by)
    chosen: list[tuple[int | str, list[int]]] = []
    is_held = False
    behind = sum(min(one.choices, default=0) for one in waiting)
    for one in waiting:
        behind -= min(one.choices, default=0)
        if one.num_slots == 0:
            chosen.append((one.key, []))
            continue
        in_use = used.get(one.experiment_id, 0)
        counts = [
            count
            for count in one.choices or (one.num_slots,)
            if one.max_slots is None or in_use + count <= one.max_slots
        ]
        there, most = left, capacity
        if one.kept_off:
            there = {node: slots for node, slots in left.items() if node not in one.kept_off}
            most = {node: count for node, count in capacity.items() if node not in one.kept_off}
        counts = [n for n in counts if could_ever_fit(n, most, is_on_one_node=one.is_on_one_node)]
        room = sum(map(len, there.values())) - behind
        counts.sort(key=lambda count: count > room)
        if is_held or not counts:
            continue
        slots = next(
            (
                found
                for count in counts
                if (found := place(count, there, most, is_on_one_node=one.is_on_one_node)) is not None
            ),
            None,
        )
        if slots is None:
            is_held = True
            continue
        chosen.append((one.key, slots))
        for node in {node_of(slot_id) for slot_id in slots}:
            left[node] = [slot_id for slot_id in left[node] if slot_id not in slots]
        used[one.experiment_id] = in_use + len(slots)
    return chosen


def waits_for_others(one: Waiting, capacity: Mapping[int, int], used_by: Mapping[int, int]) -> bool:
    """Say whether what waits could begin if others gave their slots back.

    Args:
        one: what waits.
        capacity: slots of each node, whether or not they are in use.
        used_by: slots in use by experiment.
    """
    most = {node: count for node, count in capacity.items() if node not in one.kept_off}
    if not could_ever_fit(one.num_slots, most, is_on_one_node=one.is_on_one_node):
        return False
    return one.max_slots is None or used_by.get(one.experiment_id, 0) + one.num_slots <= one.max_slots


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """The last look at the queue.

    Every write that may change who is next publishes "scheduler". A look at each pass would cost a part of a core that grows
    with the number of those who wait.

    Attributes:
        version: of the topic "scheduler" before the rows were read.
        at_s: when that was, monotonic seconds.
    """

    version: int
    at_s: float

    def is_stale(self, version: int, now_s: float, period_s: float) -> bool:
        """Say whether the queue is to be looked at again.

        Args:
            version: of the topic now.
            now_s: monotonic seconds.
            period_s: after so long it is in any case, for what nobody has told of.
        """
        return version != self.version or now_s >= self.at_s + period_s


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
    """Say what a trial waits for and who holds it, in one ``waiting for …`` line.

    ``num_enabled`` slots exist, and each holder has at least one. The trial's experiment may use ``max_slots`` at once, None for
    any number. ``before`` is first in the queue, None if that is the trial itself.
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
