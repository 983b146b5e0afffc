"""Ask real engines for everything that ``dstrial.engine.deepspeed_internals`` names; see ``test_deepspeed_internals``."""

from __future__ import annotations

import functools
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import deepspeed
import small_models
import torch
from deepspeed.utils import groups
from torch import nn

from dstrial.engine.deepspeed_internals import engines, optimizers, process

BF16 = {"bf16": {"enabled": True}}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"stage": 0},
    "zero 1": {"stage": 1},
    "zero 2": {"stage": 2},
    "zero 3": {"stage": 3, "zero": {"stage3_param_persistence_threshold": 10}},
    "bf16 unfused": {"stage": 0, "more": BF16},
    "bf16 wrapper": {"stage": 1, "more": {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}},
}


def train(options: dict[str, Any], rank: int) -> Any:
    torch.manual_seed(1)
    config = small_models.ds_config(options["stage"], **options.get("more", {}))
    config["zero_optimization"].update(options.get("zero", {}))
    model = small_models.Classifier(nn.LayerNorm)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    dtype = next(engine.module.parameters()).dtype
    for inputs, labels in small_models.training_data(0, 1, rank, dtype):
        engine.backward(small_models.cross_entropy(engine(inputs), labels))
        engine.step()
    return engine


def attributes(engine: Any, expected: dict[str, Any]) -> list[str]:
    """Return the names that an engine does not have, or has as something else."""
    missing = object()
    found = {name: getattr(engine, name, missing) for name in expected}
    return [
        name for name, value in found.items() if value is missing or not isinstance(value, expected[name])
    ]


def owned(optimizer: Any) -> list[Any]:
    """Return the parameters that an optimizer trains, by whichever of the three kinds of groups it has."""
    sub_groups, flat = optimizers.sub_groups(optimizer), optimizers.flat_groups(optimizer)
    if sub_groups is not None:
        return [param for group in sub_groups for param in group.parameters]
    return list(itertools.chain(*(optimizers.plain_groups(optimizer) if flat is None else flat.groups)))


def first_master(engine: Any, rank: int) -> list[float]:
    """Return the first element of the first parameter as the optimizer keeps it, and as the module computes with it."""
    optimizer, masters = engine.optimizer, optimizers.flat_masters(engine.optimizer)
    sub_groups, flat = optimizers.sub_groups(optimizer), optimizers.flat_groups(optimizer)
    if masters is None or rank:
        return [0.0, 0.0]
    if sub_groups is not None:
        part = optimizers.held_part(sub_groups[0].parameters[0])
        assert part is not None
        return [float(masters[0].detach().view(-1)[0]), float(part.detach().view(-1)[0])]
    assert flat is not None
    offset = 0 if flat.offsets is None else flat.offsets[0][0]
    return [float(masters[0].detach().view(-1)[offset]), float(flat.groups[0][0].detach().view(-1)[0])]


def is_tensors(buffer: Any) -> bool:
    """Say whether a bucket has tensors, a list of them, or none yet."""
    found = buffer if isinstance(buffer, list) else [] if buffer is None else [buffer]
    return all(isinstance(one, torch.Tensor) for one in found)


def of_optimizer(engine: Any, rank: int) -> dict[str, Any]:
    optimizer = engine.optimizer
    flat, sub_groups = optimizers.flat_groups(optimizer), optimizers.sub_groups(optimizer)
    optimizers.set_accumulation(optimizer, 2)
    return {
        "kind": type(optimizer).__name__,
        "owned": sorted(optimizers.full_numel(param) for param in owned(optimizer)),
        "shapes": sorted(optimizers.full_shape(param) for param in owned(optimizer)),
        "numels": None if flat is None else [list(flat.numels), list(flat.num_partitions)],
        "sub groups": None if sub_groups is None else [[g.group_idx, g.num_partitions] for g in sub_groups],
        "first master": first_master(engine, rank),
        "base is basic": optimizers.base_optimizer(optimizer) is engines.basic_optimizer(engine),
        "own file": optimizers.has_file_per_replica(optimizer),
        "loss scale": optimizers.loss_scale_holder(optimizer) is not None,
        "scalers": [engines.gradient_scaler(engine) is None, optimizers.gradient_scaler(optimizer) is None],
        "swaps": optimizers.swaps_to_nvme(optimizer),
        "gradients": [
            name
            for kind, names in optimizers.GRADIENTS.items()
            for name in names
            if isinstance(optimizer, kind) and hasattr(optimizer, name)
        ],
        "buckets": [is_tensors(buffer) for buffer in optimizers.reduction_buckets(optimizer)],
        "held gradients": len(optimizers.held_gradients(optimizer)),
        "cut": sorted({optimizers.is_cut(param) for param in engine.module.parameters()}),
        "pieces": [
            optimizers.cut_numel(param)
            == optimizers.cut_part(param).numel()
            == -(-optimizers.full_numel(param) // 2)
            for param in engine.module.parameters()
            if optimizers.is_cut(param)
        ],
    }


def data_parallel(options: dict[str, Any], path: pathlib.Path, rank: int) -> dict[str, Any]:
    engine = train(options, rank)
    engine.save_checkpoint(str(path), tag="here")
    found = {
        "wrong attributes": attributes(engine, dict(engines.ATTRIBUTES)),
        "optimizer": of_optimizer(engine, rank),
        "dtype": str(engines.compute_dtype(engine)),
        "config": engines.config_of(engine)["train_micro_batch_size_per_gpu"],
        "replica": engines.replica(engine),
        "part": engines.checkpoint_part(engine),
        "model file": engines.model_file(engine, "here"),
        "first part": engines.model_file(engine, "here", part="00"),
        "zero file": engines.zero_file(engine, "here") if options["stage"] else "",
        "tagged": sorted({name[:3] for param in engine.module.parameters() for name in vars(param)}),
        "held": [
            name for name in process.CONTAINERS if hasattr(engine, name) or hasattr(engine.optimizer, name)
        ],
    }  # fmt: skip
    engines.set_global_grad_norm(engine, 2.5)
    found["norm"] = engine.get_global_grad_norm()
    engines.set_batch_sizes(engine, 48, 4, 6)
    found["batch"] = [engine.train_batch_size(), engine.tput_timer.batch_size]
    if options["stage"] == 3:
        small = [param for param in engine.module.parameters() if optimizers.full_numel(param) < 10]
        for param in engine.module.parameters():
            optimizers.cut_part(param).data.fill_(7.0)
        optimizers.gather_persistent(engine.optimizer)
        found["gathered"] = [float(param.detach().min()) for param in small]
    if optimizers.has_file_per_replica(engine.optimizer):
        for param in engine.module.parameters():
            param.data.fill_(3.0)
        optimizers.restore_masters_from_weights(engine.optimizer)
        found["restored"] = [float(flat.max()) for flat in optimizers.flat_masters(engine.optimizer) or ()]
    process.reset_globals()
    process.release_groups()
    found["world"] = groups._WORLD_GROUP is None
    found["again"] = train(options, rank).global_steps
    return found


def wrappers(rank: int) -> dict[str, Any]:
    """Those of fp16, made by themselves, for in an engine they want an accelerator."""
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    def made(kind: Any) -> tuple[Any, list[nn.Parameter]]:
        weights = [nn.Parameter(torch.ones(shape, dtype=torch.float16)) for shape in ((3, 2), (2,))]
        return kind(torch.optim.Adam(weights), dynamic_loss_scale=True), weights

    fused, fused_weights = made(FP16_Optimizer)
    unfused, weights = made(FP16_UnfusedOptimizer)
    flat = optimizers.flat_groups(fused)
    masters, own = optimizers.flat_masters(fused), optimizers.own_masters(unfused)
    assert flat is not None
    assert masters is not None
    assert own is not None
    names = ("cur_scale", "cur_iter", "last_overflow_iter")
    return {
        "fused": [param is mine for param, mine in zip(fused_weights, flat.groups[0], strict=True)],
        "flat": [flat.offsets, list(flat.numels), list(flat.num_partitions)],
        "masters": [[*one.shape, str(one.dtype)] for one in masters],
        "unfused": [
            [a is b for a, b in zip(weights, group, strict=True)]
            for group in optimizers.plain_groups(unfused)
        ],
        "own masters": [[[*one.shape, str(one.dtype)] for one in group] for group in own],
        "bases": [type(optimizers.base_optimizer(one)).__name__ for one in (fused, unfused)],
        "others": [optimizers.flat_masters(unfused), optimizers.own_masters(fused)],
        "scale": [
            hasattr(optimizers.loss_scale_holder(one), name) for one in (fused, unfused) for name in names
        ],
    }


def pipelined(path: pathlib.Path, rank: int) -> dict[str, Any]:
    torch.manual_seed(1)
    engine, *_ = deepspeed.initialize(
        model=small_models.pipeline(kind="tied"), config=small_models.ds_config(1)
    )
    engine.train_batch(small_models.training_data(0, 1, 0, torch.float32))
    engine.save_checkpoint(str(path), tag="here")
    reduced = []

    def reduction(
        outputs: Any, reduce: Any = "avg", reduce_dp: bool = True, micro_batches: Any = None
    ) -> Any:
        result = engines.reduce_outputs(engine, outputs, reduce, reduce_dp, micro_batches)
        reduced.append(float(result))
        return result

    engines.bind_output_reduction(engine, reduction)
    engines.forget_losses(engine)
    forgotten = engine.total_loss is None and engine.total_additional_losses is None
    engine.reset_activation_shape()
    loss = engine.eval_batch(small_models.training_data(1, 2, 0, torch.float32))
    before = engine.optimizer.single_partition_of_fp32_groups[0].detach().clone()
    engine.load_checkpoint(str(path), tag="here", load_optimizer_states=False)
    engine.optimizer.single_partition_of_fp32_groups[0].data.zero_()
    engines.load_zero_states(engine, str(path), "here")
    loaded = engine.optimizer.single_partition_of_fp32_groups[0].detach().clone()
    parts: list[str] = []

    def around(part: str, call: Any) -> None:
        parts.append(part)
        call()

    put_back = engines.observe_instructions(engine, around)
    engine.train_batch(small_models.training_data(2, 3, 0, torch.float32))
    put_back()
    is_put_back = engine._INSTRUCTION_MAP is type(engine)._INSTRUCTION_MAP
    return {
        "wrong attributes": [
            *attributes(engine, {**engines.ATTRIBUTES, **engines.PIPELINE_ATTRIBUTES}),
            *attributes(engine.module, dict(engines.PIPELINE_MODULE_ATTRIBUTES)),
            *(name for name in engines.GRID_METHODS if not callable(getattr(engine.grid, name, None))),
        ],
        "buffers": [name for name in engines.PIPELINE_BUFFERS if hasattr(engine, name)],
        "kept buffers": len(engines.pipeline_buffers(engine)),
        "steps next": engines.steps_next(engine),
        "earlier": [len(engines.earlier_layers(engine.module)), engine.module._local_start],
        "received": received_shape(engine),
        "grid is mpu": engine.grid is engine.mpu,
        "layers": engines.layer_files(engine, "here"),
        "written": list(engines.written_layers(engine)),
        "tied with file": sorted(engines.tied_layers_with_file(engine.module)),
        "tied": sorted(engine.module.tied_modules),
        "offset": engine.module.micro_offset,
        "losses": [forgotten, reduced == [float(loss)] or not engine.is_last_stage()],
        "loaded": torch.equal(before, loaded),
        "parts": sorted(set(parts)),
        "put back": is_put_back,
        "part": engines.checkpoint_part(engine),
        "axes": [engine.grid.get_pipe_parallel_world_size(), engine.grid.get_slice_parallel_rank()],
    }


def received_shape(engine: Any) -> list[Any]:
    """Return what a stage makes room for when it is told of shapes past the other stage."""
    engines.leave_out_shapes(engine, lambda: torch.empty(3, 5, device="meta"))
    engine._send_tensor_meta(torch.ones(2), 0)
    buffer = engine._recv_tensor_meta(0)
    return [list(buffer.shape), buffer.device.type]


def main(fork_ranks: Any, argument: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    scratch = pathlib.Path(argument["scratch"])
    for name, options in CASES.items():
        body = functools.partial(data_parallel, options, scratch / f"checkpoint {name}")
        yield name, fork_ranks(2, body, scratch / f"ranks {name}")
    yield "wrappers", fork_ranks(1, wrappers, scratch / "ranks wrappers")
    yield (
        "pipeline",
        fork_ranks(2, functools.partial(pipelined, scratch / "pipeline"), scratch / "ranks pipeline"),
    )
