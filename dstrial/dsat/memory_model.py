"""What is known beforehand of a device's memory, and peaks as distributions. Values only.

The dry run says how many bytes of tensors are alive at most in each phase, as lines over the micro batch size. On top come
what the allocator wastes and what the device's driver takes; both are told as a mean and a spread.
"""

from __future__ import annotations

import dataclasses
import math
import statistics

from dstrial.engine.dryrun.values import MemoryForm


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What is known beforehand of a kind of device.

    Attributes:
        capacity_bytes: all of its memory; None where there is no limit.
        context_bytes: taken by the driver and the libraries before any tensor.
        context_spread_bytes: one standard deviation of that.
        waste: mean of the logarithm of what the allocator holds over what tensors need.
        spread: one standard deviation of that for a new structure.
    """

    capacity_bytes: float | None
    context_bytes: float = 0.0
    context_spread_bytes: float = 0.0
    waste: float = 0.0
    spread: float = 0.02

    @classmethod
    def cpu(cls, capacity_bytes: float | None = None) -> DeviceMemory:
        """Return ranks on a CPU, whose allocator rounds to 64 bytes; collectives in flight hold on to buffers."""
        return cls(capacity_bytes, waste=0.005, spread=0.03)

    @classmethod
    def cuda(cls, capacity_bytes: float) -> DeviceMemory:
        """Return a GPU with torch's caching allocator, before anything was measured on it.

        Source: the allocator cuts segments of 2 and 20 MiB and more into blocks of 512 bytes, of which training usually cannot
        use some percent; the context is about one GiB with NCCL. Assumed here, not measured.
        """
        return cls(
            capacity_bytes,
            context_bytes=1.0 * 2**30,
            context_spread_bytes=0.3 * 2**30,
            waste=0.04,
            spread=0.04,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryPrediction:
    """Peak memory on one device, as a distribution.

    Attributes:
        tensor_bytes: of tensors, from the dry run.
        median_bytes: of everything.
        spread: standard deviation of the logarithm.
        phase: in which the peak lies.
        phase_bytes: (phase, bytes of tensors) of every phase.
    """

    tensor_bytes: float
    median_bytes: float
    spread: float
    phase: str
    phase_bytes: tuple[tuple[str, float], ...]

    def quantile(self, probability: float) -> float:
        """Return the bytes that suffice with this probability."""
        return self.median_bytes * math.exp(statistics.NormalDist().inv_cdf(probability) * self.spread)

    def probability_to_fit(self, capacity_bytes: float) -> float:
        """Return how probable it is that so many bytes suffice."""
        if capacity_bytes <= 0:
            return 0.0
        if self.median_bytes <= 0 or self.spread <= 0:
            return float(self.median_bytes <= capacity_bytes)
        return statistics.NormalDist().cdf(math.log(capacity_bytes / self.median_bytes) / self.spread)


def unmeasured_peak(device: DeviceMemory, form: MemoryForm, micro_batch_size: float) -> MemoryPrediction:
    """Return the peak of a configuration on a device on which nothing was measured.

    Args:
        device: what is known beforehand of it.
        form: bytes of tensors, from a dry run.
        micro_batch_size: records of a micro batch.
    """
    tensors = form.peak(micro_batch_size)
    body = tensors * math.exp(device.waste)
    median = body + device.context_bytes
    spread = math.hypot(device.spread * body, device.context_spread_bytes) / median if median else 0.0
    return MemoryPrediction(
        tensor_bytes=tensors,
        median_bytes=median,
        spread=spread,
        phase=form.peak_phase(micro_batch_size),
        phase_bytes=tuple((phase.phase, phase.at(micro_batch_size)) for phase in form.phases),
    )
