"""Compute memory, communication and operations of each ZeRO stage from a dry run.

The dry run executes a step of the model on one rank without ZeRO. Formulas add what ZeRO needs (table in docs/how-to/memory.md).

Source: Rajbhandari et al. 2020 (ZeRO), section 3, and DeepSpeed 0.19 ``runtime/zero``.
``tests/engine/test_memory_of_engines.py`` compares the results with DeepSpeed's engines.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from dstrial.dsat.predictor.features import ZeroFeatures
from dstrial.engine.dryrun.values import (
    Collective,
    DryRunResult,
    Line,
    MemoryForm,
    ModelTrace,
    PhaseMemory,
    upper_envelope,
)

_MASTER_BYTES = 4  # of a float32 master weight; ZeRO keeps master weights in fp32 training, too
_FLAT_ELEMENTS = 5e8  # most gradient elements that stage 0 reduces at once; no DeepSpeed key sets it
_PASS_OPERATIONS = {0: -9, 1: -6, 2: 9, 3: 75}
_STEP_OPERATIONS = {0: 45, 1: 40, 2: 28, 3: 39}
"""ZeRO stage -> operations per tensor that ZeRO adds to the dry run's: in forward and backward; in an optimizer step."""
_GATHERS = 0.54  # all-gathers of stage 3 per tensor and pass, as counted; small tensors are kept or gathered together


def zero_run(
    trace: ModelTrace, zero: ZeroFeatures, *, is_accumulating: bool, is_cpu: bool = False
) -> DryRunResult:
    """Return memory, FLOPs and communication of one rank with these ZeRO settings.

    ``trace`` is the dry run of the model. ``is_accumulating``: a step has several micro batches. ``is_cpu``: the device is the
    host, so that both share one memory.
    """
    gradients = zero.bytes_per_value * trace.trainable_parameters
    inner_collectives, last_collectives = _collectives(trace, zero, gradients)
    device, host, parts = _memory(trace, zero, gradients, is_accumulating=is_accumulating)
    if is_cpu and host:
        device = MemoryForm(
            tuple(
                PhaseMemory(each.phase, tuple(Line(line.base + host, line.per_record) for line in each.lines))
                for each in device.phases
            ),
            device.settled + host,
        )
        host = 0.0
    inner_operations = max(trace.pass_operations + _PASS_OPERATIONS[zero.stage] * trace.num_tensors, 0)
    return DryRunResult(
        device=device,
        host=MemoryForm((PhaseMemory("step", (Line(host, 0.0),)),) if host else (), host),
        parameters=trace.parameters,
        trainable_parameters=trace.trainable_parameters,
        inner_collectives=inner_collectives if is_accumulating else (),
        last_collectives=last_collectives,
        flops=trace.flops,
        tokens=trace.tokens,
        inner_operations=inner_operations if is_accumulating else 0,
        last_operations=inner_operations + _STEP_OPERATIONS[zero.stage] * trace.num_tensors,
        device_parts=parts,
        activations=trace.activations,
    )


class _RankSizes(NamedTuple):
    """Sizes, on one rank, from which :func:`_memory` computes the memory of a step."""

    owned: float  # number of parameters whose optimizer state the rank has
    here: float  # number of these whose optimizer state is on the device, not on the host
    largest: float  # bytes of the largest tensor
    copied: float  # bytes of the largest gradient if it is too large for a bucket, else 0
    held: float  # bytes of the parameters that stage 3 keeps gathered


def _rank_sizes(trace: ModelTrace, zero: ZeroFeatures) -> _RankSizes:
    width = zero.bytes_per_value
    owned = trace.owned_parameters(zero.replicas) if zero.stage else float(trace.trainable_parameters)
    largest = width * trace.largest_tensor
    held = 0.0
    if zero.stage == 3:
        live = min(zero.live_elements, zero.reuse_elements) + zero.prefetch_elements + trace.largest_tensor
        held = min(float(trace.state_bytes["parameters"]), width * live)
    copied = largest if trace.largest_tensor > zero.reduce_elements else 0
    return _RankSizes(owned, owned * (1 - zero.host_share), largest, copied, held)


def _temporary_bytes(
    trace: ModelTrace, zero: ZeroFeatures, sizes: _RankSizes, gradients: float, *, is_accumulating: bool
) -> tuple[float, float, float]:
    """Return temporary bytes: (between micro batches, while reducing, in the step).

    Between micro batches, gradients (with their buckets) wait for those of the next one. Reducing happens at the end of a
    backward pass; the last value is for the optimizer step. Memory that also lives between steps, such as parameters, is not
    included.
    """
    width, is_half, here = zero.bytes_per_value, zero.bytes_per_value == 2, sizes.here
    buckets, copied = zero.bucket_bytes, sizes.copied
    if zero.stage == 0:
        reducing = gradients + min(gradients, width * _FLAT_ELEMENTS)
        return gradients, reducing, gradients + (8 * trace.trainable_parameters if is_half else 0)
    if zero.stage == 3:
        stepping = min(zero.group_elements, here) * (_MASTER_BYTES + (width if is_half else 0))
        return 0.0, sizes.held + 2 * sizes.largest, stepping
    stepping = here * (2 * width + (_MASTER_BYTES if is_half else 0)) + copied
    offloaded = 8 * min(sizes.owned, trace.largest_tensor) if zero.host_share else 0
    if zero.stage == 1:
        reducing = gradients + buckets + (offloaded if zero.host_share else copied)
        return gradients + buckets, reducing, stepping
    # If a rank owns a part of a tensor's gradient, it keeps the whole gradient.
    carried = max(width * sizes.owned, sizes.largest) if here else 0.0
    reducing = buckets + carried + copied + (sizes.largest if is_accumulating else 0) + offloaded
    return carried, reducing, stepping


def _memory(
    trace: ModelTrace, zero: ZeroFeatures, gradients: float, *, is_accumulating: bool
) -> tuple[MemoryForm, float, dict[str, int]]:
    """Return (memory peaks on device, bytes on host, part -> device bytes).

    The parts are parameters, gradients, optimizer and buffers, each with its largest size. ``gradients`` are the bytes of all
    gradients of the model.
    """
    stage, width, sizes = zero.stage, zero.bytes_per_value, _rank_sizes(trace, zero)
    here, buckets = sizes.here, zero.bucket_bytes
    state = (_MASTER_BYTES if width == 2 or stage else 0) + _moment_bytes(trace, is_half=width == 2)
    whole = float(trace.state_bytes["parameters"])
    # AutoEP's experts are divided among the ranks that have the same ones, as their optimizer state is.
    experts = width * (trace.owned_parameters(1) - trace.trainable_parameters)
    weights = (whole + experts) / zero.replicas if stage == 3 else whole
    on_host = (sizes.owned - here) * (state + _MASTER_BYTES + width)
    if zero.has_host_params:
        on_host, weights = on_host + weights, 0.0
    settled = weights + trace.state_bytes["buffers"] + state * here
    if stage == 3:
        settled += width * here + buckets
    elif stage and zero.host_share:
        settled += sizes.largest
    carried, reducing, stepping = _temporary_bytes(
        trace, zero, sizes, gradients, is_accumulating=is_accumulating
    )
    start = settled + sizes.held + (carried if is_accumulating else 0)
    beside = buckets if stage == 2 or (stage == 1 and not is_accumulating) else 0
    phases = [
        _phase("forward", start, trace.memory),
        _phase("backward", start + beside, trace.memory),
        PhaseMemory("reduce", (Line(settled + reducing, 0.0),)),
        PhaseMemory("step", (Line(settled + stepping, 0.0),)),
    ]
    if trace.is_pipeline:
        # Buffers between stages stay. ZeRO 1 appends a bucket: ``stage_1_and_2.py`` ``reduce_gradients(pipeline_parallel=True)``.
        appended = buckets if zero.is_contiguous else 0
        for idx, name, base in ((2, "reduce", reducing + appended), (3, "step", stepping)):
            slopes = [
                line.per_record for each in trace.memory.phases if each.phase == name for line in each.lines
            ]
            phases[idx] = PhaseMemory(name, (Line(settled + base, max(slopes, default=0.0)),))
    parts = {
        "parameters": weights,
        "gradients": gradients if stage < 2 else width * here if stage == 3 else carried,
        "optimizer": state * here,
        "buffers": trace.state_bytes["buffers"] + buckets + sizes.held,
    }
    form = MemoryForm(tuple(each for each in phases if each.lines), settled)
    return form, on_host, {name: int(value) for name, value in parts.items()}


def _moment_bytes(trace: ModelTrace, *, is_half: bool) -> float:
    """Return bytes of optimizer state per trained parameter, without its fp32 weight."""
    if not trace.trainable_parameters:
        return 0.0
    measured = trace.state_bytes["optimizer"] / trace.trainable_parameters
    return max(measured - (_MASTER_BYTES if is_half else 0), 0.0)


def _phase(name: str, start: float, form: MemoryForm) -> PhaseMemory:
    """Return the peak memory of a phase that begins with ``start`` bytes allocated.

    ``form`` is the memory in the dry run, in which phases begin with ``form.settled`` bytes allocated.
    """
    lines = [line for each in form.phases if each.phase == name for line in each.lines]
    moved = upper_envelope((start + line.base - form.settled, line.per_record) for line in lines)
    return PhaseMemory(name, moved)


def _collectives(
    trace: ModelTrace, zero: ZeroFeatures, gradients: float
) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """Return collectives: (of each micro batch but a step's last, of the last one).

    ``gradients`` are the bytes of all gradients of the model.
    """
    weights, num_tensors = trace.state_bytes["parameters"], trace.num_tensors

    def one(kind: str, phase: str, num_calls: int, num_bytes: float) -> Collective:
        return Collective(kind, zero.replicas, phase, num_calls, int(num_bytes))

    def buckets(elements: float) -> int:
        return max(math.ceil(trace.trainable_parameters / max(elements, 1.0)), 1)

    if zero.stage == 3:
        # Parameters that stage 3 keeps after the forward pass are not gathered again.
        passes = 2 - zero.kept_elements(trace.parameters) / max(trace.parameters, 1)
        gathered = one(
            "all_gather", "gather", max(round(passes * _GATHERS * num_tensors), 1), passes * weights
        )
        inner = gathered, one("reduce_scatter", "reduce", buckets(zero.reduce_elements), gradients)
        return inner, inner
    elements = zero.reduce_elements if zero.stage else _FLAT_ELEMENTS
    reduced = one("all_reduce", "reduce", buckets(elements), gradients)
    if zero.stage == 0:
        return (), (reduced,)
    gathered = one("all_gather", "gather", buckets(zero.gather_elements), weights)
    return (reduced,) if zero.stage == 2 else (), (reduced, gathered)
