"""Compare the throughput that dsat reports for its best config with that of training with this config.

Usage: ``python benchmarks/dsat_truth.py [--trials N] [--trainings N] [--only WORDS ...] [--json FILE]``

Prints one row of a Markdown table per case. A case takes about five minutes on two cores. Use a machine that nothing else
uses.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """An example of the repository on a number of slots, with other hyperparameters.

    Attributes:
        seconds: how long one training should take, at the throughput that the search reports.
    """

    example: str
    slots: int
    hyperparameters: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float = 15.0

    @property
    def name(self) -> str:
        words = [f"{name} {value}" for name, value in self.hyperparameters.items()]
        return ", ".join([self.example, *words, f"{self.slots} slot{'s' * (self.slots > 1)}"])


CASES = (
    *(
        Case("dsat_trial", slots, sizes)
        for sizes in ({}, {"width": 1024}, {"width": 512, "depth": 12})
        for slots in (1, 2)
    ),
    Case("stdlib_lm", 2),
    Case("stdlib_lm", 2, {"width": 128}),
    Case("lora_clm", 2),
    Case("digits", 2),
)


def run_dstrial(*words: str, cwd: pathlib.Path) -> None:
    """Run a command of dstrial; exit with the end of its output if the command fails."""
    found = subprocess.run(
        [sys.executable, "-m", "dstrial", *words],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if found.returncode:
        raise SystemExit(f"dstrial {' '.join(words)} failed:\n{found.stdout[-4000:]}")


def search(case: Case, scratch: pathlib.Path, max_trials: int) -> dict[str, Any]:
    """Search for the best config; return its measurements. ``scratch/search`` has the files of the search."""
    document = yaml.safe_load((ROOT / "experiment_configs" / f"{case.example}.yaml").read_text())
    document["hyperparameters"].update(case.hyperparameters)
    document["resources"]["slots_per_trial"] = case.slots
    experiment = scratch / "experiment.yaml"
    experiment.write_text(yaml.safe_dump(document))
    model = str(ROOT / "model_defs" / case.example)
    options = ("--local", "--output", "search", "--max-trials", str(max_trials))
    run_dstrial("dsat", "predict", str(experiment), model, *options, cwd=scratch)
    metrics: dict[str, Any] = json.loads((scratch / "search" / "best_ds_metrics.json").read_text())
    return metrics


def train(case: Case, scratch: pathlib.Path, num_batches: int) -> float:
    """Train with the best config; return records per second of all batches but the first."""
    document = yaml.safe_load((scratch / "search" / "best_experiment.yaml").read_text())
    document["searcher"]["max_length"] = {"batches": num_batches}
    document["min_validation_period"] = document["min_checkpoint_period"] = {"batches": num_batches}
    experiment = scratch / "training.yaml"
    experiment.write_text(yaml.safe_dump(document))
    run_dir = scratch / f"training-{time.time_ns()}"
    model = str(ROOT / "model_defs" / case.example)
    run_dstrial("run", str(experiment), model, "--run-dir", str(run_dir), "--no-progress", cwd=scratch)
    return float(json.loads((run_dir / "telemetry.json").read_text())["records_per_second"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trials", type=int, default=64, help="maximum trials of a search (default: 64)")
    parser.add_argument(
        "--trainings", type=int, default=3, help="trainings with the best config (default: 3)"
    )
    parser.add_argument("--only", nargs="+", default=[""], help="words that a case's name contains")
    parser.add_argument("--json", type=pathlib.Path, help="also write all numbers to this file")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("| case | reported, records/s | expected | trained, records/s | within | median / reported |")
    print("|---|---|---|---|---|---|")
    for case in CASES:
        if not any(word in case.name for word in arguments.only):
            continue
        with tempfile.TemporaryDirectory() as directory:
            scratch = pathlib.Path(directory)
            found = search(case, scratch, arguments.trials)
            reported = float(found["end_to_end_throughput"])
            num_batches = max(50, round(case.seconds * reported / float(found["train_batch_size"])))
            trained = [train(case, scratch, num_batches) for _ in range(arguments.trainings)]
        low, high = found["lowest_expected_throughput"], found["highest_expected_throughput"]
        num_within = sum(low <= one <= high for one in trained)
        rows.append({"case": case.name, "reported": reported, "search": found, "trained": trained})
        print(
            f"| {case.name} | {reported:,.0f} | {low:,.0f} to {high:,.0f} | {', '.join(f'{one:,.0f}' for one in trained)} | "
            f"{num_within} of {len(trained)} | {statistics.median(trained) / reported - 1:+.1%} |",
            flush=True,
        )
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
