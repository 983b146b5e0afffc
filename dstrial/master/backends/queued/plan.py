"""Decides what is released and requested, and which nodes are lost; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from dstrial.master.backends.engine import JobState

MOST_PENDING = 32  # jobs in an engine's queue; further ones wait with the master
LOST_NODE_S = 300.0  # a node stays lost for so long without news from a link or the engine


@dataclasses.dataclass(frozen=True, slots=True)
class KnownJob:
    """What the plan needs of a job.

    Attributes:
        is_in_use: whether an allocation runs in it.
        why_useless: why its request cannot use it; None if it can.
    """

    id: str
    key: str
    state: JobState
    is_in_use: bool = False
    why_useless: str | None = None
    num_slots: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to do.

    Attributes:
        given_back: ids of jobs to release, with the reason.
        asked_for: keys to request, in this order.
        left: keys that wait until others wait no more.
    """

    given_back: tuple[tuple[str, str], ...]
    asked_for: tuple[str, ...]
    left: tuple[str, ...] = ()


def plan(
    wanted: Sequence[str],
    kept: Collection[str],
    jobs: Sequence[KnownJob],
    most_pending: int = MOST_PENDING,
    *,
    growing: Collection[str] = (),
) -> Plan:
    """Give each waiting key one job, and none two.

    Args:
        wanted: keys that wait and may request now, the most urgent first.
        kept: keys that may have a job.
        jobs: those that are not over.
        most_pending: how many may wait at once.
        growing: keys that run, and wait for a larger job beside their own.
    """
    given_back: list[tuple[str, str]] = []
    served: set[str] = set()
    num_pending = 0
    # What runs first, and the largest of it: it serves, and others for the same key do not.
    for job in sorted(jobs, key=lambda one: (not one.is_in_use, one.state != "running", -one.num_slots)):
        if job.is_in_use:
            if job.key not in growing:
                served.add(job.key)
        elif job.state == "leaving":
            given_back.append((job.id, "its nodes were asked for"))
        elif job.key not in kept:
            given_back.append((job.id, "nobody wants it any more"))
        elif job.why_useless is not None:
            given_back.append((job.id, job.why_useless))
        elif job.key in served:
            given_back.append((job.id, "there is another one for the same"))
        else:
            served.add(job.key)
            # Who grows holds up nobody.
            num_pending += job.state == "pending" and job.key not in growing
    waiting = [key for key in wanted if key not in served]
    num_asked = max(most_pending - num_pending, 0)
    left = [key for key in waiting[num_asked:] if key not in growing]
    return Plan(tuple(given_back), tuple(waiting[:num_asked]), tuple(left))


def chosen_counts(
    num_slots: int, available: Mapping[int, int], *, is_on_one_node: bool = False
) -> dict[int, int] | None:
    """Return how many slots of each part are used; None if there are too few.

    What fits on one part is not divided. ``available`` has usable slots by part, in rank order.
    """
    for part, count in available.items():
        if count >= num_slots:
            return {part: num_slots}
    if is_on_one_node or sum(available.values()) < num_slots:
        return None
    left, chosen = num_slots, {}
    for part, count in available.items():
        if left > 0:
            chosen[part] = min(count, left)
            left -= chosen[part]
    return chosen


def free_indices(num: int, taken: Collection[int]) -> list[int]:
    """Return the ``num`` lowest slot numbers of a node that no other job has."""
    found: list[int] = []
    index = 0
    while len(found) < num:
        if index not in taken:
            found.append(index)
        index += 1
    return found


def key_text(key: int | str) -> str:
    """Return the engine's key of a trial's number, or of a command's task id."""
    return f"command-{key}" if isinstance(key, str) else f"trial-{key}"


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
            if node_id not in up and node_id not in down and now_s < at_s + LOST_NODE_S
        }
        return {node_id: why for node_id, (why, _) in self._lost.items()}
