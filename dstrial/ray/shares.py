"""Which shares of nodes a job asks Ray for; pure.

Ray has the queue, so that shares are chosen by what nodes have, whether or not it is in use: as few nodes as possible, with
equally many slots on each if that can be. What fits on one node waits for one.
"""

from __future__ import annotations

from collections.abc import Iterable


def choose_shares(
    num_slots: int, capacities: Iterable[int], *, is_on_one_node: bool = False
) -> tuple[int, ...] | None:
    """Return the slots of each node of a job, the most first.

    None if the nodes have not so many.

    Args:
        num_slots: on all of them together, at least 1.
        capacities: slots of each node that may be used.
        is_on_one_node: whether they cannot be divided.
    """
    largest = sorted((count for count in capacities if count), reverse=True)
    if not largest or num_slots > (largest[0] if is_on_one_node else sum(largest)):
        return None
    num_nodes = next(number for number in range(1, len(largest) + 1) if sum(largest[:number]) >= num_slots)
    each, rest = divmod(num_slots, num_nodes)
    if rest == 0 and largest[num_nodes - 1] >= each:
        return (each,) * num_nodes
    shares = largest[: num_nodes - 1]
    return (*shares, num_slots - sum(shares))
