"""Train, save and resume in new processes, for ``test_bitwise_resume``."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import deepspeed
import small_models
import torch
from torch import nn

from dstrial.engine.adapters.factory import adapt
from dstrial.engine.state import engine_extra_state, load_engine, restore_engine_extra_state, save_engine

NUM_STEPS = 5
SAVED_AFTER = 2

BF16 = {"bf16": {"enabled": True}}

MUON = {"type": "Muon", "params": {"lr": 1e-2, "torch_adam": True}}

CASES: dict[str, dict[str, Any]] = {
    **{f"zero {stage}": {"config": small_models.ds_config(stage)} for stage in range(4)},
    "zero 0 bf16": {"config": small_models.ds_config(0, **BF16), "norm": nn.LayerNorm},
    "zero 3 bf16": {"config": small_models.ds_config(3, **BF16), "norm": nn.LayerNorm},
    "zero 1 bf16, fp32 accumulation": {
        "config": small_models.ds_config(1, data_types={"grad_accum_dtype": "fp32"}, **BF16),
        "norm": nn.LayerNorm,
    },
    **{
        f"zero {stage} muon": {
            "config": small_models.ds_config(
                stage, optimizer=MUON, zero_optimization={"stage": stage, "reduce_scatter": False}
            )
        }
        for stage in (1, 2, 3)
    },
    "pipeline zero 0": {"config": small_models.ds_config(0), "pipeline": "plain"},
    "pipeline zero 1": {"config": small_models.ds_config(1), "pipeline": "plain"},
    "pipeline zero 0 bf16": {"config": small_models.ds_config(0, **BF16), "pipeline": "plain"},
    "pipeline seeded layers": {"config": small_models.ds_config(0), "pipeline": "seeded"},
    "pipeline tied by function": {"config": small_models.ds_config(0), "pipeline": "tied"},
    "two pipelines zero 1": {"config": small_models.ds_config(1), "pipeline": "plain", "ranks": 4},
}


def build(case: dict[str, Any]) -> Any:
    torch.compiler.set_stance("force_eager")  # compiling Muon takes half a minute
    torch.manual_seed(1)
    model = (
        small_models.pipeline(kind=case["pipeline"])
        if "pipeline" in case
        else small_models.Classifier(case.get("norm", nn.BatchNorm1d))
    )
    engine, *_ = deepspeed.initialize(model=model, config=case["config"])
    return adapt(engine)


def train_step(adapter: Any, step: int) -> list[str]:
    engine = adapter.engine
    dtype = next(engine.module.parameters()).dtype
    if adapter.train_calls_per_batch == 1:
        adapter.bind_training_iterator(
            small_models.training_data(step, step + 1, adapter.data_parallel_rank, dtype)
            if adapter.needs_loader
            else None
        )
        return [float(engine.train_batch()).hex()]
    losses = []
    for x, labels in small_models.training_data(step, step + 1, adapter.data_parallel_rank, dtype):
        loss = small_models.cross_entropy(engine(x), labels)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss).hex())
    return losses


def status(engine: Any) -> dict[str, Any]:
    norm = engine.get_global_grad_norm()
    return {
        "micro_steps": engine.micro_steps,
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "lr": engine.get_lr(),
        "last_lr": engine.lr_scheduler.get_last_lr(),
        "grad_norm": None if norm is None else float(norm),
        "digest": small_models.digest(engine),
    }


def uninterrupted(case: dict[str, Any], path: pathlib.Path, rank: int) -> dict[str, Any]:
    adapter = build(case)
    torch.manual_seed(100 + rank)
    losses: list[list[str]] = []
    saved: dict[str, Any] = {}
    for step in range(NUM_STEPS):
        losses.append(train_step(adapter, step))
        if step + 1 == SAVED_AFTER:
            saved = status(adapter.engine)
            save_engine(adapter.engine, path, "model0")
            beside = {"extra": engine_extra_state(adapter.engine), "torch": torch.get_rng_state()}
            torch.save(beside, path / f"beside{rank}.pt")
    return {"losses": losses[SAVED_AFTER:], "saved": saved, "end": status(adapter.engine)}


def resumed(
    case: dict[str, Any], path: pathlib.Path, rank: int, *, with_extra: bool = True
) -> dict[str, Any]:
    adapter = build(case)
    torch.manual_seed(555)
    load_engine(adapter.engine, path, "model0")
    beside = torch.load(path / f"beside{rank}.pt", weights_only=True)
    if with_extra:
        restore_engine_extra_state(adapter.engine, beside["extra"])
    torch.set_rng_state(beside["torch"])
    loaded = status(adapter.engine)
    losses = [train_step(adapter, step) for step in range(SAVED_AFTER, NUM_STEPS)]
    return {"losses": losses, "saved": loaded, "end": status(adapter.engine)}


def main(fork_ranks: Any, argument: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for number, name in enumerate(argument["cases"]):
        case = CASES[name]
        root = pathlib.Path(argument["scratch"]) / str(number)
        path = root / "checkpoint"
        path.mkdir(parents=True)
        num_ranks = case.get("ranks", 2)
        result = {
            "uninterrupted": fork_ranks(
                num_ranks, functools.partial(uninterrupted, case, path), root / "full"
            ),
            "resumed": fork_ranks(num_ranks, functools.partial(resumed, case, path), root / "again"),
        }
        if name in argument["bare"]:
            bare = functools.partial(resumed, case, path, with_extra=False)
            result["bare"] = fork_ranks(num_ranks, bare, root / "bare")
        yield name, result
