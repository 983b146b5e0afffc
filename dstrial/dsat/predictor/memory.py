"""Peaks of memory: what they are made of, and as distributions. Pure.

The dry run says how many bytes of tensors are alive at most in each phase, as lines over the micro batch size. On top come
what the allocator wastes and what the device's driver takes; both are told as a mean and a spread.
"""

from __future__ import annotations

import dataclasses
import math
import statistics

from dstrial.dsat.predictor.zero_features import ASSUMED_LAYERS, ZeroFeatures
from dstrial.engine.dryrun.values import DryRunResult, Line, MemoryForm

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
_OVERLAPPED_STAGE_3 = 0.5
_GATHERED = 0.5
_WORTH_LOOKING = 0.6
"""Phases whose peak is below this share of the greatest are no peak, whatever is learned."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Prior knowledge of a kind of device."""

    capacity_bytes: float | None
    context_bytes: float = 0.0  # of driver and libraries, before any tensor
    context_std_bytes: float = 0.0
    waste: float = 0.0  # mean log of what the allocator holds over what tensors need
    log_std: float = 0.02  # of the waste of a new structure

    @classmethod
    def cpu(cls, capacity_bytes: float | None = None) -> DeviceMemory:
        """Return a CPU: its allocator rounds to 64 bytes, collectives hold on to buffers."""
        return cls(capacity_bytes, waste=0.005, log_std=0.03)

    @classmethod
    def cuda(cls, capacity_bytes: float) -> DeviceMemory:
        """Return a GPU with torch's caching allocator, before anything was measured on it.

        Source: the allocator cuts segments of 2 and 20 MiB and more into blocks of 512 bytes, of which training usually cannot
        use some percent; the context is about one GiB with NCCL. Assumed here, not measured.
        """
        return cls(
            capacity_bytes,
            context_bytes=1.0 * 2**30,
            context_std_bytes=0.3 * 2**30,
            waste=0.04,
            log_std=0.04,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryPrediction:
    """Peak memory on one device, as a distribution."""

    median_bytes: float
    log_std: float
    phase: str
    phase_bytes: tuple[tuple[str, float], ...]

    def quantile(self, probability: float) -> float:
        """Return the bytes that suffice with this probability."""
        return self.median_bytes * math.exp(statistics.NormalDist().inv_cdf(probability) * self.log_std)

    def probability_to_fit(self, capacity_bytes: float) -> float:
        """Return the probability that so many bytes suffice."""
        if capacity_bytes <= 0:
            return 0.0
        if self.median_bytes <= 0 or self.log_std <= 0:
            return float(self.median_bytes <= capacity_bytes)
        return statistics.NormalDist().cdf(math.log(capacity_bytes / self.median_bytes) / self.log_std)


def unmeasured_peak(device: DeviceMemory, form: MemoryForm, micro_batch_size: float) -> MemoryPrediction:
    """Return the peak of a configuration on a device on which nothing was measured."""
    tensors = form.peak(micro_batch_size)
    body = tensors * math.exp(device.waste)
    median = body + device.context_bytes
    log_std = math.hypot(device.log_std * body, device.context_std_bytes) / median if median else 0.0
    return MemoryPrediction(
        median_bytes=median,
        log_std=log_std,
        phase=form.peak_phase(micro_batch_size),
        phase_bytes=tuple((phase.phase, phase.at(micro_batch_size)) for phase in form.phases),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class PeakParts:
    """The peak of one phase."""

    phase: str
    num_bytes: tuple[float, ...]  # in the order of ``MEMORY_PARTS``

    @property
    def total_bytes(self) -> float:
        return sum(self.num_bytes)


def peak_parts(
    run: DryRunResult, setup: ZeroFeatures, ran: ZeroFeatures, micro_batch_size: int
) -> list[PeakParts]:
    """Return the phases' peaks, the greatest first, without those far below it.

    ``ran`` was dry-run, ``setup`` is in question; they differ in ``ZeroFeatures`` only.
    """
    found = []
    for each in run.device.phases:
        line = max(each.lines, key=lambda one: one.at(micro_batch_size))
        found.append(PeakParts(each.phase, _split(run, setup, ran, each.phase, line, micro_batch_size)))
    found.sort(key=lambda one: -one.total_bytes)
    return [one for one in found if one.total_bytes >= _WORTH_LOOKING * found[0].total_bytes]


def _split(
    run: DryRunResult, setup: ZeroFeatures, ran: ZeroFeatures, phase: str, line: Line, micro_batch_size: int
) -> tuple[float, ...]:
    old_bytes = ran.bucket_bytes
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


def _held_bytes(setup: ZeroFeatures, phase: str, parameters: float) -> float:
    """Bytes that stage 3 gathers ahead and keeps, or stages 1, 2 gather after a step."""
    width = setup.bytes_per_value
    if setup.stage == 3 and phase in ("forward", "backward", "reduce", "gather"):
        ahead = min(
            setup.prefetch_elements + 2 * parameters / ASSUMED_LAYERS, setup.live_elements, parameters
        )
        return width * (ahead + setup.kept_elements(parameters))
    if setup.stage in (1, 2) and phase == "step":
        return _GATHERED * width * min(setup.gather_elements, parameters)
    return 0.0
