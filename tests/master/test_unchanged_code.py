"""Trial files and configs of Determined users, run without changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import warm_start
from submitting import config, log_of, steps_of, submit, trials, wait_until

from dstrial.dsat.predictor.inputs import dry_run_request
from dstrial.engine.dryrun.process import dry_run
from dstrial.testing.master import MasterForTest

pytestmark = [pytest.mark.process, pytest.mark.ranks]

# Written like Determined's DeepSpeed examples, with AttrDict, a reducer, .item() and a deprecated property.
MODEL_DEF = """
from typing import Any, Dict

import deepspeed
import torch
import torch.nn as nn
from attrdict import AttrDict
from sklearn.datasets import load_digits

from determined.pytorch import DataLoader
from determined.pytorch.deepspeed import (
    DeepSpeedTrial,
    DeepSpeedTrialContext,
    overwrite_deepspeed_config,
)


SPAWNED = {"num_workers": 1, "multiprocessing_context": "spawn"}  # which imports this file anew


class DigitsTrial(DeepSpeedTrial):
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.args = AttrDict(self.context.get_hparams())
        model = nn.Sequential(nn.Linear(64, self.args.width), nn.ReLU(), nn.Linear(self.args.width, 10))
        parameters = filter(lambda p: p.requires_grad, model.parameters())
        ds_config = overwrite_deepspeed_config(
            self.args.deepspeed_config, self.args.get("overwrite_deepspeed_args", {})
        )
        model_engine, optimizer, __, __ = deepspeed.initialize(
            model=model, model_parameters=parameters, config=ds_config
        )
        print("ZeRO stage", model_engine.zero_optimization_stage())
        self.fp16 = model_engine.fp16_enabled()
        self.model_engine = self.context.wrap_model_engine(model_engine)
        self.criterion = nn.CrossEntropyLoss().to(self.context.device)
        self.reducer = self.context.wrap_reducer(
            lambda x: sum([m[0] for m in x]) / sum([m[1] for m in x]), "accuracy", for_training=False
        )

    def train_batch(self, iter_dataloader, epoch_idx, batch_idx) -> Dict[str, torch.Tensor]:
        inputs, labels = self.context.to_device(next(iter_dataloader))
        loss = self.criterion(self.model_engine(inputs), labels)
        self.model_engine.backward(loss)
        self.model_engine.step()
        return {"loss": loss.item()}

    def evaluate_batch(self, iter_dataloader, batch_idx) -> Dict[str, Any]:
        images, labels = self.context.to_device(next(iter_dataloader))
        _, predicted = torch.max(self.model_engine(images).data, 1)
        self.reducer.update(((predicted == labels).sum().item(), labels.size(0)))
        return {}

    def _data(self, first, last):
        digits = load_digits()
        images = torch.tensor(digits.data[first:last], dtype=torch.float32) / 16
        return torch.utils.data.TensorDataset(images, torch.tensor(digits.target[first:last]))

    def build_training_data_loader(self) -> Any:
        return DataLoader(
            self._data(0, 1400),
            batch_size=self.context.train_micro_batch_size_per_gpu,
            shuffle=True,
            **(SPAWNED if self.context.distributed.rank == 0 else {}),
        )

    def build_validation_data_loader(self) -> Any:
        return DataLoader(self._data(1400, 1797), batch_size=self.context.train_micro_batch_size_per_gpu)
"""
TRAINER_SCRIPT = """
import determined as det
from determined import pytorch
from determined.pytorch import deepspeed as det_ds
from model_def import DigitsTrial


def main():
    info = det.get_cluster_info()
    with det_ds.init(hparams=info.trial.hparams) as train_context:
        trial = DigitsTrial(train_context)
        trainer = det_ds.Trainer(trial, train_context)
        trainer.fit(max_length=pytorch.Batch(40), latest_checkpoint=info.latest_checkpoint)


if __name__ == "__main__":
    main()
"""
DS_CONFIG = """
{
  "train_batch_size": 32,
  "train_micro_batch_size_per_gpu": 16,
  "optimizer": {"type": "Adam", "params": {"lr": 0.003, "torch_adam": true}}
}
"""
OLD_YAML = """
name: digits_zero_deepspeed
debug: false
hyperparameters:
  deepspeed_config: ds_config.json
  width: 64
  overwrite_deepspeed_args:
    zero_optimization: {stage: 1}
environment:
  environment_variables:
    - NCCL_DEBUG=INFO
    # You may need to modify this to match your network configuration.
    - NCCL_SOCKET_IFNAME=ens,eth,ib
  image:
    gpu: determinedai/environments:cuda-11.3-pytorch-1.10-deepspeed-0.7.0-gpu-0.19.4
resources:
  slots_per_trial: 2
records_per_epoch: 1400
searcher:
  name: single
  metric: accuracy
  smaller_is_better: false
  max_length:
    batches: 40
entrypoint:
  - python3
  - -m
  - determined.launch.deepspeed
  - --trial
  - model_def:DigitsTrial
max_restarts: 0
scheduling_unit: 20
"""
ENTRYPOINTS: list[Any] = [
    None,  # the entrypoint of OLD_YAML
    "model_def:DigitsTrial",
    "bash train.sh",
    "python3 -m determined.launch.deepspeed -- python3 train.py",
]


def write_model_definition(directory: Path, *, spawns: bool = True) -> None:
    """Write a model definition; without ``spawns``, its data loader has no worker process."""
    workers = "**(SPAWNED if self.context.distributed.rank == 0 else {}),"
    (directory / "model_def.py").write_text(MODEL_DEF if spawns else MODEL_DEF.replace(workers, ""))
    (directory / "train.py").write_text(TRAINER_SCRIPT)
    (directory / "train.sh").write_text("set -e\npython3 -m determined.launch.deepspeed python3 train.py\n")
    (directory / "ds_config.json").write_text(DS_CONFIG)
    (directory / "exp.yaml").write_text(OLD_YAML)


@pytest.mark.exhaustive(
    "[model_def:DigitsTrial]", "[python3 -m determined.launch.deepspeed -- python3 train.py]"
)
@pytest.mark.parametrize("entrypoint", ENTRYPOINTS)
def test_determined_trial_file_and_yaml_train_unchanged(
    shared_master: MasterForTest, tmp_path: Path, entrypoint: Any
) -> None:
    write_model_definition(tmp_path, spawns=entrypoint != "model_def:DigitsTrial")
    changes = () if entrypoint is None else ("--config", f"entrypoint={entrypoint}")
    created = shared_master.det(
        "e", "create", str(tmp_path / "exp.yaml"), str(tmp_path), *changes, "-f", deadline_s=240
    )

    assert created.returncode == 0, created.stdout + created.stderr
    experiment_id = int(created.stdout.split("Created experiment ")[1].split()[0])
    ended = shared_master.det("e", "wait", str(experiment_id))
    assert ended.returncode == 0, created.stdout + ended.stdout
    log = log_of(shared_master, experiment_id)
    (trial,) = trials(shared_master, experiment_id)
    assert trial["bestValidation"]["metrics"]["avgMetrics"]["accuracy"] > 0.5
    assert trial["bestCheckpoint"]["totalBatches"] == 40
    assert "ZeRO stage 1" in log
    assert "[rank=1]" in log
    assert log.count("data.dstrial.determined_imports: false") == 1


@pytest.mark.exhaustive("[True]")
@pytest.mark.parametrize("is_switched_off", [False, True])
def test_same_file_trains_under_launcher_without_master(tmp_path: Path, is_switched_off: bool) -> None:
    write_model_definition(tmp_path)
    if is_switched_off:
        with (tmp_path / "exp.yaml").open("a") as file:
            file.write("data: {dstrial: {determined_imports: false}}\n")
    words = [
        "dstrial.launch",
        "--slots",
        "1" if is_switched_off else "2",
        "--config",
        "exp.yaml",
        "--trial",
        "model_def:DigitsTrial",
    ]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = warm_start.run(words, cwd=tmp_path, env=environment, timeout=280)

    printed = done.stdout + done.stderr
    if is_switched_off:
        assert done.returncode == 1
        assert "Import DeepSpeedTrial from dstrial in model_def" in printed
    else:
        assert done.returncode == 0, printed
        assert "ZeRO stage 1" in printed
    assert printed.count("data.dstrial.determined_imports: false") == (0 if is_switched_off else 1)


CONTROLLER_SCRIPT = """
from determined import pytorch
from determined.pytorch import deepspeed as det_ds
from model_def import DigitsTrial

config = {"train_batch_size": 32, "optimizer": {"type": "Adam", "params": {"lr": 0.003, "torch_adam": True}}}
hparams = {"width": 16, "deepspeed_config": config, "overwrite_deepspeed_args": {"zero_optimization": {"stage": 1}}}
with det_ds.init(hparams=hparams) as context:
    controller = det_ds.DeepSpeedTrialController(
        trial_inst=DigitsTrial(context), context=context, checkpoint_period=pytorch.Batch(99),
        validation_period=pytorch.Batch(99), reporting_period=pytorch.Batch(2), smaller_is_better=True, steps_completed=0,
        latest_checkpoint=None, local_training=True, test_mode=False, searcher_metric_name=None, checkpoint_policy="none",
        step_zero_validation=False, max_length=pytorch.Batch(4), global_batch_size=None, profiling_enabled=False,
    )
    controller.run()
    print("trained", context.models[0].global_steps)
"""


def test_script_with_own_trial_controller_trains(tmp_path: Path) -> None:
    write_model_definition(tmp_path, spawns=False)
    (tmp_path / "own.py").write_text(CONTROLLER_SCRIPT)
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    words = ["dstrial.launch", "--slots", "1", "own.py"]
    done = warm_start.run(words, cwd=tmp_path, env=environment, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained 4" in done.stdout


def test_dry_run_describes_same_file_without_gpu(tmp_path: Path) -> None:
    write_model_definition(tmp_path)
    deepspeed = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "Adam", "params": {"lr": 0.003, "torch_adam": True}},
    }
    hparams = {
        "width": 64,
        "deepspeed_config": deepspeed,
        "overwrite_deepspeed_args": {"zero_optimization": {"stage": 1}},
    }
    asked = dry_run_request("model_def:DigitsTrial", tmp_path, hparams, world_size=2)

    assert dry_run(asked, deadline_s=200).parameters == 64 * 64 + 64 + 64 * 10 + 10


PRINT_MODULES = """
import determined.pytorch, determined.pytorch.deepspeed as ds
import determined as det
print("whose", ds.Trainer.__module__, determined.pytorch.PyTorchTrial.__module__)
with det.core.init(tensorboard_mode=det.core.TensorboardMode.MANUAL) as core:
    core.train.report_validation_metrics(1, {"score": 1.0})
"""


@pytest.mark.exhaustive("[by the config]")
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "whose dstrial.trainer determined.pytorch"),
        (
            {"data": {"dstrial": {"determined_imports": False}}},
            "whose determined.pytorch.deepspeed._trainer determined.pytorch",
        ),
        (
            {"environment": {"environment_variables": ["DSTRIAL_DETERMINED_IMPORTS=0"]}},
            "whose determined.pytorch.deepspeed._trainer determined.pytorch",
        ),
    ],
    ids=["without", "by the config", "by a variable"],
)
def test_import_switch_restores_determined_in_allocation(
    shared_master: MasterForTest, changes: dict[str, Any], expected: str
) -> None:
    experiment_id = submit(shared_master, config(resources={"slots_per_trial": 0}, **changes), PRINT_MODULES)

    wait_until(shared_master, experiment_id, "COMPLETED")
    assert expected in log_of(shared_master, experiment_id)
    assert steps_of(shared_master, trials(shared_master, experiment_id)[0]["id"]) == []
