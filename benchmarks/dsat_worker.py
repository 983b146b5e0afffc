"""What a configuration costs in a living worker and in ranks that are launched for it, and what a living rank is left with.

``python benchmarks/dsat_worker.py [--others 20] [--launched 3]``: two tables for one trial class on two CPU ranks.

1. Seconds per configuration, the timed steps themselves apart: launched (``dstrial dsat --no-worker``: launcher, imports,
   process group, engine) against living (building and taking out an engine).
2. Configuration X alone against X after all the others in the same processes: its step time with its interval, and what
   rank 0 holds: tensors, process groups, threads, files, resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from dstrial.dsat.core.outcome import Measured
from dstrial.dsat.worker.messages import Task, TaskQueue, TaskResult
from dstrial.dsat.worker.transport import ANSWERS_NAME, ORDERS_NAME
from dstrial.local.json_files import read_json_lines, write_json_atomically
from dstrial.local.measuring_variables import HPARAMS_VARIABLE

ROOT = Path(__file__).resolve().parents[1]
MODEL_DIR = ROOT / "model_defs" / "dsat_trial"
CONFIG = ROOT / "experiment_configs" / "dsat_trial.yaml"
TRIAL = "model_def:DigitsTrial"
DEADLINE_S = 600.0
HELD = ("num_tensors", "tensor_bytes", "num_groups", "num_threads", "num_files", "resident_bytes")


def configurations(num: int) -> list[dict[str, Any]]:
    """Return X and ``num`` others: ZeRO sections and micro batch sizes, all stages, buckets and offload among them."""
    sections: list[dict[str, Any]] = []
    for stage in (3, 0, 2, 1):
        sections += [{"stage": stage}, {"stage": stage, "reduce_bucket_size": 100_000}]
        if stage:
            sections += [{"stage": stage, "overlap_comm": True}]
            sections += [{"stage": stage, "offload_optimizer": {"device": "cpu", "pin_memory": False}}]
    others = [(section, micro) for micro in (16, 8, 4) for section in sections]
    return [_hparams({"stage": 2}, 16), *(_hparams(section, micro) for section, micro in others[:num])]


def _hparams(zero: dict[str, Any], micro_batch_size: int) -> dict[str, Any]:
    written = yaml.safe_load(CONFIG.read_text())["hyperparameters"]
    return {
        **written,
        "_use_dsat_mode": True,
        "_dsat": {"max_s": 1.0},
        "overwrite_deepspeed_args": {
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": micro_batch_size,
            "gradient_accumulation_steps": 32 // micro_batch_size,
            "zero_optimization": zero,
        },
    }


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **more}


def _where() -> list[str]:
    return ["--config", str(CONFIG), "--context-dir", "."]


def launched(hparams: dict[str, Any], directory: Path) -> tuple[float, float, Measured]:
    """Measure in ranks of their own; returns seconds from the launch to its end, and CPU seconds of all processes."""
    result = directory / "result.json"
    result.unlink(missing_ok=True)
    began_s, cpu_began_s = time.monotonic(), _children_cpu_s()
    subprocess.run(
        [
            *(sys.executable, "-m", "dstrial.launch", "--slots", "2", *_where()),
            *("-m", "dstrial.dsat.rank", "--trial", TRIAL, *_where()),
        ],
        cwd=MODEL_DIR,
        env=_environment(
            DSTRIAL_DSAT_RESULT=str(result),
            DSTRIAL_RUNS_DIR=str(directory / "runs"),
            **{HPARAMS_VARIABLE: json.dumps(hparams)},
        ),
        check=True,
        capture_output=True,
    )
    measured = Measured(json.loads(result.read_text())["metrics"])
    return time.monotonic() - began_s, _children_cpu_s() - cpu_began_s, measured


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def living(all_hparams: list[dict[str, Any]], directory: Path) -> tuple[list[TaskResult], float]:
    """Measure all in one worker; returns its answers and the seconds of the whole."""
    # A metric that nothing has: no configuration is measured again for comparison.
    orders = [
        Task(number, number, hparams, DEADLINE_S, "nothing") for number, hparams in enumerate(all_hparams, 1)
    ]
    began_s = time.monotonic()
    write_json_atomically(directory / ORDERS_NAME, TaskQueue(tuple(orders)).to_json())
    with (directory / "output.log").open("wb") as output:
        worker = subprocess.Popen(
            [
                *(sys.executable, "-m", "dstrial.launch", "--slots", "2", *_where()),
                *("-m", "dstrial.dsat.worker", "--trial", TRIAL, *_where(), "--mailbox", str(directory)),
            ],
            cwd=MODEL_DIR,
            env=_environment(DSTRIAL_RUNS_DIR=str(directory / "runs")),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    path = directory / ANSWERS_NAME
    while len(read_json_lines(path) if path.exists() else []) < len(orders):
        if worker.poll() is not None:
            raise SystemExit((directory / "output.log").read_text()[-4000:])
        time.sleep(0.05)
    seconds = time.monotonic() - began_s
    write_json_atomically(directory / ORDERS_NAME, TaskQueue(results={}).to_json())
    worker.wait()
    return [TaskResult.from_json(line) for line in read_json_lines(path)], seconds


def overhead_s(answer: TaskResult) -> float:
    """Return the seconds of an answer that went into anything but its measurement."""
    return answer.seconds - answer.details["measure_s"]


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--others", type=int, default=20)
    parser.add_argument("--launched", type=int, default=3)
    options = parser.parse_args()
    wanted = configurations(options.others)
    with tempfile.TemporaryDirectory(prefix="dsat-worker-") as directory:
        answers, whole_s = living([*wanted, wanted[0]], Path(directory))
        # X first, so that it is launched right after it was measured for the last time in the worker.
        rows = [
            (*launched(hparams, Path(directory)), answer)
            for hparams, answer in _some(wanted, answers, options)
        ]
    first, rest = answers[0], answers[1:]
    print("| | seconds | of these not measuring | CPU seconds of these, both ranks |\n|---|---|---|---|")
    for seconds, cpu_s, _, answer in rows:
        measuring_s, measuring_cpu_s = answer.details["measure_s"], 2 * answer.details["measure_cpu_s"]
        print(f"| launched | {seconds:.2f} | {seconds - measuring_s:.2f} | {cpu_s - measuring_cpu_s:.2f} |")
    print(f"| living, the first (starts the ranks) | {first.seconds:.2f} | {overhead_s(first):.2f} | |")
    spent = [overhead_s(answer) for answer in rest]
    spent_cpu = [2 * answer.details["other_cpu_s"] for answer in rest]
    middle = [statistics.median(values) for values in ([answer.seconds for answer in rest], spent, spent_cpu)]
    print(f"| living, median of {len(rest)} | {middle[0]:.2f} | {middle[1]:.3f} | {middle[2]:.3f} |")
    most = max(answer.seconds for answer in rest), max(spent), max(spent_cpu)
    print(f"| living, slowest | {most[0]:.2f} | {most[1]:.3f} | {most[2]:.3f} |")
    if rows:
        before = statistics.median(seconds - answer.details["measure_s"] for seconds, _, _, answer in rows)
        cpu = statistics.median(cpu_s - 2 * answer.details["measure_cpu_s"] for _, cpu_s, _, answer in rows)
        print(
            f"\nlaunched / living, not measuring: {before / middle[1]:.0f} x, in CPU seconds {cpu / middle[2]:.0f} x"
        )
    print(f"whole worker: {whole_s:.1f} s for {len(answers)} configurations")
    print(f"ranks were started {max(answer.generation for answer in answers)} time(s)")
    print(f"load average: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    alone, after = answers[0], answers[-1]
    print(
        f"| configuration X | first | after {len(answers) - 2} others | launched right then |\n|---|---|---|---|"
    )
    for name in ("latency", "latency_low", "latency_high", "host_peak_memory_bytes"):
        fresh = f"{rows[0][2].metrics[name]:,.0f}" if rows else ""
        print(f"| {name} | {_value(alone, name):,.0f} | {_value(after, name):,.0f} | {fresh} |")
    for name in HELD:
        print(f"| {name} afterwards | {alone.details[name]:,.0f} | {after.details[name]:,.0f} | |")


def _some(
    wanted: list[dict[str, Any]], answers: list[TaskResult], options: argparse.Namespace
) -> list[tuple[dict[str, Any], TaskResult]]:
    """Return X with its last answer, and the first others with theirs: as many as are to be launched."""
    return [(wanted[0], answers[-1]), *zip(wanted[1:], answers[1:], strict=False)][: options.launched]


def _value(answer: TaskResult, name: str) -> float:
    assert isinstance(answer.outcome, Measured), answer
    return answer.outcome.metrics[name]


if __name__ == "__main__":
    main()
