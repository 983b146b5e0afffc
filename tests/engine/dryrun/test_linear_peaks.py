"""Memory traces as lines over the batch size, and the numbers of a dry-run result."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrial.engine.dryrun.linear_peaks import Trace, memory_form, same_before_update
from dstrial.engine.dryrun.values import (
    PHASES,
    Collective,
    DryRunResult,
    Flops,
    Line,
    MemoryForm,
    PhaseMemory,
    upper_envelope,
)

FORWARD, BACKWARD, STEP = (PHASES.index(name) for name in ("forward", "backward", "step"))

lines = st.tuples(st.integers(-1000, 1000), st.integers(0, 50))


@given(st.lists(lines, min_size=1, max_size=30), st.integers(1, 200))
def test_upper_envelope_is_maximum_of_lines(points: list[tuple[int, int]], size: int) -> None:
    envelope = upper_envelope(points)

    assert max(line.at(size) for line in envelope) == pytest.approx(max(b + s * size for b, s in points))
    assert len(envelope) <= len({slope for _, slope in points})


def train(trace: Trace, size: int, *, kept: int, first: bool = False, extra: bool = False) -> None:
    """Trace a step: 10 B of activations per record, 100 B scratch, ``kept`` optimizer."""
    activation = trace.allocate(10 * size, FORWARD)
    if extra:
        trace.free(trace.allocate(7, FORWARD), FORWARD)
    scratch = trace.allocate(100, BACKWARD)
    trace.free(activation, BACKWARD)
    trace.free(scratch, BACKWARD)
    if first:
        trace.allocate(kept, STEP)
    trace.free(trace.allocate(30, STEP), STEP)
    trace.marks.append(len(trace.events))


def played(*, extra_in_second: bool = False) -> Trace:
    trace = Trace()
    trace.allocate(1000, PHASES.index("reduce"))
    trace.marks.append(len(trace.events))
    train(trace, 2, kept=60, first=True)
    train(trace, 4, kept=60, extra=extra_in_second)
    return trace


def test_memory_form_holds_at_other_sizes() -> None:
    form, activations = memory_form(played(), 2, 4)

    assert activations == Line(0.0, 10.0)
    assert form.in_phase("forward", 100) == 1000 + 60 + 10 * 100
    assert form.peak(100) == 1000 + 60 + 10 * 100 + 100
    assert form.peak_phase(100) == "backward"
    assert form.in_phase("step", 100) == 1000 + 60 + 30
    assert form.settled == 1060
    # Allocations before the first step belong to building the model, which has no peak of its own.
    assert [each.phase for each in form.phases] == ["forward", "backward", "step"]


def test_memory_form_leaves_out_gradients() -> None:
    trace = played()
    trace.is_gradient[0] = 1

    form, _ = memory_form(trace, 2, 4)

    assert form.settled == 60
    assert form.peak(100) == 60 + 10 * 100 + 100


def test_third_step_makes_differing_steps_linear() -> None:
    trace = played(extra_in_second=True)

    assert not same_before_update(trace)
    form, _ = memory_form(trace, 2, 4)
    # The line passes through both peaks.
    assert form.in_phase("backward", 2) == pytest.approx(1000 + 20 + 100)
    assert form.in_phase("backward", 4) == pytest.approx(1060 + 40 + 100)
    train(trace, 2, kept=60, extra=True)
    assert same_before_update(trace)
    assert memory_form(trace, 2, 4)[0].peak(50) == 1000 + 60 + 500 + 100


def result() -> DryRunResult:
    form = MemoryForm(
        (PhaseMemory("forward", (Line(10.0, 2.0),)), PhaseMemory("step", (Line(15.0, 0.0),))), 5.0
    )
    return DryRunResult(
        device=form,
        host=MemoryForm((), 0.0),
        parameters=100,
        trainable_parameters=80,
        inner_collectives=(Collective("all_gather", 8, "gather", 2, 64),),
        last_collectives=(
            Collective("all_gather", 8, "gather", 2, 64),
            Collective("all_reduce", 8, "reduce", 1, 16),
        ),
        flops=Flops(Line(0.0, 4800.0), Line(0.0, 6400.0)),
        tokens=Line(0.0, 10.0),
    )


def test_result_counts_collectives_of_step() -> None:
    assert set(result().collectives(4)) == {
        Collective("all_gather", 8, "gather", 8, 256),
        Collective("all_reduce", 8, "reduce", 1, 16),
    }
    assert result().collectives(1) == result().last_collectives
