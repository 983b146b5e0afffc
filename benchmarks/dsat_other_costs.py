"""Memory and time of DeepSpeed configurations by other formulas than ``dsat_surface_costs``. Pure; arrays in, arrays out.

For judging what was developed on the first formulas: saturating instead of rational efficiency, power means instead of sums of
computing and communication, trees instead of rings, an optimizer whose host share runs beside the backward pass, waste that
grows with activations. Sources as there, and for power means of roofline terms: Cabezas and Pueschel 2014.
"""

from __future__ import annotations

import numpy as np
from dsat_surface_costs import (
    Array,
    Hidden,
    Knobs,
    Memory,
    Times,
    activation_bytes_per_record,
    flops_per_record,
)
from dsat_workloads import Workload

_HALF = 2.0
_MIXED = 3.0  # exponent of the mean of what runs at the same time


def memory(workload: Workload, knobs: Knobs, hidden: Hidden) -> Memory:
    model, machine = workload.model, workload.machine
    params, ranks, stage = model.num_params, machine.num_ranks, knobs.stage
    weights = np.where(stage >= 3, 1 / ranks, 1.0) * _HALF * params * (1 - knobs.offload_param)
    gradients = np.where(stage >= 2, 1 / ranks, 1.0) * _HALF * params * (1 - 0.7 * knobs.on_host)
    states = np.where(stage >= 1, 1 / ranks, 1.0) * 12.0 * params * (1 - knobs.on_host)
    copies = np.where(knobs.overlap > 0, 0.7 * hidden.bucket_copies, 1.0)
    buckets = np.where(
        stage >= 1, _HALF * np.minimum(knobs.reduce_bucket, 1.1 * params) * copies, 0.0
    ) * np.where((knobs.contiguous > 0) | (stage >= 3), 1.0, 0.2)
    gathered = np.minimum(np.minimum(0.35 * knobs.reuse + 1.5 * knobs.prefetch, knobs.live), params)
    gathered = np.where(stage >= 3, _HALF * gathered + 2 * 12.0 * model.width**2 * _HALF, 0.0)
    kept = knobs.micro * activation_bytes_per_record(workload) * hidden.activations
    loss = knobs.micro * model.sequence * model.vocabulary * 8.0 * hidden.temporaries
    waste = (
        hidden.fragmentation * (1.2 * kept + buckets) + np.where(knobs.contiguous > 0, 0.0, 0.03) * weights
    )
    fixed = weights + gradients + states + buckets + hidden.context_bytes
    own = np.where(stage >= 1, params / ranks, params) * (1 - knobs.on_host)
    updated = np.where(stage >= 3, np.minimum(knobs.sub_group, own), own) * 6.0 * hidden.temporaries
    back = np.where((stage == 1) | (stage == 2), np.minimum(knobs.allgather_bucket, params) * _HALF, 0.0)
    forward = fixed + kept + loss + gathered + waste
    backward = fixed + 1.04 * kept + 0.8 * loss + gathered + 1.5 * waste
    step = fixed + np.maximum(updated, back) + hidden.fragmentation * fixed
    on_node = machine.ranks_per_node / ranks
    host = (knobs.on_host * 16.0 + knobs.offload_param * 3.0) * params * on_node + 40e9
    return Memory(
        weights + states + 1.1 * _HALF * params / np.where(stage >= 3, ranks, 1.0),
        forward,
        backward,
        step,
        host,
    )


def times(workload: Workload, knobs: Knobs, hidden: Hidden, peak_bytes: Array) -> Times:
    model, machine = workload.model, workload.machine
    params, ranks, stage = model.num_params, machine.num_ranks, knobs.stage
    tokens = knobs.micro * model.sequence
    reached = hidden.gemm * 1.05 * (1 - np.exp(-(tokens + 200) / (2.0 * hidden.gemm_half_tokens)))
    products = flops_per_record(workload) * knobs.micro / 3 / (machine.flops_per_s * reached)
    traffic = 1.6 * activation_bytes_per_record(workload) * knobs.micro / machine.memory_bytes_per_s
    launches = model.num_layers * 30 * 6e-6
    forward = _together(products + traffic, launches + 0 * tokens)
    backward = _together(2 * products + traffic, 2 * launches + 0 * tokens) + (
        forward if model.recomputes else 0.0
    )

    speed = (
        machine.network_bytes_per_s if machine.num_nodes > 1 else machine.node_bytes_per_s
    ) * hidden.bandwidth
    start_s = (machine.network_latency_s + 8e-6) * np.log2(2 * ranks)
    moved = _HALF * params * (ranks - 1) / ranks / speed

    # Stage 3: gathers of each layer beside the layer before, as far as prefetching reaches.
    small = np.where(knobs.persistence >= model.width, 6.0, 13.0)
    calls = model.num_layers * np.where(knobs.persistence >= 4 * model.width, 3.0, small)
    pcie = _HALF * params / ranks * machine.ranks_per_switch / (machine.pcie_bytes_per_s * hidden.bandwidth)
    gather = np.where(stage >= 3, moved + calls * start_s + knobs.offload_param * pcie, 0.0)
    kept = np.clip(0.6 * np.minimum(knobs.reuse, knobs.live) / params, 0.0, 0.8)
    depth = hidden.overlap * np.clip(0.3 + 0.35 * np.log10(1 + knobs.prefetch / 4e6), 0.3, 1.0)
    depth = np.where(knobs.overlap > 0, depth, 0.5 * depth)
    hooks = np.where(stage >= 3, model.num_layers * 5 * hidden.hook_s, 0.0)
    forward = _beside(_together(forward, hooks), gather, depth)
    backward = _beside(_together(backward, 1.6 * hooks), gather * (1 - kept), depth)

    # Gradients, at the last micro batch or at each.
    buckets = np.ceil(params / np.minimum(np.where(stage == 0, 5e8, knobs.reduce_bucket), params))
    doubled = np.where((stage == 0) | ((stage >= 2) & (knobs.reduce_scatter == 0)), 1.8, 1.0)
    reduce = doubled * moved + buckets * 1.5 * start_s
    often = np.where(stage >= 2, knobs.accumulation, 1.0)
    shown = _beside(backward, reduce * (1 - 1 / buckets), hidden.overlap) - backward + reduce / buckets
    sent = (
        np.where(knobs.overlap > 0, shown + hidden.contention * np.minimum(reduce, backward), reduce) * often
    )
    copied = np.where(stage == 0, 0.0, np.where(knobs.contiguous > 0, 3.0, 1.5)) * _HALF * params * often
    down = (
        pcie
        * knobs.on_host
        * often
        * np.where(stage >= 3, 1.2, 1.6)
        * np.where(knobs.round_robin > 0, 0.75, 1.0)
    )
    down = np.maximum(down - 0.6 * backward * often, 0.25 * down)

    own = np.where(stage >= 1, params / ranks, params)
    device = own * (1 - knobs.on_host) * 38.0 / (0.8 * machine.memory_bytes_per_s)
    adam = params / machine.num_nodes * machine.cpu_adam_s_per_param * hidden.host * knobs.on_host
    adam = np.maximum(adam - 0.25 * backward, 0.7 * adam) + np.where(knobs.sub_group < own, 0.0, 0.1 * adam)
    back = pcie * knobs.on_host * 1.3
    chunks = np.ceil(params / np.minimum(knobs.allgather_bucket, params))
    gathered = np.where((stage == 1) | (stage == 2), moved + chunks * start_s, 0.0)
    slices = np.where(stage >= 3, np.ceil(own / np.minimum(knobs.sub_group, own)), 1.0)
    step = _together(device, adam + back) + gathered + slices * 600e-6 + 3e-3

    full = np.clip((peak_bytes / machine.device_bytes - 0.9) / 0.1, 0.0, 1.0)
    slow = 1 + hidden.pressure * full**1.5
    times = knobs.accumulation
    passes = backward * times + sent + copied / machine.memory_bytes_per_s + down
    return Times(forward * times * slow, passes * slow, step)


def _together(one: Array, other: Array) -> Array:
    """Return the time of two things that run at the same time and disturb each other."""
    return (one**_MIXED + other**_MIXED) ** (1 / _MIXED)


def _beside(compute: Array, communication: Array, share: Array | float) -> Array:
    """Return the time of computing and of communication, a share of which can run beside it."""
    return _together(compute, share * communication) + (1 - share) * communication
