"""Save and load partly frozen models in ZeRO 0 to 3 for ``test_partial_training``."""

from __future__ import annotations

import contextlib
import gc
import pathlib
from typing import Any

import adapter_trials
import deepspeed
import small_models
import torch
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from reshape_program import allgather, begin

from dstrial.checkpoint.layout import Layout
from dstrial.engine.adapters.factory import adapt
from dstrial.engine.checkpoint_reader.saved_engine import SavedEngine
from dstrial.engine.frozen_parameters import frozen_checksums, leave_out_frozen, without_frozen
from dstrial.engine.reshape import load_reshaped
from dstrial.engine.state import engine_extra_state, load_engine, restore_engine_extra_state, save_engine
from dstrial.errors import TrialContractError

STAGES = {0: 1, 1: 3, 2: 0, 3: 1}
MODELS = {
    "lora": (adapter_trials.lora_model, False),
    "frozen parts": (adapter_trials.model_with_frozen_parts, False),
    "frozen parts in the optimizer": (adapter_trials.model_with_frozen_parts, True),
}


def build(kind: str, stage: int, seed: int = 5, **sections: Any) -> Any:
    make, gives_all = MODELS[kind]
    model = make(seed)
    parameters = [one for one in model.parameters() if gives_all or one.requires_grad]
    config = small_models.ds_config(stage, **sections)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    return engine


def train(engine: Any, first: int, last: int) -> list[str]:
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step * 10 + torch.distributed.get_rank())
        torch.manual_seed(step)  # for the adapter's dropout
        for _ in range(engine.gradient_accumulation_steps()):
            tokens = torch.randint(adapter_trials.VOCABULARY, (4, 8), generator=generator)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()).hex())
    return losses


def weights(engine: Any) -> dict[str, torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: value.detach().clone() for name, value in engine.module.named_parameters()}


def is_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def layout_of(engine: Any, **changes: Any) -> Layout:
    layout: Layout = adapt(engine).layout(allgather)
    values = {**layout.to_json(), "frozen_checksums": frozen_checksums(engine, layout, allgather), **changes}
    return Layout.from_json(values)


def save(engine: Any, path: pathlib.Path, holds_frozen: bool) -> Layout:
    if not holds_frozen:
        leave_out_frozen(engine)
    save_engine(engine, path, "model0")
    return layout_of(engine, **({"frozen_checksums": {}} if holds_frozen else {}))


def train_and_reload(directory: str, kind: str, holds_frozen: bool) -> dict[str, Any]:
    """Return by stage whether resumed and reshaped engines equal the original engine."""
    begin()
    found: dict[str, Any] = {}
    for stage, other_stage in STAGES.items():
        path = pathlib.Path(directory, str(stage))
        engine = build(kind, stage)
        train(engine, 0, 2)
        layout = save(engine, path, holds_frozen)
        saved_weights, extra = weights(engine), engine_extra_state(engine)
        losses = train(engine, 2, 4)

        resumed = build(kind, stage)
        now = layout_of(resumed)
        with without_frozen(resumed, layout, now, allgather):
            load_engine(resumed, path, "model0")
        restore_engine_extra_state(resumed, extra)
        found[f"{stage} loaded"] = is_same(saved_weights, weights(resumed))
        found[f"{stage} resumed"] = train(resumed, 2, 4) == losses and is_same(
            weights(engine), weights(resumed)
        )

        reshaped = build(kind, other_stage)
        saved = SavedEngine(path, "model0", layout)
        with without_frozen(reshaped, layout, layout_of(reshaped), allgather):
            load_reshaped(reshaped, saved, layout_of(reshaped))
        found[f"{stage} to {other_stage}"] = is_same(saved_weights, weights(reshaped))

        other = build(kind, stage, seed=6)
        try:
            with without_frozen(other, layout, layout_of(other), allgather):
                load_engine(other, path, "model0")
            refusal = ""
        except Exception as error:  # noqa: BLE001  # returned to the test
            refusal = f"{type(error).__name__}: {error}"
        found[f"{stage} other base"] = refusal
        if torch.distributed.get_rank() == 0:
            torch.save((layout.to_json(), saved_weights), path / "saved.pt")
        torch.distributed.barrier()
        del engine, resumed, reshaped, other
        gc.collect()  # frees the engine before its process groups, whose threads abort the process
    _end()
    return found


def load_on_one_rank(directory: str, kind: str) -> dict[str, bool]:
    begin()
    found = {}
    for stage, other_stage in STAGES.items():
        path = pathlib.Path(directory, str(stage))
        values, saved_weights = torch.load(path / "saved.pt")
        layout, engine = Layout.from_json(values), build(kind, other_stage)
        with without_frozen(engine, layout, layout_of(engine), allgather):
            load_reshaped(engine, SavedEngine(path, "model0", layout), layout_of(engine))
        found[f"{stage} to {other_stage}"] = is_same(saved_weights, weights(engine))
        del engine
        gc.collect()
    _end()
    return found


def share_across_stages(how: str) -> str | None:
    """Adapt a two-stage pipeline with a shared first and last layer; return the error."""
    begin()
    first = torch.nn.Linear(4, 4).requires_grad_(how != "frozen")
    layers: list[Any] = [first, torch.nn.Tanh(), torch.nn.Linear(4, 4), first]
    if how == "tied":
        layers[0] = layers[3] = TiedLayerSpec("shared", torch.nn.Linear, 4, 4)
    module = PipelineModule(layers=layers, num_stages=2, loss_fn=small_models.cross_entropy)
    engine, *_ = deepspeed.initialize(model=module, config=small_models.ds_config(0))
    try:
        adapt(engine)
        return None
    except TrialContractError as error:
        return str(error)


def train_one_stage_on_two_shapes() -> float:
    """Train a pipeline of one stage on micro batches of two shapes."""
    begin()
    module = PipelineModule(layers=[torch.nn.Linear(4, 4)], num_stages=1, loss_fn=torch.nn.MSELoss())
    config = small_models.ds_config(0)
    engine, *_ = deepspeed.initialize(model=module, config=config, model_parameters=[*module.parameters()])
    adapt(engine)
    sizes = [2 + idx for idx in range(engine.gradient_accumulation_steps())]
    return float(engine.train_batch(iter([(torch.ones(size, 4), torch.ones(size, 4)) for size in sizes])))


def _end() -> None:
    torch.distributed.barrier()
    with contextlib.suppress(Exception):
        torch.distributed.destroy_process_group()
