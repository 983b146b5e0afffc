"""What ``dstrial run`` shows of a run that goes well: reports and a summary, and nothing that every run prints."""

from __future__ import annotations

import subprocess

import pytest
from waiting import wait_for

from dstrial.local.checkpoint_directory import list_checkpoints
from dstrial.local.run_directory import RunDirectory
from dstrial.testing.master import MasterForTest

DEADLINE_S = 240

MODEL_DEF = """
import deepspeed
import torch
from torch import nn
from tqdm import tqdm

from dstrial import DataLoader, DeepSpeedTrial

# What is validated after each two batches; the second is the best.
VALUES = [0.5, 0.9, 0.1, 0.2]


class Records(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, record_idx):
        return torch.ones(8), torch.ones(4)


class MyTrial(DeepSpeedTrial):
    def __init__(self, context):
        self.context = context
        self.num_validations = 0
        model = nn.Sequential(nn.Linear(8, 4))
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=context.get_deepspeed_config()
        )
        self.engine = context.wrap_model_engine(engine)
        for _ in tqdm(range(3), desc="reading the table"):
            pass

    def build_training_data_loader(self):
        return DataLoader(Records(), batch_size=4)

    def build_validation_data_loader(self):
        return DataLoader(Records(), batch_size=16)

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        features, targets = next(dataloader_iter)
        loss = nn.functional.mse_loss(self.engine(features), targets)
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        next(dataloader_iter)
        self.num_validations += 1
        return {"accuracy": VALUES[self.num_validations - 1]}
"""
DS_CONFIG = """
{"train_micro_batch_size_per_gpu": 4,
 "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": true}},
 "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 8}},
 "zero_optimization": {"stage": 1}}
"""
CONFIG = """
name: screen
entrypoint: model_def:MyTrial
hyperparameters: {deepspeed_config: ds.json}
resources: {slots_per_trial: 1}
searcher: {name: single, metric: accuracy, smaller_is_better: false, max_length: {batches: 8}}
min_validation_period: {batches: 2}
min_checkpoint_period: {batches: 2}
# No fork of what tests import ahead has it: tqdm reads its variables when it is imported.
environment: {environment_variables: [IMPORTS_ITSELF=1]}
"""


@pytest.fixture(scope="module")
def ended(
    tmp_path_factory: pytest.TempPathFactory, shared_master: MasterForTest
) -> tuple[subprocess.CompletedProcess[str], RunDirectory]:
    project = tmp_path_factory.mktemp("project")
    context = project / "context"
    context.mkdir()
    (context / "model_def.py").write_text(MODEL_DEF)
    (context / "ds.json").write_text(DS_CONFIG)
    (project / "exp.yaml").write_text(CONFIG)
    found = shared_master.dstrial(
        "run", "exp.yaml", "context", "--no-progress", cwd=project, deadline_s=DEADLINE_S
    )
    assert found.returncode == 0, found.stdout + found.stderr
    (record,) = (project / "runs").glob("*/*/run.json")
    return found, RunDirectory(record.parent)


Ended = tuple[subprocess.CompletedProcess[str], RunDirectory]


@pytest.mark.ranks
def test_noise_is_left_out_and_the_summary_names_each_path_once_and_relative_and_the_best_checkpoint_beside_the_last(
    ended: Ended,
) -> None:
    found, run_directory = ended
    for noise in (
        "validated ",
        "learning rate from scheduler before it has started",
        "reading the table",
        "it/s",
    ):
        assert noise not in found.stdout + found.stderr
    text = found.stdout[found.stdout.index("state: ") :]
    assert str(run_directory.path) not in found.stdout
    assert text.count(run_directory.path.name) == 1
    wait_for(
        lambda: len(list_checkpoints(run_directory.checkpoints_path)) == 2, "the master has collected none"
    )
    by_batch = {
        stored.steps_completed: stored.path.name
        for stored in list_checkpoints(run_directory.checkpoints_path)
    }
    assert sorted(by_batch) == [4, 8], "the best and the last, as Determined keeps them"
    assert f"  best:        checkpoints/{by_batch[4]} (batch 4, accuracy 0.9)\n" in text
    assert f"  last:        checkpoints/{by_batch[8]} (batch 8)\n" in text
