"""Trials that are hard to export: tied or frozen weights, buffers, pipelines."""

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from dstrial import DataLoader, DeepSpeedTrial


class Records(torch.utils.data.Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(5)
        self.features = torch.randn(count, 8, generator=generator)

    def __len__(self):
        return len(self.features)

    def __getitem__(self, record_idx):
        features = self.features[record_idx]
        return features, features[:4].cumsum(0)


class Centred(nn.Module):
    """Subtract a running mean; the mean and a counter are buffers of two dtypes."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("num_calls", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            self.num_calls += 1
        return x - self.mean.to(x.dtype)


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 13, bias=False)
        self.norm = Centred(13)
        self.frozen = nn.Linear(13, 13)
        self.inner = nn.Linear(13, 8)
        self.unembed = nn.Linear(8, 13, bias=False)
        self.unembed.weight = self.embed.weight
        self.head = nn.Linear(13, 4)
        self.register_buffer("scale", torch.tensor(1.5), persistent=False)
        for parameter in self.frozen.parameters():
            parameter.requires_grad = False

    def forward(self, x):
        x = torch.relu(self.frozen(self.norm(self.embed(x))))
        return self.head(self.unembed(torch.tanh(self.inner(x)))) * self.scale

    def groups(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0, "lr": 0.003},
        ]


class Common(DeepSpeedTrial):
    last = None

    def __init__(self, context):
        self.context = context
        torch.manual_seed(11)
        self.engines = [context.wrap_model_engine(engine) for engine in self.build_engines()]
        type(self).last = self

    def build_engines(self):
        model = Wide()
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.groups(), config=self.context.get_deepspeed_config()
        )
        return [engine]

    def build_training_data_loader(self):
        return DataLoader(Records(48), batch_size=self.context.get_train_micro_batch_size_per_gpu())

    def build_validation_data_loader(self):
        return DataLoader(Records(8), batch_size=self.context.get_train_micro_batch_size_per_gpu())

    def loss(self, engine, batch):
        features, targets = self.context.to_device(batch)
        dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
        return nn.functional.mse_loss(engine(features.to(dtype)).float(), targets)

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        batch = next(dataloader_iter)
        for engine in self.engines:
            loss = self.loss(engine, batch)
            engine.backward(loss)
            engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        return {"validation_loss": self.loss(self.engines[-1], next(dataloader_iter))}


class WideTrial(Common):
    pass


class TwoEnginesTrial(Common):
    def build_engines(self):
        small, *_ = deepspeed.initialize(
            model=nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 4)),
            config=self.context.get_deepspeed_config(),
        )
        return [*super().build_engines(), small]


class Mixture(nn.Module):
    def __init__(self, num_parts):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.experts = MoE(
            8, nn.Linear(8, 8), num_experts=4, ep_size=num_parts, k=1, min_capacity=0, capacity_factor=4.0
        )
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.experts(torch.tanh(self.first(x)))[0])


class SpreadExpertsTrial(Common):
    """Each of two ranks holds two of four experts, under the same parameter names."""

    num_parts = 2

    def build_engines(self):
        model = Mixture(self.num_parts)
        groups = split_params_into_different_moe_groups_for_optimizer(
            {"params": list(model.parameters()), "name": "all"}
        )
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=groups, config=self.context.get_deepspeed_config()
        )
        return [engine]


class WholeExpertsTrial(SpreadExpertsTrial):
    num_parts = 1


def squashed(layer, x):
    return torch.tanh(layer(x))


def pipeline_loss(outputs, targets):
    return nn.functional.mse_loss(outputs, targets)


class TiedPipelineTrial(Common):
    tied_weight_attr = ("weight", "bias")

    def build_engines(self):
        tied = {"tied_weight_attr": list(self.tied_weight_attr)}
        layers = [
            LayerSpec(nn.Linear, 8, 9),
            TiedLayerSpec("plain", nn.Linear, 9, 9, **tied),
            TiedLayerSpec("called", nn.Linear, 9, 9, forward_fn=squashed, **tied),
            LayerSpec(Centred, 9),
            TiedLayerSpec("plain", nn.Linear, 9, 9, **tied),
            TiedLayerSpec("called", nn.Linear, 9, 9, forward_fn=squashed, **tied),
            LayerSpec(nn.Linear, 9, 4),
        ]
        module = PipelineModule(layers, num_stages=2, loss_fn=pipeline_loss, partition_method="uniform")
        config = self.context.get_deepspeed_config(model_parallel_size=2)
        engine, *_ = deepspeed.initialize(
            model=module, model_parameters=[p for p in module.parameters() if p.requires_grad], config=config
        )
        return [engine]

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        return {"loss": self.engines[0].train_batch()}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        return {"validation_loss": self.engines[0].eval_batch()}


class LooselyTiedPipelineTrial(TiedPipelineTrial):
    """Only tied weights are kept equal (DeepSpeed's default); tied biases diverge."""

    tied_weight_attr = ("weight",)
