"""Numbers that a Trainer and DeepSpeed both know. Pure.

Clipping, learning rate, the optimizer's, warm-up, length.

One rule: a number in the DeepSpeed config, with its overwrites, wins over the argument, ``"auto"`` lets the argument win, and a
key that is missing is added as ``"auto"`` where DeepSpeed would otherwise take its own default instead of a given argument.

Source: transformers 4.56 and 5.23 ``integrations/deepspeed.py``, ``trainer_config_process`` and ``trainer_config_finalize``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dstrial.config.auto_values import BETAS, BETAS_KEY, LENGTH, PAIRS, NumberPair
from dstrial.config.batch import AUTO
from dstrial.config.deepspeed_schema import deepspeed_rules
from dstrial.config.diagnostics import render
from dstrial.integrations.huggingface.overwrites.draft import Draft, Resolution, as_text, auto_hint

ARGUMENTS = (
    *(name for pair in PAIRS for name in (pair.argument, *pair.also_removed)),
    *BETAS,
    LENGTH.argument,
)


def reconcile_numbers(draft: Draft) -> None:
    for pair in PAIRS:
        _reconcile(draft, pair)
    _reconcile_betas(draft)
    _reconcile_length(draft)


def _reconcile(draft: Draft, pair: NumberPair) -> None:
    numbers = {
        key: number
        for key in pair.keys
        if (number := draft.number_of_key(key, minimum=pair.minimum, is_whole=pair.is_whole)) is not None
    }
    if not numbers:
        names = (pair.argument, *pair.also_removed)
        _let_argument_win(draft, pair.argument, pair.keys, names, f"the default of --{pair.argument}")
        return
    winner = next((key for key in numbers if draft.is_overwritten(key)), next(iter(numbers)))
    value = numbers[winner]
    for key, other in numbers.items():
        if other != value:
            draft.set_key(key, value)
            draft.decide(
                pair.argument,
                key,
                Resolution.KEY_CHANGED,
                f"{draft.place(key)} is {as_text(other)} and {draft.place(winner)} is {as_text(value)}, and the Trainer has one "
                f"--{pair.argument} for both: {winner} wins, {key} becomes {as_text(value)}. Set both to the same number.",
            )
    _set_argument(draft, pair.argument, winner, value)
    for name in pair.also_removed:
        if draft.is_given(name):
            draft.remove_flag(name)
            draft.decide(
                name,
                winner,
                Resolution.ARGUMENT_REMOVED,
                f"{draft.place(winner)} is {as_text(value)} and --{name} is given: {winner} wins, --{name} is removed. "
                f"{auto_hint(winner)}",
            )


def _set_argument(draft: Draft, argument: str, key: str, value: float) -> None:
    asked = draft.number_of_flag(argument)
    if asked == value:
        draft.decide(argument, key, Resolution.EQUAL, f"--{argument} and {key} are both {as_text(value)}")
        return
    draft.set_flag(argument, as_text(value))
    if not draft.is_given(argument):
        draft.decide(
            argument,
            key,
            Resolution.ARGUMENT_SET,
            f"--{argument} {as_text(value)} is added, as {draft.place(key)} has it",
        )
    elif asked is not None:
        draft.decide(
            argument,
            key,
            Resolution.ARGUMENT_CHANGED,
            f"{draft.place(key)} is {as_text(value)} and --{argument} is {as_text(asked)}: {key} wins, --{argument} becomes "
            f"{as_text(value)}. {auto_hint(key)}",
        )


def _let_argument_win(
    draft: Draft, argument: str, keys: Iterable[str], names: Iterable[str], defaults: str
) -> None:
    """Leave keys without a number to the Trainer's ``names``, or its ``defaults``."""
    given = next((name for name in names if draft.is_given(name)), None)
    for key in keys:
        if draft.key_value(key) == AUTO:
            who = f"--{given}" if given else defaults
            text = f'{key} is "auto": the Trainer fills in {who}'
            draft.decide(given or argument, key, Resolution.TRAINER, text)
        elif draft.key_value(key) is None and given is not None and _is_read(draft, key):
            draft.set_key(key, AUTO)
            draft.decide(
                given,
                key,
                Resolution.KEY_SET,
                f'{key} is missing, and DeepSpeed would take its own default: it becomes "auto", so that --{given} has an effect',
            )


def _reconcile_betas(draft: Draft) -> None:
    value = draft.key_value(BETAS_KEY)
    if value is None or value == AUTO:
        _let_argument_win(draft, BETAS[0], (BETAS_KEY,), BETAS, f"the defaults of --{' and --'.join(BETAS)}")
        return
    is_pair = isinstance(value, list) and len(value) == len(BETAS)
    if not is_pair or any(isinstance(beta, bool) or not isinstance(beta, (int, float)) for beta in value):
        fix = "Write [0.9, 0.999], for example."
        draft.findings.problem(BETAS_KEY, render(value), f'a list of two numbers, or "{AUTO}"', fix)
        return
    for name, beta in zip(BETAS, value, strict=True):
        _set_argument(draft, name, BETAS_KEY, beta)


def _reconcile_length(draft: Draft) -> None:
    """Let the length of training, which the experiment gives, win over the schedule's."""
    (key,) = LENGTH.keys  # of what the Trainer knows before it trains
    number = draft.number_of_key(key, minimum=1, is_whole=True)
    asked = draft.number_of_flag(LENGTH.argument, is_whole=True)
    if number is None:
        if draft.key_value(key) == AUTO:
            text = f'{key} is "auto": the Trainer fills in the number of steps that it is going to train'
            draft.decide(LENGTH.argument, key, Resolution.TRAINER, text)
        return
    if asked == number:
        draft.decide(
            LENGTH.argument,
            key,
            Resolution.EQUAL,
            f"--{LENGTH.argument} and {key} are both {as_text(number)}",
        )
        return
    draft.set_key(key, AUTO)
    length = (
        f"--{LENGTH.argument} is {as_text(asked)}"
        if asked is not None and asked > 0
        else "the Trainer counts its steps itself"
    )
    draft.decide(
        LENGTH.argument,
        key,
        Resolution.KEY_CHANGED,
        f'{draft.place(key)} is {as_text(number)} and {length}: the length of training wins, {key} becomes "auto". For the key '
        f"to win, pass --{LENGTH.argument} {as_text(number)}.",
    )


def _is_read(draft: Draft, key: str) -> bool:
    """Whether DeepSpeed reads a missing key: it has the section, whose type takes it."""
    section, _, parameter = key.rpartition(".params.")
    if not section:
        return True
    kind = draft.key_value(f"{section}.type")
    rules = deepspeed_rules()
    table: Mapping[str, Mapping[str, object]] = (
        rules.optimizers if section == "optimizer" else rules.schedulers
    )
    if not isinstance(kind, str):
        return False
    rule = table.get(kind) or table.get(kind.lower())
    known = None if rule is None else rule.get("params")
    return isinstance(known, list) and parameter in known
