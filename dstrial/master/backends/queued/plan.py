"""Decides which jobs are cancelled and submitted, and their slots; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from dstrial.master.backends.engine import JobState


@dataclasses.dataclass(frozen=True, slots=True)
class KnownJob:
    """What the plan needs of a job.

    Attributes:
        is_in_use: whether an allocation runs in it.
        unusable_reason: why no allocation can begin in it; None if one can.
    """

    id: str
    key: str
    state: JobState
    is_in_use: bool = False
    unusable_reason: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to do.

    Attributes:
        cancelled: ids of jobs to cancel, with the reason.
        submitted: keys for which a job is submitted, in this order.
        deferred: keys that wait until fewer jobs are pending.
    """

    cancelled: tuple[tuple[str, str], ...]
    submitted: tuple[str, ...]
    deferred: tuple[str, ...] = ()


def plan(requested: Collection[str], due: Sequence[str], jobs: Sequence[KnownJob], max_pending: int) -> Plan:
    """Give each requested key exactly one job.

    Args:
        requested: keys that wait for an allocation.
        due: those of them for which a job may be submitted now, the most urgent first.
        jobs: all that are neither ended nor cancelled.
        max_pending: how many jobs may be pending at once.
    """
    cancelled: list[tuple[str, str]] = []
    served: set[str] = set()
    num_pending = 0
    for job in sorted(jobs, key=lambda one: (not one.is_in_use, one.state != "running")):
        if job.is_in_use:
            continue
        if job.state == "leaving":
            cancelled.append((job.id, "its nodes are taken away"))
        elif job.unusable_reason is not None:
            cancelled.append((job.id, job.unusable_reason))
        elif job.key not in requested:
            cancelled.append((job.id, "its allocation is not wanted any more"))
        elif job.key in served:
            cancelled.append((job.id, "there is another job for the same allocation"))
        else:
            served.add(job.key)
            num_pending += job.state == "pending"
    waiting = [key for key in due if key not in served]
    num_submitted = max(max_pending - num_pending, 0)
    return Plan(tuple(cancelled), tuple(waiting[:num_submitted]), tuple(waiting[num_submitted:]))


def chosen_counts(
    num_slots: int, available: Mapping[int, int], *, is_on_one_node: bool = False
) -> dict[int, int] | None:
    """Return how many slots of each part are used; None if there are too few.

    What fits on one part is not divided. ``available`` has slots by part, in rank order.
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
