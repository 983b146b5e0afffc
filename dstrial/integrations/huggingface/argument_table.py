"""Make a Trainer's arguments and its DeepSpeed config agree.

For each argument, the first source in this order that has a value wins:

=====================  ====================================================================================================
argument               order
=====================  ====================================================================================================
batch sizes            the checkpoint that a run resumes from, an overwrite, the DeepSpeed config, the argument, the equation
numbers, precision     an overwrite, the DeepSpeed config, the argument, the Trainer's default
``--max_steps``        the argument, over ``scheduler.params.total_num_steps``
``--deepspeed``        the hyperparameter ``deepspeed_config``
=====================  ====================================================================================================

Batch sizes include accumulation steps. Numbers: clipping, learning rate, warm-up steps, weight decay, Adam's epsilon and betas.
An overwrite is a value in ``hyperparameters.overwrite_deepspeed_args``. "Equation" means: computed from the other batch sizes
and the number of ranks. A DeepSpeed key with the value ``"auto"`` lets the argument win. If the argument is given and the key
is missing, the key is added as ``"auto"``, because DeepSpeed would use its default.

Source of the pairs of argument and key: transformers 4.56 and 5.23 ``integrations/deepspeed.py`` (``trainer_config_process``,
``trainer_config_finalize``), which rejects a mismatch; accelerate 1.11 and 1.15 ``DeepSpeedPlugin``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrial.config.auto_values import (
    BETAS,
    BETAS_KEY,
    DEFAULT_MICRO_BATCH,
    LENGTH,
    MICRO_FLAG,
    PAIRS,
    SIZE_FLAGS,
    AutoValues,
    NumberPair,
)
from dstrial.config.batch import AUTO, BATCH_KEYS, BatchSolution
from dstrial.config.command_line import CommandLine
from dstrial.config.deepspeed_rules.settings import deepspeed_rules
from dstrial.config.deepspeed_source import OVERWRITE_KEY, DeepSpeedSource
from dstrial.config.diagnostics import Diagnostics, key_path, render
from dstrial.config.dotted_keys import value_at
from dstrial.config.merge import merge_deepspeed
from dstrial.errors import ConfigError
from dstrial.resume.batch import keep_batch
from dstrial.resume.metadata import EngineRecord, SavedRun, given_sizes

CONFIG_FLAG = "deepspeed"
"""Argument of the Trainer with the path of its DeepSpeed config."""

_TOTAL, _MICRO, _STEPS = BATCH_KEYS


class ArgumentDraft:
    """A command line and a DeepSpeed config, in which ``reconcile`` changes values.

    ``arguments`` and ``config`` are the changed command line and config; ``given`` and ``source`` are the unchanged ones.

    ``contradictions`` has a sentence for each pair of an argument and a config key to which the user gave different values.
    """

    def __init__(self, arguments: CommandLine, source: DeepSpeedSource) -> None:
        self.source = source
        self.given = arguments
        self.arguments = arguments
        self.config: dict[str, Any] = copy.deepcopy(source.merged)
        self.contradictions: list[str] = []
        overwritten = {path: source.lines.get(path) or OVERWRITE_KEY for path in source.overwritten}
        self._places = Diagnostics({**source.lines, **overwritten}, source.label)

    def place(self, key: str) -> str:
        return self._places.place(key)

    def number(self, key: str) -> float | None:
        """Return the number at a DeepSpeed key; None if the value is not a number."""
        value = value_at(self.config, key)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def flag_number(self, name: str) -> float | None:
        """Return the number given by ``--name``; None if missing or not a number."""
        try:
            return float(self.given.value(name) or "")
        except ValueError:
            return None

    def set_key(self, key: str, value: Any) -> None:
        for part in reversed(key_path(key)):
            value = {part: value}
        self.config = merge_deepspeed(self.config, value)

    def set_argument(self, name: str, value: str | None, winner: str, *, is_expected: bool = False) -> None:
        """Set ``--name`` to ``value``, from the DeepSpeed key ``winner``; None removes it.

        If the user gave the argument, a contradiction is recorded, unless ``is_expected``.
        """
        flag = self.given.find(name)
        self.arguments = (
            self.arguments.without(name) if value is None else self.arguments.with_value(name, value)
        )
        if flag is not None and not is_expected:
            outcome = "is removed" if value is None else f"becomes {value}"
            self.contradictions.append(
                f"{self.place(winner)} is {render(value_at(self.config, winner))} and --{name} is {flag.value or 'given'}: "
                f'{winner} wins, --{name} {outcome}. For the argument to win, set {winner} to "{AUTO}".'
            )

    def let_argument_win(self, keys: Sequence[str], names: Sequence[str]) -> None:
        """Set the missing ``keys`` of the config to "auto" if any argument is given.

        ``names`` are the names of the arguments. The Trainer replaces "auto" by the value of the argument.
        """
        if any(self.given.find(name) is not None for name in names):
            for key in keys:
                if value_at(self.config, key) is None and _is_read(self, key):
                    self.set_key(key, AUTO)


def reconcile(
    arguments: Sequence[str], source: DeepSpeedSource, world_size: int, *, resumed: SavedRun | None = None
) -> ArgumentDraft:
    """Make the arguments of a Trainer script agree with a DeepSpeed config.

    Arguments that are invalid numbers are not changed; the Trainer rejects them.

    Args:
        arguments: the command line without the script's name.
        source: the DeepSpeed config with overwrites.
        world_size: number of ranks.
        resumed: the run that wrote the checkpoint to resume from, whose total batch size is kept; None for a new run.

    Returns:
        A draft with the changed arguments, the changed config and the contradictions.

    Raises:
        ConfigError: the batch sizes contradict each other or the number of ranks.
    """
    draft = ArgumentDraft(CommandLine.of(arguments), source)
    named = draft.given.value(CONFIG_FLAG)
    if named is not None and (source.path is None or Path(named).resolve() != source.path.resolve()):
        draft.contradictions.append(
            f"--{CONFIG_FLAG} is {named} and hyperparameters.deepspeed_config is {source.label}: the hyperparameter wins. "
            f"For the argument to win, set hyperparameters.deepspeed_config: {named}."
        )
    _settle_batch(draft, world_size, resumed)
    for pair in PAIRS:
        _settle_number(draft, pair)
    betas = value_at(draft.config, BETAS_KEY)
    if isinstance(betas, list) and len(betas) == len(BETAS):
        for name, beta in zip(BETAS, betas, strict=True):
            _set_number(draft, name, BETAS_KEY, beta)
    else:
        draft.let_argument_win((BETAS_KEY,), BETAS)
    _settle_length(draft)
    _settle_precision(draft)
    if value_at(draft.config, "zero_optimization") is None:
        draft.set_key("zero_optimization.stage", 0)  # DeepSpeed's default, without which Accelerate fails
    return draft


def solve_sizes(
    arguments: CommandLine,
    config: Mapping[str, Any],
    world_size: int,
    resumed: SavedRun | None = None,
    where: Mapping[str, str] | None = None,
) -> tuple[BatchSolution, bool]:
    """Return the batch sizes, and whether they were computed to keep the run's total.

    If a run resumes on another number of ranks, micro batch and accumulation are computed: the total batch size stays that of
    the checkpoint. This requires sizes that the user has not changed since the run's start, or sizes with the checkpoint's
    total on the checkpoint's number of ranks. Other sizes are returned unchanged; ``DetCallback`` rejects them. A computed
    micro batch is at most the checkpoint's, which is known to fit into memory.

    ``resumed`` is the run that wrote the checkpoint; None for a new run. ``where`` maps the name of a batch size to its
    ``file:line: key``, for messages.

    Raises:
        ConfigError: the batch sizes contradict each other or the number of ranks.
    """
    engine = resumed.engines[0] if resumed is not None and resumed.engines else None
    replicas = world_size if engine is None else engine.batch_replicas(world_size)
    own: BatchSolution | None = None
    try:
        own = AutoValues("the Trainer", True, arguments).solve(config, replicas, where or {})
    except ConfigError:
        if engine is None or config.get(_TOTAL) != engine.train_batch_size:
            raise
    assert own is not None or engine is not None, "the Trainer has a default for the micro batch"
    if engine is not None and resumed is not None and _keeps(own, arguments, config, engine):
        return keep_batch(engine.own_batch, engine, replicas, checkpoint=resumed.checkpoint), True
    assert own is not None, "a batch that cannot be solved is kept, or refused above"
    return own, False


def _keeps(
    own: BatchSolution | None, arguments: CommandLine, config: Mapping[str, Any], engine: EngineRecord
) -> bool:
    if own is None:
        return True
    micro, steps = own.train_micro_batch_size_per_gpu, own.gradient_accumulation_steps
    if own.train_batch_size == engine.train_batch_size:
        is_micro_given = given_sizes(config)[1] is not None or arguments.find(MICRO_FLAG) is not None
        return not is_micro_given and micro > engine.micro_batch_limit
    began = engine.given.get(_MICRO), engine.given.get(_STEPS)
    then = micro * steps * engine.batch_replicas(engine.world_size)
    return (micro, steps) == began or then == engine.train_batch_size


def _settle_batch(draft: ArgumentDraft, world_size: int, resumed: SavedRun | None) -> None:
    sizes = {key: None if (size := draft.config.get(key)) == AUTO else size for key in BATCH_KEYS}
    flags = {key: draft.flag_number(flag) for key, flag in SIZE_FLAGS.items()}
    engine = resumed.engines[0] if resumed is not None and resumed.engines else None
    if engine is None and all(size is None for size in (*sizes.values(), *flags.values())):
        for key in BATCH_KEYS:
            draft.set_key(key, AUTO)  # the Trainer replaces "auto" by its defaults
        return
    where = {
        key: f"command line: --{SIZE_FLAGS[key]}" if size is None and key in SIZE_FLAGS else draft.place(key)
        for key, size in sizes.items()
    }
    solution, is_kept = solve_sizes(draft.given, sizes, world_size, resumed, where)
    # No contradiction if the arguments are unchanged since the run's start: `hyperparameters()` has then overwritten the sizes.
    first = flags[_MICRO] or DEFAULT_MICRO_BATCH, flags[_STEPS] or 1
    is_expected = is_kept or (
        engine is not None
        and first == (engine.given.get(_MICRO), engine.given.get(_STEPS))
        and solution.train_batch_size == engine.train_batch_size
    )
    for key in BATCH_KEYS:
        draft.set_key(key, getattr(solution, key))
    for key, flag in SIZE_FLAGS.items():
        value = getattr(solution, key)
        if flags[key] != value:
            draft.set_argument(
                flag, str(value), _TOTAL if sizes[key] is None else key, is_expected=is_expected
            )


def _settle_number(draft: ArgumentDraft, pair: NumberPair) -> None:
    numbers = {key: number for key in pair.keys if (number := draft.number(key)) is not None}
    if not numbers:
        draft.let_argument_win(pair.keys, (pair.argument, *pair.also_removed))
        return
    winner = next((key for key in numbers if draft.source.is_overwritten(key_path(key))), next(iter(numbers)))
    value = numbers[winner]
    for key, other in numbers.items():
        if other != value:
            draft.set_key(key, value)
            draft.contradictions.append(
                f"{draft.place(key)} is {other!r} and {draft.place(winner)} is {value!r}, and the Trainer has one "
                f"--{pair.argument} for both: {winner} wins. Set both to the same number."
            )
    _set_number(draft, pair.argument, winner, value)
    for name in pair.also_removed:
        if draft.given.find(name) is not None:
            draft.set_argument(name, None, winner)


def _set_number(draft: ArgumentDraft, argument: str, key: str, value: float) -> None:
    if draft.flag_number(argument) != value:
        draft.set_argument(argument, repr(value), key)


def _settle_length(draft: ArgumentDraft) -> None:
    """Set the scheduler's step count to "auto" if it differs from ``--max_steps``.

    A difference is recorded as a contradiction. A no-op if the step count is not a number.
    """
    (key,) = LENGTH.keys
    number = draft.number(key)
    if number is None or draft.flag_number(LENGTH.argument) == number:
        return
    draft.contradictions.append(
        f'{draft.place(key)} is {number}, unlike the length of training, which wins: {key} becomes "{AUTO}". For the key to '
        f"win, pass --{LENGTH.argument} {number}."
    )
    draft.set_key(key, AUTO)


def _settle_precision(draft: ArgumentDraft) -> None:
    keys = {precision: f"{precision}.enabled" for precision in ("fp16", "bf16")}
    configured = {precision: value_at(draft.config, key) for precision, key in keys.items()}
    for precision, other in (("fp16", "bf16"), ("bf16", "fp16")):
        flags = [name for name in (precision, f"{precision}_full_eval") if draft.given.truth(name)]
        if configured[precision] is True and not flags:
            draft.set_argument(precision, "True", keys[precision])
        elif configured[precision] is False or (
            configured[precision] is not True and configured[other] is True
        ):
            winner = keys[precision] if configured[precision] is False else keys[other]
            for name in flags:
                draft.set_argument(name, "False", winner)
        elif configured[precision] is not True:
            draft.let_argument_win((keys[precision],), flags)


def _is_read(draft: ArgumentDraft, key: str) -> bool:
    """Return whether the config's optimizer or scheduler type accepts the key.

    Always True for keys outside ``optimizer.params`` and ``scheduler.params``; False for an unknown type.
    """
    section, _, parameter = key.rpartition(".params.")
    if not section:
        return True
    kind = value_at(draft.config, f"{section}.type")
    rules = deepspeed_rules()
    table: Mapping[str, Mapping[str, object]] = (
        rules.optimizers if section == "optimizer" else rules.schedulers
    )
    rule = (table.get(kind) or table.get(kind.lower())) if isinstance(kind, str) else None
    known = None if rule is None else rule.get("params")
    return isinstance(known, list) and parameter in known
