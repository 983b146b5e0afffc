"""DeepSpeed configs of the programs; without torch."""

from __future__ import annotations

from typing import Any


def deepspeed_config(stage: int, precision: str = "fp32", **sections: Any) -> dict[str, Any]:
    """Return a DeepSpeed config that needs no compiled operator.

    Args:
        stage: of ZeRO.
        precision: ``fp32``, ``bf16`` or ``fp16``; fp16 starts with a loss scale of 2**32, which overflows.
        sections: further sections, which win.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        # DeepSpeed's buckets of 500 million elements are more memory than these models need.
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1_000_000},
        "steps_per_print": 1_000_000,
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    if precision == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 32, "hysteresis": 1}
    return {**config, **sections}
