"""Make a Trainer's arguments and its DeepSpeed config agree.

For each argument, the first source in this order that has a value wins:

=====================  ====================================================================================================
argument               order
=====================  ====================================================================================================
batch sizes            the checkpoint that a run resumes from, an overwrite, the DeepSpeed config, the argument, the equation
numbers, precision     an overwrite, the DeepSpeed config, the argument, the Trainer's default
``--max_steps``        the argument, over ``scheduler.params.total_num_steps``
``--deepspeed``        the hyperparameter
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
import dataclasses
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
from dstrial.config.deepspeed_schema import deepspeed_rules
from dstrial.config.deepspeed_source import OVERWRITE_KEY, DeepSpeedSource
from dstrial.config.diagnostics import Diagnostics, key_path, nested_form, render
from dstrial.config.dotted_keys import nested, value_at
from dstrial.config.merge import merge_deepspeed
from dstrial.errors import ConfigError, ConfigProblem
from dstrial.resume.batch import describe_batch, keep_batch
from dstrial.resume.metadata import EngineRecord, SavedRun, given_sizes

CONFIG_FLAG = "deepspeed"
"""Argument of the Trainer with the path of its DeepSpeed config."""

_TOTAL, _MICRO, _STEPS = BATCH_KEYS
_PRECISIONS = ("fp16", "bf16")
_FLAGS = (*SIZE_FLAGS.values(), *(pair.argument for pair in PAIRS), *BETAS, LENGTH.argument)


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """A change that makes a Trainer argument and a DeepSpeed key agree."""

    argument: str  # for example `--learning_rate`; "" if no argument is involved
    text: (
        str  # explanation; for a contradiction: both values, the winner, and how to make the other value win
    )
    is_contradiction: bool  # whether the user gave the argument and the key different values


class ArgumentDraft:
    """A command line and a DeepSpeed config while ``reconcile`` changes both."""

    def __init__(self, arguments: CommandLine, source: DeepSpeedSource) -> None:
        self.source = source
        self.given = arguments
        self.arguments = arguments
        self.config: dict[str, Any] = copy.deepcopy(source.merged)
        self.decisions: list[Decision] = []
        overwritten = {path: source.lines.get(path) or OVERWRITE_KEY for path in source.overwritten}
        self._places = Diagnostics({**source.lines, **overwritten}, source.label)

    @property
    def contradictions(self) -> list[Decision]:
        return [decision for decision in self.decisions if decision.is_contradiction]

    def place(self, key: str) -> str:
        return self._places.place(key)

    def number(self, key: str) -> float | None:
        """Return the number at a DeepSpeed key; None if the value is not a number."""
        value = value_at(self.config, key)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def flag_number(self, name: str) -> float | None:
        """Return the number given by ``--name``; None if there is none."""
        try:
            return float(self.given.value(name) or "")
        except ValueError:
            return None

    def is_overwritten(self, key: str) -> bool:
        path = key_path(key)
        return any(path[:length] in self.source.overwritten for length in range(1, len(path) + 1))

    def decide(self, argument: str, text: str, *, is_contradiction: bool = False) -> None:
        self.decisions.append(Decision(f"--{argument}" if argument else "", text, is_contradiction))

    def set_key(self, key: str, value: Any) -> None:
        self.config = merge_deepspeed(self.config, nested({key: value}))

    def set_argument(
        self, name: str, value: str | None, winner: str, *, why: str = "", is_expected: bool = False
    ) -> None:
        """Set the argument ``--name`` to ``value`` (None removes it); record a decision.

        ``winner`` is the DeepSpeed key that provides the value, ``why`` a text to append to the decision's text. The decision is
        a contradiction if the user gave the argument, unless ``is_expected``.
        """
        flag, place = self.given.find(name), self.place(winner)
        self.arguments = (
            self.arguments.without(name) if value is None else self.arguments.with_value(name, value)
        )
        outcome = f"--{name} is removed" if value is None else f"--{name} becomes {value}{why}"
        if flag is None or is_expected:
            self.decide(name, f"{outcome}, by {place}")
            return
        self.decide(
            name,
            f"{place} is {render(value_at(self.config, winner))} and --{name} is {flag.value or 'given'}: {winner} wins, "
            f"{outcome}. For the argument to win, set overwrite_deepspeed_args: {{{nested_form(winner.split('.'), AUTO)}}}.",
            is_contradiction=True,
        )

    def let_argument_win(self, keys: Sequence[str], names: Sequence[str]) -> None:
        """Set missing DeepSpeed ``keys`` to "auto" if an argument of ``names`` is given."""
        given = next((name for name in names if self.given.find(name) is not None), None)
        for key in keys:
            if given is not None and value_at(self.config, key) is None and _is_read(self, key):
                self.set_key(key, AUTO)
                self.decide(given, f'{key} is missing: it becomes "{AUTO}", so that --{given} counts')


def reconcile(
    arguments: Sequence[str], source: DeepSpeedSource, world_size: int, *, resumed: SavedRun | None = None
) -> ArgumentDraft:
    """Make the arguments of a Trainer script agree with a DeepSpeed config.

    Arguments that are invalid numbers are not changed; the Trainer rejects them.

    Args:
        arguments: the command line without the script's name.
        source: the DeepSpeed config with overwrites.
        world_size: number of ranks.
        resumed: the run that wrote the checkpoint to resume from, whose batch size is kept; None for a new run.

    Returns:
        The changed arguments and config, with the decisions.

    Raises:
        ConfigError: the batch sizes contradict each other or the number of ranks, or a flag is abbreviated.
    """
    draft = ArgumentDraft(CommandLine.of(arguments), source)
    _refuse_abbreviations(arguments)
    _settle_path(draft)
    _settle_batch(draft, world_size, resumed)
    for pair in PAIRS:
        _settle_number(draft, pair)
    _settle_betas(draft)
    _settle_length(draft)
    _settle_precision(draft)
    if value_at(draft.config, "zero_optimization") is None:
        draft.set_key("zero_optimization.stage", 0)
        draft.decide(
            "",
            "zero_optimization is missing, which Accelerate refuses: it becomes {stage: 0}, DeepSpeed's default",
        )
    return draft


def _refuse_abbreviations(arguments: Sequence[str]) -> None:
    """Raise ConfigError for abbreviated flags, which argparse would accept.

    Flags that ``reconcile`` appends would override the abbreviated ones silently.
    """
    problems = []
    for word in arguments:
        given = word.partition("=")[0].replace("-", "_")
        if word.startswith("--") and "_" in given[2:] and given[2:] not in _FLAGS:
            names = [name for name in _FLAGS if name.startswith(given[2:])]
            problems += [
                ConfigProblem(word, "an abbreviation", f"--{name}", f"Write --{name}.") for name in names[:1]
            ]
    if problems:
        raise ConfigError(problems)


def solve_sizes(
    arguments: CommandLine,
    config: Mapping[str, Any],
    world_size: int,
    resumed: SavedRun | None = None,
    where: Mapping[str, str] | None = None,
) -> tuple[BatchSolution, bool]:
    """Return the batch sizes, and whether dstrial changed them to keep the total.

    At a resume on another number of ranks, micro batch and accumulation are computed anew, so that the total batch size stays
    that of the checkpoint. This happens only if the given sizes are those with which the checkpoint's run started, or have its
    total on its number of ranks. Other sizes are returned unchanged; ``DetCallback`` rejects them. A computed micro batch is at
    most the checkpoint's, which is known to fit into memory.

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


def _settle_path(draft: ArgumentDraft) -> None:
    named, path = draft.given.value(CONFIG_FLAG), draft.source.path
    if named is not None and (path is None or Path(named).resolve() != path.resolve()):
        draft.decide(
            CONFIG_FLAG,
            f"--{CONFIG_FLAG} is {named} and hyperparameters.deepspeed_config is {draft.source.label}: the hyperparameter wins. "
            f"For the argument to win, set hyperparameters.deepspeed_config: {named}.",
            is_contradiction=True,
        )


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
    if is_kept and engine is not None and resumed is not None:
        text = f"the batch of checkpoint {resumed.checkpoint} is kept: {describe_batch(engine, solution)}"
        draft.decide("", text)
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
            winner, why = (_TOTAL, f" ({solution.equation})") if sizes[key] is None else (key, "")
            draft.set_argument(flag, str(value), winner, why=why, is_expected=is_expected)


def _settle_number(draft: ArgumentDraft, pair: NumberPair) -> None:
    numbers = {key: number for key in pair.keys if (number := draft.number(key)) is not None}
    if not numbers:
        draft.let_argument_win(pair.keys, (pair.argument, *pair.also_removed))
        return
    winner = next((key for key in numbers if draft.is_overwritten(key)), next(iter(numbers)))
    value = numbers[winner]
    for key, other in numbers.items():
        if other != value:
            text = (
                f"{draft.place(key)} is {other!r} and {draft.place(winner)} is {value!r}, and the Trainer has "
                f"one --{pair.argument} for both: {winner} wins, {key} becomes {value!r}. Set both to the same number."
            )
            draft.set_key(key, value)
            draft.decide(pair.argument, text, is_contradiction=True)
    _set_number(draft, pair.argument, winner, value)
    for name in pair.also_removed:
        if draft.given.find(name) is not None:
            draft.set_argument(name, None, winner)


def _settle_betas(draft: ArgumentDraft) -> None:
    value = value_at(draft.config, BETAS_KEY)
    if isinstance(value, list) and len(value) == len(BETAS):
        for name, beta in zip(BETAS, value, strict=True):
            _set_number(draft, name, BETAS_KEY, beta)
    else:
        draft.let_argument_win((BETAS_KEY,), BETAS)


def _set_number(draft: ArgumentDraft, argument: str, key: str, value: float) -> None:
    if draft.flag_number(argument) != value:
        draft.set_argument(argument, repr(value), key)


def _settle_length(draft: ArgumentDraft) -> None:
    """Set the scheduler's step count to "auto" unless it equals ``--max_steps``."""
    (key,) = LENGTH.keys
    number, asked = draft.number(key), draft.flag_number(LENGTH.argument)
    if number is None or asked == number:
        return
    length = (
        f"--{LENGTH.argument} is {asked:g}" if asked and asked > 0 else "the Trainer counts its steps itself"
    )
    text = (
        f'{draft.place(key)} is {number} and {length}: the length of training wins, {key} becomes "{AUTO}". For the key '
        f"to win, pass --{LENGTH.argument} {number}."
    )
    draft.set_key(key, AUTO)
    draft.decide(LENGTH.argument, text, is_contradiction=True)


def _settle_precision(draft: ArgumentDraft) -> None:
    keys = {precision: f"{precision}.enabled" for precision in _PRECISIONS}
    if all(value_at(draft.config, key) is True for key in keys.values()):
        overwritten = [precision for precision in _PRECISIONS if draft.is_overwritten(keys[precision])]
        loser = next((precision for precision in _PRECISIONS if precision not in overwritten), None)
        if overwritten and loser is not None:
            text = (
                f"{draft.place(keys[loser])} is true and {draft.place(keys[overwritten[0]])} is true: the overwrite wins, "
                f"{keys[loser]} becomes false. For {loser} to win, take the overwrite away."
            )
            draft.set_key(keys[loser], False)
            draft.decide(loser, text, is_contradiction=True)
    said = {precision: value_at(draft.config, key) for precision, key in keys.items()}
    for precision, other in zip(_PRECISIONS, reversed(_PRECISIONS), strict=True):
        names = (precision, f"{precision}_full_eval")
        asked = [name for name in names if draft.given.truth(name)]
        if said[precision] is True and not asked:
            draft.set_argument(precision, "True", keys[precision])
        elif said[precision] is False or (said[precision] is not True and said[other] is True):
            winner = keys[precision] if said[precision] is False else keys[other]
            for name in asked:
                draft.set_argument(name, "False", winner)
        elif said[precision] is not True:
            draft.let_argument_win((keys[precision],), asked)


def _is_read(draft: ArgumentDraft, key: str) -> bool:
    """Return whether DeepSpeed's optimizer or scheduler accepts parameter ``key``.

    True for keys outside ``optimizer.params`` and ``scheduler.params``.
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
