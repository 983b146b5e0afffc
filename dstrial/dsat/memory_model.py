"""Peak memory of a configuration as a quantile, from its dry run and from every measurement so far; pure.

The dry run says how many bytes of tensors are alive at most in each phase, as lines over the micro batch size. On top come
what the allocator wastes and what the device's driver takes; both are told as a mean and a spread, which measurements narrow.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from dstrial.engine.dryrun.values import MemoryForm

_HUBER = 1.345
"""Deviations beyond so many spreads weigh less: 95 % of the efficiency of a mean on normal errors (Huber 1964)."""
_FORMULA_WASTE, _FORMULA_SPREAD = 0.1, 0.12
"""What a formula leaves out, and how well it is known; assumed."""
_CENSORED_STEP = 1.0
"""By how many spreads an out-of-memory error is taken to have missed, where it says nothing else."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What is known beforehand of a kind of device.

    Attributes:
        capacity_bytes: all of its memory; None where there is no limit.
        context_bytes: taken by the driver and the libraries before any tensor.
        context_spread_bytes: one standard deviation of that.
        waste: mean of the logarithm of what the allocator holds over what tensors need.
        spread: one standard deviation of that for a new structure.
        noise: one standard deviation between two measurements of the same structure.
    """

    capacity_bytes: float | None
    context_bytes: float = 0.0
    context_spread_bytes: float = 0.0
    waste: float = 0.0
    spread: float = 0.02
    noise: float = 0.005

    @classmethod
    def cpu(cls, capacity_bytes: float | None = None) -> DeviceMemory:
        """Return ranks on a CPU, whose allocator rounds to 64 bytes; collectives in flight hold on to buffers."""
        return cls(capacity_bytes, waste=0.005, spread=0.03, noise=0.03)

    def roughly(self) -> DeviceMemory:
        """Return the same for predictions by a formula instead of a dry run."""
        return dataclasses.replace(self, waste=self.waste + _FORMULA_WASTE, spread=_FORMULA_SPREAD)

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
            noise=0.01,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """What a measurement said about memory.

    Attributes:
        structure: names what was measured up to its micro batch size.
        predicted_bytes: of tensors, from the dry run.
        measured_bytes: peak, context included; for ``is_out_of_memory`` a number that it would have exceeded.
        is_out_of_memory: whether it ended so.
    """

    structure: str
    predicted_bytes: float
    measured_bytes: float
    is_out_of_memory: bool = False


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


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryModel:
    """Predicts peaks; a new one comes from each observation.

    Attributes:
        device: what is known beforehand.
        observations: in their order.
    """

    device: DeviceMemory
    observations: tuple[Observation, ...] = ()

    def observe(self, observation: Observation) -> MemoryModel:
        """Return the model that knows this too."""
        return dataclasses.replace(self, observations=(*self.observations, observation))

    def predict(self, form: MemoryForm, micro_batch_size: float, structure: str = "") -> MemoryPrediction:
        """Return the peak of a configuration.

        Args:
            form: bytes of tensors on the device, from its dry run.
            micro_batch_size: records of a micro batch.
            structure: its name, as in observations; measurements of the same structure count most.
        """
        tensors = form.peak(micro_batch_size)
        shift, spread = self.correction(structure)
        body = tensors * math.exp(shift)
        median = body + self.device.context_bytes
        if self.observations:
            context_spread = self.device.context_spread_bytes / math.sqrt(1 + len(self.observations))
        else:
            context_spread = self.device.context_spread_bytes
        relative = math.hypot(spread * body, context_spread) / median if median else 0.0
        return MemoryPrediction(
            tensor_bytes=tensors,
            median_bytes=median,
            spread=relative,
            phase=form.peak_phase(micro_batch_size),
            phase_bytes=tuple((phase.phase, phase.at(micro_batch_size)) for phase in form.phases),
        )

    def largest_micro_batch(
        self,
        form: MemoryForm,
        *,
        structure: str = "",
        probability: float = 0.98,
        limit: int = 65_536,
    ) -> int:
        """Return the largest micro batch size that fits with this probability; 0 if none does.

        Args:
            form: from the dry run.
            structure: its name.
            probability: to fit.
            limit: at most so many records.
        """
        if self.device.capacity_bytes is None:
            return limit

        def fits(size: int) -> bool:
            return self.margin_bytes(form, size, structure=structure, probability=probability) >= 0

        if not fits(1):
            return 0
        smallest, largest = 1, limit
        while smallest < largest:
            middle = (smallest + largest + 1) // 2
            if fits(middle):
                smallest = middle
            else:
                largest = middle - 1
        return smallest

    def margin_bytes(
        self, form: MemoryForm, micro_batch_size: float, *, structure: str = "", probability: float = 0.98
    ) -> float:
        """Return the bytes left over at this probability, negative for what is missing; infinite without a limit."""
        if self.device.capacity_bytes is None:
            return math.inf
        prediction = self.predict(form, micro_batch_size, structure)
        return self.device.capacity_bytes - prediction.quantile(probability)

    def correction(self, structure: str = "") -> tuple[float, float]:
        """Return the mean and the spread of the logarithm of bytes needed over bytes of tensors.

        All observations together move the mean of all structures away from what is known beforehand, those of one
        structure move its own away from that; an outlier weighs little in both.
        """
        spread, noise = self.device.spread, self.device.noise
        everywhere, spread_everywhere = _shrunk(
            self._logarithms(self.observations, self.device.waste),
            self.device.waste,
            spread,
            math.hypot(spread, noise),
            firm=[each.is_out_of_memory for each in self.observations],
        )
        own = [each for each in self.observations if each.structure == structure]
        if not own:
            # A structure of its own differs from the mean of all by as much as was seen among them, and no less than half.
            return everywhere, math.hypot(spread_everywhere, 0.5 * spread if self.observations else 0.0)
        firm = [each.is_out_of_memory for each in own]
        mean, left = _shrunk(self._logarithms(own, everywhere), everywhere, spread, noise, firm=firm)
        return mean, math.hypot(left, noise)

    def _logarithms(self, observations: Sequence[Observation], expected: float) -> list[float]:
        found = []
        for each in observations:
            body = max(each.measured_bytes - self.device.context_bytes, 1.0)
            logarithm = math.log(body / max(each.predicted_bytes, 1.0))
            if each.is_out_of_memory:
                # It needed more than there is: news only where less was expected.
                logarithm = max(logarithm + _CENSORED_STEP * self.device.spread, expected)
            found.append(logarithm)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> MemoryModel:
        """Return what ``to_json`` was called on."""
        return cls(
            DeviceMemory(**value["device"]), tuple(Observation(**each) for each in value["observations"])
        )


def _shrunk(
    values: Sequence[float], prior: float, spread: float, noise: float, *, firm: Sequence[bool]
) -> tuple[float, float]:
    """Return mean and standard deviation of a location, given a prior for it and values with outliers.

    Args:
        values: what was seen.
        prior: expected beforehand.
        spread: standard deviation of that.
        noise: standard deviation of a value.
        firm: of each value, whether it is no outlier, however far off it is.

    Source: Huber's M-estimator by iterated reweighting, the prior being one more observation, of weight 1 / spread².
    """
    if not values:
        return prior, spread
    if spread <= 0 or noise <= 0:
        return statistics.median(values), 0.0
    location = statistics.median([*values, prior])
    weight = 0.0
    for _ in range(20):
        weights = [
            (1.0 if is_firm else min(1.0, _HUBER * noise / max(abs(value - location), 1e-12))) / noise**2
            for value, is_firm in zip(values, firm, strict=True)
        ]
        weight = sum(weights) + 1 / spread**2
        location = (
            sum(w * value for w, value in zip(weights, values, strict=True)) + prior / spread**2
        ) / weight
    return location, math.sqrt(1 / weight)
