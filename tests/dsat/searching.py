"""Writes experiments for searches and runs ``dstrial.dsat`` commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import warm_start
import yaml

from dstrial.dsat.cli import build_parser, flags_of
from dstrial.dsat.config import SearchConfig, read_config

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "experiment_configs" / "dsat_trial.yaml"
MODEL_DIR = ROOT / "model_defs" / "dsat_trial"


def write_experiment(directory: Path, base: Mapping[str, Any] | None = None, **changes: Any) -> Path:
    """Write ``exp.yaml``; if ``base``, a DeepSpeed config, is given, also ``model/``."""
    if base is not None:
        (directory / "model").mkdir()
        (directory / "model" / "model_def.py").write_text("class MyTrial:\n    pass\n")
        (directory / "model" / "train.py").write_text("")
        (directory / "model" / "ds.json").write_text(json.dumps(base))
    config = {
        "name": "mine",
        "entrypoint": "model_def:MyTrial",
        "hyperparameters": {"deepspeed_config": "ds.json"},
        "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 10}},
        "resources": {"slots_per_trial": 2},
        **changes,
    }
    path = directory / "exp.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def settings_of(path: Path, *flags: str, method: str = "asha", model_dir: Path | None = None) -> SearchConfig:
    words = [method, str(path), str(model_dir or path.parent / "model"), *flags]
    return read_config(flags_of(build_parser("dsat").parse_args(words)))


def command(
    method: str, output: Path, *flags: str, config: Path = CONFIG, model_dir: Path = MODEL_DIR
) -> list[str]:
    words = [sys.executable, "-m", "dstrial.dsat", method, str(config), str(model_dir)]
    return [*words, "--output", str(output), *flags]


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **(more or {})}


def run(
    words: list[str], more: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return warm_start.run_command(
        words,
        cwd=cwd,
        env=environment(more),
        capture_output=True,
        text=True,
        check=False,
        timeout=560,
    )


def begun(words: list[str], log: Path, more: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return warm_start.Popen(words, env=environment(more), stdout=file, stderr=subprocess.STDOUT)


def events(output: Path, kind: str | None = None) -> list[dict[str, Any]]:
    path = output / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if kind in (None, event["event"])]


def require_measured(output: Path, num_trials: int | None = None) -> None:
    """Assert that every trial has measured its requested configuration."""
    trials = json.loads((output / "trials.json").read_text())
    assert num_trials is None or len(trials) == num_trials
    for trial in trials:
        batch = trial["candidate"]["batch"]
        assert trial["metrics"]["train_micro_batch_size_per_gpu"] == batch["micro_batch_size"]
        assert trial["metrics"]["gradient_accumulation_steps"] == batch["accumulation"]
        assert trial["metrics"]["throughput"] > 0
        assert trial["metrics"]["num_steps"] >= 4
