"""Which arguments keep a resumed Trainer's batch on another number of ranks; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dstrial.config.auto_values import DEFAULT_MICRO_BATCH, MICRO_FLAG, STEPS_FLAG
from dstrial.config.batch import BATCH_KEYS, BatchSolution
from dstrial.config.command_line import CommandLine
from dstrial.errors import ConfigProblem
from dstrial.resume.batch import keep_batch
from dstrial.resume.metadata import FILLED_KEY, EngineRecord, SavedRun, given_sizes

_DEFAULT_STEPS = 1  # of transformers.TrainingArguments, 4.56 and 5.23


@dataclasses.dataclass(frozen=True, slots=True)
class ArgumentSizes:
    """``per_device_train_batch_size`` and ``gradient_accumulation_steps``."""

    micro_batch_size: int
    micro_batches_per_batch: int

    def given(self) -> dict[str, Any]:
        """Return them as ``EngineRecord.given`` keeps them."""
        return {
            BATCH_KEYS[1]: self.micro_batch_size,
            BATCH_KEYS[2]: self.micro_batches_per_batch,
            FILLED_KEY: True,
        }

    def train_batch_size(self, data_parallel_size: int) -> int:
        return self.micro_batch_size * self.micro_batches_per_batch * data_parallel_size


def sizes_to_keep(
    arguments: CommandLine, config: Mapping[str, Any], saved: SavedRun, num_ranks: int
) -> BatchSolution | None:
    """Return sizes that keep a run's batch before parsing; None if none are needed.

    ``config`` is the DeepSpeed config with its overwrites, whose numbers win over the arguments. ConfigError if the ranks cannot
    share the batch evenly.
    """
    total, micro, steps = given_sizes(config)
    micro = _given_size(arguments, MICRO_FLAG) if micro is None else micro
    steps = _given_size(arguments, STEPS_FLAG) if steps is None else steps
    if total is None:
        sizes = ArgumentSizes(micro or DEFAULT_MICRO_BATCH, steps or _DEFAULT_STEPS)
        return kept_sizes(sizes, saved, num_ranks)
    engine = saved.engines[0]
    if total != engine.train_batch_size:
        return None
    given = {
        key: size for key, size in zip(BATCH_KEYS, (total, micro, steps), strict=True) if size is not None
    }
    replicas = engine.batch_replicas(num_ranks)
    return keep_batch(given, engine, replicas, checkpoint=saved.checkpoint)


def kept_sizes(given: ArgumentSizes, saved: SavedRun, num_ranks: int) -> BatchSolution | None:
    """Return sizes that keep a run's batch; None if kept, or changed on purpose."""
    engine = saved.engines[0]
    replicas = engine.batch_replicas(num_ranks)
    if given.train_batch_size(replicas) == engine.train_batch_size or not _is_as_before(given, engine):
        return None
    return _solve(engine, saved.checkpoint, replicas)


def batch_problems(given: ArgumentSizes, saved: SavedRun, num_ranks: int) -> list[ConfigProblem]:
    """Return problems of arguments with another batch than the run's checkpoint."""
    engine = saved.engines[0]
    replicas = engine.batch_replicas(num_ranks)
    batch = given.train_batch_size(replicas)
    if batch == engine.train_batch_size:
        return []
    solution = _solve(engine, saved.checkpoint, replicas)
    return [
        ConfigProblem(
            "per_device_train_batch_size x gradient_accumulation_steps x ranks",
            f"{given.micro_batch_size} x {given.micro_batches_per_batch} x {replicas} = {batch}",
            f"{engine.train_batch_size}, the batch of checkpoint {saved.checkpoint}, in which its steps, schedule and order of "
            "records are counted",
            f"Pass --{MICRO_FLAG} {solution.train_micro_batch_size_per_gpu} --{STEPS_FLAG} "
            f"{solution.gradient_accumulation_steps}, or let dstrial.dsat.get_hf_args_with_overwrites(sys.argv[1:], "
            "dstrial.integrations.huggingface.hyperparameters(core_context)) set them before the arguments are parsed.",
        )
    ]


def _is_as_before(given: ArgumentSizes, engine: EngineRecord) -> bool:
    """Whether arguments are the run's first ones, or make its batch on its ranks."""
    began = (engine.given.get(BATCH_KEYS[1]), engine.given.get(BATCH_KEYS[2]))
    if (given.micro_batch_size, given.micro_batches_per_batch) == began:
        return True
    return given.train_batch_size(engine.batch_replicas(engine.world_size)) == engine.train_batch_size


def _solve(engine: EngineRecord, checkpoint: str, replicas: int) -> BatchSolution:
    return keep_batch({BATCH_KEYS[0]: engine.train_batch_size}, engine, replicas, checkpoint=checkpoint)


def _given_size(arguments: CommandLine, name: str) -> int | None:
    text = arguments.value(name) or ""
    return int(text) if text.isdecimal() and int(text) else None
