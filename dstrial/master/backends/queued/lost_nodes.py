"""Nodes that links have lost, and an engine reports as up for minutes; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

KEPT_S = 300.0  # a node stays lost for so long without news from a link or the engine


@dataclasses.dataclass(frozen=True, slots=True)
class LinkState:
    """State of a link to a node of a job.

    Attributes:
        is_up: whether its agent answers.
        why_lost: why the node counts as lost; None while it does not.
    """

    job_id: str
    node_id: int
    is_up: bool
    why_lost: str | None


class LostNodes:
    """Which nodes count as lost.

    A link reports a loss once: a job that has lost a node for good keeps a link that never comes up again, also when the node is
    well. So a later report of the engine, or of another job's link, counts.
    """

    def __init__(self) -> None:
        self._lost: dict[int, tuple[str, float]] = {}
        self._told: set[tuple[str, int]] = set()

    def look(self, links: Iterable[LinkState], down: Collection[int], now_s: float) -> Mapping[int, str]:
        """Return lost nodes with the reason.

        Args:
            links: of all jobs that have nodes.
            down: nodes that the engine reports as down.
            now_s: monotonic seconds.
        """
        known = list(links)
        there = {(one.job_id, one.node_id) for one in known}
        self._told &= there
        for one in known:
            link = (one.job_id, one.node_id)
            if one.is_up:
                self._told.discard(link)
            elif one.why_lost is not None and link not in self._told:
                self._told.add(link)
                self._lost[one.node_id] = (one.why_lost, now_s)
        up = {one.node_id for one in known if one.is_up}
        self._lost = {
            node_id: (why, at_s)
            for node_id, (why, at_s) in self._lost.items()
            if node_id not in up and node_id not in down and now_s < at_s + KEPT_S
        }
        return {node_id: why for node_id, (why, _) in self._lost.items()}
