"""Put torch's precision, kernels and determinism back after a configuration."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

# torch 2.9 and later; what was set by these names cannot be asked for by the older ones (it raises RuntimeError).
_FP32_PRECISION = (
    "",
    "cuda.matmul",
    "cudnn",
    "cudnn.conv",
    "cudnn.rnn",
    "mkldnn",
    "mkldnn.matmul",
    "mkldnn.conv",
    "mkldnn.rnn",
)
_ATTRIBUTES = (
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.benchmark_limit",
    "cudnn.deterministic",
    "cudnn.allow_tf32",
    "cuda.matmul.allow_tf32",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_accumulation",
    *(f"{owner}.fp32_precision".lstrip(".") for owner in _FP32_PRECISION),
)
"""Attributes below ``torch.backends``, in the order in which they are put back: the older names change the newer ones."""

_ATTENTION_KERNELS = ("flash", "mem_efficient", "math", "cudnn")


@dataclasses.dataclass(frozen=True, slots=True)
class NumericFlags:
    """Settings of torch.

    Attributes:
        matmul_precision: as ``torch.get_float32_matmul_precision`` has it; None where older and newer names were mixed.
        attributes: below ``torch.backends``, those that this build of torch has.
        attention_kernels: which kernels of scaled dot product attention may be chosen.
        is_deterministic: whether only deterministic algorithms may be.
        only_warns: whether others warn instead of failing.
    """

    matmul_precision: str | None
    attributes: Mapping[str, Any]
    attention_kernels: Mapping[str, bool]
    is_deterministic: bool
    only_warns: bool

    @classmethod
    def read(cls) -> NumericFlags:
        """Return what holds now. Ranks: any; no communication."""
        precision = None
        with contextlib.suppress(RuntimeError):
            precision = torch.get_float32_matmul_precision()
        attributes = {}
        for name in _ATTRIBUTES:
            owner, attribute = _owner(name)
            with contextlib.suppress(RuntimeError, AttributeError):
                attributes[name] = getattr(owner, attribute)
        kernels = {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _ATTENTION_KERNELS}
        return cls(
            precision,
            attributes,
            kernels,
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )

    def restore(self) -> None:
        """Put it back. Ranks: any; no communication."""
        if NumericFlags.read() == self:
            return
        if self.matmul_precision is not None:
            torch.set_float32_matmul_precision(self.matmul_precision)
        for name, value in self.attributes.items():
            owner, attribute = _owner(name)
            setattr(owner, attribute, value)
        for name, is_on in self.attention_kernels.items():
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(is_on)
        torch.use_deterministic_algorithms(self.is_deterministic, warn_only=self.only_warns)


def _owner(name: str) -> tuple[Any, str]:
    *path, attribute = name.split(".")
    owner: Any = torch.backends
    for part in path:
        owner = getattr(owner, part, None)
    return owner, attribute
