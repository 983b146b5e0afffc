"""Save engines in one layout and load them in another; see ``test_reshape``."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import deepspeed
import small_models
import torch
from deepspeed.accelerator import get_accelerator

from dstrial.checkpoint.layout import Layout
from dstrial.engine.adapters.factory import adapt
from dstrial.engine.checkpoint_reader.saved_engine import SavedEngine
from dstrial.engine.reshape import load_reshaped
from dstrial.engine.state import engine_extra_state, save_engine
from dstrial.ranks.process_group import keep_compiler_out, without_compiled_collectives

LOSS_SCALE = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}


def begin() -> None:
    keep_compiler_out()
    with without_compiled_collectives(is_cpu=True):
        deepspeed.init_distributed("gloo")


def allgather(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, value)
    return gathered


def build(zero_stage: int, num_stages: int, kind: str, **more: Any) -> Any:
    torch.manual_seed(1)
    model: Any = (
        small_models.pipeline(num_stages, kind=kind)
        if num_stages
        else small_models.Classifier(torch.nn.LayerNorm)
    )
    engine, *_ = deepspeed.initialize(model=model, config=small_models.ds_config(zero_stage, **more))
    return engine


def train(engine: Any, num_steps: int, dtype: torch.dtype) -> None:
    adapter = adapt(engine)
    for step in range(num_steps):
        data = small_models.training_data(step, step + 1, adapter.data_parallel_rank, dtype)
        if hasattr(engine, "num_stages"):
            engine.train_batch(data if adapter.needs_loader else None)
            continue
        for inputs, labels in data:
            engine.backward(small_models.cross_entropy(engine(inputs), labels))
            engine.step()


def save(engine: Any, path: pathlib.Path) -> None:
    save_engine(engine, path, "model0")
    (path / "layout.json").write_text(json.dumps(adapt(engine).layout(allgather).to_json()))


def load(engine: Any, path: pathlib.Path, tied: dict[str, Any]) -> str | None:
    layout = Layout.from_json(json.loads((path / "layout.json").read_text()))
    try:
        load_reshaped(engine, SavedEngine(path, "model0", layout, tied), adapt(engine).layout(allgather))
    except Exception as error:  # noqa: BLE001  # the other ranks and the test are told of it
        return f"{type(error).__name__}: {error}"
    return None


def loss_scale_of(engine: Any) -> dict[str, Any]:
    optimizer = engine.optimizer
    holder = optimizer.loss_scaler if hasattr(optimizer, "loss_scaler") else optimizer.loss_scale_config
    return {key: getattr(holder, key) for key in ("cur_scale", "cur_iter", "last_overflow_iter")}


def carry_loss_scales(directory: str) -> dict[str, tuple[str | None, dict[str, Any], dict[str, Any]]]:
    """Train in fp16, whose state is the same on a CPU; return what went wrong and the loss scales, by stages."""
    get_accelerator().is_fp16_supported = lambda: True
    begin()
    found = {}
    for before, after in ((0, 1), (1, 0), (3, 1), (2, 3)):
        path = pathlib.Path(directory, f"{before}{after}")
        saved = build(before, 0, "plain", fp16=LOSS_SCALE)
        train(saved, 5, torch.float16)
        save(saved, path)
        loaded = build(after, 0, "plain", fp16=LOSS_SCALE)
        problem = load(loaded, path, {})
        found[f"{before} -> {after}"] = (problem, loss_scale_of(saved), loss_scale_of(loaded))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return found


def load_into_second_copies(directory: str) -> tuple[str | None, float, float]:
    """Load into ZeRO 3 with a second copy within the machine (hpZ), after its weights have been gathered once."""
    begin()
    path = pathlib.Path(directory, "hpz")
    saved = build(1, 0, "plain")
    train(saved, 3, torch.float32)
    save(saved, path)
    hpz = {"stage": 3, "zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}
    loaded = build(3, 0, "plain", zero_optimization=hpz)
    with torch.no_grad():
        inputs, labels = next(small_models.training_data(9, 10, 0, torch.float32))
        for engine in (saved, loaded):
            engine.eval()
        small_models.cross_entropy(loaded(inputs), labels)
        problem = load(loaded, path, {})
        before, after = (
            float(small_models.cross_entropy(engine(inputs), labels)) for engine in (saved, loaded)
        )
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return problem, before, after


def merge_untied_biases(directory: str) -> str | None:
    """Bring layers of two stages into one stage that share their weight and have a bias each."""
    begin()
    path = pathlib.Path(directory, "tied")
    saved = build(1, 2, "tied")
    train(saved, 3, torch.float32)
    save(saved, path)
    tied: dict[str, Any] = {}
    for extra in allgather(engine_extra_state(saved)["tied_modules"]):
        tied |= extra
    problem = load(build(1, 1, "tied"), path, tied)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return problem
