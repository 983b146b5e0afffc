"""Read ``TrainingArguments`` and ``TrainerState`` of transformers 4.56 and 5."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dstrial.config.auto_values import MICRO_FLAG, STEPS_FLAG
from dstrial.config.batch import BATCH_KEYS
from dstrial.config.parallel_dims import ParallelDims
from dstrial.errors import ConfigError, ConfigProblem
from dstrial.resume.batch import keep_batch
from dstrial.resume.metadata import FILLED_KEY, EngineRecord, SavedRun, given_settings

if TYPE_CHECKING:
    from transformers import TrainerState, TrainingArguments


_LENGTH_UNITS = ("batches", "epochs")


@dataclasses.dataclass(frozen=True, slots=True)
class TrainerLength:
    """The length of training that the Trainer's arguments set."""

    value: float
    unit: str  # `batches` or `epochs`
    argument: str  # the command-line argument that sets it

    @classmethod
    def of(cls, max_steps: int, num_train_epochs: float) -> TrainerLength:
        """Return the length: ``max_steps`` if above 0, otherwise ``num_train_epochs``."""
        if max_steps > 0:
            return cls(max_steps, "batches", "--max_steps")
        return cls(num_train_epochs, "epochs", "--num_train_epochs")

    def __str__(self) -> str:
        return f"{self.value:g} {self.unit}"


def length_problems(
    searcher: Mapping[str, Any], length: TrainerLength, train_batch_size: int
) -> list[ConfigProblem]:
    """Return contradictions between the searcher's and the Trainer's length.

    A ``max_time`` in another unit than batches or epochs is ignored. ``train_batch_size`` (over all ranks) converts records.
    """
    problems = []
    max_length = searcher.get("max_length")
    if isinstance(max_length, Mapping) and len(max_length) == 1:
        unit, value = next(iter(max_length.items()))
        if unit == "records":
            unit, value = "batches", max(int(value) // train_batch_size, 1)
        problems += _length_problem("searcher.max_length", f"{dict(max_length)}", str(unit), value, length)
    elif max_length is not None:
        unit = str(searcher.get("unit") or "batches")
        problems += _length_problem("searcher.max_length", f"{max_length}", unit, max_length, length)
    max_time, time_metric = searcher.get("max_time"), searcher.get("time_metric")
    if max_time is not None and time_metric in _LENGTH_UNITS:
        got = f"{max_time} with searcher.time_metric {time_metric}"
        problems += _length_problem("searcher.max_time", got, str(time_metric), max_time, length)
    return problems


def _length_problem(
    where: str, got: str, unit: str, value: Any, length: TrainerLength
) -> list[ConfigProblem]:
    if unit == length.unit and float(value) == float(length.value):
        return []
    flag = {"batches": "--max_steps", "epochs": "--num_train_epochs"}.get(unit, length.argument)
    clear = " and leave --max_steps out" if unit == "epochs" and length.unit == "batches" else ""
    return [
        ConfigProblem(
            where,
            got,
            f"the length of the Trainer, {length} ({length.argument})",
            f"Pass {flag} {value}{clear}, or change {where}.",
        )
    ]


def sizes_of(args: TrainingArguments) -> tuple[int, int]:
    """Return (micro batch size, gradient accumulation steps) of one rank."""
    return int(args.train_batch_size), int(args.gradient_accumulation_steps)


def length_of(args: TrainingArguments) -> TrainerLength:
    return TrainerLength.of(int(args.max_steps), float(args.num_train_epochs))


def saves_best(args: TrainingArguments) -> bool:
    """Return whether ``save_strategy`` is ``best``: only improving evaluations save."""
    return _word(args.save_strategy) == "best"


def evaluates(args: TrainingArguments) -> bool:
    return _word(args.eval_strategy) != "no"


def evaluates_at_epochs(args: TrainingArguments) -> bool:
    """Return whether the Trainer evaluates at the end of each epoch."""
    return _word(args.eval_strategy) == "epoch"


def is_deepspeed(args: TrainingArguments) -> bool:
    return bool(args.deepspeed) or getattr(args, "deepspeed_plugin", None) is not None


def given_of(args: TrainingArguments) -> dict[str, Any]:
    """Return batch sizes, optimizer type and scheduler type, for checkpoint metadata."""
    plugin = getattr(args, "deepspeed_plugin", None)
    config: Mapping[str, Any] = plugin.deepspeed_config if plugin is not None else {}
    kinds = {key: kind for key, kind in given_settings(config).items() if key in ("optimizer", "scheduler")}
    return {**kinds, **given_by_arguments(*sizes_of(args))}


def given_by_arguments(micro: int, steps: int) -> dict[str, Any]:
    """Return micro batch size and accumulation steps, for checkpoint metadata."""
    return {BATCH_KEYS[1]: micro, BATCH_KEYS[2]: steps, FILLED_KEY: True}


def problems_of(
    args: TrainingArguments, searcher: Mapping[str, Any], saved: SavedRun | None, num_ranks: int
) -> list[ConfigProblem]:
    """Return problems with ranks, sequence parallelism, length and batch size.

    ``searcher`` is a section of the experiment config; ``saved`` is the run that wrote the checkpoint to resume from, None for
    a new run; ``num_ranks`` is the number of launched ranks.
    """
    found = []
    is_seen_whole = int(args.world_size) == num_ranks
    if not is_seen_whole:
        found.append(
            ConfigProblem(
                "args.world_size",
                str(args.world_size),
                f"{num_ranks}, the ranks that were launched; else each of them would train by itself",
                "Make the TrainingArguments inside `with dstrial.integrations.huggingface.init() as core_context:`.",
            )
        )
    sequence = getattr(getattr(args, "parallelism_config", None), "sp_size", None) or 1
    if sequence > 1:
        found.append(
            ConfigProblem(
                "args.parallelism_config.sp_size",
                str(sequence),
                "1: a resumed Trainer could not skip trained batches of the loader that cuts sequences",
                "Train in a trial with parallel_state_sp (docs/how-to/parallelism.md).",
            )
        )
    micro, steps = sizes_of(args)
    found += length_problems(searcher, length_of(args), micro * steps * num_ranks)
    if saved is not None and saved.engines and is_seen_whole:
        try:
            found += batch_problems(micro, steps, saved, num_ranks)
        except ConfigError as error:
            found += error.problems
    return found


def batch_problems(micro: int, steps: int, saved: SavedRun, num_ranks: int) -> list[ConfigProblem]:
    """Return a problem if the total batch size differs from the checkpoint's; else [].

    ``micro`` and ``steps`` are micro batch size and gradient accumulation steps.
    """
    engine = saved.engines[0]
    replicas = engine.batch_replicas(num_ranks)
    batch = micro * steps * replicas
    if batch == engine.train_batch_size:
        return []
    solution = keep_batch(engine.own_batch, engine, replicas, checkpoint=saved.checkpoint)
    return [
        ConfigProblem(
            "per_device_train_batch_size x gradient_accumulation_steps x ranks",
            f"{micro} x {steps} x {replicas} = {batch}",
            f"{engine.train_batch_size}, the batch of checkpoint {saved.checkpoint}, in which its steps, schedule and order of "
            "records are counted",
            f"Pass --{MICRO_FLAG} {solution.train_micro_batch_size_per_gpu} --{STEPS_FLAG} "
            f"{solution.gradient_accumulation_steps}, or let dstrial.dsat.get_hf_args_with_overwrites(sys.argv[1:], "
            "dstrial.integrations.huggingface.hyperparameters(core_context)) set them before the arguments are parsed.",
        )
    ]


def plain_record(args: TrainingArguments, train_batch_size: int) -> EngineRecord:
    """Return the checkpoint metadata of a Trainer without DeepSpeed."""
    micro, steps = sizes_of(args)
    return EngineRecord(
        engine_kind="data_parallel",
        **ParallelDims(int(args.world_size)).to_layout(),
        zero_stage=0,
        offload_optimizer="none",
        offload_parameters="none",
        optimizer="",
        wrapper="",
        lr_scheduler="",
        train_batch_size=train_batch_size,
        micro_batch_size=micro,
        micro_batches_per_batch=steps,
        given=given_by_arguments(micro, steps),
        micro_batch_limit=micro,
    )


def is_evaluation_due(args: TrainingArguments, state: TrainerState) -> bool:
    """Return whether the Trainer evaluates after the current step."""
    step = state.global_step
    if step == 0:
        return False
    strategy = _word(args.eval_strategy)
    if strategy == "steps":
        return bool(step % int(state.eval_steps) == 0 and step >= float(args.eval_delay or 0))
    return strategy == "epoch" and float(state.epoch or 0.0).is_integer()


def _word(strategy: Any) -> str:
    return str(getattr(strategy, "value", strategy))
