"""The batch of a Trainer that goes on: which arguments keep it on another number of ranks; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dstrial.config.batch import BATCH_KEYS, BatchSolution
from dstrial.config.kept_batch import keep_batch
from dstrial.config.saved_run import FILLED_KEY, EngineRecord, SavedRun
from dstrial.errors import ConfigProblem

_MICRO_FLAG = "--per_device_train_batch_size"
_STEPS_FLAG = "--gradient_accumulation_steps"
# Of transformers.TrainingArguments, 4.56 and 5.23.
_DEFAULT_MICRO = 8
_DEFAULT_STEPS = 1


@dataclasses.dataclass(frozen=True, slots=True)
class ArgumentSizes:
    """The batch sizes of a Trainer's arguments.

    Attributes:
        micro_batch_size: ``per_device_train_batch_size``.
        micro_batches_per_batch: ``gradient_accumulation_steps``.
    """

    micro_batch_size: int
    micro_batches_per_batch: int

    @classmethod
    def of_command_line(cls, arguments: Sequence[str]) -> ArgumentSizes:
        """Read them from a command line, ``--flag value`` or ``--flag=value``; the last one of a flag counts."""
        return cls(
            _number(arguments, _MICRO_FLAG, _DEFAULT_MICRO), _number(arguments, _STEPS_FLAG, _DEFAULT_STEPS)
        )

    def overwritten(self, overwrite: Mapping[str, Any]) -> ArgumentSizes:
        """Return them as ``overwrite_deepspeed_args`` change them."""
        micro, steps = (overwrite.get(key) for key in BATCH_KEYS[1:])
        return ArgumentSizes(
            micro if isinstance(micro, int) else self.micro_batch_size,
            steps if isinstance(steps, int) else self.micro_batches_per_batch,
        )

    def given(self) -> dict[str, Any]:
        """Return them as ``EngineRecord.given`` keeps them."""
        return {
            BATCH_KEYS[1]: self.micro_batch_size,
            BATCH_KEYS[2]: self.micro_batches_per_batch,
            FILLED_KEY: True,
        }

    def train_batch_size(self, data_parallel_size: int) -> int:
        """Return the records of one batch over all replicas."""
        return self.micro_batch_size * self.micro_batches_per_batch * data_parallel_size


def kept_sizes(given: ArgumentSizes, saved: SavedRun, num_ranks: int) -> BatchSolution | None:
    """Return the sizes that keep the batch of a run; None where the arguments keep it, or were changed on purpose.

    Raises:
        ConfigError: the ranks cannot share the batch evenly.
    """
    engine = saved.engines[0]
    replicas = max(num_ranks // engine.ranks_per_replica, 1)
    if given.train_batch_size(replicas) == engine.train_batch_size or not _is_as_before(given, engine):
        return None
    return _solve(engine, saved.checkpoint, replicas)


def batch_problems(given: ArgumentSizes, saved: SavedRun, num_ranks: int) -> list[ConfigProblem]:
    """Return what keeps a Trainer's arguments from going on with a run: another batch than its checkpoint's.

    Args:
        given: of the arguments.
        saved: the checkpoint of this very run, with the engine that it has.
        num_ranks: ranks now.

    Raises:
        ConfigError: the ranks cannot share the batch evenly, whatever the arguments.
    """
    engine = saved.engines[0]
    replicas = max(num_ranks // engine.ranks_per_replica, 1)
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
            f"Pass {_MICRO_FLAG} {solution.train_micro_batch_size_per_gpu} {_STEPS_FLAG} "
            f"{solution.gradient_accumulation_steps}, or let dstrial.dsat.get_hf_args_with_overwrites(sys.argv[1:], "
            "dstrial.integrations.huggingface.hyperparameters(core_context)) set them before the arguments are parsed.",
        )
    ]


def _is_as_before(given: ArgumentSizes, engine: EngineRecord) -> bool:
    """Say whether arguments are those with which the run began, or come to its batch where it was written."""
    began = (engine.given.get(BATCH_KEYS[1]), engine.given.get(BATCH_KEYS[2]))
    if (given.micro_batch_size, given.micro_batches_per_batch) == began:
        return True
    return given.train_batch_size(engine.data_parallel_size) == engine.train_batch_size


def _solve(engine: EngineRecord, checkpoint: str, replicas: int) -> BatchSolution:
    return keep_batch({BATCH_KEYS[0]: engine.train_batch_size}, engine, replicas, checkpoint=checkpoint)


def _number(arguments: Sequence[str], flag: str, default: int) -> int:
    found = default
    for idx, word in enumerate(arguments):
        name, separator, value = word.partition("=")
        if name.replace("-", "_").lstrip("_") != flag.lstrip("-"):
            continue
        text = value if separator else (arguments[idx + 1] if idx + 1 < len(arguments) else "")
        if text.isdecimal():
            found = int(text)
    return found
