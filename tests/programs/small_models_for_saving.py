"""Engines of all kinds for the saving tests, and a training step for each kind."""

import deepspeed
import torch
from deepspeed import comm
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

KINDS = [
    "zero 0", "zero 1", "zero 2", "zero 3", "zero 0 bf16", "zero 1 bf16", "zero 3 bf16", "zero 1 frozen",
    "pipeline zero 0", "pipeline zero 1", "pipeline zero 0 bf16",
]  # fmt: skip


class CountingTanh(nn.Module):
    """Tanh with a buffer that counts its calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return torch.tanh(x)


def loss_function(outputs, targets):
    return nn.functional.mse_loss(outputs.float(), targets.float())


def make_engine(kind):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": int(kind.split("zero ")[1][0])},
        "steps_per_print": 1_000_000,
        **({"bf16": {"enabled": True}} if "bf16" in kind else {}),
    }
    if kind.startswith("pipeline"):
        layers = [
            TiedLayerSpec("tied", nn.Linear, 8, 8),
            LayerSpec(nn.Linear, 8, 16),
            LayerSpec(nn.Linear, 16, 8),
            TiedLayerSpec("tied", nn.Linear, 8, 8),
            LayerSpec(nn.Linear, 8, 4),
        ]
        model = PipelineModule(layers, num_stages=2, loss_fn=loss_function, partition_method="uniform")
    else:
        model = nn.Sequential(nn.Linear(8, 16), CountingTanh(), nn.Linear(16, 4))
        if "frozen" in kind:
            model[0].requires_grad_(False)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=parameters, config=config)[0]


def train_step(engine, step):
    generator = torch.Generator().manual_seed(100 * step + comm.get_rank())
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    batches = [
        (torch.randn(4, 8, generator=generator).to(dtype), torch.randn(4, 4, generator=generator))
        for _ in range(2)
    ]
    if isinstance(engine, deepspeed.PipelineEngine):
        engine.train_batch(iter(batches))
        return
    for features, targets in batches:
        engine.backward(loss_function(engine(features), targets))
        engine.step()
