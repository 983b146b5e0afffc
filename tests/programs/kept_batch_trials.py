"""Trials that log the numbers of the records in every trained batch."""

import json
import pathlib
import time

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from small_trials import DataParallelTrial, pipeline_loss
from torch import nn

from dstrial import DataLoader


class NumberedRecords(torch.utils.data.Dataset):
    """Records that carry their own number as the last feature."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(5)
        self.features = torch.randn(count, 7, generator=generator)
        self.targets = self.features[:, :4].cumsum(1) * 0.5

    def __len__(self):
        return len(self.features)

    def __getitem__(self, record_idx):
        return torch.cat([self.features[record_idx], torch.tensor([float(record_idx)])]), self.targets[
            record_idx
        ]


class Noted(DataParallelTrial):
    """Takes the DeepSpeed config from the hyperparameters and logs record numbers."""

    def __init__(self, context):
        super().__init__(context)
        sizes = [
            self.model_engine.train_batch_size(),
            self.model_engine.train_micro_batch_size_per_gpu(),
            self.model_engine.gradient_accumulation_steps(),
            context.distributed.get_size(),
        ]
        if context.distributed.get_rank() == 0:
            print(f"sizes {sizes}", flush=True)

    def build_training_data_loader(self):
        return DataLoader(
            NumberedRecords(self.hparams["num_records"]),
            batch_size=self.context.get_train_micro_batch_size_per_gpu(),
            shuffle=True,
        )

    def note(self, batch_idx, features):
        rank = self.context.distributed.get_rank()
        with pathlib.Path(f"{self.hparams['record_log']}.{rank}").open("a") as file:
            file.write(json.dumps([batch_idx, features[:, 7].int().tolist()]) + "\n")

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        features, targets = next(dataloader_iter)
        self.disturb(batch_idx)
        self.note(batch_idx, features)
        features = features[:, :7] @ torch.eye(7, 8)
        loss = nn.functional.mse_loss(self.model_engine(features), targets)
        self.model_engine.backward(loss)
        self.model_engine.step()
        return {"loss": loss}


class Paced(Noted):
    """Sleeps ``pace_s[num_ranks - 1]`` per micro batch while the file ``slow`` exists."""

    def disturb(self, batch_idx):
        super().disturb(batch_idx)
        if pathlib.Path(self.hparams["slow"]).exists():
            time.sleep(self.hparams["pace_s"][self.context.distributed.get_size() - 1])


class OwnConfig(Noted):
    """Builds the DeepSpeed config in code; the hyperparameters contain none."""

    def ds_config(self):
        return {
            "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": self.hparams["own_stage"]},
            **self.hparams["own_sizes"],
        }


class PacedOwnConfig(Paced, OwnConfig):
    """Paces its batches and builds its config in code."""


class NotedPipeline(OwnConfig):
    def build_engine(self):
        torch.manual_seed(11)
        layers = [LayerSpec(nn.Linear, 8, 16), LayerSpec(nn.Tanh), LayerSpec(nn.Linear, 16, 16)]
        layers += [LayerSpec(nn.Tanh), LayerSpec(nn.Linear, 16, 4)]
        module = PipelineModule(
            layers=layers,
            num_stages=self.hparams["own_num_stages"],
            loss_fn=pipeline_loss,
            partition_method="uniform",
        )
        engine, *_ = deepspeed.initialize(
            model=module,
            model_parameters=[p for p in module.parameters() if p.requires_grad],
            config=self.ds_config(),
        )
        return engine

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        drawn = []

        def noting(iterator):
            for features, targets in iterator:
                drawn.append(features)
                yield features, targets

        loss = self.model_engine.train_batch(noting(dataloader_iter) if dataloader_iter is not None else None)
        # The last stage draws the same records, for their targets.
        if self.model_engine.is_first_stage():
            for features in drawn:
                self.note(batch_idx, features)
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        return {"validation_loss": self.model_engine.eval_batch()}
