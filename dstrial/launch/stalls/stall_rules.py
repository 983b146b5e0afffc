"""Decides whether ranks have stalled, and whether they are to be ended for it.

Pure: what ranks last said and how long ago in, a verdict out. Nothing here reads a clock or a process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import Any, Literal

from dstrial.config.experiment_config.dstrial_section import TrainingChecks
from dstrial.ranks.heartbeat import Beat, Phase

STOPPED_AFTER_S = 10.0
"""How long a rank is stopped before that is told: nobody has to wonder whether it still works."""

FIRST_FACTOR = 8
"""Timeouts after which the first of a phase, which may compile, counts as stalled: 16 minutes by default."""

EXIT_TIMEOUT_S = 60.0
"""How long threads and exit handlers may keep a rank that has trained after its program, seconds: loggers send their rest."""

UNITS = {
    Phase.BATCH: "batch",
    Phase.VALIDATION: "validation",
    Phase.SAVE: "checkpoint",
    Phase.CALLBACK: "callback",
    Phase.SCRIPT: "pause between batches",
}
"""What takes too long, in a word."""

# An exchange between batches waits for the slowest of them.
_KINDS = {Phase.BETWEEN: Phase.BATCH}


@dataclasses.dataclass(frozen=True, slots=True)
class StallSettings:
    """What ``data.dstrial`` says of stalls."""

    timeout_s: float = TrainingChecks().stall_timeout
    action: Literal["report", "restart"] = "report"

    @classmethod
    def from_config(cls, exp_conf: Mapping[str, Any] | None) -> StallSettings:
        checks = TrainingChecks.from_config(exp_conf)
        return cls(float(checks.stall_timeout), checks.stall_action)


@dataclasses.dataclass(frozen=True, slots=True)
class RankView:
    """One rank at one moment.

    ``is_uninterruptible`` is set only where every one of several looks found the process waiting inside the kernel.
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
    """Ranks that do not go on, for ``lasted_s``.

    ``position`` names what takes too long and the batches trained, equal after a restart that changed nothing. ``longest_s`` is
    the longest of its kind so far. With ``is_certain`` more than a line is due.
    """

    kind: Phase
    position: str
    lasted_s: float
    longest_s: float | None
    is_certain: bool


def longest_of(views: Sequence[RankView], longest_batch_s: float | None) -> dict[Phase, float]:
    """Return the longest of each phase that has ended.

    The launcher measures batches.
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

    They have if no rank has entered a new phase for the timeout plus the longest so far of any phase that a rank is in, as a
    rank that waits for another one is quiet for as long as that one. The first of a phase is certain after ``FIRST_FACTOR``
    timeouts. A stopped process counts at once; code between the batches of a script never does for certain.
    """
    watched = [view for view in views if view.beat.phase is not Phase.NONE]
    stopped = [view for view in watched if view.is_stopped and view.stopped_s >= STOPPED_AFTER_S]
    if stopped:
        first = stopped[0]
        return _stall(_kind(first), first.beat.batch, first.stopped_s, longest_s, is_certain=True)
    if watched:
        quiet_s = min(view.age_s for view in watched)
        phases = {_kind(view) for view in watched}
        allowed_s = settings.timeout_s + max(longest_s.get(phase, 0.0) for phase in phases)
        if quiet_s > allowed_s:
            last = min(watched, key=lambda view: (view.beat.batch, view.beat.phase is not Phase.BATCH))
            is_certain = Phase.SCRIPT not in phases and _is_certain(quiet_s, phases, longest_s, settings)
            return _stall(_kind(last), last.beat.batch, quiet_s, longest_s, is_certain=is_certain)
    saving = [view for view in views if view.save_age_s > 0]
    if saving:
        oldest = max(saving, key=lambda view: view.save_age_s)
        if oldest.save_age_s > settings.timeout_s + longest_s.get(Phase.SAVE, 0.0):
            is_certain = _is_certain(oldest.save_age_s, {Phase.SAVE}, longest_s, settings)
            return _stall(
                Phase.SAVE, oldest.beat.save_batch, oldest.save_age_s, longest_s, is_certain=is_certain
            )
    return None


def _is_certain(
    lasted_s: float, phases: Set[Phase], longest_s: Mapping[Phase, float], settings: StallSettings
) -> bool:
    return phases <= longest_s.keys() or lasted_s > FIRST_FACTOR * settings.timeout_s


def _kind(view: RankView) -> Phase:
    return _KINDS.get(view.beat.phase, view.beat.phase)


def _stall(
    phase: Phase, batch: int, lasted_s: float, longest_s: Mapping[Phase, float], *, is_certain: bool
) -> Stall:
    return Stall(phase, f"{UNITS[phase]} {batch}", lasted_s, longest_s.get(phase), is_certain)


def may_restart(
    stall: Stall, settings: StallSettings, done: Sequence[str], *, is_of_ranks: bool = True
) -> bool:
    """Return whether the ranks are to be ended for a stall.

    Not for what may only be slow; not for a master that does not answer; and once per position: a second stall there is no
    chance.
    """
    is_due = settings.action == "restart" and stall.is_certain
    return is_due and is_of_ranks and stall.position not in done


def is_told(lasted_s: float, told_s: float | None) -> bool:
    """Say whether a stall is to be told: at once, then whenever it has doubled."""
    return told_s is None or lasted_s >= 2 * told_s
