"""Which trials change their number of slots; pure.

A trial that runs changes by stopping with a checkpoint and beginning again. Three things make it: somebody more urgent waits, or
its node is being drained (it makes room); slots are free and nobody waits (it grows); what it grew to was not worth it (it gives
slots back).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence

from dstrial.master.scheduler.placement import by_node, could_ever_fit, place
from dstrial.master.scheduler.queue import Waiting, assignments

LEAST_REPORTS = 3
"""Training reports of a run from which is known how long a batch takes."""
_UNMEASURED_PERIODS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Running:
    """A trial with slots that may change their number.

    Attributes:
        trial_id: which one.
        experiment_id: its experiment.
        urgency: of its experiment in the queue; the smaller, the more urgent.
        slots: what it has.
        choices: with how many it could go on from its newest checkpoint, the most first; not only fewer.
        max_slots: how many its experiment may use at once, None for any number.
        is_on_one_node: whether it cannot be divided among machines.
    """

    trial_id: int
    experiment_id: int
    urgency: tuple[int, float]
    slots: tuple[int, ...]
    choices: tuple[int, ...]
    max_slots: int | None = None
    is_on_one_node: bool = False

    @property
    def num_slots(self) -> int:
        """How many it has."""
        return len(self.slots)

    def waiting(self, choices: Sequence[int]) -> Waiting:
        """Return it as it would wait once it has stopped."""
        return Waiting(
            self.trial_id,
            self.experiment_id,
            choices[0],
            self.max_slots,
            is_on_one_node=self.is_on_one_node,
            choices=tuple(choices),
        )


def who_makes_room(
    first: Waiting,
    urgency: tuple[int, float],
    running: Sequence[Running],
    *,
    free: Collection[int],
    enabled: Collection[int],
    used_by: Mapping[int, int],
) -> list[Running]:
    """Return who has to stop so that the first in the queue can begin.

    They go on with fewer slots.

    Only trials of a lower priority, the least urgent first, and only if each goes on with what is left; nobody, where that is
    not enough.

    Args:
        first: who waits and does not fit.
        urgency: of it, priority first.
        running: trials that may go on with fewer slots.
        free: ids of slots that are enabled and unused, or will be soon.
        enabled: ids of all slots that are enabled.
        used_by: slots in use by experiment.
    """
    if _all_fit([first], free, enabled, used_by):
        return []  # it waits for what ends already
    chosen: list[Running] = []
    candidates = sorted(running, key=lambda one: one.urgency, reverse=True)
    for one in candidates:
        fewer = [count for count in one.choices if count < one.num_slots]
        if one.urgency[0] <= urgency[0] or not fewer:
            continue
        chosen.append(one)
        theirs = {slot for victim in chosen for slot in victim.slots}
        used = dict(used_by)
        for victim in chosen:
            used[victim.experiment_id] = used.get(victim.experiment_id, 0) - victim.num_slots
        wait = [
            victim.waiting([count for count in victim.choices if count <= victim.num_slots])
            for victim in sorted(chosen, key=lambda victim: victim.urgency)
        ]
        if _all_fit([first, *wait], {*free, *theirs}, enabled, used):
            return chosen
    return []


def _all_fit(
    waiting: Sequence[Waiting],
    free: Collection[int],
    enabled: Collection[int],
    used_by: Mapping[int, int],
) -> bool:
    return len(assignments(waiting, free, enabled, used_by)) == len(waiting)


def leaves_drained(one: Running, drained: Collection[int], free: Collection[int]) -> bool:
    """Say whether a trial on slots that are being drained can go on elsewhere.

    Args:
        one: the trial.
        drained: ids of slots that are switched off, and whose trials may finish.
        free: ids of slots that are enabled and unused.
    """
    kept = [slot for slot in one.slots if slot not in drained]
    if len(kept) == one.num_slots:
        return False
    left = {*free, *kept}
    capacity = {node: len(slots) for node, slots in by_node(left).items()}
    return any(
        place(count, by_node(left), capacity, is_on_one_node=one.is_on_one_node) is not None
        for count in one.choices
        if count <= one.num_slots
    )


def grown(one: Running, *, free: Collection[int], enabled: Collection[int], used: int) -> int:
    """Return with how many slots a trial would go on if it took what is free.

    Its own number if that is no more.

    Args:
        one: the trial.
        free: ids of slots that are enabled and unused.
        enabled: ids of all slots that are enabled.
        used: slots that its experiment uses.
    """
    left = by_node({*free, *(slot for slot in one.slots if slot in set(enabled))})
    capacity = {node: len(slots) for node, slots in by_node(enabled).items()}
    for count in one.choices:
        if count <= one.num_slots:
            break
        if one.max_slots is not None and used - one.num_slots + count > one.max_slots:
            continue
        if not could_ever_fit(count, capacity, is_on_one_node=one.is_on_one_node):
            continue
        if place(count, left, capacity, is_on_one_node=one.is_on_one_node) is not None:
            return count
    return one.num_slots


def larger(one: Running, *, wish: int, spare: Mapping[int, int], used: int, before: int = 0) -> int:
    """Return with how many slots a trial would go on if an engine lent more.

    They are lent beside those that it has. Its own number for no more.

    Up to what it asks for it waits in the engine's queue as others do. Beyond that it takes what nobody uses or waits for, all of
    it for a moment beside its own.

    Args:
        one: the trial.
        wish: ``resources.slots_per_trial``.
        spare: slots by node that nobody uses or waits for.
        used: slots that its experiment uses.
        before: what was asked for already, which stays as long as it may be had; 0 for nothing.
    """
    room = max(spare.values(), default=0) if one.is_on_one_node else sum(spare.values())
    found = [
        count
        for count in one.choices
        if count > one.num_slots
        and (one.max_slots is None or used - one.num_slots + count <= one.max_slots)
        and (count <= wish or count <= room)
    ]
    return before if before in found else max(found, default=one.num_slots)


def has_to_move(one: Running, count: int, *, wish: int, spare: Mapping[int, int]) -> bool:
    """Say whether a trial gives its job back before it gets a larger one.

    There is room for the larger one in its place and not beside it.

    Only one that has less than it asks for: what it has got of that it keeps.

    Args:
        one: the trial.
        count: with how many slots it would go on.
        wish: ``resources.slots_per_trial``.
        spare: slots by node that nobody uses or waits for; without any others may be before it.
    """
    own = {node: len(slots) for node, slots in by_node(one.slots).items()}
    there = {node: spare.get(node, 0) + own.get(node, 0) for node in {*spare, *own}}
    beside, instead = (
        max(counts, default=0) if one.is_on_one_node else sum(counts)
        for counts in (spare.values(), there.values())
    )
    return 0 < beside < count <= min(wish, instead)


@dataclasses.dataclass(frozen=True, slots=True)
class Growth:
    """What a trial that runs asks an engine for besides, or instead of its job.

    Attributes:
        num_slots: with how many it would go on.
        is_move: whether it gives its job back first.
        is_on_one_node: whether they cannot be divided.
        kept_off: nodes that must not be used.
    """

    num_slots: int
    is_on_one_node: bool = False
    kept_off: frozenset[int] = frozenset()
    is_move: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """A run of a trial on a number of slots, as its training reports tell of it.

    Times are in seconds, of one clock.

    Attributes:
        num_slots: its slots.
        steps_at_start: batches at its checkpoint.
        start_s: when it began.
        asked_s: when it was asked to stop; None if it was not.
        end_s: when it ended; None while it runs.
        num_reports: training reports; ``LEAST_REPORTS`` for more.
        first: batch and time of the first; None without one.
        last: batch and time of the last.
    """

    num_slots: int
    steps_at_start: int
    start_s: float
    asked_s: float | None
    end_s: float | None
    num_reports: int
    first: tuple[int, float] | None
    last: tuple[int, float] | None

    @property
    def batch_s(self) -> float | None:
        """Seconds per batch between its first report and its last.

        None where they do not tell.
        """
        if self.first is None or self.last is None or self.num_reports < LEAST_REPORTS:
            return None
        batches = self.last[0] - self.first[0]
        return (self.last[1] - self.first[1]) / batches if batches > 0 else None

    @property
    def measured_s(self) -> float:
        """How long it was measured."""
        return 0.0 if self.first is None or self.last is None else self.last[1] - self.first[1]


def is_due_to_grow(stages: Sequence[Stage], for_s: float, period_s: float) -> bool:
    """Say whether a trial has kept its number of slots long enough to take more.

    What it takes is judged by what it had before: so that has to be measured first, for three periods at most.

    Args:
        stages: the trial's runs, in order; the last one is that which runs.
        for_s: how long that runs.
        period_s: how long a trial keeps a number of slots at least.
    """
    is_measured = bool(stages) and stages[-1].batch_s is not None
    return for_s >= period_s * (1 if is_measured else _UNMEASURED_PERIODS)


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """That more slots were not worth their restart.

    Attributes:
        num_slots: what is enough.
        more: what was tried.
        before_s: seconds a batch with what is enough.
        after_s: seconds a batch with more.
        cost_s: seconds that the change took.
    """

    num_slots: int
    more: int
    before_s: float
    after_s: float
    cost_s: float

    @property
    def text(self) -> str:
        """The same in words."""
        return (
            f"with {self.more} slots a batch takes {self.after_s:.3g} s, with {self.num_slots} it took "
            f"{self.before_s:.3g} s; the change took {self.cost_s:.0f} s"
        )


def not_worth(stages: Sequence[Stage], period_s: float) -> Verdict | None:
    """Return which number of slots is enough for a trial.

    It is judged by what the trial has measured; None if more were worth it.

    More slots are worth it if within ``period_s`` they save more time than the change to them took. They are judged once they
    have been measured for as long as the change took. It takes what the trial needs to stop, and to begin
    until its first batch; what lies between (a pause, a queue, a master that is down) is no matter of slots.

    Args:
        stages: the trial's runs, in order.
        period_s: how long a trial keeps a number of slots at least.
    """
    found: Verdict | None = None
    for before, after in itertools.pairwise(stages):
        if after.num_slots <= before.num_slots or before.asked_s is None or after.first is None:
            continue
        old_s, new_s = before.batch_s, after.batch_s
        if old_s is None or new_s is None:
            continue
        first_batch, first_s = after.first
        between_s = 0.0 if before.end_s is None else max(after.start_s - before.end_s, 0.0)
        start_and_stop_s = first_s - before.asked_s - between_s
        cost_s = max(start_and_stop_s - (first_batch - after.steps_at_start) * new_s, 0.0)
        if after.measured_s < cost_s:
            continue
        is_least = found is None or before.num_slots < found.num_slots
        if is_least and period_s * (old_s / new_s - 1) <= cost_s:
            found = Verdict(before.num_slots, after.num_slots, old_s, new_s, cost_s)
    return found
