"""Which jobs of an engine are given back, and what is asked for; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from dstrial.master.backends.engine import JobState

MOST_PENDING = 32
"""How many jobs wait in an engine's queue at most; what else waits does so with the master."""


@dataclasses.dataclass(frozen=True, slots=True)
class KnownJob:
    """A job, as far as it matters for what is done with it.

    Attributes:
        id: the engine's.
        key: what it was asked for.
        state: whether it has nodes.
        is_in_use: whether an allocation runs in it.
        why_useless: why who wants it cannot use it; None if it can.
        num_slots: that it has.
    """

    id: str
    key: str
    state: JobState
    is_in_use: bool = False
    why_useless: str | None = None
    num_slots: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done.

    Attributes:
        given_back: ids of jobs with the reason.
        asked_for: keys, in this order.
        left: keys of those who wait until others do not any more.
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
    """Return what is to be done so that who waits gets a job, and nobody has two.

    Args:
        wanted: keys of those who wait and may ask now, the most urgent first.
        kept: keys of all who may have a job.
        jobs: those that are not over.
        most_pending: how many may wait at once.
        growing: keys of those who run and wait for a job with more slots, beside the one that they are in.
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
    """Return how many slots are used of each part of a job; None where it has too few.

    What fits on a part is not divided.

    Args:
        num_slots: how many are needed.
        available: slots of each part that can be used, by its place in the order of ranks.
        is_on_one_node: whether they cannot be divided.
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
    """Return the lowest numbers of slots that no other job on the node has."""
    found: list[int] = []
    index = 0
    while len(found) < num:
        if index not in taken:
            found.append(index)
        index += 1
    return found


def key_text(key: int | str) -> str:
    """Return what an engine's job is found again by.

    ``key`` is a trial's number, or a command's task id.
    """
    return f"command-{key}" if isinstance(key, str) else f"trial-{key}"
