"""What DeepSpeed configurations of six workloads would measure, as formulas with hidden errors. Pure.

A surface is a workload and a seed. The formulas are those of ``dsat_surface_costs``; the seed draws by how much this machine
and this model differ from them: constants of the machine; systematic errors per group of configurations (stage and offload),
per value of a knob in a stage, and per structure; noise per measurement. Searches see measurements only;
``Surface.ranked`` looks at every configuration of the space without noise.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import dsat_other_costs
import dsat_surface_costs
import numpy as np
import numpy.typing as npt
from dsat_surface_costs import (
    Array,
    Hidden,
    Knobs,
    Memory,
    Times,
    activation_bytes_per_record,
    flops_per_record,
)
from dsat_workloads import WORKLOADS, Workload

from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.outcome import Failure, FailureKind, Measured, Outcome
from dstrial.dsat.space import Space

__all__ = ["WORKLOADS", "Grid", "Optimum", "Surface", "Workload"]

OUTLIER_FACTOR = 1.03
NUM_MEASURED_STEPS = 12


@dataclasses.dataclass(frozen=True, slots=True)
class Formulas:
    """Formulas, and standard deviations of what no formula says, as shares."""

    costs: Any  # a module with ``memory`` and ``times``
    group_time: float = 0.04
    knob_time: float = 0.003
    structure_time: float = 0.003
    group_memory: float = 0.03
    structure_memory: float = 0.008
    noise: float = 0.005
    outliers: float = 0.02  # share of measurements that are slower by ``OUTLIER_FACTOR``


FORMULAS = {
    "usual": Formulas(dsat_surface_costs),
    "other": Formulas(dsat_other_costs),
    "uneven": Formulas(dsat_other_costs, 0.08, 0.004, 0.004, 0.05, 0.01, 0.006, 0.04),
}
"""``uneven``: stages and kinds of offloading differ more than formulas say."""

_ZERO = "zero_optimization."
_PATHS = {
    "reduce_bucket": "reduce_bucket_size",
    "allgather_bucket": "allgather_bucket_size",
    "overlap": "overlap_comm",
    "contiguous": "contiguous_gradients",
    "reduce_scatter": "reduce_scatter",
    "round_robin": "round_robin_gradients",
    "prefetch": "stage3_prefetch_bucket_size",
    "persistence": "stage3_param_persistence_threshold",
    "live": "stage3_max_live_parameters",
    "reuse": "stage3_max_reuse_distance",
    "sub_group": "sub_group_size",
    "offload_optimizer": "offload_optimizer.device",
    "ratio": "offload_optimizer.ratio",
    "offload_param": "offload_param.device",
}
_DEFAULTS: dict[str, Any] = {
    "reduce_bucket_size": 5e8,
    "allgather_bucket_size": 5e8,
    "overlap_comm": None,
    "contiguous_gradients": True,
    "reduce_scatter": True,
    "round_robin_gradients": False,
    "stage3_prefetch_bucket_size": 5e7,
    "stage3_param_persistence_threshold": 1e5,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "sub_group_size": 1e9,
    "offload_optimizer.device": "none",
    "offload_optimizer.ratio": 1.0,
    "offload_param.device": "none",
}
"""Source: DeepSpeed 0.19.8, ``runtime/zero/config.py``."""
_LIVE = {
    "reduce_bucket": (1, 2, 3),
    "allgather_bucket": (1, 2),
    "overlap": (1, 2, 3),
    "contiguous": (1, 2, 3),
    "reduce_scatter": (2, 3),
    "round_robin": (1, 2),
    "prefetch": (3,),
    "persistence": (3,),
    "live": (3,),
    "reuse": (3,),
    "sub_group": (3,),
    "offload_optimizer": (1, 2, 3),
    "ratio": (3,),
    "offload_param": (3,),
}
_DEAD = {"overlap": 0.0, "round_robin": 0.0, "offload_optimizer": 0.0, "offload_param": 0.0}


@dataclasses.dataclass(frozen=True, slots=True)
class Optimum:
    """The best configuration of a space; samples/s without noise."""

    candidate: Candidate
    throughput: float


class Surface:
    """One workload with one seed's hidden errors; the bare formulas if the seed is None."""

    def __init__(
        self, workload: Workload, seed: int | None = None, formulas: Formulas = FORMULAS["usual"]
    ) -> None:
        self.workload = workload
        self._formulas = formulas
        self._seed = seed
        self.hidden = Hidden() if seed is None else _drawn(seed)
        self._num_measured: dict[Candidate, int] = {}

    def outcome(self, candidate: Candidate) -> Outcome:
        """Measure a configuration; another time gives other noise."""
        knobs = self.knobs([candidate])
        memory_, times_ = self._evaluate(knobs)
        machine = self.workload.machine
        peaks = {
            phase: float(getattr(memory_, phase)[0]) for phase in ("init", "forward", "backward", "step")
        }
        for phase, peak in peaks.items():
            if peak > machine.device_bytes:
                return self._out_of_memory(candidate, phase, peak)
        host_bytes = float(memory_.host[0])
        if host_bytes > machine.host_bytes:
            return Failure(FailureKind.HOST_OOM, f"the host needs {host_bytes / 2**30:.0f} GiB", "init")
        repeat = self._num_measured[candidate] = self._num_measured.get(candidate, 0) + 1
        noise = self._noise(knobs, repeat)
        step_s = float(times_.all[0]) * noise
        batch = candidate.batch
        flops = flops_per_record(self.workload)
        return Measured(
            {
                "throughput": batch.train_batch_size / step_s,
                "latency": step_s * 1e6,
                "half_width": 1.96 * self._formulas.noise,
                "num_steps": NUM_MEASURED_STEPS,
                "forward": float(times_.forward[0]) * noise * 1e6,
                "backward": float(times_.backward[0]) * noise * 1e6,
                "step": float(times_.step[0]) * noise * 1e6,
                "FLOPS_per_gpu": flops * batch.train_batch_size / machine.num_ranks / step_s,
                "train_batch_size": batch.train_batch_size,
                "train_micro_batch_size_per_gpu": batch.micro_batch_size,
                "gradient_accumulation_steps": batch.accumulation,
                "num_params": self.workload.model.num_params,
                "num_trainable_params": self.workload.model.num_params,
                "activation_bytes_per_record": activation_bytes_per_record(self.workload)
                * self.hidden.activations,
                "peak_memory_bytes": self._allocated(max(peaks.values())),
                "peak_reserved_bytes": max(peaks.values()) - self.hidden.context_bytes,
                "device_memory_bytes": machine.device_bytes,
                "host_peak_memory_bytes": host_bytes / machine.ranks_per_node,
                **{
                    f"{phase}_peak_memory_bytes": self._allocated(peak)
                    for phase, peak in peaks.items()
                    if phase != "init"
                },
            }
        )

    def throughput(self, candidate: Candidate) -> float | None:
        """Return what a configuration is worth without noise, samples/s; None if it does not fit."""
        value = float(self.throughputs(self.knobs([candidate]))[0])
        return value or None

    def throughputs(self, knobs: Knobs) -> Array:
        """Return samples/s of configurations without noise, 0 where they do not fit."""
        memory_, times_ = self._evaluate(knobs)
        machine = self.workload.machine
        fits = (memory_.peak <= machine.device_bytes) & (memory_.host <= machine.host_bytes)
        records = knobs.micro * knobs.accumulation * machine.num_ranks
        return np.where(fits, records / times_.all, 0.0)

    def ranked(self, grid: Grid, count: int = 1) -> list[Optimum]:
        """Return the ``count`` best configurations of a space, the best first."""
        found = []
        for knobs, candidates in grid.stages.values():
            worth = self.throughputs(knobs)
            best = np.argsort(worth)[-count:]
            found += [Optimum(candidates[at], float(worth[at])) for at in best if worth[at] > 0]
        if not found:
            raise ValueError(f"nothing of {self.workload.name} fits with seed {self._seed}")
        return sorted(found, key=lambda one: -one.throughput)[:count]

    def by_formulas(self) -> Surface:
        """Return the surface with the same constants, and without errors that no formula says."""
        names = ("group_time", "knob_time", "structure_time", "group_memory", "structure_memory")
        formulas = dataclasses.replace(self._formulas, **dict.fromkeys(names, 0.0))
        return Surface(self.workload, self._seed, formulas)

    def knobs(self, candidates: Sequence[Candidate]) -> Knobs:
        """Return configurations as arrays, with DeepSpeed's defaults for what they and the user's own do not say."""
        return _knobs([_row(self.workload, candidate) for candidate in candidates])

    def _evaluate(self, knobs: Knobs) -> tuple[Memory, Times]:
        formulas = self._formulas
        memory_: Memory = formulas.costs.memory(self.workload, knobs, self.hidden)
        if self._seed is None:
            return memory_, formulas.costs.times(self.workload, knobs, self.hidden, memory_.peak)
        group, structure = self._codes(knobs)
        bytes_factor = np.exp(
            formulas.group_memory * _normal(group, self._seed, 1)
            + formulas.structure_memory * _normal(structure, self._seed, 2)
        )
        context = self.hidden.context_bytes
        memory_ = Memory(
            *((getattr(memory_, phase) - context) * bytes_factor + context for phase in ("init", "forward")),
            *((getattr(memory_, phase) - context) * bytes_factor + context for phase in ("backward", "step")),
            memory_.host,
        )
        times_: Times = formulas.costs.times(self.workload, knobs, self.hidden, memory_.peak)
        error = formulas.group_time * _normal(group, self._seed, 3)
        error += formulas.structure_time * _normal(structure, self._seed, 4)
        for number, name in enumerate(_LIVE):
            values, where = np.unique(knobs.stage + 4 * getattr(knobs, name), return_inverse=True)
            effect = _normal(_mixed([values, np.full(values.shape, float(number))]), self._seed, 7)
            error += formulas.knob_time * effect[where.reshape(-1)]
        factor = np.exp(error)
        return memory_, Times(times_.forward * factor, times_.backward * factor, times_.step * factor)

    @staticmethod
    def _codes(knobs: Knobs) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Numbers that name the group of a configuration, and its structure: all but the batch."""
        group = _mixed([knobs.stage, knobs.offload_optimizer, knobs.offload_param])
        fields = [getattr(knobs, field.name) for field in dataclasses.fields(Knobs)]
        structure = _mixed(
            [field for field in fields if field is not knobs.micro and field is not knobs.accumulation]
        )
        return group, structure

    def _noise(self, knobs: Knobs, repeat: int) -> float:
        if self._seed is None:
            return 1.0
        _, structure = self._codes(knobs)
        code = _mixed([structure.astype(np.float64), knobs.micro, np.array([float(repeat)])])
        is_outlier = float(_uniform(code, self._seed, 6)[0]) < self._formulas.outliers
        noise = float(np.exp(self._formulas.noise * _normal(code, self._seed, 5))[0])
        return noise * (OUTLIER_FACTOR if is_outlier else 1.0)

    def _allocated(self, peak: float) -> float:
        """Bytes of tensors, as torch counts them: without what is lost to fragmentation, and without the context."""
        return (peak - self.hidden.context_bytes) / (1 + self.hidden.fragmentation)

    def _out_of_memory(self, candidate: Candidate, phase: str, peak: float) -> Failure:
        requested = int(min(64 * 2**20 * candidate.batch.micro_batch_size, 2 * 2**30))
        missing = peak - self.workload.machine.device_bytes
        allocated = int(self.workload.machine.device_bytes - min(requested, missing) / 2)
        message = f"OutOfMemoryError: CUDA out of memory. Tried to allocate {requested / 2**20:.2f} MiB"
        return Failure(FailureKind.DEVICE_OOM, message, phase, requested, allocated, 0)


class Grid:
    """Every legal configuration of a workload's space, as arrays; of the space's stages, or of those given."""

    def __init__(self, workload: Workload, space: Space, stages: Sequence[int] | None = None) -> None:
        # No larger batch is looked at than activations leave memory for.
        largest = workload.machine.device_bytes / (0.8 * activation_bytes_per_record(workload))
        ladder = space.batch_size_grid
        sizes = [ladder.split(position) for position in range(ladder.position(largest) + 1)]
        self.stages: dict[int, tuple[Knobs, Sequence[Candidate]]] = {}
        for stage in space.stages if stages is None else stages:
            candidates = _Candidates(_legal_structures(space, stage), sizes)
            if not candidates:
                continue
            once = _knobs([_row(workload, candidates[idx]) for idx in range(0, len(candidates), len(sizes))])
            columns = {
                field.name: np.repeat(getattr(once, field.name), len(sizes))
                for field in dataclasses.fields(Knobs)
            }
            count = len(once.stage)
            columns["micro"] = np.tile(np.array([float(size.micro_batch_size) for size in sizes]), count)
            columns["accumulation"] = np.tile(np.array([float(size.accumulation) for size in sizes]), count)
            self.stages[stage] = Knobs(**columns), candidates


def _row(workload: Workload, candidate: Candidate) -> dict[str, float]:
    settings = dict(candidate.settings)
    row = {
        "stage": float(candidate.stage),
        "micro": float(candidate.batch.micro_batch_size),
        "accumulation": float(candidate.batch.accumulation),
    }
    for name, path in _PATHS.items():
        value = settings.get(_ZERO + path, _own_value(workload, path))
        row[name] = _number(name, candidate.stage, value)
    if not row["offload_optimizer"]:
        row["ratio"] = 1.0
    return row


def _knobs(rows: Sequence[Mapping[str, float]]) -> Knobs:
    return Knobs(**{name: np.array([row[name] for row in rows], dtype=np.float64) for name in rows[0]})


def _own_value(workload: Workload, path: str) -> Any:
    value: Any = workload.own_zero
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return _DEFAULTS[path] if value is None else value


class _Candidates(Sequence[Candidate]):
    """Every structure with every batch, made when asked for."""

    def __init__(
        self, structures: Sequence[tuple[int, tuple[tuple[str, Any], ...]]], sizes: Sequence[Any]
    ) -> None:
        self._structures, self._sizes = structures, sizes

    def __len__(self) -> int:
        return len(self._structures) * len(self._sizes)

    def __getitem__(self, idx: Any) -> Any:
        stage, settings = self._structures[idx // len(self._sizes)]
        return Candidate(stage, settings, self._sizes[idx % len(self._sizes)])


def _legal_structures(space: Space, stage: int) -> list[tuple[int, tuple[tuple[str, Any], ...]]]:
    """Every legal combination of a stage's knobs; legality depends on no batch and no size, so sizes are left out of it."""
    knobs = space.knobs(stage)
    free = [knob for knob in knobs if knob.counts_params]
    bound = [knob for knob in knobs if not knob.counts_params]
    result = []
    for structure in space.structures(stage, bound):
        if space.illegal_reason(space.candidate(structure, 0)) is not None:
            continue
        for values in itertools.product(*(knob.values for knob in free)):
            settings = dict(structure.settings) | dict(zip((knob.path for knob in free), values, strict=True))
            result.append((stage, tuple(sorted(settings.items()))))
    return list(dict.fromkeys(result))


@functools.cache
def _drawn(seed: int) -> Hidden:
    random = np.random.default_rng([seed, 20_260])
    usual = Hidden()
    return Hidden(
        activations=float(random.uniform(0.85, 1.15)),
        temporaries=float(random.uniform(0.8, 1.2)),
        fragmentation=float(random.uniform(0.02, 0.08)),
        context_bytes=float(random.uniform(0.6e9, 1.6e9)),
        bucket_copies=float(random.uniform(2.0, 4.5)),
        gemm=float(random.uniform(0.6, 0.8)),
        gemm_half_tokens=usual.gemm_half_tokens * float(random.uniform(0.5, 1.6)),
        bandwidth=float(random.uniform(0.7, 1.1)),
        overlap=float(random.uniform(0.55, 0.95)),
        contention=float(random.uniform(0.02, 0.12)),
        host=float(random.uniform(0.7, 1.5)),
        pressure=float(random.uniform(0.05, 0.25)),
        hook_s=usual.hook_s * float(random.uniform(0.6, 1.6)),
    )


def _number(name: str, stage: int, value: Any) -> float:
    if stage not in _LIVE[name]:
        return _DEAD.get(name, 1.0)  # equal for all, so that it names no other structure
    if name == "overlap" and value is None:
        return float(stage == 3)
    if name in ("offload_optimizer", "offload_param"):
        return float(value in ("cpu", "nvme"))
    return float(value)


def _mixed(columns: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.uint64]:
    """Hash rows of numbers (Steele, Lea, Flood 2014, SplitMix64's finalizer)."""
    code = np.full(columns[0].shape, 0x9E3779B97F4A7C15, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for column in columns:
            code = code ^ np.ascontiguousarray(column, dtype=np.float64).view(np.uint64)
            code = (code ^ (code >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            code = (code ^ (code >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            code = code ^ (code >> np.uint64(31))
    return code


def _uniform(code: npt.NDArray[np.uint64], seed: int, salt: int) -> Array:
    salted = np.full(code.shape, float(seed * 64 + salt))
    mixed = _mixed([salted, code.view(np.float64)])
    return ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53


def _normal(code: npt.NDArray[np.uint64], seed: int, salt: int) -> Array:
    """Standard normal numbers by Box and Muller 1958."""
    first, second = _uniform(code, seed, salt), _uniform(code, seed, salt + 1000)
    return np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)
