"""Measure how long ``dstrial dsat plan`` takes: a tiny net and a model of 7 billion parameters, on hardware that is not there.

Usage: ``python benchmarks/dsat_plan.py [--models tiny 7b] [--slots 8] [--repeats N] [--against TREE] [--json FILE]``

Prints one Markdown table; ``--against`` adds another checkout of dstrial, turn by turn.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
TREE = HERE.parent
MODELS = ("tiny", "7b")
_DEADLINE_S = 1800.0
_SEVEN_BILLION = {
    "num_layers": 32,
    "width": 4096,
    "vocabulary": 32_000,
    "sequence_length": 2048,
    "checkpoints": True,
}


def main(words: list[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: both")
    parser.add_argument("--slots", type=int, default=8, help="ranks of the plan (default: 8)")
    parser.add_argument("--repeats", type=int, default=3, help="plans of each (default: 3)")
    parser.add_argument("--against", type=pathlib.Path, metavar="TREE", help="another checkout of dstrial")
    parser.add_argument("--json", type=pathlib.Path, help="also write every plan to this file")
    options = parser.parse_args(words)
    trees = {"dstrial": TREE, **({"--against": options.against.resolve()} if options.against else {})}
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for model in options.models:
        for _ in range(options.repeats):
            for name, tree in trees.items():
                with tempfile.TemporaryDirectory(prefix="dstrial-plan-") as scratch:
                    seen = plan(model, options.slots, tree, pathlib.Path(scratch))
                found.setdefault(model, {}).setdefault(name, []).append(seen)
                print(f"{model}, {name}: {seen['seconds']:.1f} s", file=sys.stderr)
    print("| model | ranks | of | seconds | CPU seconds |")
    print("|---|---|---|---|---|")
    for model, by_tree in found.items():
        for name, those in by_tree.items():
            cells = [f"{statistics.median(one[key] for one in those):.1f}" for key in ("seconds", "cpu_s")]
            print(f"| {model} | {options.slots} | {name} | {' | '.join(cells)} |")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


def plan(model: str, num_slots: int, tree: pathlib.Path, scratch: pathlib.Path) -> dict[str, float]:
    """Plan once, in new processes.

    Raises:
        RuntimeError: it failed; with the end of its output.
    """
    config, context = write_model(model, scratch)
    words = ["dsat", "plan", str(config), str(context), f"--slots={num_slots}", "--device=a100"]
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "dstrial.cli", *words, f"--output={scratch / 'plan'}"],
        env={**os.environ, "PYTHONPATH": str(tree), "DS_ACCELERATOR": "cpu"},
        cwd=scratch,
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    seconds, after = time.monotonic() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    if ended.returncode:
        raise RuntimeError(f"dsat plan of {model} failed:\n{(ended.stdout + ended.stderr)[-4000:]}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu_s": cpu_s}


def write_model(model: str, scratch: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Write an experiment config and a model definition directory; returns both."""
    context = scratch / "model_def"
    if model == "tiny":
        shutil.copytree(TREE / "model_defs" / "dsat_trial", context)
        return TREE / "experiment_configs" / "dsat_trial.yaml", context
    context.mkdir()
    shutil.copy(HERE / "gpt_model.py", context)
    shutil.copy(HERE / "dsat_plan_trial.py", context / "model_def.py")
    deepspeed_config: dict[str, Any] = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    config = scratch / "exp.json"
    config.write_text(
        json.dumps(
            {
                "name": "dsat_plan",
                "entrypoint": "python3 -m dstrial.launch --trial model_def:GPTTrial",
                "hyperparameters": {"deepspeed_config": deepspeed_config, "shape": _SEVEN_BILLION},
                "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 100}},
                "resources": {"slots_per_trial": 8},
            }
        ),
        encoding="utf-8",
    )
    return config, context


if __name__ == "__main__":
    sys.exit(main())
