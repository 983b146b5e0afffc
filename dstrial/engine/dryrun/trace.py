"""The allocations and frees of a dry run in their order; pure."""

from __future__ import annotations

import array
import dataclasses


def _integers() -> array.array[int]:
    return array.array("q")


@dataclasses.dataclass(slots=True)
class Trace:
    """Allocations and frees, on the device and on the host.

    Attributes:
        events: +n where allocation n (from 1) is made, -n where it is freed.
        phases: of each event, as an index into ``PHASES``.
        sizes: bytes of allocation n, at n - 1.
        on_host: 1 where allocation n is on the host, at n - 1.
        marks: how many events there were when the first step began, and at the end of each step.
    """

    events: array.array[int] = dataclasses.field(default_factory=_integers)
    phases: array.array[int] = dataclasses.field(default_factory=_integers)
    sizes: array.array[int] = dataclasses.field(default_factory=_integers)
    on_host: array.array[int] = dataclasses.field(default_factory=_integers)
    marks: list[int] = dataclasses.field(default_factory=list)

    def allocate(self, size: int, on_host: bool, phase_idx: int) -> int:
        """Note an allocation and return its number."""
        self.sizes.append(size)
        self.on_host.append(on_host)
        number = len(self.sizes)
        self.events.append(number)
        self.phases.append(phase_idx)
        return number

    def free(self, number: int, phase_idx: int) -> None:
        """Note that an allocation is freed."""
        self.events.append(-number)
        self.phases.append(phase_idx)
