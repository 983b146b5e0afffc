"""Save engines in one layout and load them in another; see ``test_reshape``."""

from __future__ import annotations

import gc
import itertools
import json
import pathlib
from typing import Any

import deepspeed
import small_models
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch._utils import _unflatten_dense_tensors

from dstrial.checkpoint.layout import Layout
from dstrial.engine.adapters.factory import adapt
from dstrial.engine.checkpoint_reader.saved_engine import SavedEngine
from dstrial.engine.reshape import load_reshaped
from dstrial.engine.state import engine_extra_state, save_engine
from dstrial.ranks.process_group import without_compiled_collectives

LOSS_SCALE = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}


def begin() -> None:
    torch.compiler.set_stance("force_eager")  # compiling Muon takes half a minute
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
    except Exception as error:  # noqa: BLE001  # returned to the test
        return f"{type(error).__name__}: {error}"
    return None


def loss_scale_of(engine: Any) -> dict[str, Any]:
    optimizer = engine.optimizer
    holder = optimizer.loss_scaler if hasattr(optimizer, "loss_scaler") else optimizer.loss_scale_config
    return {key: getattr(holder, key) for key in ("cur_scale", "cur_iter", "last_overflow_iter")}


def carry_loss_scales(directory: str) -> dict[str, tuple[str | None, dict[str, Any], dict[str, Any]]]:
    """Return the load error and the fp16 loss scales before and after, by ZeRO stages."""
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
    """Load into ZeRO 3 with hpZ, which keeps secondary copies, after one forward pass."""
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


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
    "amsgrad": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True, "amsgrad": True}},
    "adagrad": {"type": "Adagrad", "params": {"lr": 1e-2}},
    "lamb": {"type": "Lamb", "params": {"lr": 1e-2}},
    "lion": {"type": "Lion", "params": {"lr": 1e-2}},
    "muadam": {"type": "MuAdam", "params": {"lr": 1e-2}},
    "muadamw": {"type": "MuAdamW", "params": {"lr": 1e-2}},
    "musgd": {"type": "MuSGD", "params": {"lr": 1e-2, "momentum": 0.9}},
    "muon": {"type": "Muon", "params": {"lr": 1e-2, "torch_adam": True}},
    "sgd": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}},
    "adafactor": {"type": "Adafactor", "params": {"lr": 1e-2}},
}
"""All of DeepSpeed 0.19.8's ``DEEPSPEED_OPTIMIZERS``, and some of torch's."""


def build_with(optimizer: str, zero_stage: int, precision: str, is_offloaded: bool) -> Any:
    zero = {"stage": zero_stage, "reduce_scatter": optimizer != "muon" or zero_stage < 3}
    if is_offloaded and zero_stage:
        zero["offload_optimizer"] = {"device": "cpu"}
    return build(
        zero_stage,
        0,
        "plain",
        zero_optimization=zero,
        optimizer=OPTIMIZERS[optimizer],
        zero_allow_untested_optimizer=True,
        bf16={"enabled": precision == "bf16"},
    )


def full_state(engine: Any) -> dict[str, torch.Tensor]:
    """Return the weights and the optimizer state by ``<parameter>.<key>``.

    It uses DeepSpeed's public functions; without a ZeRO wrapper, and for Muon in ZeRO 1 and 2, it reads the optimizer.
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    momenta: dict[str, torch.Tensor] = {}
    keys: dict[str, set[str]] = {}
    for whole, keys_of_rank in allgather((_whole_momenta(engine), _keys(engine))):
        momenta |= whole
        for name, own in keys_of_rank.items():
            keys.setdefault(name, set()).update(own)
    found = {f"{name}.momentum_buffer": momentum for name, momentum in momenta.items()}
    if isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        return _of_half_precision(engine)
    for name, parameter in engine.module.named_parameters():
        is_plain = not hasattr(parameter, "ds_id") and not hasattr(parameter, "_hp_mapping")
        found[f"{name}.weights"] = parameter if is_plain else safe_get_full_fp32_param(parameter)
        for key in sorted(keys[name]):
            found[f"{name}.{key}"] = (
                optimizer.state[parameter][key] if is_plain else safe_get_full_optimizer_state(parameter, key)
            )
    return {name: value.detach().float().clone() for name, value in found.items()}


def _of_half_precision(engine: Any) -> dict[str, torch.Tensor]:
    """Return the state that half-precision wrappers without ZeRO keep, by parameter."""
    wrapper = engine.optimizer
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    is_flat = isinstance(wrapper, FP16_Optimizer)
    masters = wrapper.fp32_groups_flat if is_flat else [m for group in wrapper.fp32_groups for m in group]
    groups = wrapper.fp16_groups if is_flat else [[p] for group in wrapper.fp16_groups for p in group]
    found = {}
    for master, group in zip(masters, groups, strict=True):
        for key, value in {"weights": master, **wrapper.optimizer.state.get(master, {})}.items():
            if torch.is_tensor(value) and value.dim():
                for parameter, part in zip(
                    group, _unflatten_dense_tensors(value.reshape(-1), group), strict=True
                ):
                    found[f"{names[id(parameter)]}.{key}"] = part.detach().float().clone()
    return found


def _keys(engine: Any) -> dict[str, set[str]]:
    """Return by parameter the keys of the tensor state that this rank holds."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        if hasattr(parameter, "ds_id"):
            sub_group, *_ = engine.optimizer.grad_position[engine.optimizer.get_param_id(parameter)]
            own = engine.optimizer.optimizer.state[engine.optimizer.fp32_partitioned_groups_flat[sub_group]]
        elif hasattr(parameter, "_hp_mapping"):
            own = {} if parameter._hp_mapping is None else parameter._hp_mapping.optim_fragment
        else:
            own = engine.optimizer.state[parameter]
        found[name] = {key for key, value in own.items() if torch.is_tensor(value) and value.dim()}
    return found


def _whole_momenta(engine: Any) -> dict[str, torch.Tensor]:
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    found = {}
    for group_idx, parameters in enumerate(getattr(engine.optimizer, "params_in_partition", ())):
        flat = engine.optimizer.single_partition_of_fp32_groups[group_idx]
        momentum = engine.optimizer.optimizer.state.get(flat, {}).get("momentum_buffer")
        is_whole = type(engine.optimizer.optimizer).__name__ == "MuonWithAuxAdam"
        if momentum is None or not is_whole or engine.zero_offload_optimizer() is not None:
            continue
        at = 0
        for parameter in parameters:
            found[names[id(parameter)]] = momentum[at : at + parameter.numel()].view(parameter.shape)
            at += parameter.numel()
    return found


def save_in_all_stages(
    directory: str, optimizer: str, precision: str, is_offloaded: bool
) -> dict[int, str | None]:
    """Train and save in ZeRO 0 to 3; return DeepSpeed's error, or None, by stage."""
    begin()
    problems: dict[int, str | None] = {}
    for stage in range(4):
        path = pathlib.Path(directory, f"{torch.distributed.get_world_size()} ranks zero {stage}")
        try:
            engine = build_with(optimizer, stage, precision, is_offloaded)
            train(engine, 3, torch.bfloat16 if precision == "bf16" else torch.float32)
        except Exception as error:  # noqa: BLE001  # the optimizer is not installed or does not support CPUs
            problems[stage] = f"{type(error).__name__}: {error}"
            continue
        problems[stage] = None
        save(engine, path)
        state = full_state(engine)
        if torch.distributed.get_rank() == 0:
            torch.save(state, path / "state.pt")
        del engine
        gc.collect()  # frees the engine before its process groups, whose threads abort the process
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return problems


def load_in_all_stages(directory: str, optimizer: str, precision: str, is_offloaded: bool) -> dict[str, str]:
    """Load each saved engine into ZeRO 0 to 3; return the outcome of every pair."""
    begin()
    found = {}
    saved = sorted(pathlib.Path(directory).iterdir())
    for stage, path in itertools.product(range(4), saved):
        if any(other.name.endswith(str(stage)) for other in saved):
            engine = build_with(optimizer, stage, precision, is_offloaded)
            before = full_state(engine)
            problem = load(engine, path, {})
            wanted, now = torch.load(path / "state.pt"), full_state(engine)
            if problem is None:
                wrong = [key for key in wanted if key not in now or not torch.equal(wanted[key], now[key])]
                is_equal = not wrong and wanted.keys() == now.keys()
                outcome = f"equal: {len(wanted)} tensors" if is_equal else f"wrong: {wrong}"
            else:
                is_kept = all(torch.equal(before[key], now[key]) for key in before)
                outcome = f"{problem}{'' if is_kept else ' (after changes)'}"
            found[f"{path.name} -> {torch.distributed.get_world_size()} ranks zero {stage}"] = outcome
            del engine
            gc.collect()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return found


FUSED = ({"type": "Adam", "params": {"lr": 1e-2}}, {"type": "Muon", "params": {"lr": 1e-2}})
"""Optimizers with FusedAdam, which counts steps in a group's last parameter only."""


def reshape_fused_adam(directory: str) -> dict[str, tuple[str | None, set[float]]]:
    """Save without ZeRO and load; return the error and this rank's steps by pair."""
    begin()
    found = {}
    pairs = (
        ((0, 0), (1, 0)),
        ((0, 2), (0, 1)),
        ((0, 1), (0, 2)),
    )  # (ZeRO stage, pipeline stages); pipelines last
    for (before, after), optimizer in itertools.product(pairs, FUSED):
        path = pathlib.Path(directory, f"{optimizer['type']} {before} {after}")
        saved = build(*before, "plain", optimizer=optimizer)
        train(saved, 3, torch.float32)
        save(saved, path)
        loaded = build(*after, "plain", optimizer=optimizer)
        problem = load(loaded, path, {})
        base = getattr(loaded.optimizer, "optimizer", loaded.optimizer)
        assert base.__class__.__name__ in ("FusedAdam", "MuonWithAuxAdam")
        steps = {float(state["step"]) for state in base.state.values() if "step" in state}
        found[path.name] = (problem, steps)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return found


def load_from_swapped_places(directory: str, zero_stage: int) -> str | None:
    """Load with the offsets of two equally shaped parameters swapped in the layout."""
    begin()
    path = pathlib.Path(directory, "swapped")
    saved = build(zero_stage, 0, "plain")
    train(saved, 3, torch.float32)
    save(saved, path)
    torch.distributed.barrier()  # all ranks have written the layout
    if torch.distributed.get_rank() == 0:
        layout = json.loads((path / "layout.json").read_text())
        one, other = (
            place for place in layout["parameters"] if place["name"] in ("norm.weight", "second.bias")
        )
        one["offset"], other["offset"] = other["offset"], one["offset"]
        (path / "layout.json").write_text(json.dumps(layout))
    torch.distributed.barrier()
    problem = load(build(0, 0, "plain"), path, {})
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return problem


def merge_untied_biases(directory: str) -> str | None:
    """Merge two pipeline stages with tied weights and separate biases into one stage."""
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
