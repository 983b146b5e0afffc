"""What became of a Trainer argument and the DeepSpeed key that means the same."""

from __future__ import annotations

import dataclasses
import enum


class Outcome(enum.Enum):
    """How the two were brought together."""

    EQUAL = "both say the same"
    ARGUMENT_SET = "the argument is added with the key's value"
    ARGUMENT_CHANGED = "they contradict each other: the argument is changed to the key's value"
    ARGUMENT_REMOVED = "they contradict each other: the argument is removed"
    KEY_SET = "the key is set, so that the argument has an effect"
    KEY_CHANGED = "they contradict each other: the key is changed"
    SOLVED = "solved by the batch equation"
    KEPT = "solved for the batch of the checkpoint that the run goes on from"
    TRAINER = "the Trainer fills it in from the argument, or from the argument's default"

    @property
    def is_contradiction(self) -> bool:
        """Whether two things that the user wrote could not both hold."""
        return self in (Outcome.ARGUMENT_CHANGED, Outcome.ARGUMENT_REMOVED, Outcome.KEY_CHANGED)


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """One argument or key, and what became of it.

    Attributes:
        argument: flag of the command line, ``--learning_rate``; empty where none is involved.
        key: dotted key of the DeepSpeed config; empty where none is involved.
        outcome: how they were brought together.
        text: a whole sentence for a person, with both values, which one wins and how to say otherwise.
    """

    argument: str
    key: str
    outcome: Outcome
    text: str
