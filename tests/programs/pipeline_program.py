"""Validate between training steps of real pipelines (``test_pipeline_adapter``)."""

from __future__ import annotations

import functools
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import deepspeed
import small_models
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from dstrial.engine.adapters.factory import adapt

NUM_STEPS = 3


def build(*, kind: str = "plain", zero_stage: int = 1, num_stages: int = 2, **more: Any) -> Any:
    torch.manual_seed(1)
    config = small_models.ds_config(zero_stage, **more)
    engine, *_ = deepspeed.initialize(model=small_models.pipeline(num_stages, kind=kind), config=config)
    return adapt(engine)


def train(adapter: Any, step: int, *, explicitly: bool) -> float:
    data = small_models.training_data(step, step + 1, adapter.data_parallel_rank, torch.float32)
    iterator = data if adapter.needs_loader else None
    if explicitly:
        adapter.bind_training_iterator(iter(()) if adapter.needs_loader else None)
        return float(adapter.engine.train_batch(iterator))
    adapter.bind_training_iterator(iterator)
    return float(adapter.engine.train_batch())


def validate(adapter: Any, num_records: int, *, explicitly: bool) -> dict[str, Any]:
    """Validate as the training loop does; return loss sum, records and shapes."""
    x, labels = small_models.validation_set(num_records)
    adapter.set_training(False)
    total, weight, shapes, sizes = 0.0, 0, set(), []
    for one in adapter.validation_rounds(num_records, small_models.MICRO_BATCH_SIZE):
        micro_batches = [(x[start:stop], labels[start:stop]) for start, stop in one.record_ranges]
        iterator = iter(micro_batches) if adapter.needs_loader else None
        if explicitly:
            adapter.bind_validation_round(one, iter(()) if adapter.needs_loader else None)
            loss = adapter.engine.eval_batch(iterator)
        else:
            adapter.bind_validation_round(one, iterator)
            loss = adapter.engine.eval_batch()
        shapes.add(tuple(loss.shape))
        sizes.append(one.records)
        total += float(loss) * one.records
        weight += one.records
    adapter.bind_validation_round(None, None)
    adapter.set_training(True)
    return {"sum": total, "records": weight, "shapes": sorted(shapes), "sizes": sizes}


def reference(adapter: Any, num_records: int) -> float:
    """Return the mean loss by DeepSpeed's evaluation with one record per micro batch."""
    x, labels = small_models.validation_set(num_records)
    records = ((x[i : i + 1], labels[i : i + 1]) for i in range(num_records))
    iterator = records if adapter.needs_loader else None
    return float(adapter.engine.eval_batch(iterator, num_micro_batches=num_records))


def train_and_validate(how: str, num_records: int, options: dict[str, Any], rank: int) -> dict[str, Any]:
    adapter = build(**options)
    torch.manual_seed(100 + rank)
    losses, validations, references = [], [], []
    for step in range(NUM_STEPS):
        losses.append(train(adapter, step, explicitly=how == "explicit").hex())
        if how != "none":
            validations.append(validate(adapter, num_records, explicitly=how == "explicit"))
            references.append(reference(adapter, num_records))
    return {
        "losses": losses,
        "digest": small_models.digest(adapter.engine),
        "validations": validations,
        "references": references,
        "is_pipeline_engine": isinstance(adapter.engine, PipelineEngine),
        "replica": adapter.data_parallel_rank,
        "reports_metrics": adapter.reports_metrics,
        "needs_loader": adapter.needs_loader,
        "calls": adapter.train_calls_per_batch,
    }


def pass_through(rank: int) -> dict[str, Any]:
    """Return the results of ``eval_batch`` calls with non-default options."""
    adapter = build()
    engine = adapter.engine
    x, labels = small_models.validation_set(8)
    halves = [(x[:4], labels[:4]), (x[4:], labels[4:])]

    def call(**options: Any) -> Any:
        adapter.bind_validation_round(rounds[0], iter(halves) if adapter.needs_loader else None)
        return engine.eval_batch(**options)

    rounds = adapter.validation_rounds(8, 4)
    mean = float(call())
    each = call(reduce_output=None, bcast_loss=False)
    loss, logits = call(return_logits=True)
    of_one = call(num_micro_batches=1)
    unreduced = call(compute_loss=False, reduce_output=None, bcast_loss=False)
    adapter.bind_validation_round(None, None)
    return {
        "mean": mean,
        "each": None if each is None else [float(one) for one in each],
        "loss": float(loss),
        "logits": None if logits is None else list(logits.shape),
        "of_one": float(of_one),
        "unreduced": None if unreduced is None else [list(one.shape) for one in unreduced],
    }


def runs_out(call: str, rank: int) -> str:
    adapter = build()
    x, labels = small_models.validation_set(4)
    data = iter([(x, labels)]) if adapter.needs_loader else None
    if call == "train_batch":
        adapter.bind_training_iterator(data)
        adapter.engine.train_batch()
    elif call == "eval_batch":
        adapter.bind_validation_round(adapter.validation_rounds(8, 4)[0], data)
        adapter.engine.eval_batch()
    elif call == "train_batch without data":
        adapter.engine.train_batch()
    else:
        adapter.engine.eval_batch()
    return "returned"


def monitored(path: pathlib.Path, rank: int) -> list[str]:
    """Return the validation loss and the CSV files of DeepSpeed's monitor."""
    adapter = build(csv_monitor={"enabled": True, "output_path": str(path), "job_name": "job"})
    loss = validate(adapter, 6, explicitly=False)["sum"]
    written = [file.read_text() for file in path.rglob("*eval_loss*.csv")]
    return [f"{loss:.3f}", *written]


def batch_size(config: dict[str, Any], rank: int) -> int:
    return int(build(num_stages=1, **config).engine.train_batch_size())


def main(fork_ranks: Any, argument: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    scratch = pathlib.Path(argument["scratch"])
    number = itertools.count()

    def run(num_ranks: int, body: Any) -> list[Any]:
        return fork_ranks(num_ranks, body, scratch / str(next(number)))

    arrangements: dict[str, tuple[int, int, dict[str, Any]]] = {
        "one pipeline": (2, 23, {}),
        "one pipeline, seeded layers": (2, 10, {"kind": "seeded", "zero_stage": 0}),
        "two pipelines": (4, 21, {}),
        "two pipelines, one record left": (4, 17, {}),
        "two pipelines of one stage": (2, 21, {"num_stages": 1}),
        "fewer records than replicas": (2, 1, {"num_stages": 1}),
    }
    for name, (num_ranks, num_records, options) in arrangements.items():
        hows = ["none", "implicit", "explicit"] if name == "one pipeline" else ["none", "implicit"]
        yield (
            name,
            {
                how: run(num_ranks, functools.partial(train_and_validate, how, num_records, options))
                for how in hows
            },
        )
    yield "pass through", run(2, pass_through)
    for call in ("train_batch", "eval_batch", "train_batch without data", "eval_batch without data"):
        yield call, run(2, functools.partial(runs_out, call))
    yield "monitored", run(2, functools.partial(monitored, scratch / "csv"))
    yield "sequence parallelism", run(2, functools.partial(batch_size, {"sequence_parallel_size": 2}))
