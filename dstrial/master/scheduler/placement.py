"""Chooses an allocation's slots among nodes; pure.

An allocation that fits on one node is never divided: ranks of one node talk many times faster than those of two. Else it gets
as few nodes as possible, with equally many slots on each if that can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dstrial.master.store.nodes import node_of


def by_node(slot_ids: Iterable[int]) -> dict[int, list[int]]:
    """Return slots by their node, both ascending."""
    found: dict[int, list[int]] = {}
    for slot_id in sorted(slot_ids):
        found.setdefault(node_of(slot_id), []).append(slot_id)
    return found


def could_ever_fit(num_slots: int, capacity: Mapping[int, int], *, is_on_one_node: bool = False) -> bool:
    """Say whether so many slots exist; ``capacity``: those of nodes that are up."""
    most = max(capacity.values(), default=0) if is_on_one_node else sum(capacity.values())
    return num_slots <= most


def place(
    num_slots: int,
    free: Mapping[int, Sequence[int]],
    capacity: Mapping[int, int],
    *,
    is_on_one_node: bool = False,
) -> list[int] | None:
    """Return an allocation's slots by rank; None if it has to wait.

    ``capacity`` counts slots in use, too: an allocation that fits on a node waits for one.
    """
    fitting = [node for node, slots in free.items() if len(slots) >= num_slots]
    if fitting:
        # The fullest: large ones find the others.
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
    # The last node has what is over.
    return chosen[:num_slots]
