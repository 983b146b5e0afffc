"""Decide which trials and commands get slots next, and on which nodes. Pure.

An allocation that fits on one node is never divided. A larger allocation gets as few nodes as possible, if possible with
equally many slots on each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from dstrial.master.store.nodes import node_of


def by_node(slot_ids: Iterable[int]) -> dict[int, list[int]]:
    """Return slot ids by node id, both ascending."""
    found: dict[int, list[int]] = {}
    for slot_id in sorted(slot_ids):
        found.setdefault(node_of(slot_id), []).append(slot_id)
    return found


def could_ever_fit(num_slots: int, capacity: Mapping[int, int], *, is_on_one_node: bool = False) -> bool:
    """Return whether ``num_slots`` slots could be found if all nodes were free.

    ``capacity`` maps node id -> number of slots. With ``is_on_one_node``, one node must have them all.
    """
    limit = max(capacity.values(), default=0) if is_on_one_node else sum(capacity.values())
    return num_slots <= limit


def place(
    num_slots: int,
    free: Mapping[int, Sequence[int]],
    capacity: Mapping[int, int],
    *,
    is_on_one_node: bool = False,
) -> list[int] | None:
    """Return free slots for an allocation, in rank order; None if it must wait.

    ``free`` maps node id -> free slot ids; ``capacity`` maps node id -> total number of slots. An allocation that would fit on
    one empty node waits for such a node instead of being divided. With ``is_on_one_node``, no allocation is divided.
    """
    fitting = [node for node, slots in free.items() if len(slots) >= num_slots]
    if fitting:
        # Best fit: keep emptier nodes for large allocations.
        node = min(fitting, key=lambda one: (len(free[one]), one))
        return list(free[node][:num_slots])
    if is_on_one_node or num_slots <= max(capacity.values(), default=0):
        return None
    largest = sorted((node for node, slots in free.items() if slots), key=lambda one: (-len(free[one]), one))
    counts: list[int] = []
    for node in largest:
        counts.append(len(free[node]))
        if sum(counts) >= num_slots:
            break
    else:
        return None
    num_nodes = len(counts)
    each, rest = divmod(num_slots, num_nodes)
    equal = sorted(
        (node for node in largest if len(free[node]) >= each), key=lambda one: (len(free[one]), one)
    )
    if rest == 0 and len(equal) >= num_nodes:
        return [slot for node in sorted(equal[:num_nodes]) for slot in free[node][:each]]
    chosen: list[int] = []
    for node in sorted(largest[:num_nodes]):
        chosen += free[node]
    return chosen[:num_slots]  # the last node takes the remainder


@dataclasses.dataclass(frozen=True, slots=True)
class Waiting:
    """A trial or command that waits for slots."""

    key: int | str  # a trial's id, or a command's task id
    experiment_id: int  # 0 for a command
    num_slots: int
    max_slots: int | None  # limit of the experiment's slots in use; None for no limit
    is_on_one_node: bool = False  # whether the slots must be on one node, as for commands
    excluded_nodes: frozenset[int] = frozenset()  # nodes excluded by a log policy
    choices: tuple[int, ...] = ()  # possible numbers of slots, best first; empty for ``num_slots`` only


def assignments(
    waiting: Sequence[Waiting], free: Collection[int], enabled: Collection[int], used_by: Mapping[int, int]
) -> list[tuple[int | str, list[int]]]:
    """Return (key, slot ids in rank order) of the trials and commands that start now.

    ``waiting`` starts with the most urgent job; ``free`` and ``enabled`` are slot ids; ``used_by`` maps experiment id -> number
    of slots in use. The first job that does not fit blocks the later ones, so that small jobs do not starve a large one. A job
    blocks no others if it needs no slots, if its experiment is at ``max_slots``, or if it would not fit even if all enabled
    slots were free.
    """
    left = by_node(free)
    capacity = {node: len(slots) for node, slots in by_node(enabled).items()}
    used = dict(used_by)
    chosen: list[tuple[int | str, list[int]]] = []
    is_blocked = False
    for one in waiting:
        if one.num_slots == 0:
            chosen.append((one.key, []))
            continue
        in_use = used.get(one.experiment_id, 0)
        counts = [
            count
            for count in one.choices or (one.num_slots,)
            if one.max_slots is None or in_use + count <= one.max_slots
        ]
        allowed_free, allowed_capacity = left, capacity
        if one.excluded_nodes:
            allowed_free = {node: slots for node, slots in left.items() if node not in one.excluded_nodes}
            allowed_capacity = {n: count for n, count in capacity.items() if n not in one.excluded_nodes}
        counts = [
            count
            for count in counts
            if could_ever_fit(count, allowed_capacity, is_on_one_node=one.is_on_one_node)
        ]
        if is_blocked or not counts:
            continue
        slots = next(
            (
                found
                for count in counts
                if (found := place(count, allowed_free, allowed_capacity, is_on_one_node=one.is_on_one_node))
                is not None
            ),
            None,
        )
        if slots is None:
            is_blocked = True
            continue
        chosen.append((one.key, slots))
        for node in {node_of(slot_id) for slot_id in slots}:
            left[node] = [slot_id for slot_id in left[node] if slot_id not in slots]
        used[one.experiment_id] = in_use + len(slots)
    return chosen


def waits_for_others(one: Waiting, capacity: Mapping[int, int], used_by: Mapping[int, int]) -> bool:
    """Return whether a trial or command could start if other jobs released slots.

    ``capacity`` maps node id -> number of enabled slots, ``used_by`` experiment id -> number of slots in use. False if the
    experiment would exceed its ``max_slots``.
    """
    allowed = {node: count for node, count in capacity.items() if node not in one.excluded_nodes}
    if not could_ever_fit(one.num_slots, allowed, is_on_one_node=one.is_on_one_node):
        return False
    return one.max_slots is None or used_by.get(one.experiment_id, 0) + one.num_slots <= one.max_slots
