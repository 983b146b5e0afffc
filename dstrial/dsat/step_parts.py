"""Where the time of one optimizer step goes, from a dry run and what a machine can do. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from dstrial.dsat.knobs import ZERO
from dstrial.dsat.machine import Machine
from dstrial.engine.dryrun.values import Collective, DryRunResult

PARTS = ("compute", "unfilled", "overhead", "transfer", "calls", "optimizer", "host_optimizer", "host_copies")
"""Matrix products; what they take longer for not filling the device, as computing one record more in each micro batch;
operations as such; bytes of collectives and their calls, as far as nothing hides them; the optimizer on the
device and on the host; copies between the two."""

_STATE_BYTES = 30.0
"""Bytes that Adam reads and writes for each parameter: gradient, weight and two moments, and the weight in half precision."""


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """What of a structure's DeepSpeed config decides where time goes.

    Attributes:
        stage: ZeRO stage.
        replicas: ranks among which ZeRO divides.
        reduce_elements: ``reduce_bucket_size``.
        gather_elements: ``allgather_bucket_size``.
        is_overlapping: ``overlap_comm``.
        host_share: share of the optimizer's state on the host.
        has_host_params: whether parameters are on the host.
        bytes_per_value: 2 in half precision, else 4.
    """

    stage: int
    replicas: int
    reduce_elements: float
    gather_elements: float
    is_overlapping: bool
    host_share: float
    has_host_params: bool
    bytes_per_value: int

    @classmethod
    def from_config(cls, effective: Mapping[str, Any], *, replicas: int, bytes_per_value: int) -> Setup:
        """Read it from a config with all defaults in it.

        Args:
            effective: as ``config.check_deepspeed`` returns it.
            replicas: ranks among which ZeRO divides.
            bytes_per_value: of the model's type.
        """
        zero = effective.get(ZERO) or {}
        stage = int(zero.get("stage") or 0)
        on_host = _device(zero, "offload_optimizer") != "none" and stage > 0
        ratio = float((zero.get("offload_optimizer") or {}).get("ratio") or 1.0) if on_host else 0.0
        overlap = zero.get("overlap_comm")
        return cls(
            stage=stage,
            replicas=replicas,
            reduce_elements=float(zero.get("reduce_bucket_size") or 5e8),
            gather_elements=float(zero.get("allgather_bucket_size") or 5e8),
            is_overlapping=stage == 3 if overlap is None else bool(overlap),
            host_share=ratio,
            has_host_params=stage == 3 and _device(zero, "offload_param") != "none",
            bytes_per_value=bytes_per_value,
        )


def _device(zero: Mapping[str, Any], section: str) -> str:
    return str((zero.get(section) or {}).get("device") or "none")


@dataclasses.dataclass(frozen=True, slots=True)
class StepParts:
    """Seconds of one optimizer step, part by part.

    Attributes:
        seconds: in the order of ``PARTS``.
        hidden_s: communication that computation hides; no part of the step's time.
    """

    seconds: tuple[float, ...]
    hidden_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All parts."""
        return sum(self.seconds)

    def named(self) -> dict[str, float]:
        """Return part -> seconds."""
        return dict(zip(PARTS, self.seconds, strict=True))


def step_parts(
    run: DryRunResult,
    machine: Machine,
    setup: Setup,
    ran: Setup,
    *,
    micro_batch_size: int,
    accumulation: int,
) -> StepParts:
    """Return where the time of a step goes.

    Args:
        run: dry run of a structure that differs in bucket sizes and overlap at most.
        machine: where it is to run.
        setup: of the structure in question.
        ran: of the structure that was dry-run.
        micro_batch_size: records of a micro batch.
        accumulation: micro batches in a step.
    """
    compute = accumulation * max(run.flops.hardware.at(micro_batch_size), 0.0) / machine.flops_per_s
    one_record = accumulation * max(run.flops.hardware.per_record, 0.0) / machine.flops_per_s
    inner = run.inner_operations if accumulation > 1 else 0
    operations = (accumulation - 1) * (inner or run.last_operations) + run.last_operations
    overhead = operations * machine.operation_s
    calls = _with_buckets(run.collectives(accumulation), run.parameters, setup, ran)
    transfer_s = calls_s = 0.0
    for each in calls:
        if each.group_size > 1:
            moved, called = machine.link(each.kind).seconds(each.num_calls, each.num_bytes)
            transfer_s, calls_s = transfer_s + moved, calls_s + called
    hidden = 0.0
    if setup.is_overlapping:
        hidden = min(machine.hides * transfer_s, 0.8 * compute)
    owned = run.trainable_parameters / (setup.replicas if setup.stage else 1)
    on_host = owned * setup.host_share
    copied = 0.0
    if machine.host_copy_bytes_per_s is not None:
        # Gradients go to the host and weights come back; parameters come for forward and for backward.
        copied = 2 * setup.bytes_per_value * on_host
        if setup.has_host_params:
            copied += 2 * accumulation * setup.bytes_per_value * run.parameters / setup.replicas
        copied /= machine.host_copy_bytes_per_s
    seconds = (
        compute,
        one_record,
        overhead,
        transfer_s - hidden,
        calls_s,
        (owned - on_host) * _STATE_BYTES / machine.copy_bytes_per_s,
        on_host * _STATE_BYTES / machine.host_bytes_per_s,
        copied,
    )
    return StepParts(seconds, hidden)


def _with_buckets(
    collectives: Iterable[Collective], parameters: float, setup: Setup, ran: Setup
) -> list[Collective]:
    """Return collectives as other bucket sizes would have them sent."""
    found = []
    for each in collectives:
        old = new = 1.0
        if each.phase == "reduce":
            old, new = ran.reduce_elements, setup.reduce_elements
        elif each.phase == "gather" and setup.stage in (1, 2):
            old, new = ran.gather_elements, setup.gather_elements
        ratio = max(math.ceil(parameters / new), 1) / max(math.ceil(parameters / old), 1)
        found.append(dataclasses.replace(each, num_calls=max(round(each.num_calls * ratio), 1)))
    return found
