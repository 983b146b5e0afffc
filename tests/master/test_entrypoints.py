"""Entrypoints under a real master: trial classes and Determined's launch layers."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml
from submitting import config as config_of
from submitting import log_of, steps_of, submit, trials, wait_until

from dstrial.testing.master import MasterForTest

pytestmark = [pytest.mark.process, pytest.mark.ranks]

ROOT = Path(__file__).parents[2]
SCRIPT = """
from determined import pytorch
from dstrial import Trainer, init
from model_def import DigitsTrial

with init() as context:
    Trainer(DigitsTrial(context), context).fit(reporting_period=pytorch.Batch(10))
"""
SUM_OF_RANKS = """
import determined as det

distributed = det.core.DistributedContext.from_torch_distributed()
mode = det.core.TensorboardMode.MANUAL  # imports no torch
with det.core.init(distributed=distributed, tensorboard_mode=mode) as core:
    ranks = distributed.allgather(distributed.rank)
    if distributed.rank == 0:
        core.train.report_training_metrics(len(ranks), {"sum": sum(ranks)})
    print("of", len(ranks))
"""
LAUNCHERS = [
    "python3 -m dstrial.launch train.py",
    "python3 -m determined.launch.torch_distributed python3 train.py",
]
PYTORCH_TRIAL = """
import torch
from determined.pytorch import DataLoader, PyTorchTrial


class MyTrial(PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(torch.nn.Linear(4, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def build_training_data_loader(self):
        return DataLoader(torch.utils.data.TensorDataset(torch.ones(32, 4), torch.ones(32, 1)), batch_size=4)

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = ((self.model(batch[0]) - batch[1]) ** 2).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        return {"validation_loss": ((self.model(batch[0]) - batch[1]) ** 2).mean()}
"""


def create(
    master: MasterForTest, context: Path, config: dict[str, object], num_tries: int = 3
) -> tuple[int, str]:
    """Create an experiment with ``det`` and follow it; return its id and the output.

    On a busy machine, Determined's DeepSpeed launcher may kill its runner five seconds after the ranks ended. An experiment
    that fails with the resulting exit code 241 (SIGTERM) is created again.
    """
    (context / "exp.yaml").write_text(yaml.safe_dump(config))
    done = master.det("e", "create", str(context / "exp.yaml"), str(context), "-f", deadline_s=200)
    assert done.returncode == 0, done.stdout + done.stderr
    experiment_id = done.stdout.split("Created experiment ")[1].split()[0]
    ended = master.det("e", "wait", experiment_id)
    is_cut_off = "launch.deepspeed" in str(config["entrypoint"]) and "(exit code 241)" in done.stdout
    if ended.returncode != 0 and is_cut_off and num_tries > 1:
        return create(master, context, config, num_tries - 1)
    assert ended.returncode == 0, done.stdout + ended.stdout + ended.stderr
    return int(experiment_id), done.stdout


@pytest.mark.parametrize(
    "entrypoint", ["model_def:DigitsTrial", "python3 -m determined.launch.deepspeed python3 train.py"]
)
def test_dstrial_trial_runs_on_two_slots(
    shared_master: MasterForTest, tmp_path: Path, entrypoint: str
) -> None:
    context = tmp_path / "context"
    shutil.copytree(
        ROOT / "model_defs" / "digits", context, ignore=shutil.ignore_patterns("__pycache__", "README.md")
    )
    (context / "train.py").write_text(SCRIPT)
    with (context / "model_def.py").open("a") as model_def:
        model_def.write("\nprint('here', __import__('os').environ.get('RANK'))\n")
    config = yaml.safe_load((ROOT / "experiment_configs" / "digits.yaml").read_text())
    config["entrypoint"] = entrypoint
    config["searcher"]["max_length"] = {"epochs": 1}
    config["resources"] = {"slots_per_trial": 2}

    experiment_id, printed = create(shared_master, context, config)

    (trial,) = trials(shared_master, experiment_id)
    assert steps_of(shared_master, trial["id"]) == [10, 20, 23]
    assert trial["bestCheckpoint"]["totalBatches"] == 23
    assert re.search(r"\[rank=1\].* here 1$", printed, re.MULTILINE)


@pytest.mark.exhaustive("[model_def:MyTrial-1]")
@pytest.mark.parametrize(
    ("entrypoint", "num_slots"),
    [
        ("model_def:MyTrial", 1),
        ("python3 -m determined.launch.torch_distributed --trial model_def:MyTrial", 2),
    ],
)
def test_determined_trial_class_runs_unmodified(
    shared_master: MasterForTest, tmp_path: Path, entrypoint: str, num_slots: int
) -> None:
    (tmp_path / "model_def.py").write_text(PYTORCH_TRIAL)
    config: dict[str, object] = {
        "name": "legacy",
        "entrypoint": entrypoint,
        "hyperparameters": {"global_batch_size": 4},
        "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 20}},
        "scheduling_unit": 10,
        "resources": {"slots_per_trial": num_slots},
        "max_restarts": 0,
    }

    experiment_id, _ = create(shared_master, tmp_path, config)

    (trial,) = trials(shared_master, experiment_id)
    assert steps_of(shared_master, trial["id"]) == [10, 20]
    assert trial["bestValidation"]["metrics"]["avgMetrics"]["validation_loss"] < 1.0
    assert trial["bestCheckpoint"]["totalBatches"] == 20


@pytest.mark.parametrize("entrypoint", LAUNCHERS)
def test_script_runs_once_per_slot(shared_master: MasterForTest, entrypoint: str) -> None:
    experiment_id = submit(
        shared_master, config_of(entrypoint, resources={"slots_per_trial": 2}), SUM_OF_RANKS
    )

    wait_until(shared_master, experiment_id, "COMPLETED")

    text = log_of(shared_master, experiment_id)
    assert steps_of(shared_master, trials(shared_master, experiment_id)[0]["id"]) == [2]
    assert "[rank=0] || of 2" in text
    assert "[rank=1] || of 2" in text
    of_rank = shared_master.det("e", "logs", str(experiment_id), "--rank-id", "0").stdout
    assert "[rank=0] || of 2" in of_rank
    assert "[rank=1]" not in of_rank
    assert "Scheduling" not in of_rank
