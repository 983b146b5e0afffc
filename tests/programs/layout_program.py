"""Layouts of real engines (``test_engine_layout``)."""

from __future__ import annotations

import functools
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import deepspeed
import small_models
import torch
from deepspeed import comm
from torch import nn

from dstrial.checkpoint.layout import Layout
from dstrial.engine.adapters.factory import adapt
from dstrial.engine.state import save_engine
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


def describe(options: dict[str, Any], rank: int) -> dict[str, Any]:
    layout = build(options).layout(allgather)
    return {
        "layout": layout.to_json(),
        "survives_json": Layout.from_json(layout.to_json()) == layout,
        "differences": compatible(layout, layout),
    }


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
        yield name, run(options.get("ranks", 2), functools.partial(describe, options))
    blocked = scratch / "blocked"
    blocked.write_text("a file where the checkpoint should be")
    yield "blocked", run(2, functools.partial(save_onto_a_file, CASES["zero 1"], blocked))
