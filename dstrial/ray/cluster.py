"""Parse a Ray cluster's nodes and placement groups; choose a job's slots."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

CPU, GPU = "CPU", "GPU"  # Ray's names of resources; a slot is one of them


@dataclasses.dataclass(frozen=True, slots=True)
class RayNode:
    """A node of a Ray cluster."""

    id: str  # Ray's id, a new one at each start of Ray on the node
    name: str  # name for users, unique among living nodes
    is_alive: bool
    total: Mapping[str, float]  # resources by name, reserved or not
    free: Mapping[str, float]  # resources that are not reserved
    death_reason: str = ""  # Ray's reason; empty if the node is alive or Ray gives none
    is_draining: bool = False  # whether Ray is draining the node

    def num_slots(self, kind: str) -> int:
        return int(self.total.get(kind, 0))


@dataclasses.dataclass(frozen=True, slots=True)
class RayGroup:
    """A placement group: Ray's reservation of the slots of one job."""

    id: str  # hexadecimal
    name: str
    state: str  # ``PENDING``, ``PREPARED``, ``CREATED``, ``RESCHEDULING``, ``REMOVED``
    bundles: tuple[Mapping[str, float], ...]  # in rank order
    node_ids: tuple[str, ...]  # node of each bundle; "" if it has none


def parse_nodes(seen: Mapping[str, Any]) -> tuple[RayNode, ...]:
    """Parse the nodes, including dead nodes, in a result of ``Bridge.poll``.

    A node's name is from ``ray start --node-name``, by default its address. If several living nodes have the same name, their
    ports are appended.
    """
    rows: Sequence[Mapping[str, Any]] = seen["nodes"]
    counts = Counter(_name(row) for row in rows if row["Alive"])
    return tuple(
        RayNode(
            row["NodeID"],
            f"{_name(row)}:{row['NodeManagerPort']}" if counts[_name(row)] > 1 else _name(row),
            bool(row["Alive"]),
            row.get("Resources") or {},
            seen["free"].get(row["NodeID"], {}),
            str(row.get("DeathReasonMessage") or ""),
            row["NodeID"] in seen["draining"],
        )
        for row in rows
    )


def _name(row: Mapping[str, Any]) -> str:
    return str(row.get("NodeName") or row["NodeManagerAddress"])


def parse_groups(seen: Mapping[str, Any]) -> tuple[RayGroup, ...]:
    """Parse the placement groups, in all states, in a result of ``Bridge.poll``."""
    found = []
    for number, row in seen["groups"].items():
        indices = sorted(row["bundles"], key=int)
        places = row["bundles_to_node_id"]
        found.append(
            RayGroup(
                number,
                str(row["name"]),
                str(row["state"]),
                tuple(row["bundles"][index] for index in indices),
                tuple(str(places.get(index) or "") for index in indices),
            )
        )
    return tuple(found)


def slots_per_node(
    num_slots: int, capacities: Iterable[int], *, is_on_one_node: bool = False
) -> tuple[int, ...] | None:
    """Return a job's slots per node, largest first; None if the nodes have too few.

    The job gets as few nodes as possible, with equally many slots on each if possible.

    Args:
        num_slots: number of slots of the job.
        capacities: number of slots of each usable node, including slots in use, because Ray queues the job.
        is_on_one_node: whether all slots must be on one node.
    """
    largest = sorted((count for count in capacities if count), reverse=True)
    if not largest or num_slots > (largest[0] if is_on_one_node else sum(largest)):
        return None
    num_nodes = next(number for number in range(1, len(largest) + 1) if sum(largest[:number]) >= num_slots)
    each, rest = divmod(num_slots, num_nodes)
    if rest == 0 and largest[num_nodes - 1] >= each:
        return (each,) * num_nodes
    counts = largest[: num_nodes - 1]
    return (*counts, num_slots - sum(counts))
