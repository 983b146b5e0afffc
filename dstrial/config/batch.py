"""Solve DeepSpeed's batch equation for the batch sizes that are not given.

``train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x replicas``. ``replicas`` is the
data-parallel size, not the number of ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dstrial.config.diagnostics import render
from dstrial.errors import ConfigError, ConfigProblem

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""DeepSpeed's keys for total batch size, micro batch size and accumulation steps."""

AUTO = "auto"
"""Value of a DeepSpeed key that the user leaves to another tool, such as transformers' Trainer."""


@dataclasses.dataclass(frozen=True, slots=True)
class BatchSolution:
    """Batch sizes for which DeepSpeed's batch equation holds."""

    train_batch_size: int  # records of one optimizer step, over all replicas
    train_micro_batch_size_per_gpu: int  # records of one forward pass of one replica
    gradient_accumulation_steps: int
    data_parallel_size: int
    solved: tuple[str, ...]  # names of the sizes that were not given

    @property
    def equation(self) -> str:
        return (
            f"train_batch_size {self.train_batch_size} = train_micro_batch_size_per_gpu "
            f"{self.train_micro_batch_size_per_gpu} x gradient_accumulation_steps "
            f"{self.gradient_accumulation_steps} x {self.data_parallel_size} data-parallel "
            f"{'replica' if self.data_parallel_size == 1 else 'replicas'}"
        )


def solve_batch(
    train_batch_size: int | str | None,
    train_micro_batch_size_per_gpu: int | str | None,
    gradient_accumulation_steps: int | str | None,
    data_parallel_size: int,
    *,
    where: Mapping[str, str] | None = None,
) -> BatchSolution:
    """Return all three batch sizes; those that are None or ``"auto"`` are computed.

    If only ``train_batch_size`` or only ``train_micro_batch_size_per_gpu`` is given, ``gradient_accumulation_steps`` is 1, as in
    DeepSpeed. ``where`` maps the name of each size to its ``file:line: key``, for messages. Source: DeepSpeed 0.19.8
    runtime/config.py, ``_set_batch_related_parameters``.

    Raises:
        ConfigError: a size is no positive integer, or the sizes contradict each other. The error names sizes that work.
    """
    values = (train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps)
    places = {key: f"deepspeed config: {key}" for key in BATCH_KEYS} | dict(where or {})
    sizes = _given_sizes(dict(zip(BATCH_KEYS, values, strict=True)), places)
    total, micro, steps = (sizes.get(key) for key in BATCH_KEYS)
    replicas = data_parallel_size
    if total is None:
        if micro is None:
            raise ConfigError([_underdetermined(places, steps)])
        steps = steps or 1
        total = micro * steps * replicas
    elif micro is None or steps is None:
        known_key, known = BATCH_KEYS[2 if micro is None else 1], micro or steps or 1
        if total % (known * replicas):
            raise ConfigError([_indivisible(places, total, known_key, known, replicas)])
        quotient = total // (known * replicas)
        micro, steps = (quotient, steps or 1) if micro is None else (micro, quotient)
    elif total != micro * steps * replicas:
        raise ConfigError([_contradiction(places, total, micro, steps, replicas)])
    solved = tuple(key for key in BATCH_KEYS if key not in sizes)
    return BatchSolution(total, micro, steps, replicas, solved)


def _given_sizes(given: Mapping[str, Any], places: Mapping[str, str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    problems: list[ConfigProblem] = []
    for key, value in given.items():
        if value is None or value == AUTO:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            is_quoted = isinstance(value, str) and value.isdecimal()
            fix = f"Write {value} without quotes." if is_quoted else "Write a positive whole number."
            problems.append(
                ConfigProblem(places[key], render(value), 'an integer of at least 1, or "auto"', fix)
            )
        else:
            sizes[key] = value
    if problems:
        raise ConfigError(problems)
    return sizes


def resolve_batch(config: Mapping[str, Any], data_parallel_size: int) -> dict[str, Any]:
    """Return a copy of a DeepSpeed config in which every batch size is a number.

    DeepSpeed raises TypeError for ``"auto"`` at a batch size, unless another tool has replaced the value.
    """
    total, micro, steps = (config.get(key) for key in BATCH_KEYS)
    solution = solve_batch(total, micro, steps, data_parallel_size)
    return {**config, **{key: getattr(solution, key) for key in BATCH_KEYS}}


def _underdetermined(places: Mapping[str, str], steps: int | None) -> ConfigProblem:
    key = BATCH_KEYS[1]
    given = "only gradient_accumulation_steps is given" if steps else "no batch size is given"
    return ConfigProblem(
        places[key],
        f"not given ({given})",
        "at least train_batch_size or train_micro_batch_size_per_gpu",
        "Set train_micro_batch_size_per_gpu to the records of one forward pass on one device.",
    )


def _indivisible(
    places: Mapping[str, str], total: int, known_key: str, known: int, replicas: int
) -> ConfigProblem:
    unit, unknown = known * replicas, "micro batch" if known_key == BATCH_KEYS[2] else "accumulation steps"
    below = total // unit * unit
    multiples = " or ".join(str(number) for number in (below, below + unit) if number > 0)
    return ConfigProblem(
        places["train_batch_size"],
        f"{total} = {known} ({known_key}) x {unknown} x {replicas} (data-parallel replicas), which no whole number solves",
        f"a multiple of {unit}",
        f"Set train_batch_size to {multiples}.",
    )


def _contradiction(
    places: Mapping[str, str], total: int, micro: int, steps: int, replicas: int
) -> ConfigProblem:
    product = micro * steps * replicas
    return ConfigProblem(
        places["train_batch_size"],
        f"{total}, but {micro} (train_micro_batch_size_per_gpu) x {steps} (gradient_accumulation_steps) x {replicas} "
        f"(data-parallel replicas) = {product}",
        "both sides of the batch equation to be equal",
        f"Set train_batch_size to {product}, or remove it.",
    )
