"""Save small models in every layout and load them in every other one; compare state and the losses that follow.

Usage: ``python benchmarks/reshape_matrix.py [--sizes 1,2,3,4] [--precision fp32|bf16|fp16] [--cases plain,...] [--out FILE]``

Every cell saves after ``STEPS_BEFORE`` steps at one number of ranks and layout, loads at another, and trains on. The state
after loading must have the bits of the checkpoint (``load_reshaped`` compares them itself), and the losses must be those of the
run that was not interrupted: within 1e-6 in fp32, 2e-2 in bf16 and fp16.
In fp16 layouts with ZeRO and without are compared among themselves only: DeepSpeed 0.19.8 without ZeRO divides the gradients by
the loss scale and does not multiply the loss by it, so that the same state goes on otherwise there. Gradients are not clipped:
in fp32 pipelines without ZeRO it takes the norm of the first stage's gradients alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import sys
import tempfile
from typing import Any

TRAIN_BATCH_SIZE = 24
STEPS_BEFORE = 5
STEPS_AFTER = 20
TOLERANCES = {"fp32": 1e-6, "bf16": 2e-2, "fp16": 2e-2}
LAYOUTS = ("zero 0", "zero 1", "zero 2", "zero 3", "pipeline zero 0", "pipeline zero 1")
MORE_LAYOUTS = ("zero 1 offload", "zero 2 offload", "zero 3 offload", "pipeline1 zero 1", "pipeline4 zero 0")
CASES = ("plain", "groups", "layers", "sgd", "warmup", "frozen", "tied", "engines")


def num_stages(layout: str) -> int:
    """Return the pipeline stages of a layout: 2 of ``pipeline zero 1``, 4 of ``pipeline4 zero 1``, 0 without."""
    kind = layout.split(" ")[0]
    return int(kind.removeprefix("pipeline") or 2) if kind.startswith("pipeline") else 0


def zero_stage(layout: str) -> int:
    return int(layout.split("zero ")[1][0])


def is_legal(layout: str, num_ranks: int, case: str = "plain") -> bool:
    """Whether a layout can run on as many ranks, and holds the case.

    Two engines in one process are no pipelines here; and where a pipeline's stages have different numbers of parameter groups,
    ZeRO of DeepSpeed 0.19.8 waits for ever in its first step.
    """
    stages = num_stages(layout)
    fits_case = case != "engines" and not (case == "layers" and zero_stage(layout) > 0 and stages > 1)
    return stages == 0 or (num_ranks % stages == 0 and fits_case)


def is_same_model(case: str, saved: str, loaded: str) -> bool:
    """Whether the parameters of two layouts have the same names: a layer tied in a pipeline is called after its key."""
    return case != "tied" or (num_stages(saved) == 0) == (num_stages(loaded) == 0)


def is_comparable(precision: str, saved: str, loaded: str) -> bool:
    """Whether DeepSpeed trains the same state in the same way in two layouts; see the module."""
    return precision != "fp16" or (zero_stage(saved) == 0) == (zero_stage(loaded) == 0)


def make_engines(layout: str, precision: str, case: str) -> list[Any]:
    """Build the engines of a case for all ranks: one, or with ``engines`` two that train different models.

    Ranks: all, collectively.
    """
    if case == "engines":
        return [make_engine(layout, precision, "groups"), make_engine(layout, precision, "sgd")]
    return [make_engine(layout, precision, case)]


def make_engine(layout: str, precision: str, case: str) -> Any:
    """Build an engine of the model for all ranks; see the module. Ranks: all, collectively."""
    import deepspeed
    import torch
    from deepspeed import comm
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from torch import nn

    stage = zero_stage(layout)
    num_ranks = comm.get_world_size()
    replicas = num_ranks // (num_stages(layout) or 1)
    micro = max(size for size in (1, 2, 3, 4, 6) if TRAIN_BATCH_SIZE % (size * replicas) == 0)
    config: dict[str, Any] = {
        "train_batch_size": TRAIN_BATCH_SIZE,
        "train_micro_batch_size_per_gpu": micro,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000,
        "gradient_clipping": 0.0,
    }
    if layout.endswith("offload"):
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    if precision == "fp16":
        _let_cpu_train_fp16()
        config["fp16"] = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 3}
    if case == "warmup":
        config["scheduler"] = {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-2, "warmup_num_steps": 9},
        }
    torch.manual_seed(7)

    def loss_function(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.float(), labels)

    if num_stages(layout):
        specs = [
            LayerSpec(nn.Linear, 6, 11), LayerSpec(nn.Tanh), LayerSpec(nn.Linear, 11, 7),
            LayerSpec(nn.Tanh), LayerSpec(nn.Linear, 7, 5), LayerSpec(nn.Linear, 5, 3),
        ]  # fmt: skip
        if case == "tied":
            tied = TiedLayerSpec("shared", nn.Linear, 6, 6, tied_weight_attr=["weight", "bias"])
            specs = [tied, LayerSpec(nn.Tanh), LayerSpec(nn.Linear, 6, 6), LayerSpec(nn.Tanh), tied,
                     LayerSpec(nn.Linear, 6, 3)]  # fmt: skip
        model: Any = PipelineModule(
            specs, num_stages=num_stages(layout), loss_fn=loss_function, partition_method="uniform"
        )
    elif case == "tied":
        shared = nn.Linear(6, 6)
        model = nn.Sequential(shared, nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), shared, nn.Linear(6, 3))
    else:
        model = nn.Sequential(
            nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 7), nn.Tanh(), nn.Linear(7, 5), nn.Linear(5, 3)
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _fill(name, parameter)
            parameter.requires_grad_(case != "frozen" or name not in ("2.weight", "4.bias"))
    # Frozen parameters are handed over too, as users do.
    parameters = list(model.named_parameters())
    groups: Any = [p for _, p in parameters]
    if case == "layers":
        first = [p for name, p in parameters if name.startswith("0.")]
        rest = [p for name, p in parameters if not name.startswith("0.")]
        groups = [{"params": first, "lr": 5e-3, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
    if case == "groups":
        weights = [p for name, p in parameters if name.endswith("weight")]
        biases = [p for name, p in parameters if name.endswith("bias")]
        groups = [
            {"params": weights, "weight_decay": 0.1},
            {"params": biases, "lr": 5e-3, "weight_decay": 0.0},
        ]
    if layout.endswith("offload") and case != "sgd":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer: Any = DeepSpeedCPUAdam(groups, lr=1e-2, weight_decay=0.01, adamw_mode=True)
    elif case == "sgd":
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def _let_cpu_train_fp16() -> None:
    """Let DeepSpeed use torch's fp16 on the CPU, which it says is not supported; for the state, not for its speed."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if not accelerator.is_fp16_supported():
        accelerator.is_fp16_supported = lambda: True


def _fill(name: str, parameter: Any) -> None:
    import zlib

    import torch

    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)


def train(engine: Any, first: int, last: int) -> list[float]:
    """Train batches ``first`` to ``last``; return each batch's loss over all its records, and with fp16 the loss scale.

    Ranks: all, collectively.
    """
    import torch
    from deepspeed import comm
    from deepspeed.runtime.pipe.engine import PipelineEngine

    is_pipeline = isinstance(engine, PipelineEngine)
    micro, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    replica = engine.grid.get_data_parallel_id() if is_pipeline else comm.get_rank()
    replicas = engine.dp_world_size
    dtype = next(engine.module.parameters()).dtype
    losses = []
    for batch in range(first, last):
        generator = torch.Generator().manual_seed(batch)
        x = torch.randn(TRAIN_BATCH_SIZE, 6, generator=generator)
        y = torch.randint(0, 3, (TRAIN_BATCH_SIZE,), generator=generator)
        pieces = []
        for micro_idx in range(accumulation):
            begin = (micro_idx * replicas + replica) * micro
            pieces.append((x[begin : begin + micro].to(dtype), y[begin : begin + micro]))
        if is_pipeline:
            loss = float(engine.train_batch(iter(pieces)))
        else:
            total = torch.zeros(())
            for inputs, labels in pieces:
                of_micro = torch.nn.functional.cross_entropy(engine(inputs).float(), labels)
                engine.backward(of_micro)
                engine.step()
                total += of_micro.detach() / accumulation
            comm.all_reduce(total)
            loss = float(total) / replicas
        losses.append(loss)
    if engine.fp16_enabled():
        losses.append(
            engine.optimizer.cur_scale
            if hasattr(engine.optimizer, "cur_scale")
            else engine.optimizer.loss_scale
        )
    return losses


def _allgather(value: Any) -> list[Any]:
    import torch

    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, value)
    return gathered


def _start() -> None:
    import logging

    import deepspeed
    from deepspeed.utils import logger

    from dstrial.ranks.process_group import without_compiled_collectives

    logger.setLevel(logging.ERROR)
    with without_compiled_collectives(is_cpu=True):
        deepspeed.init_distributed("gloo")


def _end() -> None:
    """End the communication before the interpreter does, which would end it out of order."""
    import torch

    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _is_writer_of_tied_layers(engine: Any) -> bool:
    """Whether this rank's layers are told of beside DeepSpeed's files, as a checkpoint of a trial does."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    return isinstance(engine, PipelineEngine) and engine.grid.get_data_parallel_id() == 0


def save_all(directory: str, layouts: list[str], precision: str, cases: list[str]) -> dict[str, list[float]]:
    """Save every layout of this number of ranks, and train on; return the losses after the save, by cell.

    Ranks: all, collectively.
    """
    import torch
    from deepspeed import comm

    from dstrial.engine.adapters.factory import adapt
    from dstrial.engine.state import engine_extra_state, save_engine

    _start()
    following: dict[str, list[float]] = {}
    for layout, case in itertools.product(layouts, cases):
        num_ranks = len(_allgather(None))
        if not is_legal(layout, num_ranks, case):
            continue
        cell = f"{case}, {layout}, {num_ranks}"
        path = pathlib.Path(directory, cell)
        following[cell] = []
        for idx, engine in enumerate(make_engines(layout, precision, case)):
            train(engine, 0, STEPS_BEFORE)
            save_engine(engine, path, f"model{idx}")
            described = adapt(engine).layout(_allgather).to_json()
            (path / f"layout{idx}.json").write_text(json.dumps(described))
            if _is_writer_of_tied_layers(engine):
                torch.save(
                    engine_extra_state(engine)["tied_modules"], path / f"tied{idx}_{comm.get_rank()}.pt"
                )
            following[cell] += train(engine, STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER)
            engine.destroy()
    _end()
    return following


def load_all(
    directory: str, layouts: list[str], precision: str, cells: list[str]
) -> dict[str, dict[str, list[float] | str]]:
    """Load every saved cell in every layout of this number of ranks, and train on. Ranks: all, collectively."""
    import traceback

    import torch

    from dstrial.checkpoint.layout import Layout
    from dstrial.engine.adapters.factory import adapt
    from dstrial.engine.checkpoint_reader.saved_engine import SavedEngine
    from dstrial.engine.reshape import load_reshaped

    _start()
    found: dict[str, dict[str, list[float] | str]] = {cell: {} for cell in cells}
    # Pipelines last: DeepSpeed keeps their topology for what is built in the process afterwards.
    for layout, cell in itertools.product(
        sorted(layouts, key=lambda name: name.startswith("pipeline")), cells
    ):
        path = pathlib.Path(directory, cell)
        case, saved_in, _ = cell.split(", ")
        if not is_legal(layout, len(_allgather(None)), case) or not is_same_model(case, saved_in, layout):
            continue
        losses: list[float] = []
        problems: list[str] = []
        for idx, engine in enumerate(make_engines(layout, precision, case)):
            saved_layout = Layout.from_json(json.loads((path / f"layout{idx}.json").read_text()))
            tied: dict[str, Any] = {}
            for file in sorted(path.glob(f"tied{idx}_*.pt")):
                tied |= torch.load(file)
            problem = None
            try:
                now = adapt(engine).layout(_allgather)
                load_reshaped(engine, SavedEngine(path, f"model{idx}", saved_layout, tied), now)
            except Exception:  # noqa: BLE001 - a cell that fails is a result
                problem = traceback.format_exc()
            problems += [text for text in _allgather(problem) if text is not None]
            if not problems:
                losses += train(engine, STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER)
            engine.destroy()
        found[cell][layout] = problems[0] if problems else losses
    _end()
    return found


def run(sizes: list[int], precision: str, cases: list[str], layouts: list[str]) -> list[dict[str, Any]]:
    """Return one record per cell: what was saved, where it was loaded, the largest difference of a loss, the problem."""
    from dstrial.testing.ranks import run_function

    records = []
    with tempfile.TemporaryDirectory(prefix="dstrial-reshape-") as directory:
        following: dict[str, list[float]] = {}
        for size in sizes:
            legal = [layout for layout in layouts if is_legal(layout, size)]
            print(f"save at {size} ranks: {', '.join(legal)}", file=sys.stderr, flush=True)
            following |= run_function(save_all, size, directory, legal, precision, cases, deadline_s=1200)[
                0
            ].value
        for size in sizes:
            legal = [layout for layout in layouts if is_legal(layout, size)]
            print(
                f"load at {size} ranks: {len(following)} checkpoints in {len(legal)} layouts",
                file=sys.stderr,
                flush=True,
            )
            loaded = run_function(
                load_all, size, directory, legal, precision, sorted(following), deadline_s=3600
            )[0].value
            for cell, by_layout in loaded.items():
                for layout, losses in by_layout.items():
                    is_wrong = isinstance(losses, str)
                    difference = None
                    if not is_wrong and is_comparable(precision, cell.split(", ")[1], layout):
                        difference = max(abs(a - b) for a, b in zip(losses, following[cell], strict=True))
                    records.append(
                        {
                            "saved": cell,
                            "loaded": f"{layout}, {size}",
                            "difference": difference,
                            "problem": losses if is_wrong else None,
                        }
                    )
    return records


def is_right(record: dict[str, Any], precision: str) -> bool:
    difference = record["difference"]
    return record["problem"] is None and (difference is None or difference <= TOLERANCES[precision])


def table(records: list[dict[str, Any]], precision: str) -> str:
    """Return Markdown: a row per saved layout and size, a column per loaded one; the largest difference of a loss."""
    columns = sorted({record["loaded"] for record in records})
    rows = sorted({record["saved"] for record in records})
    cells = {(record["saved"], record["loaded"]): record for record in records}
    lines = ["| saved \\\\ loaded | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        shown = []
        for column in columns:
            record = cells.get((row, column))
            if record is None:
                shown.append("")
            elif record["problem"] is not None:
                shown.append("failed")
            elif record["difference"] is None:
                shown.append("state")
            else:
                mark = "" if record["difference"] <= TOLERANCES[precision] else " !"
                shown.append(f"{record['difference']:.0e}{mark}")
        lines.append(f"| {row} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the matrix and print it; 1 if a cell failed or its losses are others."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", default="1,2,3,4", help="numbers of ranks (default: 1,2,3,4)")
    parser.add_argument("--precision", choices=sorted(TOLERANCES), default="fp32")
    parser.add_argument("--cases", default="plain", help=f"of {', '.join(CASES)} (default: plain)")
    parser.add_argument(
        "--layouts",
        default=",".join(LAYOUTS),
        help=f"(default: {','.join(LAYOUTS)}; also {','.join(MORE_LAYOUTS)})",
    )
    parser.add_argument("--out", type=pathlib.Path, help="write every cell there, as JSON")
    options = parser.parse_args(arguments)
    sizes = [int(size) for size in options.sizes.split(",")]
    records = run(sizes, options.precision, options.cases.split(","), options.layouts.split(","))
    if options.out is not None:
        options.out.write_text(json.dumps(records, indent=1))
    print(table(records, options.precision))
    wrong = [record for record in records if not is_right(record, options.precision)]
    for record in wrong:
        print(f"\n{record['saved']} -> {record['loaded']}: {record['problem'] or record['difference']}")
    print(f"\n{len(records) - len(wrong)} of {len(records)} cells right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
