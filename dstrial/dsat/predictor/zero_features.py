"""What of a DeepSpeed config decides where time and memory go. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dstrial.dsat.space.knobs import ZERO

ASSUMED_LAYERS = 50
"""Modules with parameters of one size, where they are not counted."""


@dataclasses.dataclass(frozen=True, slots=True)
class ZeroFeatures:
    """The features of a structure that predictions use."""

    stage: int
    replicas: int  # ranks among which ZeRO divides
    reduce_elements: float
    gather_elements: float
    is_overlapping: bool
    host_share: float  # of the optimizer's state
    has_host_params: bool  # parameters are on the host
    bytes_per_value: int
    is_contiguous: bool = True
    has_reduce_scatter: bool = True
    prefetch_elements: float = 5e7
    persistent_elements: float = 1e5
    live_elements: float = 1e9
    reuse_elements: float = 1e9
    group_elements: float = 1e9

    @classmethod
    def from_config(
        cls, effective: Mapping[str, Any], *, replicas: int, bytes_per_value: int
    ) -> ZeroFeatures:
        zero = effective.get(ZERO) or {}
        stage = int(zero.get("stage") or 0)
        on_host = _device(zero, "offload_optimizer") != "none" and stage > 0
        ratio = float((zero.get("offload_optimizer") or {}).get("ratio") or 1.0) if on_host else 0.0
        overlap = zero.get("overlap_comm")

        def size(name: str, default: float) -> float:
            return float(zero.get(name) or default)

        return cls(
            stage=stage,
            replicas=replicas,
            reduce_elements=size("reduce_bucket_size", 5e8),
            gather_elements=size("allgather_bucket_size", 5e8),
            is_overlapping=stage == 3 if overlap is None else bool(overlap),
            host_share=ratio,
            has_host_params=stage == 3 and _device(zero, "offload_param") != "none",
            bytes_per_value=bytes_per_value,
            is_contiguous=bool(zero.get("contiguous_gradients", True)),
            has_reduce_scatter=bool(zero.get("reduce_scatter", True)),
            prefetch_elements=size("stage3_prefetch_bucket_size", 5e7),
            persistent_elements=size("stage3_param_persistence_threshold", 1e5),
            live_elements=size("stage3_max_live_parameters", 1e9),
            reuse_elements=size("stage3_max_reuse_distance", 1e9),
            group_elements=size("sub_group_size", 1e9),
        )

    @property
    def group(self) -> tuple[int, bool, bool]:
        """The main features: stage, optimizer on the host, parameters on the host."""
        return self.stage, self.host_share > 0, self.has_host_params

    @property
    def bucket_bytes(self) -> int:
        """Bytes of the gradient buckets: two with overlap in stages 1, 2, else one.

        Source: DeepSpeed ``runtime/zero/stage_1_and_2.py`` ``setup_buckets`` and ``stage3.py``'s flat bucket.
        """
        if self.stage == 0:
            return 0
        count = 2 if self.is_overlapping and self.stage < 3 else 1
        return count * int(self.reduce_elements) * self.bytes_per_value

    def kept_elements(self, parameters: float) -> float:
        """Return how many gathered parameters stage 3 keeps from forward to backward.

        A parameter with ``d`` others after it is used again after ``2 d`` of them, so it is kept if that is within the reuse
        distance.
        """
        if self.stage != 3:
            return 0.0
        return min(0.5 * self.reuse_elements, self.live_elements, 0.9 * parameters)


def _device(zero: Mapping[str, Any], section: str) -> str:
    return str((zero.get(section) or {}).get("device") or "none")
