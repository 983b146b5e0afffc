"""Checkpoints of all engines that run on a CPU load with the allowed classes only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dstrial.config.deepspeed_rules.settings import installed_deepspeed_version
from dstrial.testing.ranks import run_function

pytestmark = pytest.mark.ranks

# DeepSpeed 0.19.0 cannot load the optimizer of a mixture of experts without ZeRO (KeyError: 'optimizer').
EXPERTS = () if installed_deepspeed_version() == "0.19.0" else ("experts",)
KINDS = ("zero 0", "zero 1", "zero 2", "zero 3", "bf16 zero 0", "bf16 zero 1", *EXPERTS, "attr dict")


def test_engine_checkpoints_load_with_allowed_classes_only(tmp_path: Path) -> None:
    (result,) = run_function(_save_and_load_all, 1, str(tmp_path), deadline_s=280)

    assert result.value == {kind: {} for kind in KINDS}


def _save_and_load_all(directory: str) -> dict[str, Any]:
    import deepspeed

    from dstrial.ranks.process_group import without_compiled_collectives

    with without_compiled_collectives(is_cpu=True):
        deepspeed.init_distributed("gloo")
    return {kind: _save_and_load(kind, Path(directory) / kind) for kind in KINDS}


def _save_and_load(kind: str, path: Path) -> dict[str, tuple[str, ...]]:
    """Save, load and compare an engine; return the classes that are not allowed."""
    import torch

    from dstrial.engine.checkpoint_reader.safe_load import (
        bind_checkpoint_engine,
        make_plain_config,
        unlisted_in,
    )
    from dstrial.engine.state import load_engine, save_engine

    engine = _engine(kind)
    make_plain_config(engine)
    bind_checkpoint_engine(engine)
    for seed in range(2):
        torch.manual_seed(seed)
        dtype = next(engine.module.parameters()).dtype
        loss = engine(torch.randn(2, 8).to(dtype)).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
    path.mkdir()
    save_engine(engine, path, "model0")
    files = sorted(file.relative_to(path).as_posix() for file in path.rglob("*.pt"))
    assert files
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    other = _engine(kind)
    bind_checkpoint_engine(other)
    load_engine(other, path, "model0")
    assert other.global_steps == 2
    after = other.module.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    return unlisted_in(path, files)


def _engine(kind: str) -> Any:
    import deepspeed
    import torch
    from attrdict import AttrDict

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(8, 8)
            self.experts = deepspeed.moe.layer.MoE(
                hidden_size=8, expert=torch.nn.Linear(8, 8), num_experts=2, min_capacity=0
            )

        def forward(self, x: Any) -> Any:
            return self.experts(self.first(x))[0]

    torch.manual_seed(5)
    config: dict[str, Any] = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        "zero_optimization": {"stage": int(kind[-1]) if kind[-1].isdigit() else 0},
        "bf16": {"enabled": kind.startswith("bf16")},
    }
    model = (
        Experts() if kind == "experts" else torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    )
    parameters: Any = list(model.parameters())
    if kind == "experts":
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        group = {"params": parameters, "name": "all"}
        parameters = split_params_into_different_moe_groups_for_optimizer(group)
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameters, config=AttrDict(config) if kind == "attr dict" else config
    )
    return engine
