"""Decides which jobs of an engine are released and which are requested; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from dstrial.master.backends.engine import JobState

MOST_PENDING = 32  # jobs in an engine's queue; further ones wait with the master


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
