"""Memory and time of one DeepSpeed configuration of a transformer, from published formulas. Pure; arrays in, arrays out.

None of this is shared with ``dstrial.dsat``, whose predictions come from dry runs of the engine itself.

Sources:

- model states per stage: Rajbhandari et al. 2020 ("ZeRO"), section 5, with K = 12 for Adam in mixed precision; volumes per
  stage: section 7 (2 P for stages 0 to 2, 3 P for stage 3); contiguous gradients against fragmentation: section 6.3;
- activations per layer, s b h (34 + 5 a s / h), of which the second term is spared by recomputing attention, and those of the
  output layer, 4 s b V: Korthikanti et al. 2022 ("Reducing Activation Recomputation"), section 4;
- FLOPs of an iteration, 72 B s l h^2 (1 + s / 6h) + 6 B s h V, a third of it more with recomputation: Narayanan et al. 2021
  ("Efficient Large-Scale Language Model Training"), appendix;
- collectives on a ring, (n - 1) alpha + (n - 1) / n m beta, twice that for an all-reduce: Thakur, Rabenseifner, Gropp 2005;
- roofline: Williams, Waterman, Patterson 2009; tiles in waves: NVIDIA, "Matrix Multiplication Background"; element-wise
  operations limited by memory: Ivanov et al. 2021 ("Data Movement Is All You Need");
- offload: Ren et al. 2021 ("ZeRO-Offload"), sections 4.1 and 5; Rajbhandari et al. 2021 ("ZeRO-Infinity"), section 6.1, for
  parameters fetched in slices by every rank; twin-flow's ratio: DeepSpeed's blog "ZeRO-Offload++" (2023);
- bytes of buckets, 2 to 4.5 times their size with overlap: the description of ``overlap_comm`` in transformers' guide to
  DeepSpeed; what ``stage3_*`` hold and spare: DeepSpeed's documentation of its JSON.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
from dsat_workloads import Workload

Array = npt.NDArray[np.float64]

_HALF = 2.0
_ADAM_BYTES = 12.0
_ADAM_TRAFFIC_BYTES = 34.0  # reads three states and a gradient, writes three states and a half-precision copy
_TILE = (128, 256)
_NVLINK_LATENCY_S = 6e-6
_LAUNCH_S = 7e-6
_KERNELS_PER_LAYER = (28, 56)  # forward, backward
_GEMM_SHARES = (
    (3, 3),
    (1, 1),
    (4, 4),
    (4, 1),
)  # (share of FLOPs, columns in widths) of a layer's four products


@dataclasses.dataclass(frozen=True, slots=True)
class Knobs:
    """Configurations, one per entry; arrays of one shape. Buckets and sizes are in elements, switches are 0 or 1."""

    stage: Array
    micro: Array
    accumulation: Array
    reduce_bucket: Array
    allgather_bucket: Array
    overlap: Array
    contiguous: Array
    reduce_scatter: Array
    round_robin: Array
    prefetch: Array
    persistence: Array
    live: Array
    reuse: Array
    sub_group: Array
    offload_optimizer: Array
    ratio: Array  # share of the optimizer that is on the host
    offload_param: Array

    @property
    def on_host(self) -> Array:
        return self.offload_optimizer * self.ratio


@dataclasses.dataclass(frozen=True, slots=True)
class Hidden:
    """By how much this machine and this model differ from the formulas; searches do not see it."""

    activations: float = 1.0  # factor of activation memory
    temporaries: float = 1.0  # factor of short-lived memory
    fragmentation: float = 0.05  # share of memory that the allocator cannot use
    context_bytes: float = 1.1e9  # taken by the driver
    bucket_copies: float = 3.0  # how many buckets' worth is alive with overlap
    gemm: float = 0.72  # share of the peak that large matrix products reach
    gemm_half_tokens: float = 450.0  # tokens at which half of that is reached
    bandwidth: float = 1.0  # factor of links
    overlap: float = 0.8  # share of communication that can be hidden at most
    contention: float = 0.05  # slow-down of computing while communicating
    host: float = 1.0  # factor of the CPU's time
    pressure: float = 0.15  # slow-down at the very limit of memory
    hook_s: float = 120e-6  # of Python per gathered module in stage 3


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one device at most in each phase, and of one node's host."""

    init: Array
    forward: Array
    backward: Array
    step: Array
    host: Array

    @property
    def peak(self) -> Array:
        return np.maximum.reduce([self.init, self.forward, self.backward, self.step])


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one optimizer step."""

    forward: Array
    backward: Array
    step: Array

    @property
    def all(self) -> Array:
        return self.forward + self.backward + self.step


def flops_per_record(workload: Workload) -> float:
    """Return model FLOPs of one record, forward and backward, without recomputation."""
    model = workload.model
    seq, width = model.sequence, model.width
    layers = 72 * seq * model.num_layers * width**2 * (1 + seq / (6 * width))
    return layers + 6 * seq * width * model.vocabulary


def activation_bytes_per_record(workload: Workload) -> float:
    """Return what forward keeps for backward, of one record."""
    model = workload.model
    seq, width = model.sequence, model.width
    layer = _layer_bytes(workload)
    kept = 2 * seq * width if model.recomputes else layer
    return model.num_layers * kept + 4 * seq * width + 4 * seq * model.vocabulary


def _layer_bytes(workload: Workload) -> float:
    model = workload.model
    scores = 5 * model.num_heads * model.sequence / model.width if model.keeps_scores else 0.0
    return model.sequence * model.width * (34 + scores)


def memory(workload: Workload, knobs: Knobs, hidden: Hidden) -> Memory:
    model, machine = workload.model, workload.machine
    params, ranks = model.num_params, machine.num_ranks
    stage = knobs.stage
    held = np.where(stage >= 3, 1 / ranks, 1.0) * _HALF * params * (1 - knobs.offload_param)
    gradients = np.where(stage >= 2, 1 / ranks, 1.0) * _HALF * params
    gradients = np.where(knobs.on_host > 0, gradients * (1 - knobs.ratio), gradients)
    states = np.where(stage >= 1, 1 / ranks, 1.0) * _ADAM_BYTES * params * (1 - knobs.on_host)
    buckets = _bucket_bytes(knobs, hidden)
    layer_params = 12.0 * model.width**2
    live = np.where(
        stage >= 3,
        _HALF * np.minimum(np.minimum(knobs.live, knobs.prefetch + 2 * layer_params), params),
        0.0,
    )
    kept_live = np.where(
        stage >= 3, _HALF * np.minimum(np.minimum(knobs.reuse, knobs.live), params) * 0.5, 0.0
    )
    fixed = held + gradients + states + buckets + hidden.context_bytes
    kept = knobs.micro * activation_bytes_per_record(workload) * hidden.activations
    layer = knobs.micro * _layer_bytes(workload) * hidden.temporaries
    logits = knobs.micro * model.sequence * model.vocabulary * 6.0 * hidden.temporaries
    fragmentation = hidden.fragmentation + np.where(knobs.contiguous > 0, 0.0, 0.04)
    share = 1 + fragmentation
    # Gradients of stages 0 and 1 exist only from the first backward on; with accumulation they stay.
    forward = (fixed + kept + logits + live + kept_live) * share
    backward = (
        fixed + kept + logits + np.where(model.recomputes, layer, 0.3 * layer) + live + kept_live
    ) * share
    own = np.where(stage >= 1, params / ranks, params) * (1 - knobs.on_host)
    in_step = np.where(stage >= 3, np.minimum(knobs.sub_group, own), own) * 4.0 * hidden.temporaries
    gathered = np.where((stage == 1) | (stage == 2), np.minimum(knobs.allgather_bucket, params) * _HALF, 0.0)
    step = (fixed + in_step + gathered) * share
    init = (
        held + states + np.where(stage >= 3, _HALF * params / ranks + 2 * layer_params, _HALF * params)
    ) * share
    on_node = machine.ranks_per_node / ranks
    host = (knobs.on_host * (_ADAM_BYTES + 4.0) + knobs.offload_param * _HALF * 1.5) * params * on_node
    context = hidden.context_bytes
    return Memory(init + context, forward, backward, step, host + 30e9)


def _bucket_bytes(knobs: Knobs, hidden: Hidden) -> Array:
    copies = np.where(knobs.stage >= 3, 1 + 0.3 * (hidden.bucket_copies - 1), hidden.bucket_copies)
    reduce = _HALF * knobs.reduce_bucket * np.where(knobs.overlap > 0, copies, 1.0)
    is_scattered = (knobs.stage < 3) & (knobs.contiguous == 0) & (knobs.offload_optimizer == 0)
    reduce = np.where(is_scattered, 0.3 * reduce, reduce)
    prefetch = np.where(knobs.stage >= 3, _HALF * knobs.prefetch, 0.0)
    return np.where(knobs.stage >= 1, reduce, 0.0) + prefetch


def times(workload: Workload, knobs: Knobs, hidden: Hidden, peak_bytes: Array) -> Times:
    """Return the times of configurations, whose peak memory is known."""
    model, machine = workload.model, workload.machine
    params, ranks, stage = model.num_params, machine.num_ranks, knobs.stage
    forward_s, backward_s = _compute(workload, knobs, hidden)
    ring = _Ring(workload, hidden)
    layer_params = 12.0 * model.width**2
    bytes_all = _HALF * params
    is_overlapping = knobs.overlap * hidden.overlap

    # Stage 3: parameters are gathered for forward and again for backward.
    small = np.where(knobs.persistence >= 4 * model.width, 0.0, 3.0) + np.where(
        knobs.persistence >= model.width, 0.0, 8.0
    )
    num_gathers = model.num_layers * (4.0 + small)
    gather = np.where(stage >= 3, ring.gather(bytes_all, num_gathers), 0.0)
    spared = np.minimum(0.5 * np.minimum(knobs.reuse, knobs.live) / params, 0.9)
    ahead = np.clip(np.minimum(knobs.prefetch, knobs.live) / layer_params, 0.15, 1.0)
    hidden_share = np.where(knobs.overlap > 0, ahead * hidden.overlap, 0.3 * ahead * hidden.overlap)
    fetched = np.where(knobs.offload_param > 0, _pcie(workload, hidden, bytes_all / ranks), 0.0)
    gather_forward = _exposed(gather + fetched, forward_s, hidden_share)
    gather_backward = _exposed((gather + fetched) * (1 - spared), backward_s, hidden_share)
    hooks = np.where(stage >= 3, model.num_layers * 6 * hidden.hook_s, 0.0)
    forward_s = np.maximum(forward_s, hooks) + 0.15 * hooks + gather_forward
    backward_s = np.maximum(backward_s, 1.5 * hooks) + 0.2 * hooks + gather_backward

    # Gradients: at the last micro batch in stages 0 and 1, at each in stages 2 and 3.
    num_buckets = np.ceil(params / np.minimum(np.where(stage == 0, 5e8, knobs.reduce_bucket), params))
    scatter = ring.gather(bytes_all, num_buckets)
    is_all_reduce = (stage <= 1) | (knobs.reduce_scatter == 0)
    reduce = np.where(is_all_reduce & (stage != 1), 2.0, 1.0) * scatter
    reduce = np.where((stage == 1) & (knobs.contiguous == 0), 1.15 * reduce, reduce)
    tail = reduce / num_buckets
    per_micro = np.where(stage >= 2, knobs.accumulation, 1.0)
    exposed = np.maximum(_exposed(reduce, backward_s, is_overlapping), np.minimum(tail, reduce))
    reduce_s = np.where(knobs.overlap > 0, exposed, reduce) * per_micro
    copied = np.where(knobs.contiguous > 0, 2.5, 1.0) * bytes_all / machine.memory_bytes_per_s * per_micro
    slowed = knobs.overlap * hidden.contention * np.minimum(reduce, backward_s) * per_micro

    step_s = _step(workload, knobs, hidden, ring)
    to_host = _to_host(workload, knobs, hidden, backward_s, per_micro)
    pressure = hidden.pressure * np.clip((peak_bytes / machine.device_bytes - 0.93) / 0.07, 0.0, 1.0) ** 2
    accumulated = knobs.accumulation
    backward_all = (
        backward_s * accumulated + reduce_s + slowed + to_host + copied * np.where(stage == 0, 0.0, 1.0)
    )
    return Times(forward_s * accumulated * (1 + pressure), backward_all * (1 + pressure), step_s)


def _compute(workload: Workload, knobs: Knobs, hidden: Hidden) -> tuple[Array, Array]:
    """Forward and backward of one micro batch without communication."""
    model, machine = workload.model, workload.machine
    tokens = knobs.micro * model.sequence
    width = model.width
    shares = np.zeros_like(tokens)
    for share, columns in _GEMM_SHARES:
        tiles = np.ceil(tokens / _TILE[0]) * np.ceil(columns * width / _TILE[1])
        waves = np.ceil(tiles / machine.num_multiprocessors) * machine.num_multiprocessors
        shares = shares + share / 12 * (0.5 + 0.5 * waves / tiles)  # half of a tail wave is hidden
    reached = hidden.gemm * tokens / (tokens + hidden.gemm_half_tokens) * width / (width + 250)
    flops = flops_per_record(workload) * knobs.micro / 3
    products = flops / (machine.flops_per_s * reached) * shares
    traffic = (
        2.2 * knobs.micro * _layer_bytes(workload) * model.num_layers / (0.8 * machine.memory_bytes_per_s)
    )
    launches = [model.num_layers * count * _LAUNCH_S for count in _KERNELS_PER_LAYER]
    forward = np.maximum(products + traffic, launches[0]) + 0.1 * launches[0]
    backward = np.maximum(2 * (products + traffic), launches[1]) + 0.1 * launches[1]
    return forward, backward + (forward if model.recomputes else 0.0)


class _Ring:
    """Times of ring collectives over all ranks: the slowest link on the ring counts."""

    def __init__(self, workload: Workload, hidden: Hidden) -> None:
        machine = workload.machine
        self._ranks = machine.num_ranks
        between = machine.num_nodes > 1
        speed = machine.network_bytes_per_s if between else machine.node_bytes_per_s
        self._bytes_per_s = speed * hidden.bandwidth
        hops = self._ranks - 1
        crossing = machine.num_nodes if between else 0
        self._start_s = (
            (hops - crossing) * _NVLINK_LATENCY_S / 3 + crossing * machine.network_latency_s + 15e-6
        )

    def gather(self, size_bytes: Any, num_calls: Any) -> Array:
        """An all-gather or a reduce-scatter of so many bytes in so many calls."""
        share = (self._ranks - 1) / self._ranks
        return np.asarray(
            num_calls * self._start_s + share * size_bytes / self._bytes_per_s, dtype=np.float64
        )


def _pcie(workload: Workload, hidden: Hidden, size_bytes: Any) -> Any:
    machine = workload.machine
    return size_bytes * machine.ranks_per_switch / (machine.pcie_bytes_per_s * hidden.bandwidth)


def _exposed(communication: Array, compute: Array, share: Array) -> Array:
    """What is not hidden behind computing, of which a share can hide something."""
    return communication - np.minimum(communication * share, compute * 0.9)


def _to_host(workload: Workload, knobs: Knobs, hidden: Hidden, backward_s: Array, per_micro: Array) -> Array:
    """Copies of gradients to the host, partly behind backward."""
    ranks = workload.machine.num_ranks
    copies = _pcie(workload, hidden, _HALF * workload.model.num_params / ranks) * knobs.on_host
    # Stages 1 and 2 accumulate on the host: read, add, write, for every micro batch.
    often = np.where(knobs.stage >= 3, 1.5, 2.0) * np.where(knobs.round_robin > 0, 0.6, 1.0)
    return _exposed(copies * often, backward_s, 0.5 + 0.3 * knobs.overlap) * per_micro


def _step(workload: Workload, knobs: Knobs, hidden: Hidden, ring: _Ring) -> Array:
    model, machine = workload.model, workload.machine
    params, ranks, stage = model.num_params, machine.num_ranks, knobs.stage
    own = np.where(stage >= 1, params / ranks, params)
    on_device = own * (1 - knobs.on_host) * _ADAM_TRAFFIC_BYTES / (0.75 * machine.memory_bytes_per_s)
    norm = own * 6.0 / machine.memory_bytes_per_s + 300e-6
    groups = np.where(stage >= 3, np.ceil(own / np.minimum(knobs.sub_group, own)), 1.0)
    adam = params / machine.num_nodes * machine.cpu_adam_s_per_param * hidden.host * knobs.on_host
    adam = np.where(knobs.sub_group < own, 0.93 * adam, adam)  # copies behind the next group's arithmetic
    back = _pcie(workload, hidden, _HALF * own) * knobs.on_host
    num_buckets = np.ceil(params / np.minimum(knobs.allgather_bucket, params))
    gather = np.where((stage == 1) | (stage == 2), ring.gather(_HALF * params, num_buckets), 0.0)
    balanced = np.where((knobs.round_robin > 0) & (knobs.on_host == 0), 1.02, 1.0)
    # Twin-flow: the two shares of the optimizer run at the same time.
    both = np.where(knobs.ratio < 1, np.maximum(on_device, adam), on_device + adam)
    return (both + back + norm) * balanced + gather + groups * 400e-6 + 2e-3
