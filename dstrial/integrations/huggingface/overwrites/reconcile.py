"""Make a Trainer's command line and its DeepSpeed config agree. Pure.

Source of what has to agree: transformers 4.56 and 5.23 ``integrations/deepspeed.py``, which refuses to train otherwise;
``trainer_config_process``; accelerate 1.11 and 1.15 ``DeepSpeedPlugin.set_mixed_precision``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dstrial.config.auto_values import MICRO_FLAG, STEPS_FLAG
from dstrial.config.batch import AUTO
from dstrial.config.command_line import CommandLine
from dstrial.config.deepspeed_source import DeepSpeedSource
from dstrial.config.diagnostics import render
from dstrial.errors import ConfigError
from dstrial.integrations.huggingface.overwrites import numbers
from dstrial.integrations.huggingface.overwrites.batch import reconcile_batch
from dstrial.integrations.huggingface.overwrites.draft import Decision, Draft, Resolution, auto_hint
from dstrial.resume.metadata import SavedRun

CONFIG_FLAG = "deepspeed"
"""Argument of the Trainer with the path of its DeepSpeed config."""

_PRECISIONS = ("fp16", "bf16")
_PRECISION_ARGUMENTS = tuple(
    name for precision in _PRECISIONS for name in (precision, f"{precision}_full_eval")
)
ARGUMENTS = (
    CONFIG_FLAG,
    MICRO_FLAG,
    STEPS_FLAG,
    *numbers.ARGUMENTS,
    *_PRECISION_ARGUMENTS,
)
"""Fields of ``TrainingArguments`` that are looked at."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReconciledArguments:
    """A command line and a DeepSpeed config that a Trainer accepts together."""

    arguments: CommandLine  # `--deepspeed` is still missing or the user's
    config: dict[str, Any]  # effective; shares nothing with the source's
    decisions: tuple[Decision, ...]

    def pointing_to(self, path: str) -> list[str]:
        return [*self.arguments.with_value(CONFIG_FLAG, path).words]

    @property
    def contradictions(self) -> tuple[Decision, ...]:
        """Decisions that changed something that the user wrote."""
        return tuple(decision for decision in self.decisions if decision.outcome.is_contradiction)


def reconcile(
    arguments: Sequence[str], source: DeepSpeedSource, world_size: int, *, resumed: SavedRun | None = None
) -> ReconciledArguments:
    """Make the arguments of a Trainer script agree with a DeepSpeed config.

    ``arguments`` are the words behind the script's name; ``resumed`` is this very run's checkpoint, whose batch is kept.
    ConfigError has every problem: batch sizes without a solution, values that are no numbers, abbreviated flags.
    """
    draft = Draft(CommandLine.of(arguments), source)
    _require_flags(draft)
    draft.findings.raise_if_any()
    _settle_path(draft)
    try:
        reconcile_batch(draft, world_size, resumed)
    except ConfigError as error:
        draft.findings.problems.extend(error.problems)
    numbers.reconcile_numbers(draft)
    _reconcile_precision(draft)
    if draft.key_value("zero_optimization") is None:
        draft.set_key("zero_optimization.stage", 0)
        text = "zero_optimization is missing, which Accelerate refuses: it becomes {stage: 0}, which is DeepSpeed's default"
        draft.decide("", "zero_optimization.stage", Resolution.KEY_SET, text)
    draft.findings.raise_if_any()
    return ReconciledArguments(draft.arguments, draft.config, tuple(draft.decisions))


def _require_flags(draft: Draft) -> None:
    words = draft.arguments.words
    if len(words) == 1 and not words[0].startswith("-") and words[0].endswith((".json", ".yaml", ".yml")):
        draft.problem(
            words[0],
            "a file with the arguments",
            "the arguments themselves, which DeepSpeed's config has to agree with",
            "Pass them as --flag value.",
        )
    for written, name in draft.arguments.abbreviations(ARGUMENTS):
        draft.problem(written, "an abbreviation", f"the whole name --{name}", f"Write --{name}.")


def _settle_path(draft: Draft) -> None:
    given = draft.arguments.value(CONFIG_FLAG)
    if given is None:
        text = f"--{CONFIG_FLAG} is added with the effective copy of {draft.source.label}"
        draft.decide(CONFIG_FLAG, "", Resolution.ARGUMENT_SET, text)
    elif draft.source.path is not None and Path(given).resolve() == draft.source.path.resolve():
        text = f"--{CONFIG_FLAG} and hyperparameters.deepspeed_config name the same file; the effective copy takes its place"
        draft.decide(CONFIG_FLAG, "", Resolution.EQUAL, text)
    else:
        draft.decide(
            CONFIG_FLAG,
            "",
            Resolution.ARGUMENT_CHANGED,
            f"--{CONFIG_FLAG} is {given} and hyperparameters.deepspeed_config is {draft.source.label}: the hyperparameter wins. "
            f"For the argument to win, set hyperparameters.deepspeed_config: {given}.",
        )


def _reconcile_precision(draft: Draft) -> None:
    said: dict[str, bool | None] = {}
    for precision in _PRECISIONS:
        key = f"{precision}.enabled"
        value = draft.key_value(key)
        if value is not None and value != AUTO and not isinstance(value, bool):
            fix = "Write true or false, without quotes."
            draft.findings.problem(key, render(value), f'true, false or "{AUTO}"', fix)
            return
        said[precision] = value if isinstance(value, bool) else None
    _settle_both_precisions(draft, said)
    on = next((precision for precision in _PRECISIONS if said[precision]), None)
    for precision in _PRECISIONS:
        other = said[precision]
        if other is None and on is not None and on != precision:
            other = False
        _reconcile(draft, precision, other, on)


def _settle_both_precisions(draft: Draft, said: dict[str, bool | None]) -> None:
    """Let an overwrite decide between two precisions; without one the user has to."""
    if not all(said.values()):
        return
    keys = [f"{precision}.enabled" for precision in _PRECISIONS]
    overwritten = [draft.is_overwritten(key) for key in keys]
    if sum(overwritten) != 1:
        fix = "Keep one of the two."
        draft.findings.problem(keys[1], "true, and fp16.enabled is true too", "one precision", fix)
        return
    winner, loser = (_PRECISIONS[overwritten.index(flag)] for flag in (True, False))
    said[loser] = False
    draft.set_key(f"{loser}.enabled", False)
    draft.decide(
        loser,
        f"{loser}.enabled",
        Resolution.KEY_CHANGED,
        f"{draft.place(f'{loser}.enabled')} is true and {draft.place(f'{winner}.enabled')} is true: the overwrite wins, "
        f"{loser}.enabled becomes false. Say so in overwrite_deepspeed_args: {{{loser}: {{enabled: false}}}}.",
    )


def _reconcile(draft: Draft, precision: str, said: bool | None, on: str | None) -> None:
    key, full = f"{precision}.enabled", f"{precision}_full_eval"
    value = draft.key_value(key)
    asked = [name for name in (precision, full) if draft.truth_of_flag(name)]
    if said is None:
        if value == AUTO:
            who = " and ".join(f"--{name}" for name in asked) or f"the default of --{precision}"
            draft.decide(precision, key, Resolution.TRAINER, f'{key} is "auto": the Trainer fills in {who}')
        elif asked:
            draft.set_key(key, AUTO)
            draft.decide(
                precision,
                key,
                Resolution.KEY_SET,
                f'{key} is missing: it becomes "auto", so that --{asked[0]} has an effect',
            )
    elif said and asked:
        draft.decide(precision, key, Resolution.EQUAL, f"--{asked[0]} and {key} are both true")
    elif said:
        draft.set_flag(precision, "True")
        is_given = draft.is_given(precision)
        outcome = Resolution.ARGUMENT_CHANGED if is_given else Resolution.ARGUMENT_SET
        text = f"--{precision} True is added, as {draft.place(key)} has it"
        if is_given:
            text = (
                f"{draft.place(key)} is true and --{precision} is false: {key} wins, --{precision} becomes True. "
                f"{auto_hint(key)}"
            )
        draft.decide(precision, key, outcome, text)
    else:
        for name in asked:
            draft.set_flag(name, "False")
            winner = key if isinstance(value, bool) or on is None else f"{on}.enabled"
            draft.decide(
                name,
                key,
                Resolution.ARGUMENT_CHANGED,
                f"{draft.place(winner)} is {render(draft.key_value(winner))} and --{name} is given: {winner} wins, "
                f"--{name} becomes False. {auto_hint(winner)}",
            )
        if not asked and isinstance(value, bool):
            draft.decide(precision, key, Resolution.EQUAL, f"--{precision} is not given and {key} is false")
