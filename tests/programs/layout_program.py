"""Compare layouts and file tables with real engines (``test_engine_layout``)."""

from __future__ import annotations

import functools
import itertools
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import deepspeed
import small_models
import torch
from deepspeed import comm
from torch import nn

from dstrial.checkpoint.layout import Layout
from dstrial.engine.adapters.factory import adapt
from dstrial.engine.files import engine_files
from dstrial.engine.state import load_engine, save_engine
from dstrial.resume.plan import compatible


class Shared(nn.Module):
    """A module with odd sizes, two parameter groups, frozen and tied parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 7)
        self.norm = nn.LayerNorm(7)
        self.last = nn.Linear(5, 7, bias=False)
        self.last.weight = self.first.weight
        for param in self.frozen.parameters():
            param.requires_grad = False

    def groups(self) -> list[dict[str, Any]]:
        decayed = [self.first.weight]
        rest = [self.norm.weight, self.first.bias, self.norm.bias]
        return [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def allgather(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * comm.get_world_size()
    torch.distributed.all_gather_object(gathered, value)
    return gathered


def build(options: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    config = small_models.ds_config(options["stage"], **options.get("more", {}))
    config["zero_optimization"].update(options.get("zero", {}))
    if "pipeline" in options:
        engine, *_ = deepspeed.initialize(
            model=small_models.pipeline(kind=options["pipeline"]), config=config
        )
    else:
        model = Shared()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.groups(), config=config)
    return adapt(engine)


def describe(options: dict[str, Any], path: pathlib.Path, rank: int) -> dict[str, Any]:
    adapter = build(options)
    engine = adapter.engine
    layout = adapter.layout(allgather)
    save_engine(engine, path, "model0")
    readers: dict[str, list[int]] = {}
    for reader, read in enumerate(allgather(engine_files(engine, "model0").read)):
        for file in read:
            readers.setdefault(file, []).append(reader)
    return {
        "layout": layout.to_json(),
        "survives_json": Layout.from_json(layout.to_json()) == layout,
        "differences": compatible(layout, layout),
        "readers": dict(sorted(readers.items())),
        "written": engine_files(engine, "model0").written,
        "on_disk": sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()),
    }


def load(options: dict[str, Any], path: pathlib.Path, rank: int) -> dict[str, Any]:
    """Load a checkpoint; return the files that Python opened and those expected."""
    adapter = build(options)
    opened: set[str] = set()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | os.PathLike):
            file = pathlib.Path(arguments[0])
            if file.is_relative_to(path) and file.is_file():
                opened.add(str(file.relative_to(path)))

    sys.addaudithook(hook)
    load_engine(adapter.engine, path, "model0")
    return {"opened": sorted(opened), "read": sorted(engine_files(adapter.engine, "model0").read)}


def load_damaged(options: dict[str, Any], path: pathlib.Path, rank: int) -> str:
    load_engine(build(options).engine, path, "model0")
    return "loaded"


def save_onto_a_file(options: dict[str, Any], path: pathlib.Path, rank: int) -> str:
    save_engine(build(options).engine, path / "no directory", "model0")
    return "saved"


BF16 = {"bf16": {"enabled": True}}
CASES: dict[str, dict[str, Any]] = {
    "zero 0": {"stage": 0},
    "zero 1": {"stage": 1},
    "zero 2, round robin": {"stage": 2, "zero": {"round_robin_gradients": True}},
    "zero 2, aligned": {"stage": 2, "zero": {"parameter_alignment": True}},
    "zero 3": {"stage": 3},
    "zero 3, sub groups": {"stage": 3, "zero": {"sub_group_size": 10}},
    "bf16, fp32 accumulation": {
        "stage": 1,
        "more": {**BF16, "data_types": {"grad_accum_dtype": "fp32"}},
    },
    "pipeline, tied": {"stage": 1, "pipeline": "tied"},
    "two pipelines": {"stage": 1, "pipeline": "plain", "ranks": 4},
    "two pipelines, bf16": {"stage": 0, "pipeline": "plain", "ranks": 4, "more": BF16},
}


def main(fork_ranks: Any, argument: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    scratch = pathlib.Path(argument["scratch"])
    number = itertools.count()

    def run(num_ranks: int, body: Any) -> list[Any]:
        return fork_ranks(num_ranks, body, scratch / str(next(number)))

    for name, options in CASES.items():
        num_ranks, path = options.get("ranks", 2), scratch / f"checkpoint {name}"
        yield (
            name,
            {
                "described": run(num_ranks, functools.partial(describe, options, path)),
                "loaded": run(num_ranks, functools.partial(load, options, path)),
            },
        )
    options, path = CASES["zero 1"], scratch / "checkpoint zero 1"
    (path / "model0" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    yield "damaged", run(2, functools.partial(load_damaged, options, path))
    blocked = scratch / "blocked"
    blocked.write_text("a file where the checkpoint should be")
    yield "blocked", run(2, functools.partial(save_onto_a_file, options, blocked))
