"""Compute for ``dstrial memory`` how much memory each part of a training needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dstrial.dsat.predictor.models import MemoryPrediction
from dstrial.dsat.predictor.plan import PROBABILITY
from dstrial.engine.dryrun.values import DryRunResult

PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers")  # of a training's device memory
# Part of a training's memory -> what makes it smaller.
_REMEDIES = {
    "parameters": "ZeRO stage 3 divides them",
    "gradients": "ZeRO stage 2 divides them",
    "optimizer": "ZeRO stage 1 divides it, and offload_optimizer takes it to the host",
    "activations": "a smaller micro batch or activation checkpointing takes less",
    "buffers": "reduce_bucket_size, allgather_bucket_size and, with ZeRO stage 3, sub_group_size set the engine's",
}
_GIB = 2**30
_SMALL_PARAMETERS = 50_000_000  # memory of a model with fewer parameters is shown in MiB


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """The predicted memory of a model, or of a pipeline stage, on a number of devices."""

    num_slots: int
    micro_batch_size: int  # of one device
    run: DryRunResult | None  # dry run; None if it failed
    problem: str | None = None  # why there is no prediction
    stage: int | None = None  # index of the pipeline stage
    need: MemoryPrediction | None = None  # of one device, with driver and fragmentation, as in ``dsat plan``
    notes: tuple[str, ...] = ()  # sentences for the user

    @property
    def peak_bytes(self) -> float:
        """The most bytes of tensors that exist at once on one device; 0 if unknown."""
        return 0.0 if self.run is None else self.run.device.peak(self.micro_batch_size)

    def fits(self, capacity_bytes: float) -> bool:
        """Return whether a device with ``capacity_bytes`` suffices with 98 % probability."""
        return self.need is not None and self.need.quantile(PROBABILITY) <= capacity_bytes

    def parts(self) -> dict[str, float]:
        """Return part of the training -> its bytes at the peak of one device's memory.

        Empty if the dry run failed.

        ``activations`` are the bytes that grow with the micro batch. ``gradients`` are counted with their largest size, but at
        most with what parameters, optimizer and activations leave of the peak. ``buffers`` (of modules, operations and
        communication) are the remainder. ``peak`` is the sum; ``host`` is the peak of host memory.
        """
        if self.run is None:
            return {}
        device, size, peak = self.run.device, self.micro_batch_size, self.peak_bytes
        params, gradients, optimizer = (float(self.run.device_parts.get(name, 0)) for name in PARTS[:3])
        lines = next(each.lines for each in device.phases if each.phase == device.peak_phase(size))
        slope = max(lines, key=lambda line: line.at(size)).per_record
        activations = max(0.0, slope * size)
        rest = max(0.0, peak - (params + optimizer) - activations)
        gradients = min(gradients, rest)
        sizes = params, gradients, optimizer, activations, rest - gradients
        return {**dict(zip(PARTS, sizes, strict=True)), "peak": peak, "host": self.run.host.peak(size)}

    def largest(self) -> dict[str, float]:
        """Return part of the training -> its most bytes on one device at any time.

        Empty if the dry run failed. ``peak`` is the most bytes of all parts together.
        """
        if self.run is None:
            return {}
        found = {name: float(value) for name, value in self.run.device_parts.items()}
        if self.run.activations is not None:
            found["activations"] = self.run.activations.at(self.micro_batch_size)
        return {name: found[name] for name in PARTS if name in found} | {"peak": self.peak_bytes}


def answer(placements: Sequence[Placement], capacity_bytes: float, deepspeed: str) -> list[str]:
    """Return three lines: how many devices suffice, and what needs most memory.

    If there is no prediction, one line says why.

    ``capacity_bytes`` is the memory of one device. ``deepspeed`` describes the DeepSpeed config in the text.
    """
    known = _largest_stages(placements)
    if not known:
        return [f"It cannot be told: {placements[0].problem}"] if placements else []
    fitting = [one for one in known if one.fits(capacity_bytes)]
    first, run = known[0], known[0].run
    assert run is not None
    assert first.need is not None
    size = f"{_count(run.parameters)} parameters, {_count(run.trainable_parameters)} of them trained"
    if first.stage is not None:
        size = f"{size}, in stage {first.stage}, which needs most"
    numbers = [one.num_slots for one in known]
    if not fitting:
        verdict = f"Several devices alone do not help: none of {', '.join(map(str, numbers))} is enough."
    elif fitting[0].num_slots == 1:
        verdict = "One device is enough; more of them train faster, not more."
    elif 1 in numbers:
        verdict = f"One device is not enough; {fitting[0].num_slots} are."
    else:
        verdict = f"{fitting[0].num_slots} devices are enough; one was not asked for."
    chosen = fitting[0] if fitting else known[-1]
    parts = {name: value for name, value in chosen.parts().items() if name in PARTS}
    most = max(parts, key=lambda name: parts[name])
    doubt = ""
    if first.need.median_bytes <= capacity_bytes and not first.fits(capacity_bytes):
        doubt = f" To fit with a probability of {PROBABILITY:.0%}, it needs {_gib(first.need.quantile(PROBABILITY))}."
    return [
        verdict,
        f"{size}: with {deepspeed} a device needs {_gib(first.need.median_bytes)} at {first.num_slots} device(s), and has "
        f"{_gib(capacity_bytes)}.{doubt}",
        f"Most of it at {chosen.num_slots} device(s): {most}, {_gib(parts[most])}; {_REMEDIES[most]}.",
    ]


def _largest_stages(placements: Sequence[Placement]) -> list[Placement]:
    """Return, for each number of devices, the pipeline stage with the highest peak.

    Numbers of devices with a stage without prediction are left out.
    """
    by_slots: dict[int, list[Placement]] = {}
    for one in placements:
        by_slots.setdefault(one.num_slots, []).append(one)
    known = [stages for stages in by_slots.values() if all(one.need is not None for one in stages)]
    return [max(stages, key=lambda one: one.peak_bytes) for stages in known]


def table(placements: Sequence[Placement], capacity_bytes: float) -> list[list[str]]:
    """Return a header and one row per number of devices (and pipeline stage).

    Sizes are in ``table_unit``. Numbers of devices without a prediction are left out.
    """
    divisor = _GIB if table_unit(placements) == "GiB" else _GIB // 1024
    has_stages = any(one.stage is not None for one in placements)
    rows = [["devices", *["stage"] * has_stages, "micro batch", *PARTS, "peak", "needs", "of device", "host"]]
    for one in placements:
        if one.need is None:
            continue
        parts, needed = one.parts(), one.need.median_bytes
        sizes = [*(parts[name] for name in (*PARTS, "peak")), needed]
        first = [str(one.num_slots), *[str(one.stage)] * has_stages, str(one.micro_batch_size)]
        cells = [_cell(size / divisor) for size in sizes]
        rows.append(
            [*first, *cells, f"{100 * needed / capacity_bytes:.0f} %", _cell(parts["host"] / divisor)]
        )
    return rows


def table_unit(placements: Sequence[Placement]) -> str:
    """Return ``MiB`` if all models have under 50 million parameters, else ``GiB``."""
    weights = [one.run.parameters for one in placements if one.run is not None]
    return "MiB" if weights and max(weights) < _SMALL_PARAMETERS else "GiB"


def _count(number: float) -> str:
    for unit, factor in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.995 * factor:
            return f"{number / factor:.2f} {unit}"
    return f"{number:.0f}"


def _gib(num_bytes: float) -> str:
    return f"{_cell(num_bytes / _GIB)} GiB"


def _cell(number: float) -> str:
    return f"{number:,.1f}" if number >= 1 else f"{number:.2f}"
