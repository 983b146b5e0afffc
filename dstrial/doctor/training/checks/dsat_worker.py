"""Five configurations in a living worker leave nothing behind in its ranks.

They hold afterwards what they held after the first. CPU ranks do not show a device's memory; they show tensors, groups,
threads, files and resident memory.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from dstrial.doctor.training.bench import Bench, last_line
from dstrial.doctor.training.check import CheckFailedError, Finding
from dstrial.dsat.core.outcome import Failure, Measured
from dstrial.dsat.worker.messages import TaskResult
from dstrial.dsat.worker.transport import ANSWERS_NAME
from dstrial.local.json_files import read_json_lines

_NUM_TRIALS = 5
_SIGN = "does not come back to what it was"
_SHOWN = (
    "num_tensors",
    "tensor_bytes",
    "num_groups",
    "num_threads",
    "num_files",
    "device_bytes",
    "resident_bytes",
)


def run(bench: Bench) -> Finding:
    """Search at random here, without a master, and check what the ranks report."""
    config = bench.write_experiment(slots=bench.num_slots, stage=1)
    output = bench.scratch / "search"
    words = [
        "random",
        str(config),
        str(config.parent),
        "--local",
        "--max-trials",
        str(_NUM_TRIALS),
        "--fresh",
    ]
    words += ["--zero-stages", "0", "1", "2", "3", "--measure-seconds", "1", "--output", str(output)]
    ended = bench.run([sys.executable, "-m", "dstrial.dsat", *words])
    answers = [answer for path in sorted(output.rglob(ANSWERS_NAME)) for answer in _answers(path)]
    bench.note(configurations=[_row(answer) for answer in answers])
    measured = [answer for answer in answers if isinstance(answer.outcome, Measured)]
    if ended.exit_code != 0 or not measured:
        failures = [answer.outcome.message for answer in answers if isinstance(answer.outcome, Failure)]
        raise CheckFailedError(
            f"the search ended with exit code {ended.exit_code} after {len(measured)} measured configurations: "
            f"{failures[0] if failures else last_line(ended.output)}",
            "Read what it printed, below.",
            ended.end,
        )
    grown = [answer for answer in answers if _SIGN in answer.respawned]
    if grown:
        raise CheckFailedError(
            f"after configuration {grown[0].number}, {grown[0].respawned}",
            "Search with --no-worker until this is mended; report what has grown.",
            ended.end,
        )
    return Finding(
        f"{len(measured)} of {len(answers)} configurations measured by {max(answer.generation for answer in answers)} "
        "generation(s) of ranks; nothing has grown beyond what the worker allows",
        "a device's memory" if bench.is_cpu else "",
    )


def _answers(path: Path) -> list[TaskResult]:
    return [TaskResult.from_json(row) for row in read_json_lines(path)]


def _row(answer: TaskResult) -> dict[str, Any]:
    outcome = "measured" if isinstance(answer.outcome, Measured) else answer.outcome.kind.value
    held = {name: answer.details.get(name) for name in _SHOWN}
    return {"number": answer.number, "outcome": outcome, "generation": answer.generation, **held}
