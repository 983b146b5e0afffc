"""The six workloads of the autotuner's benchmark: published transformers on published machines. Values only.

Sources: shapes: Radford et al. 2019 (GPT-2 large), Brown et al. 2020, table 2.1 (1.3 B to 13 B). Devices: NVIDIA's data
sheets of A100 and V100 (peak FLOP/s, memory bandwidth). Attainable link speeds: NCCL's bus bandwidth as its tests report it
on DGX A100 and p3.16xlarge, and 25 Gbit/s Ethernet less its protocol. Host: CPU-Adam's latency per parameter of Ren et
al. 2021 ("ZeRO-Offload"), table 4, on a node with two sockets.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from dstrial.config import ParallelDims
from dstrial.dsat.space.space import Space


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """A cluster.

    Attributes:
        device_bytes: memory of one device.
        flops_per_s: peak of one device in half precision.
        memory_bytes_per_s: bandwidth of one device's memory.
        num_multiprocessors: of one device, by which tiles of a matrix product come in waves.
        ranks_per_node: devices of one machine.
        num_nodes: machines.
        node_bytes_per_s: bus bandwidth of a ring within a node.
        network_bytes_per_s: bandwidth of one node's network; unused with one node.
        network_latency_s: of one message between nodes.
        pcie_bytes_per_s: between the host and all devices of a switch, shared by ``ranks_per_switch``.
        ranks_per_switch: see there.
        cpu_adam_s_per_param: of one node's CPUs together.
        host_bytes: memory of one node.
    """

    device_bytes: float
    flops_per_s: float
    memory_bytes_per_s: float
    num_multiprocessors: int
    ranks_per_node: int
    num_nodes: int
    node_bytes_per_s: float
    network_bytes_per_s: float
    network_latency_s: float
    pcie_bytes_per_s: float
    ranks_per_switch: int
    cpu_adam_s_per_param: float
    host_bytes: float

    @property
    def num_ranks(self) -> int:
        """Devices of all nodes."""
        return self.ranks_per_node * self.num_nodes


@dataclasses.dataclass(frozen=True, slots=True)
class Transformer:
    """A decoder.

    Attributes:
        num_layers: its layers.
        width: hidden size.
        num_heads: attention heads.
        sequence: tokens of one record.
        vocabulary: rows of the embedding.
        keeps_scores: whether attention's scores are kept for backward, as without a fused kernel.
        recomputes: whether every layer is computed a second time in backward (activation checkpointing).
    """

    num_layers: int
    width: int
    num_heads: int
    sequence: int
    vocabulary: int = 50257
    keeps_scores: bool = False
    recomputes: bool = False

    @property
    def num_params(self) -> float:
        """Narayanan et al. 2021, equation 2: 12 l h^2 (1 + 13/(12 h) + (V + s)/(12 l h))."""
        layers, width = self.num_layers, self.width
        rest = 13 / (12 * width) + (self.vocabulary + self.sequence) / (12 * layers * width)
        return 12 * layers * width**2 * (1 + rest)


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """A model, a machine, and the configuration that its user has written.

    Attributes:
        name: for tables.
        model: what is trained.
        machine: where.
        train_batch_size: records of one optimizer step.
        own_micro_batch: the user's micro batch size.
        own_zero: the user's ``zero_optimization``.
        half: ``bf16`` or ``fp16``.
    """

    name: str
    model: Transformer
    machine: Machine
    train_batch_size: int
    own_micro_batch: int
    own_zero: dict[str, Any]
    half: str = "bf16"

    def deepspeed_config(self) -> dict[str, Any]:
        """Return the user's DeepSpeed config, a new one."""
        return {
            "train_batch_size": self.train_batch_size,
            "train_micro_batch_size_per_gpu": self.own_micro_batch,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            self.half: {"enabled": True},
            "zero_optimization": dict(self.own_zero),
        }

    def space(self, *, free_batch: bool = False) -> Space:
        """Return what is searched: stages 0 to 3, at the fixed global batch or a free one.

        With a free batch the accumulation stays at its own value, as in dsat 0.37; that value is taken to be 1 there, so
        that the two are different problems.
        """
        base = self.deepspeed_config()
        if free_batch:
            del base["train_batch_size"]
            base["gradient_accumulation_steps"] = 1
        sizes = ParallelDims(self.machine.num_ranks)
        return Space(base, sizes, stages=(0, 1, 2, 3), free_batch=free_batch)


_A100_40 = Machine(
    device_bytes=40 * 2**30,
    flops_per_s=312e12,
    memory_bytes_per_s=1.555e12,
    num_multiprocessors=108,
    ranks_per_node=8,
    num_nodes=1,
    node_bytes_per_s=230e9,
    network_bytes_per_s=0.0,
    network_latency_s=0.0,
    pcie_bytes_per_s=24e9,
    ranks_per_switch=2,
    cpu_adam_s_per_param=0.25e-9,
    host_bytes=1024 * 2**30,
)
_A100_80 = dataclasses.replace(
    _A100_40, device_bytes=80 * 2**30, memory_bytes_per_s=2.039e12, host_bytes=2048 * 2**30
)
_V100_16_ETHERNET = Machine(
    device_bytes=16 * 2**30,
    flops_per_s=125e12,
    memory_bytes_per_s=0.9e12,
    num_multiprocessors=80,
    ranks_per_node=8,
    num_nodes=2,
    node_bytes_per_s=120e9,
    network_bytes_per_s=2.8e9,
    network_latency_s=30e-6,
    pcie_bytes_per_s=12e9,
    ranks_per_switch=2,
    cpu_adam_s_per_param=0.33e-9,
    host_bytes=488 * 2**30,
)

WORKLOADS: tuple[Workload, ...] = (
    Workload(
        "GPT-2 large, 8x40 GB",
        Transformer(36, 1280, 20, 1024, keeps_scores=True),
        _A100_40,
        480,
        4,
        {"stage": 1},
    ),
    Workload("1.3 B, 8x40 GB", Transformer(24, 2048, 16, 2048), _A100_40, 480, 1, {"stage": 1}),
    Workload("2.7 B, 8x80 GB", Transformer(32, 2560, 32, 2048), _A100_80, 480, 2, {"stage": 2}),
    Workload("6.7 B, 8x80 GB", Transformer(32, 4096, 32, 2048), _A100_80, 480, 1, {"stage": 2}),
    Workload(
        "13 B, 8x80 GB",
        Transformer(40, 5120, 40, 2048, recomputes=True),
        _A100_80,
        480,
        1,
        {"stage": 3},
    ),
    Workload(
        "1.3 B, 16x16 GB Ethernet",
        Transformer(24, 2048, 16, 1024, keeps_scores=True, recomputes=True),
        _V100_16_ETHERNET,
        480,
        1,
        {"stage": 2, "reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000},
        half="fp16",
    ),
)
