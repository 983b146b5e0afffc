"""Compute memory, communication and operations of each ZeRO stage from a dry run.

The dry run executes a step of the model on one rank without ZeRO. Formulas add what ZeRO needs (table in docs/how-to/memory.md).

Source: Rajbhandari et al. 2020 (ZeRO), section 3, and DeepSpeed 0.19 ``runtime/zero``.
``tests/engine/test_memory_of_engines.py`` compares the results with DeepSpeed's engines.
"""

from __future__ import annotations

import math

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


def _memory(
    trace: ModelTrace, zero: ZeroFeatures, gradients: float, *, is_accumulating: bool
) -> tuple[MemoryForm, float, dict[str, int]]:
    """Return (memory peaks on device, bytes on host, part of model -> device bytes)."""
    stage, width, trained = zero.stage, zero.bytes_per_value, trace.trainable_parameters
    is_half = width == 2
    owned = trace.owned_parameters(zero.replicas) if stage else float(trained)
    here = owned * (1 - zero.host_share)  # parameters whose optimizer state is on the device
    masters = _MASTER_BYTES if is_half or stage else 0
    state = masters + _moment_bytes(trace, is_half=is_half)
    largest = width * trace.largest_tensor
    copied = largest if trace.largest_tensor > zero.reduce_elements else 0  # not reduced in a bucket
    buckets = zero.bucket_bytes
    whole = float(trace.state_bytes["parameters"])
    # AutoEP's experts are divided among the ranks that have the same ones, as their optimizer state is.
    experts = width * (trace.owned_parameters(1) - trained)
    weights = (whole + experts) / zero.replicas if stage == 3 else whole
    on_host = (owned - here) * (state + _MASTER_BYTES + width) + (weights if zero.has_host_params else 0)
    weights = 0.0 if zero.has_host_params else weights
    held = 0.0
    if stage == 3:
        live = min(zero.live_elements, zero.reuse_elements) + zero.prefetch_elements + trace.largest_tensor
        held = min(whole, width * live)
    settled = weights + trace.state_bytes["buffers"] + state * here
    # ``carried``: gradients in the next forward pass of a step. ``reducing``: what the end of a backward pass adds.
    carried = reducing = 0.0
    if stage == 0:
        carried, reducing = gradients, gradients + min(gradients, width * _FLAT_ELEMENTS)
        stepping = gradients + (8 * trained if is_half else 0)
    elif stage == 1:
        carried, reducing = gradients + buckets, gradients + buckets + copied
    elif stage == 2:
        # If a rank owns a part of a tensor's gradient, it keeps the whole gradient.
        carried = max(width * owned, largest) if here else 0.0
        reducing = buckets + carried + copied + (largest if is_accumulating else 0)
    else:
        settled += width * here + buckets
        reducing = held + 2 * largest
    if stage in (1, 2):
        stepping = here * (2 * width + (_MASTER_BYTES if is_half else 0)) + copied
    elif stage == 3:
        stepping = min(zero.group_elements, here) * (_MASTER_BYTES + (width if is_half else 0))
    if zero.host_share and stage < 3:
        settled += largest
        reducing += 8 * min(owned, trace.largest_tensor) - (copied if stage == 1 else 0)
    start = settled + held + (carried if is_accumulating else 0)
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
        "buffers": trace.state_bytes["buffers"] + buckets + held,
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

    ``form`` has the phase's memory in the dry run, where other bytes were allocated before it.
    """
    lines = [line for each in form.phases if each.phase == name for line in each.lines]
    moved = upper_envelope((start + line.base - form.settled, line.per_record) for line in lines)
    return PhaseMemory(name, moved)


def _collectives(
    trace: ModelTrace, zero: ZeroFeatures, gradients: float
) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """Return the collectives of each micro batch but a step's last, and of the last."""
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
