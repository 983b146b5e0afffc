"""The speed of a machine, measured or from the data sheet of its device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

METRIC_PREFIX = "machine_"  # prefix of the metrics in which a trial reports the speed of its machine
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")  # collectives whose speed trials measure


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """Latency and bandwidth of one type of collective, such as ``all_reduce``."""

    latency_s: float  # of a call with an empty tensor
    bytes_per_s: float  # of the whole tensor, all ranks together

    def seconds(self, num_calls: float, num_bytes: float) -> tuple[float, float]:
        """Return (seconds of moving the bytes, seconds of starting the calls)."""
        return num_bytes / self.bytes_per_s, num_calls * self.latency_s


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """The compute, memory and network rates of one rank while all ranks are busy."""

    flops_per_s: float
    operation_s: float  # time of an operation of torch on a tiny tensor
    copy_bytes_per_s: float  # bytes read plus bytes written in device memory
    host_bytes_per_s: float  # bytes read plus bytes written in host memory
    host_copy_bytes_per_s: float | None  # between device and host; None if the device is the host
    collectives: Mapping[str, Link]  # collective -> link, for this number of ranks
    hides: float = 0.0  # share of the communication that overlapping hides behind computation

    def link(self, kind: str) -> Link:
        """Return the latency and bandwidth of collective ``kind``.

        If it was not timed, return those of all_gather. If neither was timed, return a link that takes no time.
        """
        known = self.collectives.get(kind) or self.collectives.get("all_gather")
        return known if known is not None else Link(0.0, math.inf)

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, float]) -> Machine | None:
        """Return the machine that a trial's ``machine_*`` metrics describe.

        None if a required metric is missing; the rates of collectives are optional.
        """
        found = {
            name.removeprefix(METRIC_PREFIX): value
            for name, value in metrics.items()
            if name.startswith(METRIC_PREFIX) and value > 0
        }
        if not {"flops_per_s", "operation_s", "copy_bytes_per_s"} <= found.keys():
            return None
        links = {
            kind: Link(found[f"{kind}_latency_s"], found[f"{kind}_bytes_per_s"])
            for kind in COLLECTIVES
            if f"{kind}_latency_s" in found and f"{kind}_bytes_per_s" in found
        }
        copy = found["copy_bytes_per_s"]
        is_device = "host_copy_bytes_per_s" in found
        return cls(
            flops_per_s=found["flops_per_s"],
            operation_s=found["operation_s"],
            copy_bytes_per_s=copy,
            host_bytes_per_s=found.get("host_bytes_per_s", copy),
            host_copy_bytes_per_s=found.get("host_copy_bytes_per_s"),
            collectives=links,
            # gloo's collectives on a CPU take the cores that compute.
            hides=_HIDDEN_ON_DEVICES if is_device else 0.0,
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Machine:
        links = {kind: Link(**link) for kind, link in value["collectives"].items()}
        return cls(**{**value, "collectives": links})


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """Rates and memory of an accelerator, from its data sheet."""

    half_flops_per_s: float  # dense matrix products in bf16 or fp16
    single_flops_per_s: float  # in fp32, without shortened mantissas
    memory_bytes: float  # of the variant with most memory
    memory_bytes_per_s: float
    peer_bytes_per_s: float  # to the other devices of a machine, in one direction
    host_bytes_per_s: float
    source: str


DEVICES: dict[str, Device] = {
    "v100": Device(125e12, 15.7e12, 32 * 2**30, 0.9e12, 150e9, 16e9, "NVIDIA V100 datasheet, 2020, SXM2"),
    "t4": Device(65e12, 8.1e12, 16 * 2**30, 0.32e12, 16e9, 16e9, "NVIDIA T4 product brief, 2020"),
    "a10": Device(125e12, 31.2e12, 24 * 2**30, 0.6e12, 32e9, 32e9, "NVIDIA A10 datasheet, 2021"),
    "a100": Device(312e12, 19.5e12, 80 * 2**30, 2.0e12, 300e9, 32e9, "NVIDIA A100 datasheet, 2021, SXM4"),
    "l40s": Device(362e12, 91.6e12, 48 * 2**30, 0.864e12, 32e9, 32e9, "NVIDIA L40S datasheet, 2023"),
    "rtx4090": Device(165e12, 82.6e12, 24 * 2**30, 1.0e12, 32e9, 32e9, "NVIDIA Ada architecture paper, 2023"),
    "h100": Device(989e12, 67e12, 80 * 2**30, 3.35e12, 450e9, 64e9, "NVIDIA H100 datasheet, 2023, SXM5"),
    "h200": Device(989e12, 67e12, 141e9, 4.8e12, 450e9, 64e9, "NVIDIA H200 datasheet, 2024, SXM5"),
    "b200": Device(2250e12, 75e12, 180e9, 8.0e12, 900e9, 64e9, "NVIDIA Blackwell datasheet, 2025, HGX B200"),
}
"""FLOPs without sparsity; bytes between devices and to the host in one direction, half of what is published."""

_REACHED = 0.7  # share of a published rate that large operations reach; assumed
_HIDDEN_ON_DEVICES = 0.7  # ``Machine.hides`` of an accelerator; assumed
_OPERATION_S = 6e-6  # start of an operation; assumed
_CALL_S = 12e-6  # latency of a collective inside a machine; assumed
_NETWORK_CALL_S = 25e-6  # latency of a collective between machines; assumed
_HOST_BYTES_PER_S = 15e9  # one rank's share of the bandwidth of host memory


def nominal_machine(
    device: Device,
    num_ranks: int,
    *,
    per_machine: int = 8,
    bytes_per_value: int = 2,
    network_bytes_per_s: float = 50e9,
) -> Machine:
    """Return rates of one of ``num_ranks`` devices: 70 % of those in the data sheet.

    ``per_machine`` is the number of devices in a machine. ``network_bytes_per_s`` is the network rate between machines, per
    device and direction. A ring collective over several machines is limited by the network rate of all devices of a machine.

    Source: a ring sends 2 (n - 1) / n of a tensor in an all_reduce, half of that in other collectives (Patarasuk and Yuan 2009).
    """
    is_spread = num_ranks > per_machine
    rate = _REACHED * (
        min(device.peer_bytes_per_s, per_machine * network_bytes_per_s)
        if is_spread
        else device.peer_bytes_per_s
    )
    call_s = _NETWORK_CALL_S if is_spread else _CALL_S
    links = {}
    for kind in COLLECTIVES if num_ranks > 1 else ():
        passes = 2 if kind == "all_reduce" else 1
        share = passes * (num_ranks - 1) / num_ranks
        # Trees keep the latency of large groups from growing with their size.
        links[kind] = Link(call_s * passes * math.log2(2 * num_ranks), rate / share)
    flops = device.half_flops_per_s if bytes_per_value == 2 else device.single_flops_per_s
    return Machine(
        flops_per_s=_REACHED * flops,
        operation_s=_OPERATION_S,
        copy_bytes_per_s=_REACHED * device.memory_bytes_per_s,
        host_bytes_per_s=_HOST_BYTES_PER_S,
        host_copy_bytes_per_s=_REACHED * device.host_bytes_per_s,
        collectives=links,
        hides=_HIDDEN_ON_DEVICES,
    )


def unknown_machine(num_ranks: int, *, is_cpu: bool) -> Machine:
    """Return assumed rates for an unmeasured machine: an A100's, or those of a CPU."""
    if not is_cpu:
        return nominal_machine(DEVICES["a100"], num_ranks)
    links = {kind: Link(2e-4, 1e9) for kind in COLLECTIVES if num_ranks > 1}
    return Machine(5e10, 8e-6, 8e9, 8e9, None, links)
