"""Ranks of a launcher that is a new process: forks of what has imported the same beside it, once, or new processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from dstrial.harness_paths import WARM_VARIABLE
from dstrial.launch import early_imports

TRIAL = """
import json, os, pathlib, sys

BEFORE = [name for name in ("torch", "deepspeed") if name in sys.modules]

import deepspeed
import torch

import dstrial


class Trial(dstrial.DeepSpeedTrial):
    def __init__(self, context):
        net = torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
        config = context.get_hparams()["deepspeed_config"]
        engine = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)[0]
        self.engine = context.wrap_model_engine(engine)
        parent = pathlib.Path("/proc", str(os.getppid()), "cmdline").read_text().split("\\0")
        self.seen = {
            "before": BEFORE,
            # It shows the variables of the program that was executed.
            "forked": b"RANK=" not in pathlib.Path("/proc/self/environ").read_bytes(),
            "parent": parent[2],
            "colour": os.environ.get("COLOUR"),
            "losses": [],
        }

    def loader(self):
        return dstrial.DataLoader([torch.ones(4) * idx for idx in range(16)], batch_size=2)

    build_training_data_loader = build_validation_data_loader = loader

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        loss = (self.engine(next(dataloader_iter)) - 1).square().mean()
        self.engine.backward(loss)
        self.engine.step()
        self.seen["losses"].append(loss.item())
        self.seen["servers"] = servers()
        pathlib.Path(f"rank{os.environ['RANK']}.json").write_text(json.dumps(self.seen))
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        return {"validation_loss": self.engine(next(dataloader_iter)).mean()}


def servers():
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text().split("\\0")
            parent = (path.parent / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if "dstrial.fork_server.server" in words and parent == str(os.getppid()):
            found.append(words)
    return found
"""
CONFIG: dict[str, Any] = {
    "name": "early",
    "entrypoint": "python3 -m dstrial.launch --trial model_def:Trial",
    "environment": {"environment_variables": ["COLOUR=red"]},
    "hyperparameters": {
        "deepspeed_config": {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}},
        }
    },
    "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 4}},
}


def start(
    tmp_path: Path, *, env: dict[str, str] | None = None, ranks: int = 2, **config: Any
) -> tuple[subprocess.Popen[str], list[Path]]:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "model_def.py").write_text(TRIAL)
    (tmp_path / "exp.json").write_text(
        json.dumps({**CONFIG, "resources": {"slots_per_trial": ranks}, **config})
    )
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    program = subprocess.Popen(
        [sys.executable, "-m", "dstrial.launch", "--config=exp.json", "--trial=model_def:Trial"],
        cwd=tmp_path,
        env={**variables, "DS_ACCELERATOR": "cpu", "DSTRIAL_RUNS_DIR": str(tmp_path / "runs"), **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return program, [tmp_path / f"rank{rank}.json" for rank in range(ranks)]


def seen_by(started: tuple[subprocess.Popen[str], list[Path]]) -> list[dict[str, Any]]:
    program, paths = started
    output = program.communicate(timeout=120)[0]
    assert program.returncode == 0, output
    return [json.loads(path.read_text()) for path in paths]


@pytest.mark.exhaustive("tests/trainer/test_forked_ranks.py::test_forked_ranks_train_the_same")
@pytest.mark.ranks
def test_ranks_of_a_trial_are_forks_that_train_what_new_processes_train(tmp_path: Path) -> None:
    forks = seen_by(start(tmp_path / "forks"))
    new = seen_by(start(tmp_path / "new", env={WARM_VARIABLE: "0"}))

    assert [one["forked"] for one in forks] == [True, True]
    assert [one["forked"] for one in new] == [False, False]
    for one in (*forks, *new):
        assert "torch" in one["before"], "a trial's module finds it imported in any case"
        assert one["parent"] == "dstrial.launch"
        assert one["colour"] == "red"
        assert one["servers"] == [], "it has ended when ranks train"
    assert [one["losses"] for one in forks] == [one["losses"] for one in new]


@pytest.mark.ranks
def test_an_experiment_may_have_new_processes(tmp_path: Path) -> None:
    assert not any(
        one["forked"] for one in seen_by(start(tmp_path, ranks=1, data={"dstrial": {"warm": False}}))
    )


@pytest.mark.ranks
def test_ranks_are_new_processes_where_what_imports_for_them_is_killed(tmp_path: Path) -> None:
    started = start(tmp_path, ranks=1)
    program = started[0]

    def servers() -> list[int]:
        children = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
        return [int(pid) for pid in children if b"fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    wait_for(servers, "the process that imports")
    os.kill(servers()[0], 9)
    assert not any(one["forked"] for one in seen_by(started))


@pytest.mark.process
def test_nothing_is_left_where_the_launch_fails(tmp_path: Path) -> None:
    program, _ = start(tmp_path, resources={"slots_per_trial": 0}, hyperparameters={"deepspeed_config": 1})
    assert program.communicate(timeout=120)[0]
    assert program.returncode == 2


def test_in_doubt_ranks_are_new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_imports.client, "of_this_process", None)
    cpu = {"DS_ACCELERATOR": "cpu"}

    assert early_imports._is_possible(cpu)
    assert not early_imports._is_possible({"DS_ACCELERATOR": "cuda"})
    assert not early_imports._is_possible({**cpu, WARM_VARIABLE: "0"})
    assert not early_imports._is_possible({**cpu, "DET_ALLOCATION_ID": "1.1"}), "a cluster of Determined's"
    assert early_imports._is_possible({**cpu, "DET_ALLOCATION_ID": "1.1", "DSTRIAL_ALLOCATION_DIR": "/a"})
    monkeypatch.setattr(early_imports.glob, "glob", lambda path: [path] if "nvidia" in path else [])
    assert not early_imports._is_possible({}), "there may be a device"
    assert early_imports._is_possible(cpu)
    monkeypatch.setattr(early_imports.client, "of_this_process", object())
    assert not early_imports._is_possible(cpu), "this is a fork, and its ranks are"
