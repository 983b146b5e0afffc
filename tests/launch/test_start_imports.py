"""Modules that launcher and ranks import, in new processes without forks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TRIAL = """
import atexit, gc, json, os, pathlib, sys

import deepspeed
import torch
from torch import nn

from dstrial import DataLoader, DeepSpeedTrial

def write_down():
    path = pathlib.Path(os.environ["SEEN"]) / f"rank{os.environ['RANK']}.json"
    path.write_text(json.dumps({"modules": sorted(sys.modules), "collector": COLLECTOR}))


COLLECTOR = {"at import": gc.isenabled(), "kept at import": gc.get_freeze_count()}
atexit.register(write_down)


class Trial(DeepSpeedTrial):
    def __init__(self, context):
        self.context = context
        net = nn.Linear(4, 1)
        config = context.get_hparams()["deepspeed_config"]
        engine = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)[0]
        self.engine = context.wrap_model_engine(engine)

    def loader(self):
        return DataLoader([torch.ones(4)] * 16, batch_size=2)

    build_training_data_loader = build_validation_data_loader = loader

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        COLLECTOR["in a batch"] = gc.isenabled()
        COLLECTOR["trials found"] = sum(type(one) is Trial for one in gc.get_objects())
        loss = self.engine(next(dataloader_iter)).square().mean()
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        return {"validation_loss": self.engine(next(dataloader_iter)).mean()}
"""
LAUNCHER = """
import sys
from dstrial.launch.__main__ import main

code = main(sys.argv[1:])
print("imported:", *sorted({"torch", "deepspeed", "determined"} & set(sys.modules)))
sys.exit(code)
"""
EXPERIMENT = {
    "name": "imports",
    "entrypoint": "python3 -m dstrial.launch --trial model_def:Trial",
    "hyperparameters": {
        "deepspeed_config": {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": 1},
            "steps_per_print": 1000,
        }
    },
    "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 3}},
    "resources": {"slots_per_trial": 2},
    "scheduling_unit": 1,
}


@pytest.mark.ranks
def test_garbage_collector_is_paused_during_rank_imports(tmp_path: Path) -> None:
    # torch_adam needs no C++ compiler.
    (tmp_path / "model_def.py").write_text(TRIAL)
    (tmp_path / "exp.json").write_text(json.dumps(EXPERIMENT))
    command = ["-c", LAUNCHER, "--config", "exp.json", "--trial", "model_def:Trial"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_"))}
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env={
            **environ,
            "SEEN": str(tmp_path),
            "DS_ACCELERATOR": "cpu",
            "DSTRIAL_RUNS_DIR": str(tmp_path / "runs"),
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "saved checkpoint" in ended.stderr
    assert "imported:\n" in ended.stdout, "the launcher has imported what only ranks need"
    assert list(tmp_path.rglob("*tfevents*")), "the chief has reported"
    for rank in (0, 1):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        seen = set(found["modules"])
        assert {"torch", "deepspeed", "dstrial.trainer"} <= seen
        assert "onnx" not in seen
        # Imports ran without garbage collection, and their objects are frozen; collection is enabled for the trial.
        assert found["collector"].pop("kept at import") > 100_000
        assert found["collector"] == {"at import": True, "in a batch": True, "trials found": 1}
