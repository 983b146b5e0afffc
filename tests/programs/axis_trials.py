"""A small model with parallel axes, trained by a trial and by plain DeepSpeed."""

import json
import pathlib

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, UlyssesSPDataLoaderAdapter
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups
from torch import distributed, nn
from torch.utils.data import default_collate

from dstrial import DataLoader, DeepSpeedTrial, MetricReducer
from dstrial.ranks.process_group import without_compiled_collectives

WIDTH, HEADS, LENGTH = 8, 4, 8
SHARED = ("tensor", "sequence", "tiled", "sharded", "llama")
"""Axes along which one replica spans several ranks."""


class Sequences(torch.utils.data.Dataset):
    """Sequences whose last feature is the record number, at each position."""

    def __init__(self, count, seed=5):
        generator = torch.Generator().manual_seed(seed)
        self.features = torch.randn(count, LENGTH, WIDTH, generator=generator)
        self.features[:, :, -1] = torch.arange(count).view(-1, 1)

    def __len__(self):
        return len(self.features)

    def __getitem__(self, record_idx):
        features = self.features[record_idx]
        return features, features[:, :4].cumsum(0) * 0.5


def attend(query, key, value, *_arguments):
    """Compute causal attention over tensors (batch, position, head, feature)."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj = nn.Linear(WIDTH, 4 * WIDTH)
        self.down_proj = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down_proj(torch.tanh(self.up_proj(x)))


class Model(nn.Module):
    def __init__(self, sequence_group=None, expert_size=0, is_tiled=False):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = Mlp()
        self.head = nn.Linear(WIDTH, 4)
        self.experts = None
        self.is_tiled = is_tiled
        if expert_size:
            self.experts = MoE(
                WIDTH,
                Mlp(),
                num_experts=2,
                ep_size=expert_size,
                k=1,
                min_capacity=0,
                capacity_factor=2.0,
                eval_capacity_factor=2.0,
            )
        self.attention = attend
        if sequence_group is not None:
            self.attention = DistributedAttention(attend, sequence_group, scatter_idx=2, gather_idx=1)

    def forward(self, x, targets=None):
        """Return the outputs, or with ``is_tiled`` the loss that is computed in tiles."""
        x = torch.cat([x[..., :-1], torch.zeros_like(x[..., :1])], -1)
        parts = [part.unflatten(-1, (HEADS, -1)) for part in self.qkv(x).chunk(3, -1)]
        # DeepSpeed checks the batch dimension only if its index is passed.
        attended = (
            self.attention(*parts, 0) if isinstance(self.attention, nn.Module) else self.attention(*parts)
        )
        x = x + attended.flatten(-2)
        x = x + self.mlp(x)
        if self.is_tiled:
            parameters = [self.head.weight, self.head.bias]
            return TiledFusedLogitsLoss.apply(head_loss, self, x, targets, None, 2, parameters, "mean")
        return self.head(x if self.experts is None else x + self.experts(x)[0])


def head_loss(model, x, targets):
    return nn.functional.mse_loss(model.head(x), targets)


def llama():
    """Return a causal language model that takes features in place of embeddings."""
    import transformers

    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "vocab_size": 4,
        "use_cache": False,
    }

    class Llama(transformers.LlamaForCausalLM):
        def forward(self, x):
            return super().forward(inputs_embeds=x).logits

    return Llama(transformers.LlamaConfig(**sizes))


def build_engine(config, axis, size):
    """Return an engine with ``size`` ranks along ``axis``; ``plain`` has no axis."""
    torch.manual_seed(11)
    arguments = {}
    group = None
    if axis in ("sequence", "tiled", "sharded") and size > 1:
        parallel_state_sp.initialize_sequence_parallel(size)
        group = parallel_state_sp.get_sequence_parallel_group()
        arguments["mpu"] = parallel_state_sp
    elif axis == "mesh":
        num_replicas = distributed.get_world_size() // size
        config = {**config, "data_parallel_size": num_replicas}
        mesh = deepspeed.comm.initialize_mesh_device(
            (num_replicas, size), ("data_parallel", "sequence_parallel")
        )
        group = mesh.get_group("sequence_parallel")
    model = llama() if axis == "llama" else Model(group, size if axis == "expert" else 0, axis == "tiled")
    parameters = model.parameters()
    if axis == "expert":
        parameters = split_params_into_different_moe_groups_for_optimizer(
            {"params": [*model.parameters()], "name": "all"}
        )
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config, **arguments)
    return engine


def loss_of(engine, batch):
    """Return the loss of this rank's part of the sequences, and the record numbers."""
    if isinstance(batch, dict):  # from DeepSpeed's adapter, which has split the sequences
        numbers = batch["input_ids"][:, 0].tolist()
        whole = default_collate([Sequences(64)[number] for number in numbers])
        features, targets = (part[:, batch["position_ids"][0]] for part in whole)
    else:
        features, targets = batch
        numbers = features[:, 0, -1].int().tolist()
        size = engine.sequence_parallel_size
        rank = groups._get_sequence_parallel_rank()
        features, targets = (tensor.chunk(size, 1)[rank] for tensor in (features, targets))
    if getattr(engine.module, "is_tiled", False):
        return engine(features, targets), numbers
    return nn.functional.mse_loss(engine(features), targets), numbers


def num_added(engine):
    """Return the divisor of this rank's mean loss before ``backward``.

    DeepSpeed 0.19.8 sums gradients over the ranks of a sequence; ZeRO 3 with ``reduce_scatter`` averages them.
    """
    is_averaged = engine.zero_optimization_stage() == 3 and engine.zero_reduce_scatter()
    return 1 if is_averaged else engine.sequence_parallel_size


def plain_losses(config, axis, size, log):
    """Train the batches in a trial's log without dstrial; return this rank's losses."""
    with without_compiled_collectives(is_cpu=True):
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    engine = build_engine(config, axis, size)
    records = Sequences(64)
    losses = []
    for line in pathlib.Path(f"{log}.{distributed.get_rank()}").read_text().splitlines():
        batch = default_collate([records[idx] for idx in json.loads(line)["records"]])
        loss, _ = loss_of(engine, batch)
        engine.backward(loss / num_added(engine))
        engine.step()
        losses.append(float(loss.detach()))
    return losses


class AxisTrial(DeepSpeedTrial):
    def __init__(self, context):
        self.context = context
        self.hparams = context.get_hparams()
        if self.hparams["axis"] == "sharded":
            context.disable_dataset_reproducibility_checks()
        config = context.get_deepspeed_config()
        self.engine = context.wrap_model_engine(
            build_engine(config, self.hparams["axis"], self.hparams["size"])
        )

        class Count(MetricReducer):
            count = 0  # until the first report

            def reset(self):
                self.count = 0

            def per_slot_reduce(self):
                return self.count

            def cross_slot_reduce(self, per_slot_metrics):
                return sum(per_slot_metrics)

        self.trained = context.wrap_reducer(Count(), name="num_trained", for_validation=False)
        self.counted = context.wrap_reducer(Count(), name="num_records", for_training=False)

    def require_groups(self):
        """Assert that dstrial and DeepSpeed assign this rank to the same replica."""
        rank, num_ranks = self.context.distributed.get_rank(), self.context.distributed.get_size()
        per_replica = self.hparams["size"] if self.hparams["axis"] in SHARED else 1
        unit = self.context._mpu
        assert (unit.data_parallel_rank, unit.data_parallel_world_size) == (
            rank // per_replica,
            num_ranks // per_replica,
        )
        if self.hparams["axis"] == "tensor" and self.hparams["size"] > 1:
            assert unit.data_parallel_rank == groups.get_data_parallel_rank()
            assert unit.should_report_metrics == (groups.get_tensor_model_parallel_rank() == 0)

    def build_training_data_loader(self):
        size = self.context.get_train_micro_batch_size_per_gpu()
        if self.hparams["axis"] == "sharded":
            return self.sharded_loader(size)
        return DataLoader(Sequences(64), batch_size=size, shuffle=True)

    def sharded_loader(self, size):
        """Return DeepSpeed's Ulysses adapter around a loader sharded over all ranks."""
        ranks = self.context.distributed
        tokens = [
            dict.fromkeys(("input_ids", "labels"), torch.full((LENGTH,), number))
            | {"position_ids": torch.arange(LENGTH)}
            for number in range(ranks.get_rank(), 64, ranks.get_size())
        ]
        return UlyssesSPDataLoaderAdapter(
            torch.utils.data.DataLoader(tokens, batch_size=size),
            parallel_state_sp.get_sequence_parallel_rank(),
            parallel_state_sp.get_sequence_parallel_group(),
            parallel_state_sp.get_sequence_parallel_world_size(),
            "cpu",
        )

    def build_validation_data_loader(self):
        return DataLoader(Sequences(6, seed=6), batch_size=self.context.get_train_micro_batch_size_per_gpu())

    def get_num_tokens(self, micro_batch):
        return micro_batch[0].shape[:2].numel()

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        self.require_groups()
        if batch_idx == self.hparams.get("fails_at"):
            raise RuntimeError("the batch at which the test ends the run")
        loss, numbers = loss_of(self.engine, next(dataloader_iter))
        self.trained.count += len(numbers)
        self.engine.backward(loss / num_added(self.engine))
        self.engine.step()
        log = pathlib.Path(f"{self.hparams['log']}.{self.context.distributed.get_rank()}")
        parameters = list(self.engine.module.parameters())
        with deepspeed.zero.GatheredParameters(parameters):  # ZeRO 3 partitions them over the ranks
            weights = torch.cat([p.detach().float().flatten() for p in parameters])
        with log.open("a") as file:
            line = {
                "batch": batch_idx,
                "records": numbers,
                "loss": float(loss.detach()),
                "weights": float(weights.sum()),
            }
            file.write(json.dumps(line) + "\n")
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        loss, numbers = loss_of(self.engine, next(dataloader_iter))
        self.counted.count += len(numbers)
        return {"validation_loss": loss}
