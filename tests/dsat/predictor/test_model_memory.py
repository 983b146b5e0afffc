"""The answer and the table that say how many devices a model needs."""

from __future__ import annotations

import dataclasses

import pytest
from predicted import dry_run

from dstrial.dsat.predictor.model_memory import Placement, answer, table
from dstrial.dsat.predictor.models import MemoryPrediction
from dstrial.engine.dryrun.values import Line, MemoryForm, PhaseMemory

GIB = float(2**30)


def placement(num_slots: int, *, gradients: float = 20.0, activations: float = 2.0) -> Placement:
    """Return a placement of 10 GiB of weights and 60 GiB of optimizer state."""
    kept = (10 + 60) * GIB / num_slots
    peak = Line(kept + gradients * GIB / num_slots, activations * GIB)
    phases = (
        PhaseMemory("forward", (Line(kept, activations * GIB),)),
        PhaseMemory("step", (Line(kept / 2, 0.0), peak)),
    )
    run = dry_run(
        device=MemoryForm(phases, kept),
        parameters=5_000_000_000,
        trainable_parameters=5_000_000_000,
        device_parts={
            "parameters": int(10 * GIB / num_slots),
            "gradients": int(15 * GIB / num_slots),
            "optimizer": int(60 * GIB / num_slots),
            "buffers": int(GIB),
        },
        activations=Line(GIB, 3 * GIB),
    )
    need = MemoryPrediction(run.device.peak(4) + GIB, 0.001)
    return Placement(num_slots, 4, run, need=need)


def test_placement_parts_sum_to_peak() -> None:
    parts = {name: value / GIB for name, value in placement(2).parts().items()}

    assert parts == pytest.approx(
        {
            "parameters": 5,
            "optimizer": 30,
            "gradients": 7.5,
            "activations": 8,
            "buffers": 2.5,
            "peak": 53,
            "host": 0,
        }
    )


def test_answer_names_fitting_number_and_largest_part() -> None:
    lines = answer([placement(1), placement(2), placement(4)], 80 * GIB, "ZeRO stage 3 and bf16")

    assert lines == [
        "One device is not enough; 2 are.",
        "5.00 B parameters, 5.00 B of them trained: with ZeRO stage 3 and bf16 a device needs 99.0 GiB at 1 device(s), and has "
        "80.0 GiB.",
        "Most of it at 2 device(s): optimizer, 30.0 GiB; ZeRO stage 1 divides it, and offload_optimizer takes it to the host.",
    ]


@pytest.mark.parametrize(
    ("slots", "capacity_gib", "verdict"),
    [
        ([1, 2], 100, "One device is enough; more of them train faster, not more."),
        ([1, 2], 20, "Several devices alone do not help: none of 1, 2 is enough."),
        ([2, 4], 80, "2 devices are enough; one was not asked for."),
    ],
)
def test_answer_verdict_depends_on_slots_and_capacity(
    slots: list[int], capacity_gib: float, verdict: str
) -> None:
    assert answer([placement(number) for number in slots], capacity_gib * GIB, "fp16")[0] == verdict


def test_answer_explains_why_nearly_full_device_fails() -> None:
    first = placement(1)
    assert first.need is not None
    first = dataclasses.replace(first, need=dataclasses.replace(first.need, log_std=0.05))

    verdict, needs, _ = answer([first, placement(2)], 100 * GIB, "fp16")

    assert verdict == "One device is not enough; 2 are."
    assert needs.endswith(
        "99.0 GiB at 1 device(s), and has 100.0 GiB. To fit with a probability of 98%, it needs 109.7 GiB."
    )


def test_table_has_rows_of_known_placements() -> None:
    unknown = Placement(3, 0, None, "the batch cannot be divided by 3")
    heads, one, four = table([placement(1), unknown, placement(4)], 80 * GIB)

    parts = "parameters gradients optimizer activations buffers"
    assert " ".join(heads) == f"devices micro batch {parts} peak needs of device host"
    assert " ".join(one) == "1 4 10.0 15.0 60.0 8.0 5.0 98.0 99.0 124 % 0.00"
    assert " ".join(four).endswith(" 30.5 31.5 39 % 0.00")
    assert answer([unknown], 80 * GIB, "fp16") == ["It cannot be told: the batch cannot be divided by 3"]
