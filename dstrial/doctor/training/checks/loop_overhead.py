"""What dstrial's loop adds to each step, compared to DeepSpeed's on one engine.

The time between two steps, without the steps themselves, in turns of both loops; the same method as ``make bench``, shorter.
On the CPU figures of a busy machine say little.
"""

from __future__ import annotations

from dstrial.doctor.training.bench import Bench
from dstrial.doctor.training.check import Finding


def run(bench: Bench) -> Finding:
    """Measure."""
    found = bench.launch("overhead").facts
    return Finding(
        f"a step takes {found['step_us']:.0f} us; between two steps dstrial's loop takes {found['dstrial_us']:.0f} us and "
        f"a bare one {found['bare_us']:.0f} us: {found['added_percent']:.1f} % of a step",
        "the ratio to a device's steps" if bench.is_cpu else "",
    )
