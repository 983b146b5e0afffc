"""Parses a Ray cluster's nodes and groups, and chooses what to request; pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

CPU, GPU = "CPU", "GPU"  # Ray's names of what slots are


@dataclasses.dataclass(frozen=True, slots=True)
class RayNode:
    """A node of the cluster."""

    id: str  # Ray's, new whenever Ray is started there
    name: str  # for people, unique among living nodes
    is_alive: bool
    total: Mapping[str, float]  # resources by name, in use or not
    free: Mapping[str, float]  # those that are not reserved
    death_reason: str = ""  # Ray's reason, empty without one
    is_draining: bool = False  # whether it was asked to leave soon

    def num_slots(self, kind: str) -> int:
        return int(self.total.get(kind, 0))


@dataclasses.dataclass(frozen=True, slots=True)
class RayGroup:
    """A placement group."""

    id: str  # hexadecimal
    name: str
    state: str  # Ray's word: ``PENDING``, ``PREPARED``, ``CREATED``, ``RESCHEDULING``, ``REMOVED``
    bundles: tuple[Mapping[str, float], ...]  # in rank order
    node_ids: tuple[str, ...]  # where each bundle is; empty for nowhere


def parse_nodes(seen: Mapping[str, Any]) -> tuple[RayNode, ...]:
    """Parse the nodes of the bridge's answer, dead ones included.

    A node's name is Ray's: ``ray start --node-name``, by default its address. Host names may repeat in a cluster; two living
    nodes of one name get their ports behind it.
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
    """Parse the placement groups of the bridge's answer, of all owners and states."""
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


def choose_shares(
    num_slots: int, capacities: Iterable[int], *, is_on_one_node: bool = False
) -> tuple[int, ...] | None:
    """Return a job's slots of each node, largest first; None if there are too few.

    Ray has the queue, so nodes count with all they have, in use or not: as few nodes as possible, with equally many slots on
    each if possible. What fits on one node waits for one. ``capacities`` are slots of each node that may be used.
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
