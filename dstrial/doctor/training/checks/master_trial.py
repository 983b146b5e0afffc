"""Trials through a master of the check's own."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrial.doctor.training.bench import Bench, LaunchResult, last_line
from dstrial.doctor.training.check import CheckFailedError, Finding, NotApplicableError

_MEMORY = "process_peak_memory_bytes"
_EXPECTED: Mapping[str, tuple[str, ...]] = {
    "training": ("loss", "samples_per_second"),
    "validation": ("validation_loss",),
    "telemetry": ("records_per_second", _MEMORY),
    "cpu": ("cpu_util_simple",),
    "memory": ("memory_free",),
}
_EXPECTED_OF_A_DEVICE = {"gpu": ("gpu_util", "gpu_free_memory")}

_MAX_STARTS = 4
_FORK, _NEW_PROCESS = "started as a fork", "started as a new process"
# The variables of /proc are those of the program that was executed; a rank that is one has RANK there.
_SAYS_HOW_IT_STARTED = f"""
import pathlib
_is_new = any(one.startswith(b"RANK=") for one in pathlib.Path("/proc/self/environ").read_bytes().split(b"\\0"))
print({_NEW_PROCESS!r} if _is_new else {_FORK!r}, flush=True)
"""
_BOUND_ON_A_DEVICE = 1e-4


def check_master_trial(bench: Bench) -> Finding:
    """A ZeRO 1 trial goes through a master of its own from submission to COMPLETED.

    On CPU ranks the master's choice of devices (``CUDA_VISIBLE_DEVICES``) is not shown.
    """
    began_s = time.monotonic()
    slots = bench.num_slots
    config = bench.write_experiment(slots=slots, stage=1)
    with bench.master(slots=slots) as env:
        up_s = time.monotonic() - began_s
        ended = bench.dstrial("run", str(config), str(config.parent), "--no-progress", env=env)
        bench.note(up_s=round(up_s, 1), run_s=round(ended.seconds, 1))
        # The first of a new master.
        (described,) = bench.det("experiment", "describe", "1", "--json", env=env)
        state = str(described["experiment"]["state"]).removeprefix("STATE_")
        bench.note(state=state)
    if ended.exit_code != 0 or state != "COMPLETED":
        raise CheckFailedError(
            f"the experiment is {state} and `dstrial run` ended with {ended.exit_code}: {last_line(ended.output)}",
            "Read the log of the trial, below.",
            ended.end,
        )
    kind = "CPU" if bench.is_cpu else "accelerator"
    return Finding(
        f"COMPLETED on {slots} {kind} slot(s): master up in {up_s:.1f} s, trial in {ended.seconds:.1f} s",
        "the devices that a master gives to its trials" if bench.is_cpu else "",
    )


def check_system_metrics(bench: Bench) -> Finding:
    """What a trial reports of each kind reaches the master.

    They are read with Determined's client. Only NVIDIA's devices have system metrics of their own.
    """
    slots = bench.num_slots
    config = bench.write_experiment(slots=slots, stage=0, profiling={"enabled": True})
    expected = {**_EXPECTED, **(_EXPECTED_OF_A_DEVICE if bench.has_cuda else {})}
    with bench.master(slots=slots) as env:
        ended = _run(bench, config, env)
        reports = bench.reports(1, *expected, env=env)
    found = {group: sorted(_names(rows)) for group, rows in reports.items()}
    num_ranks = {len(row.get("ranks", {}).get(_MEMORY, ())) for row in reports["telemetry"]}
    bench.note(metrics=found, ranks_of_telemetry=sorted(num_ranks))
    lacking = [
        f"{name} of the group {group}"
        for group, names in expected.items()
        for name in names
        if name not in found[group]
    ]
    if num_ranks != {slots}:
        lacking.append(f"{_MEMORY} of each of {slots} ranks")
    if lacking:
        raise CheckFailedError(
            f"{', '.join(lacking)} did not arrive at the master", "Read the trial's log, below.", ended.end
        )
    return Finding(
        f"{len(found['training'])} training and {len(found['validation'])} validation metrics, "
        f"{len(found['telemetry'])} of telemetry for {slots} rank(s), system metrics of {', '.join(list(found)[3:])}",
        "" if bench.has_cuda else "system metrics of a device",
    )


def _names(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the metrics' names, those of nodes and devices within them as well."""
    found: set[str] = set()
    for row in rows:
        for name, value in row.items():
            found.add(name)
            if isinstance(value, Mapping):
                found |= _names([value])
    return found


def check_warm_start(bench: Bench) -> Finding:
    """A trial that starts as a fork reports what a new process reports.

    The same experiment is trained by a new process, and again until a trial is a fork of what the master has imported ahead. On
    the CPU all losses are equal to the bit; a device's kernels may add in another order.
    """
    slots = bench.num_slots
    cold = bench.write_experiment(
        slots=slots, stage=1, code=_SAYS_HOW_IT_STARTED, data={"dstrial": {"warm": False}}
    )
    warm = bench.write_experiment(slots=slots, stage=1, code=_SAYS_HOW_IT_STARTED)
    with bench.master(slots=slots) as env:
        began = _run(bench, cold, env)
        if _FORK in began.output:
            raise CheckFailedError("warm: false has forked a trial", "Report this with the JSON.", began.end)
        expected = bench.reports(1, "training", "validation", env=env)
        trial_id, ended = 1, began
        while _FORK not in ended.output and trial_id <= _MAX_STARTS:
            trial_id += 1
            ended = _run(bench, warm, env)
        bench.note(new_process_s=round(began.seconds, 1), fork_s=round(ended.seconds, 1), trials=trial_id)
        found = bench.reports(trial_id, "training", "validation", env=env)
    if _FORK not in ended.output:
        why = [line for line in ended.output.splitlines() if "not as a fork" in line]
        raise NotApplicableError(why[-1] if why else f"{_MAX_STARTS} trials were new processes")
    difference = _greatest_difference(_losses(expected), _losses(found))
    bench.note(greatest_difference=difference)
    if difference > (0.0 if bench.is_cpu else _BOUND_ON_A_DEVICE):
        raise CheckFailedError(
            f"a fork's losses differ by {difference:.3g} from those of a new process",
            "Set warm to false in the master's settings until this is mended, and report it with the JSON.",
            ended.end,
        )
    return Finding(
        f"{slots} rank(s) as forks: losses equal{'' if bench.is_cpu else f' within {difference:.2g}'}; "
        f"the trial in {ended.seconds:.1f} s, in {began.seconds:.1f} s as a new process",
        "forks beside an accelerator" if bench.is_cpu else "",
    )


def _losses(reports: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[float]:
    """Return all losses that were reported; NaN for one that is missing."""
    wanted = (("training", "loss"), ("validation", "validation_loss"))
    return [float(row.get(name, math.nan)) for group, name in wanted for row in reports[group]]


def _greatest_difference(expected: Sequence[float], found: Sequence[float]) -> float:
    """Return the greatest relative difference; infinite where one has no counterpart."""
    if len(expected) != len(found) or not expected or not all(map(math.isfinite, [*expected, *found])):
        return math.inf
    return max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(expected, found, strict=True))


def _run(bench: Bench, config: Path, env: Mapping[str, str]) -> LaunchResult:
    """Train an experiment to its end.

    Raises:
        CheckFailedError: it did not get there.
    """
    ended = bench.dstrial("run", str(config), str(config.parent), "--no-progress", env=env)
    if ended.exit_code != 0:
        raise CheckFailedError(
            f"`dstrial run` ended with {ended.exit_code}: {last_line(ended.output)}",
            "Read the log, below.",
            ended.end,
        )
    return ended
