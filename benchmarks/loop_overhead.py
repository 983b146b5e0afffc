"""Measure what a training loop adds to bare DeepSpeed: dstrial's, Hugging Face's Trainer and Determined 0.38.1's.

Usage: ``python benchmarks/loop_overhead.py [--ranks 1 2] [--batches N] [--gas G] [--json FILE]``

Prints one Markdown table per number of ranks; see the README beside this file for how to read it. Uses the
accelerator that DeepSpeed finds, else the CPU; ``DS_ACCELERATOR=cpu`` forces the CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from loop_overhead_timing import Block, Plan, Spread, Summary, heartbeat_costs, summarize
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

RANK_PROGRAM = pathlib.Path(__file__).with_name("loop_overhead_ranks.py")
AIMS_US = {1: 15.0, 2: 25.0}
"""Ranks -> the most that dstrial's loop should add per micro batch, microseconds."""

NUM_TAIL_LINES = 200
TITLES = {
    "bare": "bare DeepSpeed",
    "dstrial": "dstrial",
    "silent": "dstrial without heartbeats",
    "huggingface": "Hugging Face's Trainer",
    "determined": "Determined 0.38.1",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    num_ranks: int
    machine: dict[str, str]
    load_averages: tuple[float, float]
    blocks: list[Block]


class RanksFailedError(Exception):
    """The ranks did not finish; carries the end of their output."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; impossible numbers end the program with a message."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks (default: 1 2)"
    )
    parser.add_argument(
        "--batches",
        type=int,
        default=300,
        help="measured batches per block, rounded up to whole reporting periods",
    )
    parser.add_argument("--repeats", type=int, default=15, help="blocks per loop that count (default: 15)")
    parser.add_argument("--gas", type=int, default=1, help="gradient accumulation steps (default: 1)")
    parser.add_argument("--report-every", type=int, default=100, help="batches per report (default: 100)")
    parser.add_argument("--metrics", type=int, default=1, help="tensors each step returns (default: 1)")
    parser.add_argument("--json", type=pathlib.Path, help="also write every block's timings to this file")
    parsed = parser.parse_args(arguments)
    for name in ("batches", "gas", "metrics"):
        if getattr(parsed, name) < 1:
            parser.error(f"--{name} is {getattr(parsed, name)}; expected at least 1")
    if min(parsed.ranks) < 1:
        parser.error(f"--ranks is {parsed.ranks}; expected numbers of at least 1")
    if parsed.report_every < 4:
        parser.error(
            f"--report-every is {parsed.report_every}; expected at least 4, to see batches without one"
        )
    return parsed


def environment(num_ranks: int, scratch: pathlib.Path) -> dict[str, str]:
    """Return the environment of the ranks: one thread each, files under ``scratch``."""
    from dstrial.ranks.process_group import has_accelerator

    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DSTRIAL_RUNS_DIR": str(scratch / "runs"),
        # Determined's import of deepspeed comes before the process group, so both are settled here.
        "LOCAL_SIZE": str(num_ranks),
    }
    if not has_accelerator():
        variables["DS_ACCELERATOR"] = "cpu"
    return variables


def measure(num_ranks: int, plan: Plan, progress: Progress) -> Measured:
    name = f"{num_ranks} rank{'s' * (num_ranks > 1)}"
    num_periods = plan.num_blocks + 2
    task = progress.add_task(f"{name}: starting", total=num_periods)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="loop_overhead_") as directory:
        scratch = pathlib.Path(directory)
        # Determined copies the working directory into every checkpoint, so it has to be a small one.
        working_directory = scratch / "empty"
        working_directory.mkdir()
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={num_ranks}",
        ]
        command += [str(RANK_PROGRAM), "--scratch", directory]
        command += ["--plan", json.dumps(dataclasses.asdict(plan))]
        for period_idx in run_ranks(command, working_directory, environment(num_ranks, scratch)):
            progress.update(task, completed=period_idx, description=f"{name}: reporting periods")
        progress.update(task, completed=num_periods)
        result = json.loads((scratch / "blocks.json").read_text())
    blocks = [Block(**block) for block in result.pop("blocks")]
    return Measured(num_ranks, result, (load_before, os.getloadavg()[0]), blocks)


def run_ranks(command: list[str], cwd: pathlib.Path, env: Mapping[str, str]) -> Iterator[int]:
    """Run a command, yielding how many reporting periods it says are done."""
    tail: deque[str] = deque(maxlen=NUM_TAIL_LINES)
    process = subprocess.Popen(
        command, cwd=cwd, env=dict(env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("@period "):
                yield int(line.split()[1])
            else:
                tail.append(line)
        status = process.wait()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait()
    if status:
        raise RanksFailedError(
            f"the ranks exited with status {status}; the end of their output:\n{''.join(tail)}"
        )


def table(measured: Measured, plan: Plan) -> str:
    summaries = summarize(measured.blocks)
    machine = measured.machine
    before, after = measured.load_averages
    lines = [
        f"### {measured.num_ranks} rank{'s' * (measured.num_ranks > 1)} on {machine['device']} "
        f"({machine['backend']}), torch {machine['torch']}, deepspeed {machine['deepspeed']}",
        "",
        f"{plan.num_blocks} blocks per loop, each of {plan.report_every} batches with one report; gradient "
        f"accumulation {plan.micro_batches_per_batch}; metrics {plan.num_metrics}; load average {before:.1f} before, "
        f"{after:.1f} after, on {os.cpu_count()} cores. All numbers in µs.",
        "",
        "| loop | micro batch: median (min) | added: median [quartiles] | added, seen directly: median [quartiles] (min) "
        "| draw | between steps | report share | one report |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(summary) for summary in summaries.values()]
    ours = summaries["dstrial"]
    lines.append("")
    for name in ("huggingface", "determined"):
        theirs = summaries[name]
        lines.append(
            f"{TITLES[name]} / dstrial: {_ratio(theirs.added, ours.added)} by what is added, "
            f"{_ratio(theirs.direct, ours.direct)} by what is seen directly."
        )
    lines += [
        f"dstrial: {_us(ours.draw.median + ours.between.median)} per micro batch without a report, "
        f"{_us(ours.report.median)} per report.",
    ]
    beats = Spread.of(heartbeat_costs(measured.blocks))
    lines.append(
        f"Heartbeats: {beats.median:.2f} [{beats.low:.2f} … {beats.high:.2f}] per micro batch, seen directly, block by block."
    )
    aim = AIMS_US.get(measured.num_ranks)
    if aim is not None:
        reached = "reached" if ours.direct.median < aim else "not reached"
        lines.append(f"Aim for dstrial: under {aim:.0f}; seen directly {_us(ours.direct.median)}: {reached}.")
    return "\n".join(lines)


def _row(summary: Summary) -> str:
    whole, added, direct = summary.whole, summary.added, summary.direct
    cells = [TITLES[summary.loop], f"{_us(whole.median)} ({_us(whole.minimum)})"]
    if summary.loop == "bare":
        cells += ["-"] * 6
    else:
        cells += [
            f"{_us(added.median)} [{_us(added.low)} … {_us(added.high)}]",
            f"{_us(direct.median)} [{_us(direct.low)} … {_us(direct.high)}] ({_us(direct.minimum)})",
            _us(summary.draw.median),
            _us(summary.between.median),
            _us(summary.report_share.median),
            _us(summary.report.median),
        ]
    return f"| {' | '.join(cells)} |"


def _us(value: float) -> str:
    return f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"


def _ratio(theirs: Spread, ours: Spread) -> str:
    return (
        f"{theirs.median / ours.median:.1f} times" if ours.median > 0 else "no ratio (dstrial adds nothing)"
    )


def main() -> int:
    arguments = parse_arguments()
    plan = Plan(
        report_every=arguments.report_every,
        num_blocks=-(-arguments.batches // arguments.report_every),
        micro_batches_per_batch=arguments.gas,
        num_metrics=arguments.metrics,
    )
    results: list[Measured] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for num_ranks in arguments.ranks:
            try:
                results.append(measure(num_ranks, plan, progress))
            except RanksFailedError as error:
                progress.stop()
                print(error, file=sys.stderr)
                return 1
    for measured in results:
        print(table(measured, plan), end="\n\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json(results, plan), indent=2) + "\n")
    return 0


def as_json(results: list[Measured], plan: Plan) -> dict[str, Any]:
    """Return the plan, and per number of ranks the machine, every block and the summaries."""
    return {
        "plan": dataclasses.asdict(plan),
        "results": [
            {
                **dataclasses.asdict(measured),
                "summaries": {
                    loop: dataclasses.asdict(summary) for loop, summary in summarize(measured.blocks).items()
                },
            }
            for measured in results
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
