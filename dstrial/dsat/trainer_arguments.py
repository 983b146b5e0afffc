"""Make a Trainer script's command line and its DeepSpeed config agree. Pure: values in, values out.

Source of what has to agree: transformers 4.56 and 5.23 ``integrations/deepspeed.py``, which refuses to train otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dstrial.config.command_line import CommandLine
from dstrial.config.deepspeed_source import DeepSpeedSource
from dstrial.config.saved_run import SavedRun
from dstrial.dsat import trainer_numbers, trainer_precision
from dstrial.dsat.decisions import Decision, Outcome
from dstrial.dsat.trainer_batch import MICRO_FLAG, STEPS_FLAG, reconcile_batch
from dstrial.dsat.trainer_draft import Draft
from dstrial.errors import ConfigError

CONFIG_FLAG = "deepspeed"
"""Argument of the Trainer with the path of its DeepSpeed config."""

ARGUMENTS = (
    CONFIG_FLAG,
    MICRO_FLAG,
    STEPS_FLAG,
    *trainer_numbers.ARGUMENTS,
    *trainer_precision.ARGUMENTS,
)
"""Fields of ``TrainingArguments`` that are looked at."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReconciledArguments:
    """A command line and a DeepSpeed config that a Trainer accepts together.

    Attributes:
        arguments: the command line; ``--deepspeed`` is still missing or the user's.
        config: the effective DeepSpeed config, which shares nothing with the source's.
        decisions: what became of every pair of an argument and a key.
    """

    arguments: CommandLine
    config: dict[str, Any]
    decisions: tuple[Decision, ...]

    def pointing_to(self, path: str) -> list[str]:
        """Return the words of the command line with ``--deepspeed`` naming the effective config."""
        return [*self.arguments.with_value(CONFIG_FLAG, path).words]

    @property
    def contradictions(self) -> tuple[Decision, ...]:
        """Those that had to change something that the user wrote."""
        return tuple(decision for decision in self.decisions if decision.outcome.is_contradiction)


def reconcile(
    arguments: Sequence[str], source: DeepSpeedSource, world_size: int, *, resumed: SavedRun | None = None
) -> ReconciledArguments:
    """Bring the arguments of a Trainer script and a DeepSpeed config together.

    Args:
        arguments: words behind the script's name; not changed.
        source: the DeepSpeed config with its overwrites, and where each value stands.
        world_size: ranks that train.
        resumed: the checkpoint of this very run that it goes on from, whose batch is kept; None for a new run.

    Raises:
        ConfigError: with everything that has no solution: batch sizes, values that are no numbers, abbreviated flags.
    """
    draft = Draft(CommandLine.of(arguments), source)
    _require_flags(draft)
    draft.findings.raise_if_any()
    _settle_path(draft)
    try:
        reconcile_batch(draft, world_size, resumed)
    except ConfigError as error:
        draft.findings.problems.extend(error.problems)
    trainer_numbers.reconcile_numbers(draft)
    trainer_precision.reconcile_precision(draft)
    if draft.key_value("zero_optimization") is None:
        draft.set_key("zero_optimization.stage", 0)
        text = "zero_optimization is missing, which Accelerate refuses: it becomes {stage: 0}, which is DeepSpeed's default"
        draft.decide("", "zero_optimization.stage", Outcome.KEY_SET, text)
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
        draft.decide(CONFIG_FLAG, "", Outcome.ARGUMENT_SET, text)
    elif draft.source.path is not None and Path(given).resolve() == draft.source.path.resolve():
        text = f"--{CONFIG_FLAG} and hyperparameters.deepspeed_config name the same file; the effective copy takes its place"
        draft.decide(CONFIG_FLAG, "", Outcome.EQUAL, text)
    else:
        draft.decide(
            CONFIG_FLAG,
            "",
            Outcome.ARGUMENT_CHANGED,
            f"--{CONFIG_FLAG} is {given} and hyperparameters.deepspeed_config is {draft.source.label}: the hyperparameter wins. "
            f"For the argument to win, set hyperparameters.deepspeed_config: {given}.",
        )
