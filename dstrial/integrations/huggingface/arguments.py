"""Read ``TrainingArguments`` and ``TrainerState`` of transformers 4.56 and 5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dstrial.config.auto_values import MICRO_FLAG, STEPS_FLAG
from dstrial.config.batch import BATCH_KEYS
from dstrial.config.parallel_dims import ParallelDims
from dstrial.config.schema import Length
from dstrial.errors import ConfigError, ConfigProblem
from dstrial.resume.batch import keep_batch
from dstrial.resume.metadata import FILLED_KEY, EngineRecord, SavedRun, given_settings

if TYPE_CHECKING:
    from transformers import TrainerState, TrainingArguments


# Unit of training length -> argument of the Trainer.
_FLAGS = {"batches": "max_steps", "epochs": "num_train_epochs"}


def sizes_of(args: TrainingArguments) -> tuple[int, int]:
    """Return (micro batch size, gradient accumulation steps) of one rank."""
    return int(args.train_batch_size), int(args.gradient_accumulation_steps)


def length_of(args: TrainingArguments) -> tuple[str, float]:
    """Return the length of training: ("batches", ``max_steps``) or ("epochs", number)."""
    steps = int(args.max_steps)
    return ("batches", steps) if steps > 0 else ("epochs", float(args.num_train_epochs))


def length_problems(
    searcher: Mapping[str, Any], length: tuple[str, float], train_batch_size: int
) -> list[ConfigProblem]:
    """Return a problem for each length of the searcher that differs from ``length``.

    ``searcher`` is a section of the experiment config, in which ``max_length`` and ``max_time`` are compared. ``length`` is the
    result of ``length_of``. ``train_batch_size`` (over all ranks) converts records to batches. A ``max_time`` in another unit
    than batches or epochs is ignored.
    """
    wanted: dict[str, tuple[str, float]] = {}
    if (max_length := searcher.get("max_length")) is not None:
        found = Length.from_config(max_length)
        is_records = found.unit == "records"
        wanted["max_length"] = (
            ("batches", max(found.value // train_batch_size, 1)) if is_records else (found.unit, found.value)
        )
    if searcher.get("max_time") is not None and searcher.get("time_metric") in _FLAGS:
        wanted["max_time"] = (searcher["time_metric"], searcher["max_time"])
    return [
        ConfigProblem(
            f"searcher.{key}",
            f"{value:.15g} {unit}",
            f"the length of the Trainer, {length[1]:.15g} {length[0]} (--{_FLAGS[length[0]]})",
            f"Pass --{_FLAGS[unit]} {value:.15g}, or change searcher.{key}.",
        )
        for key, (unit, value) in wanted.items()
        if (unit, value) != length
    ]


def saves_best(args: TrainingArguments) -> bool:
    """Return whether the Trainer saves only after an evaluation with a better metric."""
    return _word(args.save_strategy) == "best"


def evaluates(args: TrainingArguments) -> bool:
    """Return whether the Trainer evaluates during training."""
    return _word(args.eval_strategy) != "no"


def evaluates_at_epochs(args: TrainingArguments) -> bool:
    """Return whether the Trainer evaluates at the end of each epoch."""
    return _word(args.eval_strategy) == "epoch"


def is_deepspeed(args: TrainingArguments) -> bool:
    """Return whether the Trainer has a DeepSpeed config."""
    return bool(args.deepspeed) or getattr(args, "deepspeed_plugin", None) is not None


def given_of(args: TrainingArguments) -> dict[str, Any]:
    """Return the user's settings that checkpoints record; a resume compares them.

    These are micro batch size, accumulation steps, and the types of optimizer and scheduler in the DeepSpeed config.
    """
    plugin = getattr(args, "deepspeed_plugin", None)
    config: Mapping[str, Any] = plugin.deepspeed_config if plugin is not None else {}
    kinds = {key: kind for key, kind in given_settings(config).items() if key in ("optimizer", "scheduler")}
    return {**kinds, **given_by_arguments(*sizes_of(args))}


def given_by_arguments(micro: int, steps: int) -> dict[str, Any]:
    """Return micro batch size and accumulation steps by their keys in checkpoints."""
    return {BATCH_KEYS[1]: micro, BATCH_KEYS[2]: steps, FILLED_KEY: True}


def problems_of(
    args: TrainingArguments, searcher: Mapping[str, Any], saved: SavedRun | None, num_ranks: int
) -> list[ConfigProblem]:
    """Return contradictions between a Trainer's arguments and its trial.

    Checked are the number of ranks, sequence parallelism, the length of training and the total batch size.

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
    """Return a problem if the total batch size is not the checkpoint's; otherwise [].

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
