"""The six workloads of the autotuner's benchmark: published transformers on published machines. Values only.

Sources: shapes: Radford et al. 2019 (GPT-2 large), Brown et al. 2020, table 2.1 (1.3 B to 13 B). Devices: NVIDIA's data
sheets of A100 and V100 (peak FLOP/s, memory bandwidth). Attainable link speeds: NCCL's bus bandwidth as its tests report it
on DGX A100 and p3.16xlarge, and 25 Gbit/s Ethernet less its protocol. Host: CPU-Adam's latency per parameter of Ren et
al. 2021 ("ZeRO-Offload"), table 4, on a node with two sockets.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from dstrial.config.parallel_dims import ParallelDims
from dstrial.dsat.space import Space


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    device_bytes: float
    flops_per_s: float  # peak of one device in half precision
    memory_bytes_per_s: float  # of one device
    num_multiprocessors: int  # of one device: tiles of a matrix product come in waves of so many
    ranks_per_node: int
    num_nodes: int
    node_bytes_per_s: float  # bus bandwidth of a ring within a node
    network_bytes_per_s: float  # of one node; unused with one node
    network_latency_s: float
    pcie_bytes_per_s: float  # between the host and all devices of a switch
    ranks_per_switch: int
    cpu_adam_s_per_param: float  # of one node's CPUs together
    host_bytes: float  # of one node

    @property
    def num_ranks(self) -> int:
        return self.ranks_per_node * self.num_nodes


@dataclasses.dataclass(frozen=True, slots=True)
class Transformer:
    num_layers: int
    width: int
    num_heads: int
    sequence: int
    vocabulary: int = 50257
    keeps_scores: bool = False  # attention's scores are kept for backward, as without a fused kernel
    recomputes: bool = False  # activation checkpointing of every layer

    @property
    def num_params(self) -> float:
        """Narayanan et al. 2021, equation 2: 12 l h^2 (1 + 13/(12 h) + (V + s)/(12 l h))."""
        layers, width = self.num_layers, self.width
        rest = 13 / (12 * width) + (self.vocabulary + self.sequence) / (12 * layers * width)
        return 12 * layers * width**2 * (1 + rest)


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """A model, a machine, and the configuration that its user has written."""

    name: str
    model: Transformer
    machine: Machine
    train_batch_size: int
    own_micro_batch: int
    own_zero: dict[str, Any]
    half: str = "bf16"

    def deepspeed_config(self) -> dict[str, Any]:
        return {
            "train_batch_size": self.train_batch_size,
            "train_micro_batch_size_per_gpu": self.own_micro_batch,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            self.half: {"enabled": True},
            "zero_optimization": dict(self.own_zero),
        }

    def space(self) -> Space:
        return Space(self.deepspeed_config(), ParallelDims(self.machine.num_ranks), stages=(0, 1, 2, 3))


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
