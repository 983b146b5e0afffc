"""A warm start (preload, fork, train) should give a fresh process's losses.

Not there yet.
"""

from __future__ import annotations

from dstrial.doctor.training.bench import Bench
from dstrial.doctor.training.check import Finding, NotApplicableError


def run(bench: Bench) -> Finding:
    """Say that there is none."""
    del bench
    raise NotApplicableError("this dstrial has no warm starts")
