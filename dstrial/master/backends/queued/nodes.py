"""The engine's nodes as the scheduler sees them; a slot keeps its id for ever."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from dstrial.master.backends.backend import Node
from dstrial.master.backends.devices import Slot, SlotKind
from dstrial.master.backends.engine import NodeCapacity
from dstrial.master.backends.queued.jobs import TrackedJob
from dstrial.master.clock import now_us
from dstrial.master.store.nodes import OWN_NODE, index_of, node_of, slot_id_of


class NodeTable:
    """Written by the engine's thread; any thread reads ``nodes``.

    Args:
        ids_of: returns permanent ids of nodes by name.
        engine: its name.
        kind: of slots.
    """

    def __init__(
        self, ids_of: Callable[[Sequence[str]], Mapping[str, int]], engine: str, kind: SlotKind
    ) -> None:
        self._ids_of = ids_of
        self._engine = engine
        self._kind: SlotKind = kind
        self._capacity: Mapping[str, NodeCapacity] = {}
        self._silent: dict[int, str] = {}  # nodes that do not answer though the engine calls them up, and why
        self.ids: dict[str, int] = {}
        self.nodes: tuple[Node, ...] = ()

    def set_capacity(self, capacity: Mapping[str, NodeCapacity]) -> None:
        self.learn(capacity.keys())
        self._capacity = dict(capacity)

    def learn(self, names: Collection[str]) -> None:
        """Give new nodes their ids."""
        if new := sorted(name for name in names if name not in self.ids):
            self.ids = {**self.ids, **self._ids_of(new)}

    def names_of(self, excluded: frozenset[int]) -> frozenset[str]:
        """Return the names of excluded nodes, and of those that are silent."""
        return frozenset(name for name, id_ in self.ids.items() if id_ in excluded or id_ in self._silent)

    def update(self, jobs: Iterable[TrackedJob]) -> bool:
        """Rebuild the nodes from capacity and links; return whether one has changed."""
        jobs = [job for job in jobs if job.end is None]
        links = [link for job in jobs for link in job.links.values()]
        ends = [link.node() for link in links]
        up = {end.id for end in ends if end.why_down is None}
        # A job whose node is dead is ended only when the engine notices that, minutes later.
        self._silent = {
            link.node_id: self._silent.get(link.node_id) or link.why_lost() or "silent"
            for link in links
            if link.is_silent and link.node_id not in up
        }
        known = {slot.id: slot for end in ends if end.why_down is None for slot in end.slots}
        used = [slot_id for job in jobs for share in job.shares for slot_id in share.slots]
        before = {node.id: node for node in self.nodes}
        nodes = []
        for name, node_id in sorted(self.ids.items(), key=lambda pair: pair[1]):
            if node_id == OWN_NODE:
                continue
            old, capacity = before.get(node_id), self._capacity.get(name, NodeCapacity(0, is_up=False))
            counts = [index_of(slot_id) + 1 for slot_id in used if node_of(slot_id) == node_id]
            count = max([capacity.num_slots, 0 if old is None else len(old.slots), *counts])
            slots = tuple(
                known.get(slot_id_of(node_id, index))
                or Slot(slot_id_of(node_id, index), self._kind, "", f"{name}-{index}")
                for index in range(count)
            )
            why = self._silent.get(node_id) if capacity.is_up else f"down, as {self._engine} says"
            is_same = old is not None and (old.why_down is None) == (why is None)
            since_us = old.since_us if old is not None and is_same else now_us()
            nodes.append(Node(node_id, name, name, slots, why, since_us))
        changed = tuple(nodes) != self.nodes
        self.nodes = tuple(nodes)
        return changed
