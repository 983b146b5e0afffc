"""Requests and results of dry runs: dataclasses that do not need torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PHASES = ("init", "forward", "backward", "reduce", "step")
"""Phases of a dry run: engine construction, forward, backward, gradient reduction, optimizer step."""


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A quantity that is linear in the micro batch size, such as bytes or FLOPs."""

    base: float
    per_record: float

    def at(self, micro_batch_size: float) -> float:
        return self.base + self.per_record * micro_batch_size


@dataclasses.dataclass(frozen=True, slots=True)
class PhaseMemory:
    """Peak bytes of one phase of ``PHASES``, as a function of the micro batch size.

    The peak is the maximum of ``lines`` at that size. There may be several lines, because the time of the peak may depend on
    the micro batch size.
    """

    phase: str
    lines: tuple[Line, ...]

    def at(self, micro_batch_size: float) -> float:
        return max(line.at(micro_batch_size) for line in self.lines)


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryForm:
    """Peak bytes of device or host memory by phase, for any micro batch size.

    ``settled`` is the number of bytes allocated between two steps: parameters, optimizer state, buffers.
    """

    phases: tuple[PhaseMemory, ...]
    settled: float

    def peak(self, micro_batch_size: float) -> float:
        return max((phase.at(micro_batch_size) for phase in self.phases), default=0.0)

    def peak_phase(self, micro_batch_size: float) -> str:
        """Return the phase with the highest peak; of equal peaks, the first phase."""
        return max(self.phases, key=lambda phase: phase.at(micro_batch_size)).phase

    def in_phase(self, phase: str, micro_batch_size: float) -> float:
        """Return the peak bytes of one phase; 0 if the phase did not occur."""
        return max((each.at(micro_batch_size) for each in self.phases if each.phase == phase), default=0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """Calls and bytes of one kind of collective, such as ``all_reduce``, in one phase.

    ``group_size`` is the number of communicating ranks. ``num_bytes`` is the sum over all calls, and counts full tensors: for
    all_gather and reduce_scatter, the tensor of all ranks together.
    """

    kind: str
    group_size: int
    phase: str
    num_calls: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Flops:
    """FLOPs of a micro batch on one rank.

    ``hardware`` includes the forward passes that activation checkpointing recomputes; ``model`` does not.
    """

    model: Line
    hardware: Line

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Flops:
        return cls(Line(**value["model"]), Line(**value["hardware"]))


@dataclasses.dataclass(frozen=True, slots=True)
class DryRunRequest:
    """A model to dry-run, on one rank of a training.

    The engines are built with ZeRO stage 0; ``dsat.predictor.closed_form`` computes the effects of the other stages.

    Attributes:
        workload: ``module:callable``; called with a ``FakeWorld`` and ``options``, returns a ``Workload``.
        options: keyword arguments of the workload; JSON values.
        world_size: number of virtual ranks.
        micro_batch_sizes: two different sizes to run. Avoid 1, which many kernels treat specially.
        is_real: whether to use real tensors, for code that fake tensors do not support; needs a real batch's memory and time.
        module_paths: directories put first in ``sys.path``; the first is the working directory.
        rank: the rank to run. To measure a later stage of a pipeline, choose one of its ranks.
    """

    workload: str
    options: Mapping[str, Any]
    world_size: int
    micro_batch_sizes: tuple[int, int] = (2, 4)
    is_real: bool = False
    module_paths: tuple[str, ...] = ()
    rank: int = 0

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> DryRunRequest:
        low, high = value["micro_batch_sizes"]
        return cls(
            **{**value, "micro_batch_sizes": (low, high), "module_paths": tuple(value["module_paths"])}
        )


@dataclasses.dataclass(frozen=True, slots=True)
class ModelTrace:
    """Memory, FLOPs and operations of a model on one rank, as with ZeRO stage 0.

    Attributes:
        memory: peak bytes in each phase, without the gradients of parameters.
        activations: bytes that are live between forward and backward, but not between steps; includes the micro batch itself.
        state_bytes: name -> bytes of ``parameters``, ``optimizer`` (with master weights) and ``buffers`` between steps.
        parameters: number of parameters of all engines' models.
        trainable_parameters: number of trained parameters.
        expert_parameters: ``ep_size`` of mixture-of-experts layers -> number of trained parameters in this rank's experts.
        num_tensors: number of trained parameter tensors.
        largest_tensor: number of elements of the largest trained parameter tensor.
        flops: FLOPs of one micro batch.
        tokens: elements of a micro batch's largest integer tensor; None without an integer tensor.
        pass_operations: number of torch operations in forward and backward of one micro batch.
        step_operations: number of torch operations in the optimizer step.
        bypasses: places (``file:line``) where user code read a fake tensor's value and got a constant.
        notes: sentences to show to the user, from the workload.
        num_records: records per batch, if the workload is a script that makes its batches itself; 0 for other workloads.
        epoch_records: records of the training loader; 0 if unknown.
        is_pipeline: whether any engine is a ``PipelineEngine``.
    """

    memory: MemoryForm
    activations: Line
    state_bytes: Mapping[str, int]
    parameters: int
    trainable_parameters: int
    num_tensors: int
    largest_tensor: int
    flops: Flops
    tokens: Line | None
    pass_operations: int
    step_operations: int
    bypasses: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    num_records: int = 0
    epoch_records: int = 0
    is_pipeline: bool = False
    expert_parameters: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def owned_parameters(self, replicas: int) -> float:
        """Return the number of trained parameters in one rank's ZeRO partition.

        Parameters are divided by ``replicas``. A rank's experts are divided by ``replicas / ep_size``, the number of ranks with
        the same experts.
        """
        more = sum((ranks - 1) * count for ranks, count in self.expert_parameters.items())
        return (self.trainable_parameters + more) / replicas

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelTrace:
        return cls(
            **{
                **value,
                "memory": memory_form_from_json(value["memory"]),
                "activations": _line(value["activations"]),
                "flops": Flops.from_json(value["flops"]),
                "tokens": _line(value["tokens"]),
                "bypasses": tuple(value["bypasses"]),
                "notes": tuple(value["notes"]),
                "expert_parameters": {int(size): count for size, count in value["expert_parameters"].items()},
            }
        )


@dataclasses.dataclass(frozen=True, slots=True)
class DryRunResult:
    """Predicted memory, FLOPs and communication of one rank in one configuration.

    ``dsat.predictor.closed_form`` computes the prediction from a ``ModelTrace``. Memory, FLOPs and tokens are functions of the
    micro batch size.

    Attributes:
        device: peak bytes on the device in each phase.
        host: peak bytes on the host in each phase.
        parameters: number of parameters of all engines' models; a partitioned parameter counts whole.
        trainable_parameters: number of trained parameters.
        inner_collectives: collectives of each micro batch except a step's last one; empty if a step has one micro batch.
        last_collectives: collectives of the last micro batch of a step, with the optimizer step.
        flops: FLOPs of one micro batch.
        tokens: elements of a micro batch's largest integer tensor; None without an integer tensor.
        inner_operations: number of torch operations in each micro batch except a step's last one; 0 if a step has one micro
            batch.
        last_operations: number of torch operations in a step's last micro batch, with the optimizer step.
        device_parts: name -> peak bytes on the device of ``parameters``, ``gradients``, ``optimizer`` and ``buffers``.
        activations: device bytes that are live after a forward pass and not in ``device_parts``, such as the micro batch; None
            if unknown.
    """

    device: MemoryForm
    host: MemoryForm
    parameters: int
    trainable_parameters: int
    inner_collectives: tuple[Collective, ...]
    last_collectives: tuple[Collective, ...]
    flops: Flops
    tokens: Line | None
    inner_operations: int = 0
    last_operations: int = 0
    device_parts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    activations: Line | None = None

    def collectives(self, accumulation_steps: int) -> tuple[Collective, ...]:
        """Return a step's collectives, summed over ``accumulation_steps`` micro batches."""
        inner = accumulation_steps - 1
        repeated = [
            dataclasses.replace(each, num_calls=each.num_calls * inner, num_bytes=each.num_bytes * inner)
            for each in self.inner_collectives
            if inner
        ]
        return _summed([*repeated, *self.last_collectives])

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> DryRunResult:
        return cls(
            **{
                **value,
                "device": memory_form_from_json(value["device"]),
                "host": memory_form_from_json(value["host"]),
                "inner_collectives": tuple(Collective(**each) for each in value["inner_collectives"]),
                "last_collectives": tuple(Collective(**each) for each in value["last_collectives"]),
                "flops": Flops.from_json(value["flops"]),
                "tokens": _line(value["tokens"]),
                "activations": _line(value.get("activations")),
            }
        )


def _line(value: Mapping[str, float] | None) -> Line | None:
    return None if value is None else Line(**value)


def memory_form_from_json(value: Mapping[str, Any]) -> MemoryForm:
    phases = tuple(
        PhaseMemory(each["phase"], tuple(Line(**line) for line in each["lines"])) for each in value["phases"]
    )
    return MemoryForm(phases, value["settled"])


def _summed(collectives: Sequence[Collective]) -> tuple[Collective, ...]:
    sums: dict[tuple[str, int, str], tuple[int, int]] = {}
    for each in collectives:
        key = (each.kind, each.group_size, each.phase)
        calls, num_bytes = sums.get(key, (0, 0))
        sums[key] = (calls + each.num_calls, num_bytes + each.num_bytes)
    return tuple(Collective(*key, *totals) for key, totals in sums.items())


def upper_envelope(lines: Iterable[tuple[float, float]]) -> tuple[Line, ...]:
    """Return the lines that are highest at some micro batch size of at least 1.

    ``lines`` are pairs (base, per_record). The result, an upper convex hull, is in order of ascending slope.
    """
    best: dict[float, float] = {}
    for base, slope in lines:
        if base > best.get(slope, float("-inf")):
            best[slope] = base
    hull: list[tuple[float, float]] = []
    for slope in sorted(best):
        base = best[slope]
        while hull:
            last_base, last_slope = hull[-1]
            # From the crossing on, this line is above the last line.
            crossing = (last_base - base) / (slope - last_slope)
            start = 1.0
            if len(hull) > 1:
                former_base, former_slope = hull[-2]
                start = max(start, (former_base - last_base) / (last_slope - former_slope))
            if crossing > start:
                break
            hull.pop()
        hull.append((base, slope))
    return tuple(Line(base, slope) for base, slope in hull)
