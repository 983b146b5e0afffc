"""Compare the losses of the Accelerate example, resumed on other numbers of slots, with those of an uninterrupted run.

``python benchmarks/accelerate_resume.py`` starts a master of its own with two slots and prints a table: for ZeRO 2 and 3,
5 batches on some slots, then 5 more with ``--resume latest`` on others, against 10 batches on two slots at once.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path

from dstrial.testing.master import MasterForTest, master_for_test

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "experiment_configs" / "accelerate_clm_two_slots.yaml"
DEFINITION = ROOT / "model_defs" / "accelerate_clm"
DEADLINE_S = 600


def train(
    master: MasterForTest, runs_dir: Path, *, batches: int, slots: int, stage: int, resumes: bool = False
) -> list[float]:
    """Train to ``batches``; return the loss of every batch of the run."""
    values = {
        "searcher.max_length": {"batches": batches},
        "scheduling_unit": 1,
        "hyperparameters.num_chars_max": 60_000,
        "hyperparameters.overwrite_deepspeed_args": {"zero_optimization": {"stage": stage}},
    }
    given = [word for key, value in values.items() for word in ("--config", f"{key}={json.dumps(value)}")]
    words = ["--slots", str(slots), "--runs-dir", str(runs_dir), *(["--resume", "latest"] if resumes else [])]
    ended = master.dstrial("run", str(CONFIG), str(DEFINITION), *given, *words, deadline_s=DEADLINE_S)
    if ended.returncode:
        raise RuntimeError(ended.stdout + ended.stderr)
    (path,) = runs_dir.glob("*/*/metrics.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row["metrics"]["loss"] for row in rows if row["group"] == "training"]


def main() -> None:
    """Train everything and print the table."""
    print("| ZeRO | slots before -> after | batches | largest relative difference of a loss |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name, master_for_test(Path(name), num_slots=2) as master:
        for stage in (2, 3):
            whole = train(master, Path(name) / f"whole{stage}", batches=10, slots=2, stage=stage)
            for before, after in itertools.product((1, 2), repeat=2):
                runs_dir = Path(name) / f"resumed{stage}{before}{after}"
                train(master, runs_dir, batches=5, slots=before, stage=stage)
                losses = train(master, runs_dir, batches=10, slots=after, stage=stage, resumes=True)
                difference = max(abs(a - b) / b for a, b in zip(losses, whole, strict=True))
                print(f"| {stage} | {before} -> {after} | {len(losses)} | {difference:g} |", flush=True)


if __name__ == "__main__":
    main()
