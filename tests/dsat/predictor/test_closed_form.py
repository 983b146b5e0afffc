"""Closed-form ZeRO memory, collectives and operations against values by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dstrial.dsat.predictor.closed_form import zero_run
from dstrial.dsat.predictor.features import ZeroFeatures
from dstrial.engine.dryrun.values import DryRunResult, Flops, Line, MemoryForm, ModelTrace, PhaseMemory

NUM = 7_000_000_000
RANKS = 8
ACTIVATIONS = 1e9  # bytes per record
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}

TRACE = ModelTrace(
    memory=MemoryForm(
        (
            PhaseMemory("init", (Line(18.0 * NUM, 0.0),)),
            PhaseMemory("forward", (Line(14.0 * NUM, ACTIVATIONS),)),
            PhaseMemory("backward", (Line(14.0 * NUM, 1.5 * ACTIVATIONS),)),
            PhaseMemory("step", (Line(24.0 * NUM, 0.0),)),
        ),
        settled=14.0 * NUM,
    ),
    activations=Line(0.0, ACTIVATIONS),
    state_bytes={"parameters": 2 * NUM, "optimizer": 12 * NUM, "buffers": 0, "gradients": 0},
    parameters=NUM,
    trainable_parameters=NUM,
    num_tensors=300,
    largest_tensor=130_000_000,
    flops=Flops(Line(0.0, 6.0 * NUM), Line(0.0, 8.0 * NUM)),
    tokens=Line(0.0, 2048.0),
    pass_operations=20_000,
    step_operations=9_000,
)


def run(stage: int, *, is_accumulating: bool = False, is_cpu: bool = False, **zero: Any) -> DryRunResult:
    config = {"zero_optimization": {"stage": stage, **zero}}
    features = ZeroFeatures.from_config(config, replicas=RANKS, bytes_per_value=2)
    return zero_run(TRACE, features, is_accumulating=is_accumulating, is_cpu=is_cpu)


@pytest.mark.parametrize(
    ("stage", "settled", "step"),
    [
        (0, 14, 24),  # weights 2, master and moments 12; gradients 2 and their float32 copies 8
        (1, 2 + 12 / 8, 2 + 12 / 8 + 8 / 8),
        (2, 2 + 12 / 8, 2 + 12 / 8 + 8 / 8),
        (3, (2 + 2 + 12) / 8, (2 + 2 + 12 + 6) / 8),
    ],
)
def test_bytes_per_parameter_follow_stage(stage: int, settled: float, step: float) -> None:
    found = run(stage)
    bucket = 1e9 / NUM if stage == 3 else 0  # stage 3 keeps this buffer

    assert found.device.settled / NUM == pytest.approx(settled + bucket)
    assert found.device.in_phase("step", 1) / NUM == pytest.approx(step + bucket, rel=0.01)
    assert found.device.in_phase("forward", 4) - found.device.in_phase("forward", 1) == 3 * ACTIVATIONS


def test_accumulation_carries_gradients_into_next_forward() -> None:
    carried = [
        run(stage, is_accumulating=True).device.in_phase("forward", 1)
        - run(stage).device.in_phase("forward", 1)
        for stage in (0, 1, 2, 3)
    ]

    assert carried == pytest.approx([2 * NUM, 2 * NUM + 1e9, 2 * NUM / RANKS, 0])


def test_offloaded_state_is_on_host() -> None:
    kept, offloaded, on_cpu = run(2), run(2, **OFFLOADED), run(2, is_cpu=True, **OFFLOADED)

    assert kept.host.settled == 0
    assert kept.device.settled - offloaded.device.settled == pytest.approx(12 / 8 * NUM - 2 * 130e6)
    assert offloaded.host.settled == (12 + 4 + 2) / 8 * NUM
    assert on_cpu.device.settled == offloaded.device.settled + offloaded.host.settled
    assert on_cpu.host.settled == 0
    params = run(3, **OFFLOADED, offload_param={"device": "cpu"})
    assert params.device.settled == pytest.approx(1e9)


def test_gathered_parameters_are_limited_by_live_and_reuse() -> None:
    largest, prefetched = 130e6, 5e7
    for sizes, live in (
        ({}, 1e9),
        ({"stage3_max_live_parameters": 1e8}, 1e8),
        ({"stage3_max_reuse_distance": 0}, 0),
    ):
        found = run(3, **sizes).device
        held = found.in_phase("forward", 1) - found.settled - ACTIVATIONS
        assert held == pytest.approx(2 * (live + largest + prefetched))


def test_collectives_move_gradients_and_parameters() -> None:
    def moved(stage: int) -> list[tuple[str, str, int, float]]:
        found = run(stage, is_accumulating=True).collectives(2)
        return [(one.kind, one.phase, one.num_calls, one.num_bytes / NUM) for one in found]

    assert moved(0) == [("all_reduce", "reduce", 14, 2)]
    assert moved(1) == [("all_reduce", "reduce", 14, 2), ("all_gather", "gather", 14, 2)]
    assert moved(2) == [("all_reduce", "reduce", 28, 4), ("all_gather", "gather", 14, 2)]
    gathered, reduced = moved(3)
    assert reduced == ("reduce_scatter", "reduce", 28, 4)
    # Gathered twice in each of two micro batches, except parameters kept after the forward pass.
    assert gathered[:2] == ("all_gather", "gather")
    assert gathered[3] == pytest.approx(2 * 2 * (2 - 0.5e9 / NUM))


def test_operations_grow_with_tensors_and_stage() -> None:
    found = [run(stage, is_accumulating=True) for stage in (0, 1, 2, 3)]

    inner = [one.inner_operations for one in found]
    assert inner == sorted(inner)
    assert all(one.last_operations > one.inner_operations for one in found)
    assert run(3).inner_operations == 0


def test_zero_3_divides_experts_among_their_ranks() -> None:
    """Of eight ranks, four have different experts, so two ranks divide each expert."""
    trace = dataclasses.replace(TRACE, expert_parameters={4: NUM // 2})
    zero = ZeroFeatures.from_config({"zero_optimization": {"stage": 3}}, replicas=RANKS, bytes_per_value=2)
    parts = zero_run(trace, zero, is_accumulating=False).device_parts

    owned = NUM / 2 / RANKS + NUM / 2 / 2
    assert parts["parameters"] == pytest.approx(2 * owned)
    assert parts["optimizer"] == pytest.approx(12 * owned)
