"""Split a configuration's step time and memory into parts, from a dry run.

docs/explanation/dsat-model.md has the equations and their symbols.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from dstrial.dsat.predictor.hardware import Machine
from dstrial.dsat.space import ZERO
from dstrial.engine.dryrun.values import DryRunResult, Line

ASSUMED_LAYERS = 50
"""Assumed number of equally large layers of a model, because layers are not counted."""

_SIZES = {
    "reduce_elements": ("reduce_bucket_size", 5e8),
    "gather_elements": ("allgather_bucket_size", 5e8),
    "prefetch_elements": ("stage3_prefetch_bucket_size", 5e7),
    "persistent_elements": ("stage3_param_persistence_threshold", 1e5),
    "live_elements": ("stage3_max_live_parameters", 1e9),
    "reuse_elements": ("stage3_max_reuse_distance", 1e9),
    "group_elements": ("sub_group_size", 1e9),
}
"""Field of ``ZeroFeatures`` -> (key of DeepSpeed's ``zero_optimization``, its default)."""
_KNOBS = (
    *_SIZES,
    *("host_share", "is_overlapping", "is_contiguous", "has_reduce_scatter", "is_round_robin"),
)
"""Fields of ``ZeroFeatures`` that may vary between configurations of the same stage and offloading."""


@dataclasses.dataclass(frozen=True, slots=True)
class ZeroFeatures:
    """The ZeRO settings of a configuration from which time and memory are predicted.

    Fields ``*_elements`` are numbers of parameters or gradients; ``_SIZES`` names their keys in DeepSpeed's config.
    """

    stage: int
    replicas: int  # ranks among which ZeRO divides the model
    reduce_elements: float
    gather_elements: float
    is_overlapping: bool  # communication overlaps with computation (``overlap_comm``)
    host_share: float  # share of the optimizer state that is on the host
    has_host_params: bool  # parameters are on the host
    bytes_per_value: int  # of a parameter or gradient
    is_contiguous: bool = True  # gradients are copied to a contiguous buffer
    has_reduce_scatter: bool = True
    prefetch_elements: float = 5e7
    persistent_elements: float = 1e5
    live_elements: float = 1e9
    reuse_elements: float = 1e9
    group_elements: float = 1e9
    is_round_robin: bool = False
    layer_ranks: int = 1  # ranks that share each layer (AutoTP)
    sequence_ranks: int = 1  # ranks that share each sequence (Ulysses)

    @classmethod
    def from_config(
        cls,
        effective: Mapping[str, Any],
        *,
        replicas: int,
        bytes_per_value: int,
        layer_ranks: int = 1,
        sequence_ranks: int = 1,
    ) -> ZeroFeatures:
        """Return the ZeRO settings of a DeepSpeed config with defaults filled in."""
        zero = effective.get(ZERO) or {}
        stage = int(zero.get("stage") or 0)
        optimizer, params = (zero.get(name) or {} for name in ("offload_optimizer", "offload_param"))
        is_on_host = stage > 0 and (optimizer.get("device") or "none") != "none"
        overlap = zero.get("overlap_comm")
        sizes = {
            name: default if zero.get(key) is None else float(zero[key])
            for name, (key, default) in _SIZES.items()
        }
        return cls(
            stage=stage,
            replicas=replicas,
            is_overlapping=stage == 3 if overlap is None else bool(overlap),
            host_share=float(optimizer.get("ratio") or 1.0) if is_on_host else 0.0,
            has_host_params=stage == 3 and (params.get("device") or "none") != "none",
            bytes_per_value=bytes_per_value,
            is_contiguous=bool(zero.get("contiguous_gradients", True)),
            has_reduce_scatter=bool(zero.get("reduce_scatter", True)),
            is_round_robin=stage in (1, 2) and bool(zero.get("round_robin_gradients")),
            layer_ranks=layer_ranks,
            sequence_ranks=sequence_ranks,
            **sizes,
        )

    @property
    def group(self) -> tuple[int, bool, bool]:
        """(ZeRO stage, whether optimizer state is on the host, whether parameters are)."""
        return self.stage, self.host_share > 0, self.has_host_params

    @property
    def knobs(self) -> tuple[tuple[str, Any], ...]:
        """(name, value) of the settings that are not in :attr:`group`; empty in stage 0."""
        return tuple((name, getattr(self, name)) for name in _KNOBS) if self.stage else ()

    def clamped(self, parameters: float) -> ZeroFeatures:
        """Return a copy whose bucket and other sizes are at most ``parameters`` elements.

        ``parameters`` is the model's number of parameters; larger sizes have the same effect.
        """
        sizes = {name: min(getattr(self, name), parameters) for name in _SIZES}
        return dataclasses.replace(self, **sizes)

    @property
    def bucket_bytes(self) -> int:
        """Bytes of all gradient buckets of a rank.

        Stage 0 has none, stages 1 and 2 with overlap have two, all others have one.

        Source: DeepSpeed ``runtime/zero/stage_1_and_2.py`` ``setup_buckets`` and ``stage3.py``'s flat bucket.
        """
        if self.stage == 0:
            return 0
        count = 2 if self.is_overlapping and self.stage < 3 else 1
        return count * int(self.reduce_elements) * self.bytes_per_value

    def kept_elements(self, parameters: float) -> float:
        """Return how many gathered parameters stage 3 keeps between forward and backward.

        ``parameters`` is the model's number of parameters. ZeRO keeps a parameter if at most ``stage3_max_reuse_distance``
        elements are used between its forward and its backward. Parameters of later layers are used twice in between, so half of
        that distance counts.
        """
        if self.stage != 3:
            return 0.0
        return min(0.5 * self.reuse_elements, self.live_elements, 0.9 * parameters)


# ---- time ------------------------------------------------------------------------------------

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
    "pressure",
)
"""Parts of a step's time. ``compute``: matrix products. ``unfilled``: time lost because small products do not fill the device.
``overhead``: starting operations, while the device waits. ``transfer``, ``reduce``: moving parameters and gradients in
collectives; ``calls``: starting collectives. These three cover only communication that cannot overlap with computation.
``unhidden``: communication that could overlap but does not. ``gradient_copies``: gradients copied to buckets. ``optimizer``,
``host_optimizer``: the optimizer on the device and on the host. ``host_copies``: copies between device and host. ``pressure``:
time that forward and backward lose if memory is nearly full (``StepParts.pressed``)."""

PHASES = ("forward", "backward", "step")
"""Phases of a step that are timed separately."""

_STATE_BYTES = 30.0
"""Bytes that Adam reads and writes for each parameter: gradient, weight and two moments, and the weight in half precision."""
_FILLING_TOKENS = 512.0  # a micro batch that does not fill the device loses the time of this many tokens
_FILLING_SHARE = 0.25  # the same loss as a share of a record's time, for models without tokens
_MAX_HIDDEN = 0.9  # share of computing that communication can overlap
_MIN_OVERHEAD = 0.1  # share of the operations' overhead that a busy device does not hide
_UNSTREAMED = 0.3  # share of the prefetched parameters that still overlap without ``overlap_comm``
_STEP_SHARE = 0.35  # the optimizer's share of the operations of a step with one micro batch
_FULL = 0.9  # share of the device's memory above which its allocator frees and allocates again; assumed
_COPIED_IN, _COPIED_OUT = 2.0, 0.8  # copies of each gradient in memory, with contiguous gradients and without


@dataclasses.dataclass(frozen=True, slots=True)
class StepParts:
    """The predicted seconds of an optimizer step, split by their cause (``PARTS``)."""

    phases: tuple[tuple[float, ...], ...]  # for each of ``PHASES``, seconds in the order of ``PARTS``

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds of each part, summed over the phases, in the order of ``PARTS``."""
        return tuple(map(sum, zip(*self.phases, strict=True)))

    def pressed(self, share: float) -> StepParts:
        """Return a copy that adds the time lost when memory is nearly full.

        ``share`` is the predicted memory peak, divided by the device's memory. Up to 0.9 no time is lost.
        """
        pressure = min(max((share - _FULL) / (1 - _FULL), 0.0), 1.0) ** 2
        forward, backward, step = self.phases
        pressed = tuple((*phase[:-1], pressure * sum(phase[:-1])) for phase in (forward, backward))
        return StepParts((*pressed, step))


def step_parts(
    run: DryRunResult,
    machine: Machine,
    setup: ZeroFeatures,
    ran: ZeroFeatures,
    *,
    micro_batch_size: int,
    accumulation: int,
) -> StepParts:
    """Return the predicted seconds of a step, split by their cause (``PARTS``).

    ``setup`` are the ZeRO settings of the configuration; ``run`` is a dry run of a similar configuration, with the ZeRO settings
    ``ran``. ``accumulation`` is the number of micro batches per optimizer step.
    """
    forward_s, backward_s, filling = _compute_s(run, machine, setup, micro_batch_size, accumulation)
    overheads = _overheads(run, machine, accumulation, (forward_s, backward_s, 0.0))
    exchange = _exchange_s(run, machine, setup, micro_batch_size * accumulation, accumulation)

    reduced, gathered, stepped = _communication_s(run, machine, setup, ran, accumulation)
    # Stages 0 and 1 send gradients only during the backward pass of the last micro batch.
    often, beside_s = (accumulation, backward_s) if setup.stage >= 2 else (1, backward_s / accumulation)
    able = 1 - 1 / _num_buckets(run, setup.reduce_elements) if setup.is_overlapping else 0.0
    reduce = _exposed(*reduced, hides=machine.hides, able=able, beside_s=beside_s)
    first, second = _gathers(run, machine, setup, gathered, accumulation, (forward_s, backward_s))

    moves = (_COPIED_IN if setup.is_contiguous else _COPIED_OUT) if setup.stage else 0.0
    copies = moves * setup.bytes_per_value * run.trainable_parameters / machine.copy_bytes_per_s * often
    on_device_s, on_host_s, up = _optimizer_s(run, machine, setup)
    down = often * up - min(0.5 * often * up, _MAX_HIDDEN * backward_s)  # copies of offloaded gradients
    phases = (
        _phase(
            compute=forward_s,
            unfilled=filling / 3,
            overhead=overheads[0],
            transfer=first.moved_s + exchange[0],
            calls=first.called_s + exchange[1],
            unhidden=first.unhidden_s,
            host_copies=first.fetched_s,
        ),
        _phase(
            compute=backward_s,
            unfilled=filling * 2 / 3,
            overhead=overheads[1],
            transfer=second.moved_s + exchange[0],
            reduce=reduce.moved_s,
            calls=reduce.called_s + second.called_s + exchange[1],
            unhidden=second.unhidden_s + reduce.unhidden_s,
            gradient_copies=copies,
            host_copies=second.fetched_s + down,
        ),
        _phase(
            overhead=overheads[2],
            transfer=stepped[0],
            calls=stepped[1],
            optimizer=on_device_s,
            host_optimizer=on_host_s,
            host_copies=up,
        ),
    )
    return StepParts(phases)


def _compute_s(
    run: DryRunResult, machine: Machine, setup: ZeroFeatures, micro_batch_size: int, accumulation: int
) -> tuple[float, float, float]:
    """Return seconds: (forward, backward, lost because small products are slower).

    The first two are those of all matrix products of a step at full speed. Small products lose time in addition, because they
    do not fill the device.
    """
    model, all_flops = (max(line.at(micro_batch_size), 0.0) for line in (run.flops.model, run.flops.hardware))
    # Each rank computes its share of a record.
    rate = machine.flops_per_s * (setup.layer_ranks * setup.sequence_ranks)
    tokens = 0.0 if run.tokens is None else run.tokens.per_record
    filling = min(_FILLING_TOKENS / tokens, 1.0) if tokens > 1 else _FILLING_SHARE
    return (
        accumulation * model / 3 / rate,
        accumulation * max(all_flops - model / 3, 0.0) / rate,
        filling * (accumulation * max(run.flops.hardware.per_record, 0.0) / rate),
    )


def _optimizer_s(run: DryRunResult, machine: Machine, setup: ZeroFeatures) -> tuple[float, float, float]:
    """Return the optimizer's seconds: (on the device, on the host, copying weights).

    Weights that are updated on the host are then copied to the device. The host's seconds do not include those during which the
    device updates weights, too.
    """
    owned = run.trainable_parameters / setup.layer_ranks / (setup.replicas if setup.stage else 1)
    on_host = owned * setup.host_share
    on_device_s = (owned - on_host) * _STATE_BYTES / machine.copy_bytes_per_s
    on_host_s = on_host * _STATE_BYTES / machine.host_bytes_per_s
    if 0 < setup.host_share < 1:  # the optimizer runs on host and device at the same time
        on_host_s = max(on_host_s - on_device_s, 0.0)
    if machine.host_copy_bytes_per_s is None:
        return on_device_s, on_host_s, 0.0
    return on_device_s, on_host_s, setup.bytes_per_value * on_host / machine.host_copy_bytes_per_s


def _phase(**seconds: float) -> tuple[float, ...]:
    return tuple(seconds.get(part, 0.0) for part in PARTS)


class _Exposed(NamedTuple):
    """Seconds of communication that are not overlapped with computation."""

    moved_s: float  # of moving bytes that cannot be overlapped
    called_s: float  # of starting calls that cannot be overlapped
    unhidden_s: float  # of communication that could be overlapped, but is not
    fetched_s: float = 0.0  # of copies from the host


def _exposed(moved_s: float, called_s: float, *, hides: float, able: float, beside_s: float) -> _Exposed:
    """Return the seconds of communication that computation does not hide.

    Args:
        moved_s: seconds of moving bytes.
        called_s: seconds of starting calls.
        hides: share of the overlappable communication that really overlaps.
        able: share of the communication that can overlap; of gradients, all but the last bucket.
        beside_s: seconds of the computation with which the communication may overlap.
    """
    whole = moved_s + called_s
    if not whole or not hides:
        return _Exposed(moved_s, called_s, 0.0)
    could = min(able * whole, _MAX_HIDDEN * beside_s)
    left = 1 - could / whole
    return _Exposed(moved_s * left, called_s * left, (1 - hides) * could)


def _gathers(
    run: DryRunResult,
    machine: Machine,
    setup: ZeroFeatures,
    gathered: tuple[float, float],
    accumulation: int,
    computing: tuple[float, float],
) -> list[_Exposed]:
    """Return [forward, backward] seconds that stage 3 waits for parameters.

    ``gathered`` is (seconds of moving bytes, seconds of starting calls) of a step's gathers. ``computing`` is (seconds of
    forward, seconds of backward) of computation.
    """
    fetched = 0.0
    if machine.host_copy_bytes_per_s is not None and setup.has_host_params:
        num_bytes = 2 * accumulation * setup.bytes_per_value * run.parameters / setup.replicas
        fetched = num_bytes / machine.host_copy_bytes_per_s
    ahead = min(max(setup.prefetch_elements * ASSUMED_LAYERS / max(run.parameters, 1.0), 0.15), 1.0)
    ahead *= 1.0 if setup.is_overlapping else _UNSTREAMED
    spared = setup.kept_elements(run.parameters) / max(run.parameters, 1.0)
    found = []
    for each_s, kept in zip(computing, (0.0, spared), strict=True):
        moved, called, fetched_s = (0.5 * (1 - kept) * seconds for seconds in (*gathered, fetched))
        exposed = _exposed(moved, called, hides=machine.hides, able=ahead, beside_s=each_s)
        fetched_s -= min(ahead * machine.hides * fetched_s, _MAX_HIDDEN * each_s)
        found.append(exposed._replace(fetched_s=fetched_s))
    return found


def _overheads(
    run: DryRunResult, machine: Machine, accumulation: int, computing: tuple[float, ...]
) -> list[float]:
    """Return, for each phase, the seconds that the device waits for operations.

    ``computing`` are the seconds of computation in each phase, which hide the start of operations.
    """
    last = run.last_operations
    inner = run.inner_operations if accumulation > 1 and run.inner_operations else (1 - _STEP_SHARE) * last
    passes = accumulation * inner * machine.operation_s
    amounts = [passes / 3, passes * 2 / 3, max(last - inner, 0.0) * machine.operation_s]
    if machine.host_copy_bytes_per_s is None:  # on a CPU nothing overlaps
        return amounts
    return [
        max(amount - busy, _MIN_OVERHEAD * amount) for amount, busy in zip(amounts, computing, strict=True)
    ]


def _communication_s(
    run: DryRunResult, machine: Machine, setup: ZeroFeatures, ran: ZeroFeatures, accumulation: int
) -> list[tuple[float, float]]:
    """Return communication times: [gradients, gathers of stage 3, optimizer step].

    Each item is (seconds of moving bytes, seconds of starting calls), summed over a step's micro batches.
    """
    sums = {"reduce": [0.0, 0.0], "gather": [0.0, 0.0], "step": [0.0, 0.0]}
    for each in run.collectives(accumulation):
        if each.group_size <= 1:
            continue
        kind, where, ratio = each.kind, "step", 1.0
        if each.phase == "reduce":
            where = "reduce"
            ratio = _num_buckets(run, setup.reduce_elements) / _num_buckets(run, ran.reduce_elements)
            if not setup.has_reduce_scatter and ran.has_reduce_scatter:
                kind = "all_reduce"
        elif each.phase == "gather" and setup.stage == 3:
            where = "gather"
        elif each.phase == "gather" and setup.stage in (1, 2):
            ratio = _num_buckets(run, setup.gather_elements) / _num_buckets(run, ran.gather_elements)
        num_bytes = each.num_bytes / setup.layer_ranks
        moved, called = machine.link(kind).seconds(max(round(each.num_calls * ratio), 1), num_bytes)
        sums[where][0] += moved
        sums[where][1] += called
    return [(moved, called) for moved, called in sums.values()]


def _exchange_s(
    run: DryRunResult, machine: Machine, setup: ZeroFeatures, records: int, accumulation: int
) -> tuple[float, float]:
    """Return the seconds that a step's forward passes spend on exchanging activations.

    The result is (seconds of moving bytes, seconds of starting calls). Backward passes take as long. Ranks that share a layer
    (AutoTP) need two all-reduces a layer; ranks that share a sequence (Ulysses) need four all-to-alls of a rank's share of the
    sequence.

    Source: Shoeybi et al. 2019 (Megatron-LM), section 3; Jacobs et al. 2023 (DeepSpeed-Ulysses), section 3.2.
    """
    if setup.layer_ranks * setup.sequence_ranks == 1:
        return 0.0, 0.0
    # A layer of a transformer has 12 width^2 parameters.
    width = math.sqrt(run.parameters / (12 * ASSUMED_LAYERS))
    tokens = records * (1.0 if run.tokens is None else run.tokens.per_record)
    kind, calls = ("all_reduce", 2) if setup.layer_ranks > 1 else ("all_gather", 4)
    num_bytes = calls * ASSUMED_LAYERS * tokens * width * setup.bytes_per_value / setup.sequence_ranks
    return machine.link(kind).seconds(calls * ASSUMED_LAYERS * accumulation, num_bytes)


def _num_buckets(run: DryRunResult, elements: float) -> int:
    """Return how many buckets of ``elements`` parameters hold the whole model."""
    return max(math.ceil(run.parameters / max(elements, 1.0)), 1)


# ---- memory ----------------------------------------------------------------------------------

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
"""Parts of a memory peak. ``state``: bytes that live between steps. ``others``, ``others_divided``, ``others_offloading``:
temporary bytes that do not depend on the micro batch, if gradients are whole, divided (from stage 2 on) or copied to the host.
``kept``, ``grown``: bytes that grow with the micro batch, in forward and in all other phases. ``buckets``, ``overlapped``: the
gradient bucket, and the buckets that overlapping adds. ``held``: gathered parameters that a stage keeps, as its knobs allow."""
_OVERLAPPED_STAGE_3 = 0.5  # number of gradient buckets that overlapping adds in stage 3
_GATHERED = 0.5  # share of an all-gather bucket that exists at the peak of an optimizer step
_MIN_SHARE = 0.6  # a phase below this share of the highest peak is assumed never to become the highest


@dataclasses.dataclass(frozen=True, slots=True)
class PeakParts:
    """The peak bytes of a phase of a step, split by their use (``MEMORY_PARTS``)."""

    phase: str
    num_bytes: tuple[float, ...]  # in the order of ``MEMORY_PARTS``

    @property
    def total_bytes(self) -> float:
        return sum(self.num_bytes)


def peak_parts(
    run: DryRunResult, setup: ZeroFeatures, ran: ZeroFeatures, micro_batch_size: int
) -> list[PeakParts]:
    """Return the memory peaks of a configuration's phases, the highest first.

    ``setup`` are the ZeRO settings of the configuration; ``run`` is a dry run of a similar configuration, with the ZeRO settings
    ``ran``. Phases below 60 % of the highest peak are left out.
    """
    found = []
    for each in run.device.phases:
        line = max(each.lines, key=lambda one: one.at(micro_batch_size))
        found.append(PeakParts(each.phase, _split(run, setup, ran, each.phase, line, micro_batch_size)))
    found.sort(key=lambda one: -one.total_bytes)
    return [one for one in found if one.total_bytes >= _MIN_SHARE * found[0].total_bytes]


def _split(
    run: DryRunResult, setup: ZeroFeatures, ran: ZeroFeatures, phase: str, line: Line, micro_batch_size: int
) -> tuple[float, ...]:
    old_bytes = ran.bucket_bytes
    settled = run.device.settled - (old_bytes if setup.stage == 3 else 0)
    owned = run.trainable_parameters / (setup.replicas if setup.stage else 1)
    moved = (ran.host_share - setup.host_share) * owned * (12 if setup.bytes_per_value == 2 else 8)
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
        updated, before = (min(one.group_elements, owned * (1 - one.host_share)) for one in (setup, ran))
        change = updated - before
        others = max(others + 4.0 * change, 0.0)
    grown = max(line.per_record, 0.0) * micro_batch_size
    kept, grown = (grown, 0.0) if phase == "forward" else (0.0, grown)
    ranks = setup.layer_ranks
    # AutoTP divides what ZeRO does not: parameters up to stage 2, gradients up to stage 1.
    spared = (1 - 1 / ranks) * setup.bytes_per_value * run.parameters
    state = state / ranks if setup.stage == 0 else state - spared * (setup.stage < 3)
    others = max(others - spared * (setup.stage < 2 and phase in ("backward", "reduce")), 0.0)
    kept, grown = (size / (ranks * setup.sequence_ranks) for size in (kept, grown))
    if setup.stage >= 2:
        kind = "others_divided"
    elif setup.host_share and phase != "init":
        kind = "others_offloading"
    else:
        kind = "others"
    parts = {"state": max(state + moved, 0.0), kind: others, "kept": kept, "grown": grown}
    parts |= {"buckets": buckets, "overlapped": overlapped, "held": held}
    return tuple(parts.get(part, 0.0) for part in MEMORY_PARTS)


def _held_bytes(setup: ZeroFeatures, phase: str, parameters: float) -> float:
    """Return the bytes of gathered parameters that exist at the peak of a phase."""
    width = setup.bytes_per_value
    if setup.stage == 3 and phase in ("forward", "backward", "reduce", "gather"):
        ahead = min(
            setup.prefetch_elements + 2 * parameters / ASSUMED_LAYERS, setup.live_elements, parameters
        )
        return width * (ahead + setup.kept_elements(parameters))
    if setup.stage in (1, 2) and phase == "step":
        return _GATHERED * width * min(setup.gather_elements, parameters)
    return 0.0
