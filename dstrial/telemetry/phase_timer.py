"""Time forward, backward and step of a rank's engines without blocking.

On an accelerator, device events are recorded in some batches, and their times are read at a later report. On the CPU, the
host's clock is used in all batches.
"""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from deepspeed import PipelineEngine

from dstrial.engine.deepspeed_internals.engines import observe_instructions
from dstrial.telemetry.samples import DEVICE_CLOCK, HOST_CLOCK

ResultT = TypeVar("ResultT")

# Approximate maximum number of batches per report that are timed by device events. Every n-th batch is timed; n is chosen at each
# report from the number of batches since the last one.
MOST_TIMED = 32

# Maximum number of recorded phases whose times are not read yet; further batches are not timed.
_MAX_PENDING = 4096


class Event(Protocol):
    """Interface of an accelerator's event, such as ``torch.cuda.Event``."""

    def record(self) -> None:
        """Enqueue the event after all work that is already enqueued."""

    def query(self) -> bool:
        """Return whether the device has reached the event, without blocking."""

    def elapsed_time(self, end: Any) -> float:
        """Return milliseconds from this event to ``end``, both reached by the device."""


class PhaseTimer:
    """Times the phases of a rank's engines; pass one to ``observe_engines``.

    Attributes:
        around_step: function that gets an engine's step as a function, runs the step and returns its result; None if not used.
        entering: function that is called at the beginning of each phase with the phase's name; None if not used.
    """

    def __init__(
        self, make_event: Callable[[], Event] | None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._make_event = make_event
        self._clock = clock
        self._is_on = False
        self._is_inside = False
        self._seconds: dict[str, float] = {}
        self._num_timed = 0
        self._first: Any = None
        self.around_step: Callable[[Callable[[], Any]], Any] | None = None
        self.entering: Callable[[str], None] | None = None
        self._put_back: list[Callable[[], None]] = []
        self._watched: set[int] = set()
        # state of timing by device events
        self._open_s: dict[str, float] = {}
        self._pending: collections.deque[tuple[str, Event | None, Event | None]] = collections.deque()
        self._spare: list[Event] = []
        self._stride = 1
        self._num_heard = 0
        self._is_timed = True

    @property
    def clock_name(self) -> str:
        return HOST_CLOCK if self._make_event is None else DEVICE_CLOCK

    def switch(self, is_on: bool) -> None:
        """Switch timing on or off; it should be on only while batches are trained."""
        self._is_on = is_on

    def run(self, phase: str, engine: Any, call: Callable[[], ResultT]) -> ResultT:
        """Run an engine's method, ``call``, and return its result; time it as ``phase``.

        The call is not timed if timing is off, or if it is inside another timed call. A pipeline's ``train_batch`` is timed by
        its instructions.
        """
        if not self._is_on or self._is_inside:
            return call()
        if phase == "train_batch":
            return self._in_schedule(engine, call)
        return self._timed(phase, call)

    def stepped(self, engine: Any) -> None:
        """Count a batch at the end of an optimizer step of ``engine``.

        Only steps of the engine that steps first are counted. A no-op for other engines, or if timing is off.
        """
        if not self._is_on:
            return
        if self._first is None:
            self._first = engine
        if engine is not self._first:
            return
        if self._make_event is None:
            self._num_timed += 1
            return
        if self._is_timed:
            self._pending.append(("", None, None))
        self._num_heard += 1
        self._is_timed = self._num_heard % self._stride == 0 and len(self._pending) < _MAX_PENDING

    def take(self) -> dict[str, float]:
        """Return phase -> average seconds per batch, since the last call.

        The average is over timed batches; {} if no batch was timed. Batches whose events the device has not reached yet are
        included in a later result.
        """
        if self._make_event is not None:
            self._read_events()
            self._stride = max(1, self._num_heard // MOST_TIMED)
            self._num_heard = 0
        num_timed, self._num_timed = self._num_timed, 0
        seconds, self._seconds = self._seconds, {}
        return {phase: value / num_timed for phase, value in seconds.items()} if num_timed else {}

    def forget(self) -> None:
        self._seconds, self._open_s, self._num_timed, self._num_heard = {}, {}, 0, 0
        self._pending.clear()

    def close(self) -> None:
        """Remove the hooks from pipeline engines."""
        while self._put_back:
            self._put_back.pop()()
        self._watched.clear()
        self._first = None

    def _in_schedule(self, engine: PipelineEngine, call: Callable[[], ResultT]) -> ResultT:
        if id(engine) not in self._watched:
            self._watched.add(id(engine))
            self._put_back.append(observe_instructions(engine, self._instruction))
        return call()

    def _instruction(self, part: str, call: Callable[[], None]) -> None:
        if self._is_on:
            self._timed(part, call)
        else:
            call()

    def _timed(self, phase: str, call: Callable[[], ResultT]) -> ResultT:
        if self.entering is not None:
            self.entering(phase)
        if phase == "step" and self.around_step is not None:
            call = functools.partial(self.around_step, call)
        self._is_inside = True
        try:
            if self._make_event is not None and not self._is_timed:
                return call()
            if self._make_event is None:
                began_s = self._clock()
                result = call()
                self._seconds[phase] = self._seconds.get(phase, 0.0) + self._clock() - began_s
                return result
            start, end = self._event(), self._event()
            start.record()
            result = call()
            end.record()
            self._pending.append((phase, start, end))
            return result
        finally:
            self._is_inside = False

    def _event(self) -> Event:
        assert self._make_event is not None
        return self._spare.pop() if self._spare else self._make_event()

    def _read_events(self) -> None:
        while self._pending:
            phase, start, end = self._pending[0]
            if start is None or end is None:  # the end of a batch
                self._num_timed += 1
                for name, seconds in self._open_s.items():
                    self._seconds[name] = self._seconds.get(name, 0.0) + seconds
                self._open_s = {}
            elif not end.query():
                return
            else:
                self._open_s[phase] = self._open_s.get(phase, 0.0) + start.elapsed_time(end) / 1e3
                self._spare += (start, end)
            self._pending.popleft()
