"""What a configuration's peaks of memory are made of, from the dry run of one that differs in buckets and the like. Pure."""

from __future__ import annotations

import dataclasses

from dstrial.dsat.buckets import Buckets
from dstrial.dsat.setup import Setup
from dstrial.engine.dryrun.values import DryRunResult, Line

MEMORY_PARTS = (
    "state",
    "others",
    "others_divided",
    "others_offloading",
    "kept",
    "grown",
    "buckets",
    "overlapped",
    "held",
)
"""What lives between steps; what lives for a while whatever the micro batch, where gradients are whole, where they are divided
(from stage 2 on), and where they are on their way to the host; what grows with the micro batch in forward, and in all other
phases; the bucket of gradients, and those that overlapping adds; parameters that stages hold on to because their knobs let
them."""

_LAYERS = 50
"""Modules with parameters of one size, where nobody has counted them; assumed."""
_OVERLAPPED_STAGE_3 = 0.5
_GATHERED = 0.5
_WORTH_LOOKING = 0.6
"""Phases whose peak is below this share of the greatest are no peak, whatever is learned."""


@dataclasses.dataclass(frozen=True, slots=True)
class PeakParts:
    """The peak of one phase.

    Attributes:
        phase: in which it lies.
        num_bytes: in the order of ``MEMORY_PARTS``.
    """

    phase: str
    num_bytes: tuple[float, ...]

    @property
    def total_bytes(self) -> float:
        """All parts."""
        return sum(self.num_bytes)


def peak_parts(run: DryRunResult, setup: Setup, ran: Setup, micro_batch_size: int) -> list[PeakParts]:
    """Return the peaks of all phases, the greatest first, without those that are far below it.

    Args:
        run: dry run of a structure that differs in what ``Setup`` knows of, at most.
        setup: of the structure in question.
        ran: of the structure that was dry-run.
        micro_batch_size: records of a micro batch.
    """
    found = []
    for each in run.device.phases:
        line = max(each.lines, key=lambda one: one.at(micro_batch_size))
        found.append(PeakParts(each.phase, _split(run, setup, ran, each.phase, line, micro_batch_size)))
    found.sort(key=lambda one: -one.total_bytes)
    return [one for one in found if one.total_bytes >= _WORTH_LOOKING * found[0].total_bytes]


def _split(
    run: DryRunResult, setup: Setup, ran: Setup, phase: str, line: Line, micro_batch_size: int
) -> tuple[float, ...]:
    old_bytes = _buckets(ran).num_bytes
    settled = run.device.settled - (old_bytes if setup.stage == 3 else 0)
    state = max(min(settled, line.base), 0.0)
    others = max(line.base - state, 0.0)
    buckets = overlapped = 0.0
    has_buckets = phase in ("backward", "reduce") or (phase != "init" and others >= 0.99 * old_bytes)
    if setup.stage and (has_buckets or (setup.stage == 3 and phase != "init")):
        others = max(others - old_bytes, 0.0)
        buckets = setup.reduce_elements * setup.bytes_per_value
        if setup.is_overlapping:
            overlapped = buckets * (_OVERLAPPED_STAGE_3 if setup.stage == 3 else 1.0)
    held, held_before = (_held_bytes(one, phase, run.parameters) for one in (setup, ran))
    others = max(others - held_before, 0.0)
    if phase == "step" and setup.stage == 3:
        owned = run.trainable_parameters / setup.replicas * (1 - setup.host_share)
        change = min(setup.group_elements, owned) - min(ran.group_elements, owned)
        others = max(others + 4.0 * change, 0.0)
    grown = max(line.per_record, 0.0) * micro_batch_size
    kept, grown = (grown, 0.0) if phase == "forward" else (0.0, grown)
    whole = divided = offloading = 0.0
    if setup.stage >= 2:
        divided = others
    elif setup.host_share and phase != "init":
        offloading = others
    else:
        whole = others
    return state, whole, divided, offloading, kept, grown, buckets, overlapped, held


def _buckets(setup: Setup) -> Buckets:
    return Buckets(setup.stage, int(setup.reduce_elements), setup.bytes_per_value, setup.is_overlapping)


def _held_bytes(setup: Setup, phase: str, parameters: float) -> float:
    """What stage 3 gathers ahead and keeps, and what stages 1 and 2 gather at once after the optimizer."""
    width = setup.bytes_per_value
    if setup.stage == 3 and phase in ("forward", "backward", "reduce", "gather"):
        ahead = min(setup.prefetch_elements + 2 * parameters / _LAYERS, setup.live_elements, parameters)
        return width * (ahead + setup.kept_elements(parameters))
    if setup.stage in (1, 2) and phase == "step":
        return _GATHERED * width * min(setup.gather_elements, parameters)
    return 0.0
