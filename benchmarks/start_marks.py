"""How long the trainings of ``start.py`` are, and the marks that their ranks leave; imports nothing that costs time."""

from __future__ import annotations

import json
import os
import pathlib
import resource
import time

NUM_BATCHES = 20


def note_first_batch() -> None:
    """Write down, once, what this rank has spent until its first batch. Ranks: each its own."""
    path = pathlib.Path(os.environ["DSTRIAL_START_MARKS"]) / f"{os.environ['RANK']}.json"
    if path.exists():
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    marks = {"at_s": time.time(), "cpu_s": used.ru_utime + used.ru_stime, "rss_mib": used.ru_maxrss / 1024}
    lines = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()
    marks["private_mib"] = sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024
    path.write_text(json.dumps(marks))
