"""Says of stalled ranks which is where, and which of them holds the others up.

Pure: what ranks last said and what their stacks tell in, sentences out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from dstrial.launch.stalls.stacks import Place, Wait
from dstrial.launch.stalls.stall_rules import UNITS, RankView, Stall
from dstrial.ranks.heartbeat import Phase

PREFIX = "stalled:"
"""How every line on a stall begins."""

SLOW_PREFIX = "slow:"
"""How a line begins on what may only be slow: nothing of its kind has ended so far."""

_DOING = {
    Phase.BATCH: "in train_batch",
    Phase.BETWEEN: "between batches",
    Phase.VALIDATION: "in validation",
    Phase.SAVE: "in a checkpoint",
    Phase.CALLBACK: "in a callback",
    Phase.SCRIPT: "between batches",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Account:
    """What is said of a stall; ``text`` has no full stop.

    ``guilty`` is the rank that holds the others up, if known. Without ``is_of_ranks`` the master stalls.
    """

    text: str
    guilty: int | None
    advice: str = ""
    is_of_ranks: bool = True
    lasting: str = "Nothing has moved"


def account(views: Sequence[RankView], places: Mapping[int, Place]) -> Account:
    """Say which rank is where, the one that holds the others up first.

    ``places`` lacks ranks without a stack.
    """
    watched = [view for view in views if view.beat.phase is not Phase.NONE]
    if not watched:
        return account_of_save(views, {})
    guilty = _guilty(watched, places)
    if guilty is None:
        return _account_of_collectives(watched, places)
    texts = [f"{_name([guilty.rank])} {_state_of(guilty, places.get(guilty.rank))}"]
    waiting = [view for view in watched if view is not guilty and _waits_for_ranks(places.get(view.rank))]
    if waiting:
        operations = sorted({places[view.rank].operation for view in waiting} - {""})
        what = f" ({', '.join(operations)})" if operations else ""
        verb = "waits" if len(waiting) == 1 else "wait"
        texts.append(f"{_name([view.rank for view in waiting])} {verb} for it in a collective{what}")
    rest = [view for view in watched if view is not guilty and view not in waiting]
    texts += [f"{_name([view.rank])} {_state_of(view, places.get(view.rank))}" for view in rest]
    place = places.get(guilty.rank)
    is_of_ranks = place is None or place.wait is not Wait.MASTER
    return Account("; ".join(texts), guilty.rank, _advice(guilty, place), is_of_ranks)


def account_of_save(views: Sequence[RankView], places: Mapping[int, Place]) -> Account:
    """Name the rank that a checkpoint in the background waits for."""
    saving = [view for view in views if view.save_age_s > 0]
    if not saving:
        return Account("no rank says where it is", None)
    waiting = [view for view in saving if _waits_for_ranks(places.get(view.rank))]
    writing = [view for view in saving if view not in waiting] or saving
    guilty = max(writing, key=lambda view: (view.is_stopped, view.save_age_s))
    texts = [f"{_name([view.rank])} {_saving_state(view, places.get(view.rank))}" for view in writing]
    if waiting and guilty not in waiting:
        verb = "waits" if len(waiting) == 1 else "wait"
        texts.append(f"{_name([view.rank for view in waiting])} {verb} for it")
    is_of_master = any(place.wait is Wait.MASTER for place in places.values())
    advice = "See whether the master runs, or is stopped, with `dstrial status`." if is_of_master else ""
    if guilty.is_stopped:
        advice = _advice(guilty, None)
    named = guilty.rank if len(writing) == 1 else None
    return Account(
        "; ".join(texts),
        named,
        advice or "Look at the storage.",
        not is_of_master,
        "It has not ended",
    )


def _saving_state(view: RankView, place: Place | None) -> str:
    what = f"the checkpoint at batch {view.beat.save_batch}"
    if view.is_stopped:
        return f"is stopped (SIGSTOP) and writes {what}"
    if place is None:
        return f"writes {what}"
    if place.wait is Wait.RANKS:
        return f"waits for other ranks with {what}"
    if place.wait is Wait.MASTER:
        return f"waits for an answer of the master with {what}"
    return f"writes {what}, in {place.user_call}" if place.user_call else f"writes {what}"


def _guilty(views: Sequence[RankView], places: Mapping[int, Place]) -> RankView | None:
    """Return the first rank whose wait no other rank can cause."""
    # On an accelerator a rank may wait for others without a call that says so: who works is guilty only if another one waits.
    is_awaited = len(views) == 1 or any(_waits(place) for place in places.values())
    for is_guilty in (
        lambda view: view.is_stopped,
        lambda view: view.is_uninterruptible,
        lambda view: _waits_for_data(view, places.get(view.rank)),
        lambda view: is_awaited and view.rank in places and not _waits(places[view.rank]),
        lambda view: view.rank not in places and len(places) == len(views) - 1,
    ):
        found = [view for view in views if is_guilty(view)]
        if found:
            return min(found, key=lambda view: (view.beat.batch, -view.age_s))
    return None


def _account_of_collectives(views: Sequence[RankView], places: Mapping[int, Place]) -> Account:
    if len(places) < len(views) or not all(_waits(place) for place in places.values()):
        return Account(_states(views, places), None)
    if any(place.wait is Wait.DEVICE for place in places.values()):
        # What a device waits for is not seen: perhaps for a collective that another rank has not called.
        advice = "See whether all ranks call the same collectives, in the same order."
        return Account(_states(views, places), None, advice)
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


def _states(views: Sequence[RankView], places: Mapping[int, Place]) -> str:
    return "; ".join(f"{_name([view.rank])} {_state_of(view, places.get(view.rank))}" for view in views)


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
        worker = f", whose worker (process {place.worker_pid}) is" if place and place.worker_pid else ""
        return f"waits for its data loader {where}{worker}{call.replace(',', '', 1) if worker else call}"
    if place is not None and place.wait is Wait.MASTER:
        return f"waits for an answer of the master {where}"
    if place is not None and place.wait is Wait.DEVICE:
        return f"waits for its device {where}{call}"
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
    if place is not None and place.wait is Wait.MASTER:
        return "See whether the master runs, or is stopped, with `dstrial status`."
    return ""


def _waits(place: Place | None) -> bool:
    return place is not None and place.wait in (Wait.RANKS, Wait.DEVICE)


def _waits_for_ranks(place: Place | None) -> bool:
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
    unit = UNITS[stall.kind]
    if stall.longest_s is None:
        so_far = f"no {unit} has ended so far"
        if not stall.is_certain:
            so_far += ", and the first may take long"
    else:
        so_far = f"the longest {unit} so far took {_seconds(stall.longest_s)}"
    advice = f" {told.advice}" if told.advice else ""
    prefix = PREFIX if stall.is_certain else SLOW_PREFIX
    return f"{prefix} {told.text}. {told.lasting} for {_seconds(stall.lasted_s)}; {so_far}.{advice}"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
