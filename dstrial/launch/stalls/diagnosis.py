"""Decide whether ranks have stalled, and find the straggler; no I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dstrial.config.experiment_config.dstrial_section import TrainingChecks
from dstrial.launch.stalls.stacks import Place, Wait
from dstrial.ranks.heartbeat import Beat, Phase

STOPPED_AFTER_S = 10.0  # a process stopped by a signal is a stall after this time, regardless of the timeout
FIRST_FACTOR = 8  # timeouts until a stall in the first phase of a kind is certain, as kernels may compile

_LEAF_MODULES = (
    "ZeRO 3 gathers the weights of a module that not all ranks have called, such as an expert without tokens on some rank. Call "
    "deepspeed.utils.set_z3_leaf_modules(model, [class of the block of experts]) before deepspeed.initialize."
)

_PHASES = {
    Phase.BATCH: ("batch", "in train_batch"),
    Phase.BETWEEN: ("batch", "between batches"),
    Phase.VALIDATION: ("validation", "in validation"),
    Phase.SAVE: ("checkpoint", "in a checkpoint"),
    Phase.CALLBACK: ("callback", "in a callback"),
    Phase.SCRIPT: ("pause between batches", "between batches"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class StallSettings:
    """The settings ``stall_timeout`` and ``stall_action`` of ``data.dstrial``."""

    timeout_s: float = TrainingChecks().stall_timeout
    action: Literal["report", "restart"] = "report"

    @classmethod
    def from_config(cls, exp_conf: Mapping[str, Any] | None) -> StallSettings:
        checks = TrainingChecks.from_config(exp_conf)
        return cls(float(checks.stall_timeout), checks.stall_action)


@dataclasses.dataclass(frozen=True, slots=True)
class RankView:
    """A rank's state at one poll.

    Attributes:
        rank: global rank.
        beat: the rank's heartbeat.
        age_s: seconds since the heartbeat entered its current phase.
        state: state letter of the process (proc(5)).
        stopped_s: seconds since a signal stopped the process; 0 if the process is not stopped.
    """

    rank: int
    beat: Beat
    age_s: float
    state: str = "S"
    stopped_s: float = 0.0

    @property
    def is_stopped(self) -> bool:
        return self.state in ("T", "t")

    @property
    def kind(self) -> Phase:
        """The phase whose timeout applies.

        For a rank that is between batches this is ``BATCH``, because the rank may wait there for a slower rank's batch.
        """
        return Phase.BATCH if self.beat.phase is Phase.BETWEEN else self.beat.phase


@dataclasses.dataclass(frozen=True, slots=True)
class Stall:
    """A stall: no rank has made progress for some time.

    Attributes:
        kind: the phase in which the ranks stall.
        batch: number of trained batches.
        lasted_s: seconds without progress.
        longest_s: longest duration so far of a phase of this kind; None if none has ended.
        is_certain: False if the ranks may only be slow.
    """

    kind: Phase
    batch: int
    lasted_s: float
    longest_s: float | None
    is_certain: bool

    @property
    def prefix(self) -> str:
        """Prefix of log lines about the stall: ``stalled:``, or ``slow:`` if uncertain."""
        return "stalled:" if self.is_certain else "slow:"


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnosis:
    """Where each rank of a stall is, and for which rank the others wait.

    Attributes:
        text: where each rank is, for users; without a full stop.
        straggler: the rank for which the others wait; None if unknown.
        hint: what users can do; empty if nothing is known.
        is_of_master: whether the straggler waits for a response of the master, so that restarting the ranks does not help.
    """

    text: str
    straggler: int | None
    hint: str = ""
    is_of_master: bool = False


def find_longest(views: Sequence[RankView]) -> dict[Phase, float]:
    """Return phase -> longest duration so far, in seconds, over all ranks.

    Phases that have not ended on any rank are left out.
    """
    longest_s = [max(each) for each in zip(*(view.beat.longest_s for view in views), strict=True)]
    return {phase: seconds for phase, seconds in zip(Phase, longest_s, strict=False) if seconds > 0}


def find_stall(
    views: Sequence[RankView], longest_s: Mapping[Phase, float], settings: StallSettings
) -> Stall | None:
    """Return the stall if the ranks have stalled, else None.

    A stall means that no rank has entered a new phase for some time. This time is the timeout plus the longest duration so far
    (``longest_s``) of any current phase. If no phase of a current kind has ended before, a stall is certain only after
    ``FIRST_FACTOR`` timeouts. In user code between batches, a stall is never certain. A process stopped by a signal is a
    certain stall after ten seconds.
    """
    views = [view for view in views if view.beat.phase is not Phase.NONE]
    if not views:
        return None
    for view in views:
        if view.is_stopped and view.stopped_s >= STOPPED_AFTER_S:
            return Stall(view.kind, view.beat.batch, view.stopped_s, longest_s.get(view.kind), True)
    quiet_s = min(view.age_s for view in views)
    kinds = {view.kind for view in views}
    if quiet_s <= settings.timeout_s + max(longest_s.get(kind, 0.0) for kind in kinds):
        return None
    last = min(views, key=lambda view: (view.beat.batch, view.beat.phase is not Phase.BATCH))
    has_measured = kinds <= longest_s.keys() or quiet_s > FIRST_FACTOR * settings.timeout_s
    is_certain = has_measured and Phase.SCRIPT not in kinds
    return Stall(last.kind, last.beat.batch, quiet_s, longest_s.get(last.kind), is_certain)


def find_straggler(views: Sequence[RankView], places: Mapping[int, Place]) -> RankView | None:
    """Return the rank for which the others wait; None if unknown.

    If the others wait for several ranks, the rank with the fewest trained batches is returned. ``places`` maps a rank to its
    position in the code; ranks that have not written their stacks are missing.
    """
    # On an accelerator, a wait for other ranks may not show in the stack. So a rank that seems to compute is the straggler
    # only if the stack of another rank shows a wait.
    is_awaited = len(views) == 1 or any(_waits(place) for place in places.values())
    for is_straggler in (
        lambda view: view.is_stopped,
        lambda view: _is_blocked(view, places.get(view.rank)),
        lambda view: _waits_for_data(places.get(view.rank)),
        lambda view: is_awaited and view.rank in places and not _waits(places[view.rank]),
        lambda view: view.rank not in places and len(places) == len(views) - 1,
    ):
        found = [view for view in views if is_straggler(view)]
        if found:
            return min(found, key=lambda view: (view.beat.batch, -view.age_s))
    return None


def diagnose(views: Sequence[RankView], places: Mapping[int, Place]) -> Diagnosis:
    """Return where each rank is, the straggler first, with a hint for users.

    ``places`` maps a rank to its position in the code; ranks that have not written their stacks are missing.
    """
    views = [view for view in views if view.beat.phase is not Phase.NONE]
    straggler = find_straggler(views, places)
    if straggler is None:
        return _diagnose_collectives(views, places)
    texts = [_state_of(straggler, places.get(straggler.rank))]
    others = [view for view in views if view is not straggler]
    waiting = [view for view in others if _waits_for_ranks(places.get(view.rank))]
    if waiting:
        operations = sorted({places[view.rank].operation for view in waiting} - {""})
        calls = f" ({', '.join(operations)})" if operations else ""
        verb = "waits" if len(waiting) == 1 else "wait"
        texts.append(f"{_name([view.rank for view in waiting])} {verb} for it in a collective{calls}")
    texts += [_state_of(view, places.get(view.rank)) for view in others if view not in waiting]
    place = places.get(straggler.rank)
    is_of_master = place is not None and place.wait is Wait.MASTER
    return Diagnosis("; ".join(texts), straggler.rank, _hint(straggler, place), is_of_master)


def sentence(stall: Stall, diagnosis: Diagnosis) -> str:
    """Return a stall's log line: where the ranks are, for how long, and a hint."""
    unit = _PHASES[stall.kind][0]
    if stall.longest_s is not None:
        so_far = f"the longest {unit} so far took {_seconds(stall.longest_s)}"
    elif stall.is_certain:
        so_far = f"no {unit} has ended so far"
    else:
        so_far = f"no {unit} has ended so far, and the first may take long"
    hint = f" {diagnosis.hint}" if diagnosis.hint else ""
    return (
        f"{stall.prefix} {diagnosis.text}. Nothing has moved for {_seconds(stall.lasted_s)}; {so_far}.{hint}"
    )


def _diagnose_collectives(views: Sequence[RankView], places: Mapping[int, Place]) -> Diagnosis:
    states = "; ".join(_state_of(view, places.get(view.rank)) for view in views)
    if len(places) < len(views) or not all(_waits(place) for place in places.values()):
        return Diagnosis(states, None)
    if any(place.wait is Wait.DEVICE for place in places.values()):
        # A device may wait for a collective that another rank has not called; stacks do not show that.
        return Diagnosis(states, None, "Check that all ranks call the same collectives in the same order.")
    groups: dict[str, list[int]] = {}
    for view in views:
        place = places[view.rank]
        call = f" of {place.call}" if place.call else ""
        groups.setdefault(f"in {place.operation or 'a collective'}{call} {_where(view)}", []).append(
            view.rank
        )
    gathers_weights = any(place.gathers_weights for place in places.values())
    if len(groups) == 1:
        hint = "Look at a rank on another machine, or at the network between them."
        hint = _LEAF_MODULES if gathers_weights and len(views) > 1 else hint
        (where,) = groups
        ranks = f"all {len(views)} ranks are" if len(views) > 1 else f"{_name([views[0].rank])} is"
        return Diagnosis(f"{ranks} {where}", None, hint)
    texts = [f"{_name(ranks)} {'is' if len(ranks) == 1 else 'are'} {at}" for at, ranks in groups.items()]
    ahead = max(views, key=lambda view: view.beat.batch)
    # The other ranks wait in a collective; a rank that is ahead of it has skipped the call.
    is_ahead = any(view.beat.batch != ahead.beat.batch for view in views)
    named = _name([ahead.rank]) if is_ahead else "one of them"
    return Diagnosis(
        f"{'; '.join(texts)}: {named} has left a collective out",
        ahead.rank if is_ahead else None,
        _LEAF_MODULES if gathers_weights else "Call every collective on all ranks, in the same order.",
    )


def _state_of(view: RankView, place: Place | None) -> str:
    call = f", in {place.call}" if place is not None and place.call else ""
    wait = None if place is None else place.wait
    if view.state == "t":
        what, call = "is held by a debugger", ""
    elif view.is_stopped:
        what, call = "is stopped (SIGSTOP)", ""
    elif _is_blocked(view, place):
        what = "waits in the kernel for a device or a storage"
    elif wait is Wait.DATA:
        what = "waits for its data loader"
    elif wait is Wait.MASTER:
        what, call = "waits for a response of the master", ""
    elif wait is Wait.DEVICE:
        what = "waits for its device"
    elif place is not None and wait is Wait.RANKS:
        what, call = f"is in {place.operation or 'a collective'}", ""
    else:
        what = "is"
    return f"{_name([view.rank])} {what} {_where(view)}{call}"


def _where(view: RankView) -> str:
    return f"at batch {view.beat.batch} {_PHASES[view.beat.phase][1]}"


def _hint(view: RankView, place: Place | None) -> str:
    if view.state == "t":
        return f"End the debugger of process {view.beat.pid}."
    if view.is_stopped:
        return f"Continue it with `kill -CONT {view.beat.pid}`."
    if _is_blocked(view, place):
        return "Look at the storage and the kernel's log; no signal ends such a process."
    if _waits_for_data(place):
        return "Look at what the data set waits for; a timeout of the loader would make this an error."
    if place is not None and place.wait is Wait.MASTER:
        return "Check with `dstrial status` whether the master runs or is stopped."
    return "Look at the storage." if view.beat.phase is Phase.SAVE else ""


def _is_blocked(view: RankView, place: Place | None) -> bool:
    # A process that could write its stacks is not blocked in the kernel.
    return view.state == "D" and place is None


def _waits(place: Place | None) -> bool:
    return place is not None and place.wait in (Wait.RANKS, Wait.DEVICE)


def _waits_for_ranks(place: Place | None) -> bool:
    return place is not None and place.wait is Wait.RANKS


def _waits_for_data(place: Place | None) -> bool:
    return place is not None and place.wait is Wait.DATA


def _name(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"{len(ranks)} ranks from {min(ranks)} to {max(ranks)}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
