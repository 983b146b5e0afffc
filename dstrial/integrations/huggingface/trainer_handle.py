"""The Trainer of a callback: this package's ``train`` tells, others do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrial.errors import CheckpointError
from dstrial.integrations.huggingface import arguments

if TYPE_CHECKING:
    from transformers import TrainerState, TrainingArguments


class TrainerHandle:
    """Answers from the Trainer what callbacks are not told, else from its arguments.

    Attributes:
        trainer: None where it is not known.
    """

    def __init__(self) -> None:
        self.trainer: Any = None

    @property
    def is_known(self) -> bool:
        return self.trainer is not None

    def require(self, problem: str) -> None:
        """Refuse an unknown Trainer; ``problem`` says what needs it."""
        if not self.is_known:
            raise CheckpointError(
                f"{problem}. Write dstrial.integrations.huggingface.train(trainer, callback) in place of trainer.train()."
            )

    def train_batch_size(self, args: TrainingArguments, state: TrainerState) -> int:
        if self.is_known:
            return int(self.trainer.get_total_train_batch_size(args))
        micro = int(state.train_batch_size or args.train_batch_size)
        return micro * int(args.gradient_accumulation_steps) * int(args.world_size)

    def can_evaluate(self, args: TrainingArguments) -> bool:
        return self.trainer.eval_dataset is not None if self.is_known else arguments.evaluates(args)

    def has_one_evaluation_set(self) -> bool:
        """Whether an ended evaluation is all; of several sets, the next event tells."""
        return self.is_known and not isinstance(self.trainer.eval_dataset, dict)

    def owes_evaluation(
        self, args: TrainingArguments, state: TrainerState, *, is_last: bool, leaves: bool
    ) -> bool:
        """Whether the resumed step still needs its evaluation.

        It does if the evaluation was left, which it may be with ``leaves``, or if nothing is left to train (``is_last``).
        """
        if not self.is_known or not self.can_evaluate(args) or arguments.has_evaluated(state):
            return False
        return is_last or (leaves and arguments.is_evaluation_due(args, state))
