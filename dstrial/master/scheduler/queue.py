"""Decides who gets slots next, and says why a trial waits; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from dstrial.master.scheduler.placement import by_node, could_ever_fit, place
from dstrial.master.store.nodes import node_of


@dataclasses.dataclass(frozen=True, slots=True)
class Waiting:
    """A trial or command that waits for slots."""

    key: int | str  # a trial's id, or a command's task id
    experiment_id: int  # 0 for a command
    num_slots: int
    max_slots: int | None  # of its experiment at once; None for any number
    is_on_one_node: bool = False  # cannot be divided among nodes, as a command
    excluded_nodes: frozenset[int] = frozenset()  # nodes excluded by a log policy
    choices: tuple[int, ...] = ()  # the best first; empty for ``num_slots`` alone


def assignments(
    waiting: Sequence[Waiting], free: Collection[int], enabled: Collection[int], used_by: Mapping[int, int]
) -> list[tuple[int | str, list[int]]]:
    """Return the keys of what starts now, with their slots.

    ``waiting`` has the most urgent first, ``free`` and ``enabled`` are slot ids. The first that does not fit holds up the rest,
    so that small ones do not starve a large one. Three kinds hold up nobody: one without slots, one whose experiment is at its
    ``max_slots``, and one that no enabled set of slots could ever hold. One that has a choice leaves the least of theirs to those
    behind it that have one, too.
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
        if one.excluded_nodes:
            there = {node: slots for node, slots in left.items() if node not in one.excluded_nodes}
            most = {node: count for node, count in capacity.items() if node not in one.excluded_nodes}
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
    """Say whether a waiting trial could begin if others gave their slots back."""
    most = {node: count for node, count in capacity.items() if node not in one.excluded_nodes}
    if not could_ever_fit(one.num_slots, most, is_on_one_node=one.is_on_one_node):
        return False
    return one.max_slots is None or used_by.get(one.experiment_id, 0) + one.num_slots <= one.max_slots


_MAX_NAMED = 3


@dataclasses.dataclass(frozen=True, slots=True)
class SlotUser:
    """A trial or command with slots."""

    name: str  # for example ``trial 3 of experiment 2 (gpt)``
    experiment_id: int  # 0 for a command
    num_slots: int


def waiting_text(
    num_slots: int,
    num_enabled: int,
    slot_users: Sequence[SlotUser],
    *,
    experiment_id: int,
    max_slots: int | None,
    before: str | None,
) -> str:
    """Return one line: for which slots a trial waits, and who holds them.

    ``before`` is first in the queue, None if that is the trial itself.
    """
    wanted = f"waiting for {_slots(num_slots)}"
    own = sum(user.num_slots for user in slot_users if user.experiment_id == experiment_id)
    if max_slots is not None and own + num_slots > max_slots:
        return f"{wanted}: its experiment uses {own} of the {max_slots} that resources.max_slots allows"
    used = sum(user.num_slots for user in slot_users)
    if used + num_slots <= num_enabled and before is not None:
        return f"{wanted}: {before} is before it in the queue, and needs more than is free"
    named = [f"{user.name} on {user.num_slots}" for user in slot_users[:_MAX_NAMED]]
    if len(slot_users) > _MAX_NAMED:
        named.append(f"{len(slot_users) - _MAX_NAMED} others")
    held = f", by {', '.join(named)}" if named else ""
    return f"{wanted}: {used} of {num_enabled} {'are' if used != 1 else 'is'} in use{held}"


def _slots(count: int) -> str:
    return f"{count} slot{'s' if count != 1 else ''}"
