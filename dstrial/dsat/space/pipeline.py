"""Which pipeline stages are possible, and how they divide the batch. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dstrial.config import ParallelDims
from dstrial.dsat.core.candidate import HYPERPARAMETERS, BatchSplit

STAGE_NAMES = ("pipeline_stages", "num_stages", "pipe_parallel_size")
"""Hyperparameters that may set a trial's number of stages, if they equal ``data.dstrial.pipeline_stages``."""
LAYER_NAMES = ("num_layers", "num_hidden_layers", "n_layers", "n_layer")
"""Hyperparameters that may set the number of layers that stages share."""

_MIN_EFFICIENCY = 0.9
_PER_STAGE = 8  # micro batches per stage: 8 P / (8 P + P - 1) is nearly 0.9


def efficiency(accumulation: int, num_stages: int) -> float:
    """Return the share of a step outside of filling and draining a pipeline.

    Source: Huang et al. 2019 (GPipe), section 2.3; the same for 1F1B (Narayanan et al. 2021).
    """
    return accumulation / (accumulation + num_stages - 1)


def enough_accumulation(num_stages: int) -> int:
    """Return the micro batches of a step beyond which larger ones gain more."""
    return 1 if num_stages == 1 else _PER_STAGE * num_stages


def first_position(splits: Sequence[BatchSplit], num_stages: int) -> int:
    """Return the largest micro batch with enough of them in a step, else the smallest."""
    good = [
        position
        for position, split in enumerate(splits)
        if split.accumulation >= enough_accumulation(num_stages)
        or efficiency(split.accumulation, num_stages) >= _MIN_EFFICIENCY
    ]
    return good[-1] if good else 0


def stages_path(paths: Sequence[str], hyperparameters: Mapping[str, Any], sizes: ParallelDims) -> str | None:
    """Return the ``--space`` path that changes pipeline stages; None without."""
    for name in STAGE_NAMES:
        path = f"{HYPERPARAMETERS}{name}"
        if path in paths and sizes.has_pipeline_engine and hyperparameters.get(name) == sizes.pp:
            return path
    return None


def with_stages(sizes: ParallelDims, num_stages: Any) -> ParallelDims:
    """Return the sizes with other stages; ``ValueError`` if ranks are indivisible."""
    if not isinstance(num_stages, int) or isinstance(num_stages, bool):
        raise ValueError(f"pipeline stages are {num_stages!r}; expected a whole number. Correct it.")
    return dataclasses.replace(sizes, pp=num_stages, is_pipeline=True)


def divided_anew(batch: BatchSplit, sizes: ParallelDims, num_stages: int, *, is_free: bool) -> BatchSplit:
    """Return a batch as the replicas of another number of stages divide it."""
    replicas = with_stages(sizes, num_stages).dp
    if is_free:
        accumulation = max(batch.accumulation, enough_accumulation(num_stages))
        total = batch.micro_batch_size * accumulation * replicas
        return BatchSplit(batch.micro_batch_size, accumulation, total)
    accumulation = max(batch.train_batch_size // (batch.micro_batch_size * replicas), 1)
    return BatchSplit(batch.micro_batch_size, accumulation, batch.train_batch_size)


def uneven(num_stages: int, hyperparameters: Mapping[str, Any]) -> str | None:
    """Return why stages cannot share layers evenly; None if they can, or unknown."""
    for name in LAYER_NAMES:
        num_layers = hyperparameters.get(name)
        if isinstance(num_layers, int) and num_layers % num_stages:
            return f"{num_layers} layers cannot be divided evenly between {num_stages} pipeline stages"
    return None
