"""Decides whether ranks have stalled, which of them holds the others up, and what is said of it.

Pure: what ranks last said and how long ago in, a verdict out. Nothing here reads a clock or a process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dstrial.config.experiment_config.training_checks import TrainingChecks
from dstrial.launch.stacks import Place, Wait
from dstrial.ranks.heartbeat import Beat, Phase

STOPPED_AFTER_S = 10.0
"""How long a rank is stopped before that is told: nobody has to wonder whether it still works."""

PREFIX = "stalled:"
"""How every line on a stall begins."""

_DOING = {
    Phase.BATCH: "in train_batch",
    Phase.BETWEEN: "between batches",
    Phase.VALIDATION: "in validation",
    Phase.SAVE: "in a checkpoint",
    Phase.CALLBACK: "in a callback",
}
_UNITS = {
    Phase.BATCH: "batch",
    Phase.BETWEEN: "exchange between batches",
    Phase.VALIDATION: "validation",
    Phase.SAVE: "checkpoint",
    Phase.CALLBACK: "callback",
}


@dataclasses.dataclass(frozen=True, slots=True)
class StallSettings:
    """What ``data.dstrial`` says of stalls.

    Attributes:
        timeout_s: how much longer than the longest so far a batch, validation or checkpoint may take.
        action: whether a stall is only told, or ends the ranks so that the trial starts again.
    """

    timeout_s: float = TrainingChecks().stall_timeout
    action: Literal["report", "restart"] = "report"

    @classmethod
    def from_config(cls, exp_conf: Mapping[str, Any] | None) -> StallSettings:
        """Read an experiment config; the defaults without one.

        Raises:
            ConfigError: a value is not one of those that are possible.
        """
        checks = TrainingChecks.from_config(exp_conf)
        return cls(float(checks.stall_timeout), checks.stall_action)


@dataclasses.dataclass(frozen=True, slots=True)
class RankView:
    """One rank at one moment.

    Attributes:
        rank: its number over all machines.
        pid: its process.
        beat: what it last said.
        age_s: for how long it has said nothing else.
        save_age_s: for how long its save in the background has gone on; 0 without one.
        is_stopped: whether a signal or a debugger holds its process.
        is_traced: whether that is a debugger.
        stopped_s: for how long, seconds.
        is_uninterruptible: whether it has waited inside the kernel, out of every signal's reach, at every look.
        kernel_function: what it waits in there; may be empty.
    """

    rank: int
    pid: int
    beat: Beat
    age_s: float
    save_age_s: float = 0.0
    is_stopped: bool = False
    is_traced: bool = False
    stopped_s: float = 0.0
    is_uninterruptible: bool = False
    kernel_function: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Stall:
    """Ranks that do not go on.

    Attributes:
        kind: what takes too long.
        position: that and the batches trained; the same again after a restart that changed nothing.
        lasted_s: for how long no rank has gone on, seconds.
        longest_s: the longest of this kind that has ended; None before the first.
        is_certain: whether more than a line is due: something of the kind has ended before, or a rank is stopped.
    """

    kind: Phase
    position: str
    lasted_s: float
    longest_s: float | None
    is_certain: bool


def longest_of(views: Sequence[RankView], longest_batch_s: float | None) -> dict[Phase, float]:
    """Return the longest that has ended of each phase, over all ranks; without what has not.

    Args:
        views: the ranks.
        longest_batch_s: the longest batch, which the launcher measures; None before the first.
    """
    found = {} if longest_batch_s is None else {Phase.BATCH: longest_batch_s}
    for view in views:
        for phase, seconds in zip(Phase, view.beat.longest_s, strict=True):
            if seconds > 0:
                found[phase] = max(found.get(phase, 0.0), seconds)
    return found


def stall_of(
    views: Sequence[RankView], longest_s: Mapping[Phase, float], settings: StallSettings
) -> Stall | None:
    """Say whether the ranks have stalled.

    They have if none has said anything new for the timeout and the longest so far of what any of them does: one that waits for
    another has done nothing for as long as that one. A stopped process is told at once, whatever the others do.
    """
    watched = [view for view in views if view.beat.phase is not Phase.NONE]
    stopped = [view for view in watched if view.is_stopped and view.stopped_s >= STOPPED_AFTER_S]
    if stopped:
        first = stopped[0]
        return _stall(first.beat.phase, first.beat.batch, first.stopped_s, longest_s, is_certain=True)
    if watched:
        quiet_s = min(view.age_s for view in watched)
        phases = {view.beat.phase for view in watched}
        allowed_s = settings.timeout_s + max(longest_s.get(phase, 0.0) for phase in phases)
        if quiet_s > allowed_s:
            last = min(watched, key=lambda view: (view.beat.batch, view.beat.phase is not Phase.BATCH))
            is_certain = all(phase in longest_s for phase in phases)
            return _stall(last.beat.phase, last.beat.batch, quiet_s, longest_s, is_certain=is_certain)
    saving = [view for view in views if view.save_age_s > 0]
    if saving:
        oldest = max(saving, key=lambda view: view.save_age_s)
        if oldest.save_age_s > settings.timeout_s + longest_s.get(Phase.SAVE, 0.0):
            is_certain = Phase.SAVE in longest_s
            return _stall(
                Phase.SAVE, oldest.beat.save_batch, oldest.save_age_s, longest_s, is_certain=is_certain
            )
    return None


def _stall(
    phase: Phase, batch: int, lasted_s: float, longest_s: Mapping[Phase, float], *, is_certain: bool
) -> Stall:
    return Stall(phase, f"{_UNITS[phase]} {batch}", lasted_s, longest_s.get(phase), is_certain)


def may_restart(stall: Stall, settings: StallSettings, done: Sequence[str]) -> bool:
    """Say whether the ranks are to be ended for a stall.

    Not before anything of its kind has ended, which may only be slow, and once per position: what stalls there again does not
    stall by chance.
    """
    is_due = settings.action == "restart" and stall.is_certain and stall.longest_s is not None
    return is_due and stall.position not in done


def is_told(lasted_s: float, told_s: float | None) -> bool:
    """Say whether a stall is to be told (again): first at once, then whenever it has doubled."""
    return told_s is None or lasted_s >= 2 * told_s


@dataclasses.dataclass(frozen=True, slots=True)
class Account:
    """What is said of a stall.

    Attributes:
        text: who is where, one sentence without its point.
        guilty: the rank that holds the others up; None where that cannot be told.
        advice: what to do, one sentence; may be empty.
    """

    text: str
    guilty: int | None
    advice: str = ""


def account(views: Sequence[RankView], places: Mapping[int, Place]) -> Account:
    """Say which rank is where, the one that holds the others up first.

    Args:
        views: the ranks of this machine.
        places: what the stacks say, by rank; without those of which there is no stack.
    """
    watched = [view for view in views if view.beat.phase is not Phase.NONE]
    if not watched:
        return _saving_account(views)
    guilty = _guilty(watched, places)
    if guilty is None:
        return _account_of_collectives(watched, places)
    texts = [f"{_name([guilty.rank])} {_state_of(guilty, places.get(guilty.rank))}"]
    waiting = [view for view in watched if view is not guilty and _waits(places.get(view.rank))]
    if waiting:
        operations = sorted({places[view.rank].operation for view in waiting} - {""})
        what = f" ({', '.join(operations)})" if operations else ""
        verb = "waits" if len(waiting) == 1 else "wait"
        texts.append(f"{_name([view.rank for view in waiting])} {verb} for it in a collective{what}")
    rest = [view for view in watched if view is not guilty and view not in waiting]
    texts += [f"{_name([view.rank])} {_state_of(view, places.get(view.rank))}" for view in rest]
    return Account("; ".join(texts), guilty.rank, _advice(guilty, places.get(guilty.rank)))


def _saving_account(views: Sequence[RankView]) -> Account:
    saving = [view for view in views if view.save_age_s > 0]
    if not saving:
        return Account("no rank says where it is", None)
    oldest = max(saving, key=lambda view: view.save_age_s)
    return Account(
        f"{_name([oldest.rank])} writes the checkpoint at batch {oldest.beat.save_batch}", oldest.rank
    )


def _guilty(views: Sequence[RankView], places: Mapping[int, Place]) -> RankView | None:
    """Choose who holds the others up: the first of what cannot be the fault of another."""
    for is_guilty in (
        lambda view: view.is_stopped,
        lambda view: view.is_uninterruptible,
        lambda view: _waits_for_data(view, places.get(view.rank)),
        lambda view: view.rank in places and not _waits(places[view.rank]),
        lambda view: view.rank not in places and len(places) == len(views) - 1,
    ):
        found = [view for view in views if is_guilty(view)]
        if found:
            return min(found, key=lambda view: (view.beat.batch, -view.age_s))
    return None


def _account_of_collectives(views: Sequence[RankView], places: Mapping[int, Place]) -> Account:
    """Say which collectives ranks wait in, if all of them do; else only where they are."""
    if len(places) < len(views):
        return Account(
            "; ".join(f"{_name([view.rank])} {_state_of(view, places.get(view.rank))}" for view in views),
            None,
        )
    groups: dict[str, list[int]] = {}
    for view in views:
        groups.setdefault(_collective(view, places[view.rank]), []).append(view.rank)
    texts = [
        f"{_name(ranks)} {'is' if len(ranks) == 1 else 'are'} {where}" for where, ranks in groups.items()
    ]
    if len(groups) == 1:
        (where,) = groups
        whole = f"all {len(views)} ranks are" if len(views) > 1 else f"{_name([views[0].rank])} is"
        return Account(
            f"{whole} {where}",
            None,
            "Look at a rank on another machine, or at the network between them.",
        )
    ahead = max(views, key=lambda view: view.beat.batch)
    behind = min(views, key=lambda view: view.beat.batch)
    # Who has gone past an exchange that the others still wait in has left it out.
    skipped = ahead.rank if ahead.beat.batch != behind.beat.batch else None
    who = f"{_name([skipped])} has" if skipped is not None else "one of them has"
    return Account(
        f"{'; '.join(texts)}: {who} left a collective out",
        skipped,
        "Call every collective on all ranks, in the same order.",
    )


def _collective(view: RankView, place: Place) -> str:
    what = place.operation or "a collective"
    call = f" of {place.user_call}" if place.user_call else ""
    return f"in {what}{call} at batch {view.beat.batch} {_DOING[view.beat.phase]}"


def _state_of(view: RankView, place: Place | None) -> str:
    where = f"at batch {view.beat.batch} {_DOING[view.beat.phase]}"
    if view.is_traced:
        return f"is held by a debugger {where}"
    if view.is_stopped:
        return f"is stopped (SIGSTOP) {where}"
    if view.is_uninterruptible:
        what = f" ({view.kernel_function})" if view.kernel_function else ""
        return f"waits in the kernel for a device or a storage{what} {where}"
    call = f", in {place.user_call}" if place is not None and place.user_call else ""
    if _waits_for_data(view, place):
        return f"waits for its data loader {where}{call}"
    if place is not None and place.wait is Wait.RANKS:
        return f"is in {place.operation or 'a collective'} {where}"
    return f"is {where}{call}"


def _advice(view: RankView, place: Place | None) -> str:
    if view.is_traced:
        return f"End the debugger of process {view.pid}."
    if view.is_stopped:
        return f"Let it go on with `kill -CONT {view.pid}`."
    if view.is_uninterruptible:
        return "Look at the storage and the kernel's log; no signal ends such a process."
    if _waits_for_data(view, place):
        return "Look at what the data set waits for; a timeout of the loader would make this an error."
    return ""


def _waits(place: Place | None) -> bool:
    return place is not None and place.wait is Wait.RANKS


def _waits_for_data(view: RankView, place: Place | None) -> bool:
    # A loader may itself talk to other ranks, as the Trainer's does: then it waits for them.
    if _waits(place):
        return False
    return view.beat.waits_for_data or (place is not None and place.wait is Wait.DATA)


def _name(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"{len(ranks)} ranks from {min(ranks)} to {max(ranks)}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def sentence(stall: Stall, told: Account) -> str:
    """Return the line of a stall, without the prefix of who prints it."""
    unit = _UNITS[stall.kind]
    if stall.longest_s is None:
        so_far = f"no {unit} has ended so far, and the first may take long"
    else:
        so_far = f"the longest {unit} so far took {_seconds(stall.longest_s)}"
    advice = f" {told.advice}" if told.advice else ""
    return f"{PREFIX} {told.text}. Nothing has moved for {_seconds(stall.lasted_s)}; {so_far}.{advice}"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
