"""Split the time of one step, from a dry run and a machine. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from dstrial.dsat.predictor.hardware import Machine
from dstrial.dsat.predictor.zero_features import ASSUMED_LAYERS, ZeroFeatures
from dstrial.engine.dryrun.values import Collective, DryRunResult

PARTS = (
    "compute",
    "unfilled",
    "overhead",
    "transfer",
    "reduce",
    "calls",
    "unhidden",
    "gradient_copies",
    "optimizer",
    "host_optimizer",
    "host_copies",
)
"""Matrix products; what they take longer for not filling the device; operations as such, as far as the device waits for them;
bytes of parameters and of gradients in collectives and their calls, as far as nothing can hide them; what of others is not
hidden all the same; gradients copied to buckets; the optimizer on the device and on the host; copies between the two."""

PHASES = ("forward", "backward", "step")
"""Where measurements tell times apart."""

_STATE_BYTES = 30.0
"""Bytes that Adam reads and writes for each parameter: gradient, weight and two moments, and the weight in half precision."""
_FILLING_TOKENS, _FILLING_SHARE = 512.0, 0.25
"""Tokens, or the share of a record where there are none, whose products fit into the time for which a device is not full."""
_MOST_HIDDEN = 0.9
"""Of computing, beside which something else can run."""
_LEAST_OVERHEAD, _UNSTREAMED = 0.1, 0.3
_STEP_SHARE = 0.35
"""Of the operations of a step without accumulation, the optimizer's share."""
_COPIED_IN, _COPIED_OUT = 2.0, 0.8
"""How often gradients are moved in memory with contiguous gradients and without."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepParts:
    """Seconds of one optimizer step, part by part."""

    phases: tuple[tuple[float, ...], ...]  # of each of ``PHASES``, in the order of ``PARTS``

    @property
    def seconds(self) -> tuple[float, ...]:
        """Of the whole step, in the order of ``PARTS``."""
        return tuple(map(sum, zip(*self.phases, strict=True)))


def step_parts(
    run: DryRunResult,
    machine: Machine,
    setup: ZeroFeatures,
    ran: ZeroFeatures,
    *,
    micro_batch_size: int,
    accumulation: int,
) -> StepParts:
    """Return where a step's time goes; ``ran`` was dry-run, ``setup`` is asked for."""
    is_device = machine.host_copy_bytes_per_s is not None
    rate = machine.flops_per_s
    model, all_flops = (max(line.at(micro_batch_size), 0.0) for line in (run.flops.model, run.flops.hardware))
    forward_s = accumulation * model / 3 / rate
    backward_s = accumulation * max(all_flops - model / 3, 0.0) / rate
    filling = accumulation * max(run.flops.hardware.per_record, 0.0) / rate * _filling(run)
    overheads = _overheads(run, machine, accumulation, (forward_s, backward_s), is_device=is_device)

    reduced, gathered, stepped = _calls(run, machine, setup, ran, accumulation)
    buckets = max(math.ceil(run.parameters / max(setup.reduce_elements, 1.0)), 1)
    able = 1.0 if setup.is_overlapping else 0.0
    reduce = _Exposed.of(*reduced, hides=machine.hides, able=able * (1 - 1 / buckets), beside_s=backward_s)
    fetched = _fetched_s(run, machine, setup, accumulation)
    gathers, fetches = _gathers(run, machine, setup, gathered, fetched, (forward_s, backward_s))
    owned = run.trainable_parameters / (setup.replicas if setup.stage else 1)
    on_host = owned * setup.host_share
    often = accumulation if setup.stage >= 2 else 1
    down, up = _offload_s(machine, setup.bytes_per_value, on_host, often, backward_s)
    copies = 0.0
    if setup.stage:
        moves = _COPIED_IN if setup.is_contiguous else _COPIED_OUT
        copies = moves * setup.bytes_per_value * run.trainable_parameters / machine.copy_bytes_per_s
        copies *= often
    unhidden = [gathers[0].unhidden_s, gathers[1].unhidden_s + reduce.unhidden_s]
    phases = (
        (
            forward_s, filling / 3, overheads[0], gathers[0].moved_s, 0.0,
            gathers[0].called_s, unhidden[0], 0.0, 0.0, 0.0, fetches[0],
        ),
        (
            backward_s, filling * 2 / 3, overheads[1], gathers[1].moved_s, reduce.moved_s,
            reduce.called_s + gathers[1].called_s, unhidden[1], copies, 0.0, 0.0, fetches[1] + down,
        ),
        (
            0.0, 0.0, overheads[2], stepped[0], 0.0, stepped[1], 0.0, 0.0,
            (owned - on_host) * _STATE_BYTES / machine.copy_bytes_per_s,
            on_host * _STATE_BYTES / machine.host_bytes_per_s, up,
        ),
    )  # fmt: skip
    return StepParts(phases)


def _gathers(
    run: DryRunResult,
    machine: Machine,
    setup: ZeroFeatures,
    gathered: tuple[float, float],
    fetched: float,
    computing: tuple[float, float],
) -> tuple[list[_Exposed], list[float]]:
    """Return gathers, and unhidden seconds of fetches, in forward and in backward."""
    ahead = min(max(setup.prefetch_elements * ASSUMED_LAYERS / max(run.parameters, 1.0), 0.15), 1.0)
    ahead *= 1.0 if setup.is_overlapping else _UNSTREAMED
    spared = setup.kept_elements(run.parameters) / max(run.parameters, 1.0)
    gathers, fetches = [], []
    for each_s, kept in zip(computing, (0.0, spared), strict=True):
        moved, called = (0.5 * (1 - kept) * seconds for seconds in gathered)
        fetched_s = 0.5 * (1 - kept) * fetched
        gathers.append(_Exposed.of(moved, called, hides=machine.hides, able=ahead, beside_s=each_s))
        fetches.append(fetched_s - min(ahead * machine.hides * fetched_s, _MOST_HIDDEN * each_s))
    return gathers, fetches


def _offload_s(
    machine: Machine, bytes_per_value: int, on_host: float, often: int, backward_s: float
) -> tuple[float, float]:
    """Return seconds of gradients to the host, partly hidden, and of weights back."""
    if machine.host_copy_bytes_per_s is None:
        return 0.0, 0.0
    down = often * bytes_per_value * on_host / machine.host_copy_bytes_per_s
    down -= min(0.5 * down, _MOST_HIDDEN * backward_s)
    return down, bytes_per_value * on_host / machine.host_copy_bytes_per_s


def _filling(run: DryRunResult) -> float:
    """Return the share of one record that would fill the device."""
    tokens = 0.0 if run.tokens is None else run.tokens.per_record
    return min(_FILLING_TOKENS / tokens, 1.0) if tokens > 1 else _FILLING_SHARE


def _overheads(
    run: DryRunResult,
    machine: Machine,
    accumulation: int,
    computing: tuple[float, float],
    *,
    is_device: bool,
) -> list[float]:
    """Return seconds of operations in each phase that a device does not hide."""
    last = run.last_operations
    inner = run.inner_operations if accumulation > 1 and run.inner_operations else (1 - _STEP_SHARE) * last
    passes = accumulation * inner * machine.operation_s
    amounts = [passes / 3, passes * 2 / 3, max(last - inner, 0.0) * machine.operation_s]
    if not is_device:
        return amounts
    return [
        max(amount - busy, _LEAST_OVERHEAD * amount)
        for amount, busy in zip(amounts, (*computing, 0.0), strict=True)
    ]


def _fetched_s(run: DryRunResult, machine: Machine, setup: ZeroFeatures, accumulation: int) -> float:
    """Return seconds of fetching parameters from the host, forward and backward."""
    if machine.host_copy_bytes_per_s is None or not setup.has_host_params:
        return 0.0
    num_bytes = 2 * accumulation * setup.bytes_per_value * run.parameters / setup.replicas
    return num_bytes / machine.host_copy_bytes_per_s


@dataclasses.dataclass(frozen=True, slots=True)
class _Exposed:
    """Seconds of communication that never could be hidden; that could, but are not."""

    moved_s: float
    called_s: float
    unhidden_s: float

    @classmethod
    def of(cls, moved_s: float, called_s: float, *, hides: float, able: float, beside_s: float) -> _Exposed:
        """Split communication beside ``beside_s`` of computing.

        ``able`` is the share that could be hidden (of gradients all but the last bucket), ``hides`` the share that is, of that.
        """
        whole = moved_s + called_s
        if not whole or not hides:
            return cls(moved_s, called_s, 0.0)
        could = min(able * whole, _MOST_HIDDEN * beside_s)
        left = 1 - could / whole
        return cls(moved_s * left, called_s * left, (1 - hides) * could)


def _calls(
    run: DryRunResult, machine: Machine, setup: ZeroFeatures, ran: ZeroFeatures, accumulation: int
) -> list[tuple[float, float]]:
    """Return seconds of (bytes, calls): reduce, gather before use, and optimizer step."""
    sums = {"reduce": [0.0, 0.0], "gather": [0.0, 0.0], "step": [0.0, 0.0]}
    for each in _with_buckets(run.collectives(accumulation), run.parameters, setup, ran):
        if each.group_size <= 1:
            continue
        kind = each.kind
        if each.phase == "reduce" and not setup.has_reduce_scatter and ran.has_reduce_scatter:
            kind = "all_reduce"
        moved, called = machine.link(kind).seconds(each.num_calls, each.num_bytes)
        where = (
            each.phase if each.phase == "reduce" or (each.phase == "gather" and setup.stage == 3) else "step"
        )
        sums[where][0] += moved
        sums[where][1] += called
    return [(moved, called) for moved, called in sums.values()]


def _with_buckets(
    collectives: Iterable[Collective], parameters: float, setup: ZeroFeatures, ran: ZeroFeatures
) -> list[Collective]:
    """Return collectives as other bucket sizes would have them sent."""
    found = []
    for each in collectives:
        old = new = 1.0
        if each.phase == "reduce":
            old, new = ran.reduce_elements, setup.reduce_elements
        elif each.phase == "gather" and setup.stage in (1, 2):
            old, new = ran.gather_elements, setup.gather_elements
        ratio = max(math.ceil(parameters / new), 1) / max(math.ceil(parameters / old), 1)
        found.append(dataclasses.replace(each, num_calls=max(round(each.num_calls * ratio), 1)))
    return found
