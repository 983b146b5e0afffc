"""Make a Trainer's arguments and its DeepSpeed config agree. Pure.

For each argument, the first given value in this order wins:

=====================  ====================================================================================================
argument               order
=====================  ====================================================================================================
batch and accumulation the checkpoint that a run resumes from, an overwrite, the DeepSpeed config, the argument, the equation
numbers, precision     an overwrite, the DeepSpeed config, the argument, the Trainer's default
``--max_steps``        the argument, over ``scheduler.params.total_num_steps``
``--deepspeed``        the hyperparameter
=====================  ====================================================================================================

An overwrite is a value in ``hyperparameters.overwrite_deepspeed_args``. A key with the value ``"auto"`` lets the argument win.
A missing key is added as ``"auto"`` if DeepSpeed would otherwise use its default instead of a given argument.
``tools/trainer_arguments_table.py`` shows every case, and that the real Trainer accepts it.

Source of the pairs that must agree: transformers 4.56 and 5.23 ``integrations/deepspeed.py`` (``trainer_config_process``,
``trainer_config_finalize``), which rejects a mismatch; accelerate 1.11 and 1.15 ``DeepSpeedPlugin``.
"""

from __future__ import annotations

import copy
import dataclasses
import math
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
    STEPS_FLAG,
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

_COMMAND_LINE = "command line"
_TOTAL, _MICRO, _STEPS = BATCH_KEYS
_PRECISIONS = ("fp16", "bf16")
_ARGUMENTS = (
    CONFIG_FLAG,
    MICRO_FLAG,
    STEPS_FLAG,
    *(name for pair in PAIRS for name in (pair.argument, *pair.also_removed)),
    *BETAS,
    LENGTH.argument,
    *(name for precision in _PRECISIONS for name in (precision, f"{precision}_full_eval")),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """A change that makes a Trainer argument and a DeepSpeed key agree."""

    argument: str  # for example `--learning_rate`; "" if no argument is involved
    key: str  # dotted DeepSpeed key; "" if no key is involved
    text: str  # explanation; for a contradiction: both values, the winner, and how to make the other win
    is_contradiction: bool  # whether two values that the user wrote exclude each other


class ArgumentDraft:
    """A command line and a DeepSpeed config that ``reconcile`` changes step by step.

    ``findings`` collects problems, ``decisions`` the changes.
    """

    def __init__(self, arguments: CommandLine, source: DeepSpeedSource) -> None:
        self.source = source
        self.given = arguments
        self.arguments = arguments
        self.config: dict[str, Any] = copy.deepcopy(source.merged)
        overwritten = {path: source.lines.get(path) or OVERWRITE_KEY for path in source.overwritten}
        self.findings = Diagnostics({**source.lines, **overwritten}, source.label)
        self.decisions: list[Decision] = []

    @property
    def contradictions(self) -> list[Decision]:
        return [decision for decision in self.decisions if decision.is_contradiction]

    def pointing_to(self, path: str) -> list[str]:
        return [*self.arguments.with_value(CONFIG_FLAG, path).words]

    def key_number(self, key: str, minimum: float | None = None, *, is_whole: bool = False) -> float | None:
        """Return the number at a DeepSpeed key; None if missing or ``"auto"``.

        A value below ``minimum`` or of another type is recorded as a problem and also gives None.
        """
        value = value_at(self.config, key)
        if value is None or value == AUTO:
            return None
        if isinstance(value, (int, float)) and _is_legal(value, minimum, is_whole=is_whole):
            return int(value) if is_whole else value
        meant = _number(value) if isinstance(value, str) else None
        fix = "Write such a number." if meant is None else f"Write {_as_yaml(meant)}, without quotes."
        self.findings.problem(
            key, render(value), f'{_expected(minimum, is_whole=is_whole)}, or "{AUTO}"', fix
        )
        return None

    def flag_number(self, name: str, minimum: float | None = None, *, is_whole: bool = False) -> float | None:
        """Return a flag's number; None if the flag is missing.

        A value below ``minimum`` or of another type is recorded as a problem and also gives None.
        """
        flag = self.given.find(name)
        if flag is None:
            return None
        number = _number(flag.value)
        if number is None or not _is_legal(number, minimum, is_whole=is_whole):
            got = "without a value" if flag.value is None else render(flag.value)
            expected = _expected(minimum, is_whole=is_whole)
            self.problem(f"--{name}", got, expected, f"Write --{name} and such a value.")
            return None
        return int(number) if is_whole else number

    def problem(self, flag: str, got: str, expected: str, fix: str) -> None:
        """Record an error in the command line, unless the same error is already recorded."""
        found = ConfigProblem(f"{_COMMAND_LINE}: {flag}", got, expected, fix)
        if found not in self.findings.problems:
            self.findings.problems.append(found)

    def is_overwritten(self, key: str) -> bool:
        path = key_path(key)
        return any(path[:length] in self.source.overwritten for length in range(1, len(path) + 1))

    def decide(self, argument: str, key: str, text: str, *, is_contradiction: bool = False) -> None:
        self.decisions.append(Decision(f"--{argument}" if argument else "", key, text, is_contradiction))

    def set_key(self, key: str, value: Any) -> None:
        self.config = merge_deepspeed(self.config, nested({key: value}))

    def set_argument(
        self, name: str, value: str, winner: str, *, why: str = "", is_expected: bool = False
    ) -> None:
        """Set an argument to the value of DeepSpeed key ``winner``; record a decision.

        ``why`` is added to the decision's text. The decision is a contradiction if the user gave the argument and ``is_expected``
        is false.
        """
        flag = self.given.find(name)
        self.arguments = self.arguments.with_value(name, value)
        place = self.findings.place(winner)
        if flag is None or is_expected:
            self.decide(name, winner, f"--{name} becomes {value}{why}, by {place}")
            return
        said = "given" if flag.value is None else flag.value
        self.decide(
            name,
            winner,
            f"{place} is {render(value_at(self.config, winner))} and --{name} is {said}: {winner} wins, --{name} becomes "
            f"{value}{why}. {_argument_wins(winner)}",
            is_contradiction=True,
        )


def reconcile(
    arguments: Sequence[str], source: DeepSpeedSource, world_size: int, *, resumed: SavedRun | None = None
) -> ArgumentDraft:
    """Make the arguments of a Trainer script agree with a DeepSpeed config.

    Args:
        arguments: the words after the script's name.
        source: the DeepSpeed config with overwrites.
        world_size: number of ranks.
        resumed: describes this run's checkpoint, whose batch size is kept; None for a new run.

    Returns:
        The changed arguments and config, with the decisions.

    Raises:
        ConfigError: batch sizes have no solution, values are no numbers, or flags are abbreviated; has every problem.
    """
    draft = ArgumentDraft(CommandLine.of(arguments), source)
    _require_flags(draft)
    draft.findings.raise_if_any()
    _settle_path(draft)
    try:
        _settle_batch(draft, world_size, resumed)
    except ConfigError as error:
        draft.findings.problems.extend(error.problems)
    for pair in PAIRS:
        _settle_number(draft, pair)
    _settle_betas(draft)
    _settle_length(draft)
    _settle_precision(draft)
    if value_at(draft.config, "zero_optimization") is None:
        draft.set_key("zero_optimization.stage", 0)
        text = "zero_optimization is missing, which Accelerate refuses: it becomes {stage: 0}, which is DeepSpeed's default"
        draft.decide("", "zero_optimization.stage", text)
    draft.findings.raise_if_any()
    return draft


def solve_sizes(
    arguments: CommandLine,
    config: Mapping[str, Any],
    world_size: int,
    resumed: SavedRun | None = None,
    where: Mapping[str, str] | None = None,
) -> tuple[BatchSolution, bool]:
    """Return batch sizes, and whether the checkpoint's sizes replaced the given ones.

    The checkpoint's batch size is kept in two cases: the given sizes are those of the run's start, or they give the same batch
    on the checkpoint's ranks. ``DetCallback`` rejects other sizes, which the user must have changed. A computed micro batch is
    never larger than the checkpoint's, because that size fits into memory.
    ``where`` maps the name of a size to its ``file:line: key``. ConfigError if there is no solution.
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


def _require_flags(draft: ArgumentDraft) -> None:
    words = draft.given.words
    if len(words) == 1 and not words[0].startswith("-") and words[0].endswith((".json", ".yaml", ".yml")):
        expected = "the arguments themselves, which DeepSpeed's config has to agree with"
        draft.problem(words[0], "a file with the arguments", expected, "Pass them as --flag value.")
    for written, name in draft.given.abbreviations(_ARGUMENTS):
        draft.problem(written, "an abbreviation", f"the whole name --{name}", f"Write --{name}.")


def _settle_path(draft: ArgumentDraft) -> None:
    named, path = draft.given.value(CONFIG_FLAG), draft.source.path
    if named is not None and (path is None or Path(named).resolve() != path.resolve()):
        draft.decide(
            CONFIG_FLAG,
            "",
            f"--{CONFIG_FLAG} is {named} and hyperparameters.deepspeed_config is {draft.source.label}: the hyperparameter wins. "
            f"For the argument to win, set hyperparameters.deepspeed_config: {named}.",
            is_contradiction=True,
        )


def _settle_batch(draft: ArgumentDraft, world_size: int, resumed: SavedRun | None) -> None:
    """Set the three batch-size keys, and the two batch-size flags to the same numbers."""
    sizes = {key: draft.key_number(key, 1, is_whole=True) for key in BATCH_KEYS}
    flags = {key: draft.flag_number(flag, 1, is_whole=True) for key, flag in SIZE_FLAGS.items()}
    if draft.findings.problems:
        return
    engine = resumed.engines[0] if resumed is not None and resumed.engines else None
    if engine is None and not any((*sizes.values(), *flags.values())):
        for key in BATCH_KEYS:
            draft.set_key(key, AUTO)  # the Trainer fills in its defaults
        return
    where = {
        key: draft.findings.place(key)
        if size is not None or key == _TOTAL
        else f"{_COMMAND_LINE}: --{SIZE_FLAGS[key]}"
        for key, size in sizes.items()
    }
    solution, is_kept = solve_sizes(draft.given, sizes, world_size, resumed, where)
    if is_kept and engine is not None and resumed is not None:
        text = f"the batch of checkpoint {resumed.checkpoint} is kept: {describe_batch(engine, solution)}"
        draft.decide("", _TOTAL, text)
    # Sizes from `hyperparameters()` keep the batch size; the arguments of the run's start are then no contradiction.
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
    found = {key: draft.key_number(key, pair.minimum, is_whole=pair.is_whole) for key in pair.keys}
    numbers = {key: number for key, number in found.items() if number is not None}
    if not numbers:
        _let_argument_win(draft, pair.keys, (pair.argument, *pair.also_removed))
        return
    winner = next((key for key in numbers if draft.is_overwritten(key)), next(iter(numbers)))
    value = numbers[winner]
    for key, other in numbers.items():
        if other != value:
            text = (
                f"{draft.findings.place(key)} is {other!r} and {draft.findings.place(winner)} is {value!r}, and the Trainer has "
                f"one --{pair.argument} for both: {winner} wins, {key} becomes {value!r}. Set both to the same number."
            )
            draft.set_key(key, value)
            draft.decide(pair.argument, key, text, is_contradiction=True)
    _set_number(draft, pair.argument, winner, value)
    for name in pair.also_removed:
        if draft.given.find(name) is not None:
            draft.arguments = draft.arguments.without(name)
            text = (
                f"{draft.findings.place(winner)} is {value!r} and --{name} is given: {winner} wins, --{name} is removed. "
                f"{_argument_wins(winner)}"
            )
            draft.decide(name, winner, text, is_contradiction=True)


def _settle_betas(draft: ArgumentDraft) -> None:
    value = value_at(draft.config, BETAS_KEY)
    if value is None or value == AUTO:
        _let_argument_win(draft, (BETAS_KEY,), BETAS)
    elif isinstance(value, list) and len(value) == len(BETAS) and all(_is_legal(beta) for beta in value):
        for name, beta in zip(BETAS, value, strict=True):
            _set_number(draft, name, BETAS_KEY, beta)
    else:
        fix = "Write [0.9, 0.999], for example."
        draft.findings.problem(BETAS_KEY, render(value), f'a list of two numbers, or "{AUTO}"', fix)


def _set_number(draft: ArgumentDraft, argument: str, key: str, value: float) -> None:
    if draft.flag_number(argument) != value:
        draft.set_argument(argument, repr(value), key)


def _let_argument_win(draft: ArgumentDraft, keys: Sequence[str], names: Sequence[str]) -> None:
    """If an argument in ``names`` is given, set missing DeepSpeed ``keys`` to "auto"."""
    given = next((name for name in names if draft.given.find(name) is not None), None)
    for key in keys:
        if given is not None and value_at(draft.config, key) is None and _is_read(draft, key):
            draft.set_key(key, AUTO)
            text = f'{key} is missing, and DeepSpeed would take its own default: it becomes "{AUTO}", so that --{given} counts'
            draft.decide(given, key, text)


def _settle_length(draft: ArgumentDraft) -> None:
    """Set the scheduler's step count to "auto" if it differs from ``--max_steps``."""
    (key,) = LENGTH.keys  # the one key whose value the Trainer knows before it trains
    number = draft.key_number(key, 1, is_whole=True)
    asked = draft.flag_number(LENGTH.argument, is_whole=True)
    if number is None or asked == number:
        return
    length = (
        f"--{LENGTH.argument} is {asked}" if asked and asked > 0 else "the Trainer counts its steps itself"
    )
    text = (
        f'{draft.findings.place(key)} is {number} and {length}: the length of training wins, {key} becomes "{AUTO}". For the key '
        f"to win, pass --{LENGTH.argument} {number}."
    )
    draft.set_key(key, AUTO)
    draft.decide(LENGTH.argument, key, text, is_contradiction=True)


def _settle_precision(draft: ArgumentDraft) -> None:
    said: dict[str, Any] = {}
    for precision in _PRECISIONS:
        key = f"{precision}.enabled"
        value = value_at(draft.config, key)
        if value is not None and value != AUTO and not isinstance(value, bool):
            fix = "Write true or false, without quotes."
            draft.findings.problem(key, render(value), f'true, false or "{AUTO}"', fix)
            return
        said[precision] = value if isinstance(value, bool) else None
    _settle_both_precisions(draft, said)
    for precision, other in zip(_PRECISIONS, reversed(_PRECISIONS), strict=True):
        key, names = f"{precision}.enabled", (precision, f"{precision}_full_eval")
        asked = [name for name in names if draft.given.truth(name)]
        if said[precision] and not asked:
            draft.set_argument(precision, "True", key)
        elif said[precision] is False or (said[precision] is None and said[other]):
            winner = key if said[precision] is False else f"{other}.enabled"
            for name in asked:
                draft.set_argument(name, "False", winner)
        elif said[precision] is None:
            _let_argument_win(draft, (key,), asked)


def _settle_both_precisions(draft: ArgumentDraft, said: dict[str, Any]) -> None:
    """If fp16 and bf16 are both on, keep the overwritten one, or record a problem.

    ``said`` maps ``fp16`` and ``bf16`` to the config's value: true, false or None.
    """
    if not all(said.values()):
        return
    overwritten = [precision for precision in _PRECISIONS if draft.is_overwritten(f"{precision}.enabled")]
    if len(overwritten) != 1:
        draft.findings.problem(
            "bf16.enabled", "true, and fp16.enabled is true too", "one precision", "Keep one of the two."
        )
        return
    (winner,) = overwritten
    (loser,) = set(_PRECISIONS) - {winner}
    key, place = f"{loser}.enabled", draft.findings.place
    text = (
        f"{place(key)} is true and {place(f'{winner}.enabled')} is true: the overwrite wins, {key} becomes false. For {loser} to "
        f"win, set overwrite_deepspeed_args: {{{winner}: {{enabled: false}}}}."
    )
    said[loser] = False
    draft.set_key(key, False)
    draft.decide(loser, key, text, is_contradiction=True)


def _is_read(draft: ArgumentDraft, key: str) -> bool:
    """Return whether DeepSpeed would read the key, given the type of its section."""
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


def _argument_wins(key: str) -> str:
    return f"For the argument to win, set overwrite_deepspeed_args: {{{nested_form(key.split('.'), AUTO)}}}."


def _is_legal(number: Any, minimum: float | None = None, *, is_whole: bool = False) -> bool:
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
        return False
    return (not is_whole or number == int(number)) and (minimum is None or number >= minimum)


def _expected(minimum: float | None, *, is_whole: bool) -> str:
    kind = "a whole number" if is_whole else "a number"
    return kind if minimum is None else f"{kind} of at least {minimum:g}"


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _as_yaml(number: float) -> str:
    """Return a number as YAML 1.1 needs it: ``1.0e-3``, because ``1e-3`` is text."""
    text = repr(int(number) if number == int(number) else number)
    mantissa, separator, exponent = text.partition("e")
    return f"{mantissa}{'' if '.' in mantissa else '.0'}e{exponent}" if separator else text
