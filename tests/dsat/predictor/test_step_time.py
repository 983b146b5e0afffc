"""Step times predicted from dry runs and machines, and learning from timings."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from predicted import dry_run

from dstrial.dsat.predictor.features import PARTS, StepParts, ZeroFeatures, step_parts
from dstrial.dsat.predictor.hardware import DEVICES, Link, Machine, nominal_machine
from dstrial.dsat.predictor.models import Point, StepModel, Timing
from dstrial.engine.dryrun.values import Collective

MACHINE = Machine(
    flops_per_s=1e14,
    operation_s=1e-5,
    copy_bytes_per_s=1e12,
    host_bytes_per_s=2e10,
    host_copy_bytes_per_s=2e10,
    collectives={"all_reduce": Link(1e-4, 1e10), "all_gather": Link(5e-5, 2e10)},
    hides=0.5,
)
SETUP = ZeroFeatures(2, 8, 5e8, 5e8, False, 0.0, False, 2)


RUN = dry_run(
    inner_collectives=(Collective("all_reduce", 8, "reduce", 2, 2_000_000_000),),
    last_collectives=(
        Collective("all_reduce", 8, "reduce", 2, 2_000_000_000),
        Collective("all_gather", 8, "gather", 2, 2_000_000_000),
    ),
    inner_operations=1000,
    last_operations=1500,
)


def parts(setup: ZeroFeatures = SETUP, micro: int = 4, accumulation: int = 4) -> dict[str, float]:
    found = step_parts(RUN, MACHINE, setup, SETUP, micro_batch_size=micro, accumulation=accumulation)
    return dict(zip(PARTS, found.seconds, strict=True))


def test_step_parts_are_amounts_over_rates() -> None:
    found = parts()

    assert found["compute"] == pytest.approx(4 * 4 * 1e13 / 1e14)
    assert found["unfilled"] == pytest.approx(4 * 0.25 * 1e13 / 1e14)
    assert found["transfer"] == pytest.approx(2e9 / 2e10)
    assert found["reduce"] == pytest.approx(4 * 2e9 / 1e10)
    assert found["calls"] == pytest.approx(8 * 1e-4 + 2 * 5e-5)
    assert found["gradient_copies"] == pytest.approx(4 * 2 * 2e9 / 1e12)
    assert found["optimizer"] == pytest.approx(30 * 1e9 / 8 / 1e12)
    assert found["host_optimizer"] == found["host_copies"] == 0


def test_smaller_buckets_add_calls_not_bytes() -> None:
    small = parts(dataclasses.replace(SETUP, reduce_elements=5e7))

    assert small["reduce"] == parts()["reduce"]
    assert small["calls"] - parts()["calls"] == pytest.approx(9 * 8 * 1e-4)


def test_overlap_hides_communication_offload_moves_optimizer() -> None:
    overlapped = parts(dataclasses.replace(SETUP, is_overlapping=True))
    offloaded = parts(dataclasses.replace(SETUP, host_share=1.0))

    shown = ("transfer", "reduce", "calls", "unhidden")
    hidden = sum(parts()[name] for name in shown) - sum(overlapped[name] for name in shown)
    assert hidden == pytest.approx(overlapped["unhidden"])
    assert hidden > 0
    assert offloaded["optimizer"] == 0
    assert offloaded["host_optimizer"] == pytest.approx(30 * 1e9 / 8 / 2e10)
    # Gradient copies after each micro batch, half of them hidden by backward, and one weight copy back.
    assert offloaded["host_copies"] == pytest.approx((0.5 * 4 + 1) * 2 * 1e9 / 8 / 2e10)


def test_last_bucket_is_not_hidden() -> None:
    small, one = (
        parts(dataclasses.replace(SETUP, is_overlapping=True, reduce_elements=size)) for size in (5e7, 1e9)
    )

    assert one["reduce"] == pytest.approx(parts()["reduce"])
    assert small["reduce"] < 0.1 * parts()["reduce"]


def test_overhead_is_hidden_by_device_computing() -> None:
    slow = dataclasses.replace(MACHINE, operation_s=1e-3)

    def overhead(micro: int, machine: Machine) -> float:
        found = step_parts(RUN, machine, SETUP, SETUP, micro_batch_size=micro, accumulation=4)
        return found.seconds[PARTS.index("overhead")]

    assert overhead(64, slow) < overhead(1, slow)
    assert overhead(64, dataclasses.replace(slow, host_copy_bytes_per_s=None)) == pytest.approx(4.5)


def test_machine_from_incomplete_metrics_is_none() -> None:
    metrics = {
        "machine_flops_per_s": 1e12,
        "machine_operation_s": 1e-6,
        "machine_copy_bytes_per_s": 1e10,
        "machine_all_reduce_latency_s": 1e-4,
        "machine_all_reduce_bytes_per_s": 1e9,
        "throughput": 3.0,
    }
    machine = Machine.from_metrics(metrics)

    assert machine is not None
    assert machine.host_copy_bytes_per_s is None
    assert machine.link("all_reduce") == Link(1e-4, 1e9)
    assert machine.link("broadcast").seconds(5, 1e9) == (0.0, 0.0)
    assert Machine.from_json(dataclasses.asdict(machine)) == machine
    del metrics["machine_operation_s"]
    assert Machine.from_metrics(metrics) is None


def test_nominal_machine_models_rings_and_networks() -> None:
    inside, across = (nominal_machine(DEVICES["h100"], ranks) for ranks in (8, 64))

    assert inside.link("all_gather").bytes_per_s == pytest.approx(2 * inside.link("all_reduce").bytes_per_s)
    assert across.link("all_gather").bytes_per_s < inside.link("all_gather").bytes_per_s
    assert nominal_machine(DEVICES["h100"], 1).collectives == {}


# ---- learning ---------------------------------------------------------------------------------


def point(micro: int, stage: int = 2, bucket: float | None = None, total: int = 64) -> Point:
    accumulation = total // micro
    passes = {
        "compute": 0.02 * total,
        "unfilled": 0.02 * accumulation,
        "overhead": 0.05 * accumulation,
        "transfer": (0.1 if stage == 3 else 0.0) * accumulation,
        "reduce": 0.1 * accumulation,
        "calls": 0.01 * accumulation,
        "optimizer": 0.02,
    }
    settings = () if bucket is None else (("zero_optimization.reduce_bucket_size", bucket),)
    shares = {"forward": 1 / 3, "backward": 2 / 3, "step": 0.0}
    phases = tuple(
        tuple(
            (float(phase == "step") if part == "optimizer" else share) * passes.get(part, 0.0)
            for part in PARTS
        )
        for phase, share in shares.items()
    )
    return Point(StepParts(phases), (), (stage,), settings, micro)


def truth(at: Point, factors: tuple[float, ...]) -> float:
    return sum(factor * seconds for factor, seconds in zip(factors, at.parts.seconds, strict=True))


@given(st.lists(st.floats(0.6, 1.8), min_size=len(PARTS), max_size=len(PARTS)))
@settings(max_examples=15, deadline=None)
def test_two_micro_batches_predict_others(factors: list[float]) -> None:
    timings = [Timing(point(size), truth(point(size), tuple(factors)), 0.005) for size in (2, 32)]
    model = StepModel(timings)

    for size in (4, 8, 16):
        (prediction,) = model.predict([point(size)])
        assert prediction.median_s == pytest.approx(truth(point(size), tuple(factors)), rel=0.08)


def test_measurement_narrows_own_structure_most() -> None:
    before, after = StepModel(), StepModel([Timing(point(8), 3.0, 0.005)])

    own, bucket, stage = after.predict([point(8), point(8, bucket=1e6), point(8, stage=3)])
    assert own.median_s == pytest.approx(3.0, rel=0.01)
    assert own.log_std < bucket.log_std < stage.log_std < before.predict([point(8, stage=3)])[0].log_std


def test_outlier_moves_prediction_little() -> None:
    steady = [Timing(point(8, bucket=size), 3.0, 0.004) for size in (None, 1e6, 2e6, 5e6, 1e7)]
    (before,) = StepModel(steady).predict([point(8)])
    (after,) = StepModel([*steady, Timing(point(8), 3.3, 0.004)]).predict([point(8)])

    assert after.median_s == pytest.approx(before.median_s, rel=0.02)


def test_spreads_grow_with_residuals() -> None:
    noise = random.Random(2)

    def model(spread: float) -> StepModel:
        return StepModel(
            [
                Timing(point(8, bucket=bucket), 3.0 * math.exp(noise.gauss(0, spread)), 0.002)
                for bucket in (1e6, 2e6, 5e6, 1e7, 2e7, 5e7, 1e8, 2e8)
            ]
        )

    calm, wild = model(0.002), model(0.05)

    assert (
        wild.predict([point(8, bucket=1e9)])[0].log_std > 2 * calm.predict([point(8, bucket=1e9)])[0].log_std
    )


def test_unmeasured_group_stays_uncertain() -> None:
    model = StepModel([Timing(point(8, bucket=size), 3.0, 0.002) for size in (1e6, 2e6, 5e6, 1e7, 2e7, 5e7)])

    (known,), (new,) = model.predict([point(8, bucket=1e8)]), model.predict([point(8, stage=3)])

    assert new.log_std > 0.08 > 0.02 > known.log_std
