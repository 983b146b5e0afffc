"""A real checkpoint of two ranks, and malicious changes to its files."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from dstrial.checkpoint.checksum import with_checksum
from dstrial.checkpoint.completion_marker import read_marker, write_marker
from dstrial.checkpoint.manifest import MANIFEST_NAME, hash_files, read_manifest, write_manifest
from dstrial.local.run_directory import RunDirectory
from dstrial.testing.ranks import run_function

DEFINITIONS = Path(__file__).parent.parent / "cli" / "checkpointed"
NUM_BATCHES = 2
NUM_RANKS = 2

ENGINE_FILE = "model0/mp_rank_00_model_states.pt"
OPTIMIZER_FILE = "model0/zero_pp_rank_0_mp_rank_00_optim_states.pt"
RANK_FILE = "dstrial_rank0.pt"


class Payload:
    """Creates a directory when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = str(marker)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.makedirs, (self._marker, 0o777, True)


def experiment_config(num_batches: int = NUM_BATCHES, **more: Any) -> dict[str, Any]:
    return {
        "name": "foreign",
        "entrypoint": "wide_trials:WideTrial",
        "resources": {"slots_per_trial": NUM_RANKS},
        "hyperparameters": {
            "deepspeed_config": {
                "train_batch_size": 8,
                "train_micro_batch_size_per_gpu": 4,
                "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
                "zero_optimization": {"stage": 1},
            }
        },
        "searcher": {
            "name": "single",
            "metric": "validation_loss",
            "max_length": {"batches": num_batches},
        },
        "min_checkpoint_period": {"batches": 1},
        "checkpoint_policy": "none",
        **more,
    }


def write_experiment(path: Path, config: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(config))
    return path


def make_run(scratch: Path, **more: Any) -> Path:
    """Train the two batches and return the run directory."""
    config = experiment_config(**more)
    path = write_experiment(scratch / "foreign.yaml", config)
    run_directory = RunDirectory.create(
        scratch / "runs", name="foreign", context_dir=DEFINITIONS, command=["test"], config=config
    )
    code, output = fit(path, run_directory.path)
    assert code == 0, output
    return run_directory.path


def fit(config: Path, run_path: Path, resume: Path | None = None, **env: str) -> tuple[int, str]:
    """Run ``Trainer.fit`` on two ranks; return the highest exit code and the output."""
    ranks = run_function(
        _fit,
        NUM_RANKS,
        str(config),
        str(run_path),
        None if resume is None else str(resume),
        env=env,
        deadline_s=200,
        check=False,
    )
    return max(rank.exit_code for rank in ranks), "".join(rank.stdout + rank.stderr for rank in ranks)


def resume(
    checkpoint: Path, directory: Path, *, config: dict[str, Any] | None = None, **env: str
) -> tuple[int, str]:
    """Resume a checkpoint for three batches in a new run in a directory, as ``fit`` does."""
    path = write_experiment(directory / "resumed.yaml", config or experiment_config(3))
    run = RunDirectory.create(
        directory / "runs", name="new", context_dir=DEFINITIONS, command=["test"], config={}
    )
    return fit(path, run.path, checkpoint, **env)


def _fit(config: str, run_path: str, resume: str | None) -> None:
    from dstrial.config.experiment_config.config import load_experiment
    from dstrial.trainer import run_trial

    sys.path[:0] = [str(DEFINITIONS), str(Path(__file__).parent)]
    import wide_trials

    experiment = load_experiment(config, DEFINITIONS, slots=NUM_RANKS)
    run_trial(wide_trials.WideTrial, experiment=experiment, run_dir=run_path, resume=resume)


def latest(run_path: Path) -> Path:
    marks = {read_marker(path)["steps_completed"]: path for path in (run_path / "checkpoints").iterdir()}
    return marks[max(marks)]


def foreign_copy(checkpoint: Path, to: Path) -> Path:
    """Copy a checkpoint without this account's signature, as from another account."""
    shutil.copytree(checkpoint, to)
    remake(to)
    return to


def poison(checkpoint: Path, name: str, value: Any) -> None:
    """Add an object to a file; rewrite the manifest and the marker to match."""
    put(checkpoint, name, value)
    remake(checkpoint)


def put(checkpoint: Path, name: str, value: Any) -> None:
    path = checkpoint / name
    content = torch.load(path, weights_only=False)
    content["zz_added"] = value
    torch.save(content, path)


def remake(checkpoint: Path, *, is_own: bool = False) -> None:
    """Rewrite manifest and marker for the current files, signed only if ``is_own``."""
    manifest = read_manifest(checkpoint)
    made = dataclasses.replace(manifest, files=hash_files(checkpoint, manifest.files))
    if is_own:
        write_manifest(checkpoint, made)
    else:
        _write_unsigned(checkpoint, made.to_json())
    if (checkpoint / "COMPLETE").is_file():
        write_marker(checkpoint, read_marker(checkpoint))


def add_file(checkpoint: Path, name: str) -> None:
    """Add a file to the manifest."""
    manifest = read_manifest(checkpoint)
    made = dataclasses.replace(manifest, files={**manifest.files, **hash_files(checkpoint, [name])})
    _write_unsigned(checkpoint, made.to_json())


def rename_in_manifest(checkpoint: Path, name: str, to: str) -> None:
    """Replace the path of a file in the manifest."""
    values = read_manifest(checkpoint).to_json()
    values["files"] = {to if path == name else path: entry for path, entry in values["files"].items()}
    _write_unsigned(checkpoint, values)


def _write_unsigned(checkpoint: Path, values: dict[str, Any]) -> None:
    """Write a manifest without this account's signature, as any program can."""
    (checkpoint / MANIFEST_NAME).write_text(json.dumps(with_checksum(values), indent=1) + "\n")


class OfUser:
    """A class of the user whose objects a callback may save."""

    best = 3.5


class ObjectsAsNumbers:
    """A NumPy object dtype that claims to hold plain data: arrays read any address."""

    def __reduce__(self) -> tuple[Any, ...]:
        return np.dtype, ("O8", False, True), (3, "|", None, None, None, -1, -1, 0)
