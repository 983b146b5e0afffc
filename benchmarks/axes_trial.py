"""A small trial for each parallel axis, optimizer, kind of parameters and loader; ``axes_matrix.py`` trains it."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import zlib
from collections.abc import Iterator
from typing import Any

import deepspeed
import peft
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence.layer import DistributedAttention
from torch import nn
from torch.utils import data
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import dstrial
from dstrial.config.deepspeed_rules.check import check_deepspeed
from dstrial.config.parallel_dims import ParallelDims

BATCH_SIZE, MICRO, RANKS = 8, 2, 2
WIDTH, HEADS, LENGTH, CLASSES = 8, 4, 8, 4
LAYERS = [
    {"patterns": [r".*up_proj(\.base_layer)?.weight"], "partition_type": "column"},
    {"patterns": [r".*down_proj(\.base_layer)?.weight"], "partition_type": "row"},
]
AUTOEP = {
    "moe_layer_pattern": "2",
    "router_pattern": "gate",
    "expert_pattern": "experts",
    "expert_w1": "gate_proj",
    "expert_w2": "down_proj",
    "expert_w3": "up_proj",
    "score_func": "softmax",
    "route_norm": True,
    "top_k": 2,
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One trial; ``size`` counts the ranks of its axis, ``client`` is torch's SGD, which the trial creates."""

    axis: str
    stage: int
    optimizer: str = "AdamW"
    parameters: str = "full"
    loader: str = "map"
    size: int = RANKS
    ranks: int = RANKS

    @property
    def name(self) -> str:
        return ", ".join(map(str, dataclasses.astuple(self)))

    def config(self) -> dict[str, Any]:
        """Return the DeepSpeed config."""
        replicas = self.ranks if self.axis in ("dp", "ep", "autoep") else self.ranks // self.size
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": MICRO,
            "gradient_accumulation_steps": BATCH_SIZE // MICRO // replicas,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": self.stage},
        }
        if self.optimizer == "client":
            config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        else:
            parameters = {"lr": 0.01} | ({} if self.optimizer == "Muon" else {"torch_adam": True})
            config["optimizer"] = {"type": self.optimizer, "params": parameters}
        if self.optimizer == "Muon" and self.stage == 3:
            config["zero_optimization"]["reduce_scatter"] = False
        if self.axis == "tp" and self.size > 1:
            partition = {"use_default_specs": False, "layer_specs": LAYERS}
            config["tensor_parallel"] = {"autotp_size": self.size, "partition_config": partition}
        if self.axis == "sp" and self.size > 1:
            config["sequence_parallel_size"] = self.size
        if self.axis == "autoep" and self.size > 1:
            config["expert_parallel"] = {"enabled": True, "autoep_size": self.size, **AUTOEP}
        return config

    def refusal(self) -> str | None:
        """Return the line with which ``dstrial check`` refuses the config; None if it does not."""
        unit = {} if self.axis == "dp" else {self.axis.removeprefix("auto"): self.size}
        sizes = ParallelDims(self.ranks, **unit, is_pipeline=self.axis == "pp")
        problems = check_deepspeed(self.config(), sizes).problems
        return f"refused: {problems[0]}" if problems else None

    def on_one_rank(self) -> Cell:
        return dataclasses.replace(self, size=1, ranks=1, stage=0)

    def reshaped(self, ranks: int) -> Cell:
        """Return the layout in which the cell is resumed on that many ranks: in the next ZeRO stage."""
        stage = (self.stage + 1) % (2 if self.axis == "pp" else 4)
        return dataclasses.replace(self, stage=stage, ranks=ranks, size=min(self.size, ranks))


share_sequences = functools.cache(parallel_state_sp.initialize_sequence_parallel)  # once in a process


class Attention(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.attend = attend
        if group is not None:
            self.attend = DistributedAttention(attend, group, scatter_idx=2, gather_idx=1)

    def forward(self, x: Any) -> Any:
        parts = [part.unflatten(-1, (HEADS, -1)) for part in self.qkv(x).chunk(3, -1)]
        return x + self.attend(*parts, 0).flatten(-2)


def attend(query: Any, key: Any, value: Any, *_arguments: Any) -> Any:
    """Attention over whole sequences, with dimensions (batch, position, head, feature)."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(WIDTH, 4 * WIDTH)
        self.down_proj = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + self.down_proj(torch.tanh(self.up_proj(x)))


class Experts(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        capacity = {"min_capacity": 0, "capacity_factor": 2.0, "eval_capacity_factor": 2.0}  # drops no token
        self.moe = MoE(WIDTH, Mlp(), num_experts=2, ep_size=size, k=1, **capacity)

    def forward(self, x: Any) -> Any:
        return x + self.moe(x)[0]


class Router(nn.Module):
    """Returns scores, and weight and number of the two experts of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(CLASSES, WIDTH))

    def forward(self, x: Any) -> Any:
        scores = nn.functional.linear(x, self.weight).softmax(-1)
        weights, experts = scores.topk(2)
        return scores, weights / weights.sum(-1, keepdim=True), experts


class StackedExperts(nn.Module):
    """Four experts whose weights are stacked in three tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(CLASSES, 4 * WIDTH, WIDTH))
        self.up_proj = nn.Parameter(torch.empty(CLASSES, 4 * WIDTH, WIDTH))
        self.down_proj = nn.Parameter(torch.empty(CLASSES, WIDTH, 4 * WIDTH))

    def forward(self, x: Any, experts: Any, weights: Any) -> Any:
        total = torch.zeros_like(x)
        for number in range(CLASSES):
            gate = nn.functional.silu(nn.functional.linear(x, self.gate_proj[number]))
            hidden = gate * nn.functional.linear(x, self.up_proj[number])
            share = (weights * (experts == number)).sum(-1, keepdim=True)
            total = total + share * nn.functional.linear(hidden, self.down_proj[number])
        return total


class AutoExperts(nn.Module):
    """A mixture of experts that AutoEP finds by the names of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = Router(), StackedExperts()
        self.top_k, self.num_experts = 2, CLASSES

    def forward(self, x: Any) -> Any:
        rows = x.reshape(-1, WIDTH)
        _, weights, experts = self.gate(rows)
        return self.experts(rows, experts, weights).reshape(x.shape)


def build_engine(cell: Cell) -> Any:
    """Return an engine of the cell's model. Ranks: all, collectively."""
    arguments: dict[str, Any] = {}
    group = None
    if cell.axis == "sp" and cell.size > 1:
        share_sequences(cell.size)
        group, arguments["mpu"] = parallel_state_sp.get_sequence_parallel_group(), parallel_state_sp
    third = {"ep": lambda: Experts(cell.size), "autoep": AutoExperts}.get(cell.axis, Mlp)()
    model: Any = nn.Sequential(Attention(group), Mlp(), third, nn.Linear(WIDTH, CLASSES))
    if cell.parameters == "LoRA":
        lora = peft.LoraConfig(r=2, target_modules=["up_proj", "down_proj"])
        model = peft.inject_adapter_in_model(lora, model)
    if cell.axis == "pp":
        model = PipelineModule(
            [*model], cell.size, loss_fn=nn.functional.mse_loss, partition_method="uniform"
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill(name, parameter, cell)
            if cell.parameters == "frozen" and name.startswith("0.qkv"):
                parameter.requires_grad_(False)
    trained: Any = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if cell.axis == "ep":
        trained = split_params_into_different_moe_groups_for_optimizer({"params": trained, "name": "all"})
    if cell.optimizer == "client":
        arguments["optimizer"] = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    else:
        arguments["model_parameters"] = trained
    return deepspeed.initialize(model=model, config=cell.config(), **arguments)[0]


def fill(name: str, parameter: Any, cell: Cell) -> None:
    """Give a parameter the values that belong to its name, in which an expert has its number among all."""
    if cell.size > 1:
        name = re.sub(r"(deepspeed_experts)\.\d+", rf"\1.{int(os.environ['RANK']) % cell.size}", name)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)


def num_added(engine: Any) -> int:
    """Return by what the mean loss of a rank's part of a sequence is divided before ``backward``.

    DeepSpeed 0.19.8 adds gradients over the ranks of a sequence; ZeRO 3 with ``reduce_scatter`` averages them.
    """
    is_averaged = engine.zero_optimization_stage() == 3 and engine.zero_reduce_scatter()
    return 1 if is_averaged else int(engine.sequence_parallel_size)


class AxisTrial(dstrial.DeepSpeedTrial):
    def __init__(self, context: Any, cell: Cell) -> None:
        self.context, self.cell = context, cell
        self.engine = context.wrap_model_engine(build_engine(cell))
        if cell.loader != "map":
            context.disable_dataset_reproducibility_checks()
        features = torch.randn(48, LENGTH, WIDTH, generator=torch.Generator().manual_seed(5))
        self.records = data.TensorDataset(features, features[:, :, :CLASSES].cumsum(1) / 2)

    def build_training_data_loader(self) -> Any:
        replica = self.context.get_data_parallel_rank()
        replicas = self.context.get_data_parallel_world_size()
        if self.cell.loader == "iterable":
            return data.DataLoader(Turns(self.records, replica, replicas), batch_size=MICRO)
        if self.cell.loader == "stateful":
            sampler = StatefulDistributedSampler(self.records, replicas, replica, shuffle=True, seed=3)
            return StatefulDataLoader(self.records, batch_size=MICRO, sampler=sampler)
        return dstrial.DataLoader(self.records, batch_size=MICRO, shuffle=True)

    def build_validation_data_loader(self) -> Any:
        return dstrial.DataLoader(data.Subset(self.records, range(BATCH_SIZE)), batch_size=MICRO)

    def loss(self, batches: Any) -> Any:
        batch = next(batches)
        if self.cell.axis == "sp" and self.cell.size > 1:
            rank = parallel_state_sp.get_sequence_parallel_rank()
            batch = [part.chunk(self.cell.size, dim=1)[rank] for part in batch]
        return nn.functional.mse_loss(self.engine(batch[0]), batch[1])

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:  # noqa: ARG002
        if self.cell.axis == "pp":
            return {"loss": self.engine.train_batch()}
        loss = self.loss(dataloader_iter)
        self.engine.backward(loss / num_added(self.engine))
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> Any:  # noqa: ARG002
        return {"eval": self.engine.eval_batch() if self.cell.axis == "pp" else self.loss(dataloader_iter)}


class Turns(data.IterableDataset[Any]):
    def __init__(self, records: Any, replica: int, replicas: int) -> None:
        self.records, self.numbers = records, range(replica, len(records), replicas)

    def __iter__(self) -> Iterator[Any]:
        return (self.records[number] for number in self.numbers)
