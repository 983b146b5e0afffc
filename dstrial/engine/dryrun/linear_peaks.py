"""Compute memory peaks for any micro batch size from a trace of two such sizes."""

from __future__ import annotations

import array
import dataclasses

import numpy as np
from numpy.typing import NDArray

from dstrial.engine.dryrun.values import PHASES, Line, MemoryForm, PhaseMemory, upper_envelope

_Floats = NDArray[np.float64]


def _integers() -> array.array[int]:
    return array.array("q")


@dataclasses.dataclass(slots=True)
class Trace:
    """Allocations and frees of memory, in order of time.

    Attributes:
        events: +n if allocation n (counted from 1) is made, -n if it is freed.
        phases: phase of each event, as an index into ``PHASES``.
        sizes: bytes of allocation n at index n - 1.
        is_gradient: 1 at index n - 1 if allocation n is the gradient of a parameter, else 0.
        marks: number of events before the first step, then the number of events up to the end of each step.
    """

    events: array.array[int] = dataclasses.field(default_factory=_integers)
    phases: array.array[int] = dataclasses.field(default_factory=_integers)
    sizes: array.array[int] = dataclasses.field(default_factory=_integers)
    is_gradient: array.array[int] = dataclasses.field(default_factory=_integers)
    marks: list[int] = dataclasses.field(default_factory=list)

    def allocate(self, size: int, phase_idx: int) -> int:
        """Record an allocation; return its number, counted from 1."""
        self.sizes.append(size)
        self.is_gradient.append(0)
        number = len(self.sizes)
        self.events.append(number)
        self.phases.append(phase_idx)
        return number

    def free(self, number: int, phase_idx: int) -> None:
        self.events.append(-number)
        self.phases.append(phase_idx)


def same_before_update(trace: Trace) -> bool:
    """Return whether the last two steps of a trace allocate and free in equal order.

    The sizes of allocations may differ. Only events before the optimizer update of each step are compared.
    """
    return _same(_Steps(trace))


def memory_form(trace: Trace, low: int, high: int) -> tuple[MemoryForm, Line]:
    """Return (peak bytes by phase, activation bytes), by micro batch size.

    Gradients of parameters are not counted. Activations are the bytes that are live at the end of forward, but not between
    steps.

    The trace contains the construction of the engines, then one step at micro batch size ``low`` and one at ``high``. If these
    steps differ in the order of allocations, a third step at ``low`` follows. The allocations of the last two steps, up to the
    optimizer update, are matched one by one. Each allocation is taken as linear in the micro batch size, and so is the sum of
    live bytes after each event. A phase's peak is the maximum of these sums. If the steps do not match, the result is the
    line through the two measured peaks.
    """
    steps = _Steps(trace)
    is_linear = _same(steps)
    at_last, at_former = (high, low) if len(trace.marks) == 3 else (low, high)
    slopes = np.zeros_like(steps.sizes)
    if is_linear:
        former = slice(steps.num_made(steps.former), steps.num_made(steps.update_of_former))
        last = slice(steps.num_made(steps.last), steps.num_made(steps.update_of_last))
        growth = (steps.sizes[last] - steps.sizes[former]) / (at_last - at_former)
        slopes[former] = slopes[last] = growth
        bases = steps.sizes - slopes * np.where(np.arange(len(slopes)) >= last.start, at_last, at_former)
    else:
        bases = steps.sizes
    is_counted = ~steps.is_gradient[steps.numbers]
    signs = np.where(steps.is_made, 1.0, -1.0) * is_counted
    alive = _Alive(
        base=np.cumsum(signs * bases[steps.numbers]),
        slope=np.cumsum(signs * slopes[steps.numbers]),
        is_peak=steps.is_made & is_counted,
    )
    form = _form(alive, steps, (at_former, at_last), is_linear)
    is_forward = steps.phases == PHASES.index("forward")
    ends = np.flatnonzero(is_forward[steps.last : -1] & ~is_forward[steps.last + 1 :]) + steps.last
    lines = upper_envelope(_highest(alive.base[ends], alive.slope[ends]) if len(ends) else [(0.0, 0.0)])
    activations = max(lines, key=lambda line: line.at(high))
    return form, Line(activations.base - form.settled, activations.per_record)


class _Steps:
    """The events of a trace as arrays, and the indices where the last two steps begin."""

    def __init__(self, trace: Trace) -> None:
        events = np.asarray(trace.events, dtype=np.int64)
        self.numbers, self.is_made = np.abs(events) - 1, events > 0
        self.phases = np.asarray(trace.phases, dtype=np.int64)
        self.phases[: trace.marks[0]] = PHASES.index("init")
        self.sizes = np.asarray(trace.sizes, dtype=np.float64)
        self.is_gradient = np.asarray(trace.is_gradient, dtype=bool)
        # Numbers of events before the last but one step, before the last step, and of all events; then before the
        # optimizer update in each of these two steps.
        self.former, self.last, self.end = trace.marks[-3:]
        self.update_of_former = self._update(self.former, self.last)
        self.update_of_last = self._update(self.last, self.end)
        self._made = np.append(0, np.cumsum(self.is_made))

    def num_made(self, event_idx: int) -> int:
        return int(self._made[event_idx])

    def _update(self, start: int, end: int) -> int:
        found = np.flatnonzero(self.phases[start:end] == PHASES.index("step"))
        return start + int(found[0]) if len(found) else end


@dataclasses.dataclass(frozen=True, slots=True)
class _Alive:
    """Live bytes after each event: ``base + slope * micro_batch_size``."""

    base: _Floats
    slope: _Floats
    is_peak: NDArray[np.bool_]  # memory may be at a peak after the event: allocations, except of gradients


def _same(steps: _Steps) -> bool:
    relative = []
    for start, end in ((steps.former, steps.update_of_former), (steps.last, steps.update_of_last)):
        own = steps.numbers[start:end] - steps.num_made(start)
        is_own = own >= 0
        # Ignore frees of allocations made before the step, because the two steps start with different allocations.
        kept = is_own | steps.is_made[start:end]
        signs = np.where(steps.is_made[start:end], 1, -1)
        relative.append(((own + 1) * signs)[kept])
    return bool(np.array_equal(relative[0], relative[1]))


def _form(alive: _Alive, steps: _Steps, at: tuple[int, int], is_linear: bool) -> MemoryForm:
    found = []
    for phase_idx, phase in enumerate(PHASES):
        in_phase = (steps.phases == phase_idx) & alive.is_peak
        former = np.flatnonzero(in_phase[steps.former : steps.last]) + steps.former
        last = np.flatnonzero(in_phase[steps.last :]) + steps.last
        if not len(last):
            continue
        if is_linear:
            lines = upper_envelope(_highest(alive.base[last], alive.slope[last]))
        else:
            peaks = [float(alive.base[idx].max()) if len(idx) else 0.0 for idx in (former, last)]
            lines = (line_through(peaks[0], peaks[1], *at),)
        found.append(PhaseMemory(phase, lines))
    return MemoryForm(tuple(found), settled=float(alive.base[-1]) if len(alive.base) else 0.0)


def _highest(base: _Floats, slope: _Floats) -> list[tuple[float, float]]:
    order = np.lexsort((base, slope))
    slopes, bases = slope[order], base[order]
    is_last = np.append(np.diff(slopes) != 0, True)
    return list(zip(bases[is_last].tolist(), slopes[is_last].tolist(), strict=True))


def line_through(at_low: float, at_high: float, low: int, high: int) -> Line:
    growth = (at_high - at_low) / (high - low)
    return Line(at_low - growth * low, growth)
