"""Start of a Trainer's trial: its facts, checks of its arguments, its checkpoint."""

from __future__ import annotations

import contextlib
import logging
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deepspeed import DeepSpeedEngine
from determined import core

from dstrial.config.dotted_keys import dstrial_section
from dstrial.engine.state import optimizer_settings
from dstrial.errors import CheckpointError, ConfigError
from dstrial.integrations.huggingface import arguments
from dstrial.integrations.huggingface.checkpoint_uploader import RunDescription
from dstrial.integrations.huggingface.context import TrialFacts, saved_run_of
from dstrial.integrations.huggingface.resume import OpenedCheckpoint, directory_for, load_engine, opened
from dstrial.loop.checkpoint_loader import settle_optimizer_settings

if TYPE_CHECKING:
    from transformers import TrainerState, TrainingArguments

logger = logging.getLogger("dstrial.integrations.huggingface")

_MODEL_ONLY = "args.save_only_model is True: checkpoints hold no optimizer, and a trial that is paused cannot go on from them"

_OWN_LOGGERS = "data.dstrial.loggers is not for Hugging Face's Trainer, which has loggers of its own: name them in args.report_to"

_NOT_OVERRIDDEN = (
    "data.dstrial.override_optimizer has no effect on this Trainer, whose optimizer settings are the checkpoint's: it needs "
    "DeepSpeed, and dstrial.integrations.huggingface.train(trainer, callback) in place of trainer.train()"
)


class Startup:
    """Checks a Trainer's arguments and opens the checkpoint, if there is one.

    ConfigError has all contradictions at once. Ranks: all, collectively.
    """

    def __init__(self, context: core.Context, args: TrainingArguments) -> None:
        self._distributed = context.distributed
        self.facts = TrialFacts.of(context)
        saved = saved_run_of(context)
        problems = arguments.problems_of(args, self.facts.searcher, saved, self._distributed.size)
        if problems:
            raise ConfigError(problems)
        if getattr(args, "save_only_model", False) and self._distributed.rank == 0:
            logger.warning(_MODEL_ONLY)
        if dstrial_section(self.facts.exp_conf).get("loggers") and self._distributed.rank == 0:
            logger.warning(_OWN_LOGGERS)
        self._given, self._limit = arguments.given_of(args), arguments.sizes_of(args)[0]
        if saved is not None and saved.engines and saved.engines[0].given:
            self._given, self._limit = dict(saved.engines[0].given), saved.engines[0].micro_batch_limit
        self._stack = contextlib.ExitStack()
        self._overrides = dstrial_section(self.facts.exp_conf).get("override_optimizer") is True
        self.opened: OpenedCheckpoint | None = None
        if self.facts.latest_checkpoint is not None:
            self.opened = self._stack.enter_context(
                opened(context, self.facts.latest_checkpoint, self.facts.trial_id, self.facts.exp_conf)
            )
            self._resumed_from = self._stack.enter_context(
                directory_for(self.opened, int(args.train_batch_size))
            )

    @property
    def checkpoint_path(self) -> str | None:
        """The directory from which the Trainer goes on; None for a trial that starts anew."""
        if self.opened is None or not self.opened.continues:
            return None
        return str(self._resumed_from)

    def run_description(self, user_data: Mapping[str, Any] | None) -> RunDescription:
        facts = self.facts
        return RunDescription(
            facts.trial_id, facts.exp_conf, facts.hparams, user_data, self._given, self._limit
        )

    def load_engine(self, engine: DeepSpeedEngine) -> None:
        """Load the checkpoint into a new engine. Ranks: all, collectively."""
        assert self.opened is not None, "there is a checkpoint to load"
        self._overrides = False
        before = optimizer_settings(engine)
        load_engine(engine, self.opened, self._distributed)
        is_chief = self._distributed.rank == 0
        settle_optimizer_settings(engine, before, self.facts.exp_conf, "Trainer", is_chief=is_chief)

    def require_resumed(self, step: int, *, is_attached: bool) -> None:
        """Refuse training that begins elsewhere than the checkpoint."""
        found = self.opened
        if found is None or (is_attached and not found.continues):
            return
        if not found.continues:
            raise CheckpointError(
                f"trainer.train() starts without the weights of checkpoint {found.uuid}, which is another trial's; expected "
                "this trial to begin with them. Write dstrial.integrations.huggingface.train(trainer, callback) in place "
                "of trainer.train()."
            )
        if step != found.step:
            raise CheckpointError(
                f"trainer.train() starts at step {step}; expected step {found.step} of checkpoint {found.uuid}, from which this "
                "trial goes on. Write dstrial.integrations.huggingface.train(trainer, callback) in place of trainer.train(), "
                "or trainer.train(resume_from_checkpoint=callback.checkpoint_path)."
            )
        if self._overrides and self._distributed.rank == 0:
            logger.warning(_NOT_OVERRIDDEN)

    def settle_best_model(self, state: TrainerState) -> None:
        """Forget a best model whose directory, an earlier attempt's, is gone.

        The Trainer expects it. Ranks: all, collectively (one exchange, only where there is a checkpoint to go on from).
        """
        best = state.best_model_checkpoint
        if self.checkpoint_path is None:
            return
        # transformers 5 has forgotten it already on the ranks that do not see it.
        found = self._distributed.allgather(None if best is None else pathlib.Path(best).is_dir())
        if all(found) or all(one is None for one in found):
            return
        if self._distributed.rank == 0:
            logger.warning(
                "the best model so far%s was an earlier attempt's file and is only among the stored checkpoints: it is not "
                "loaded at the end unless a better one comes",
                "" if best is None else f", {pathlib.Path(best).name},",
            )
        state.best_model_checkpoint = None

    def close(self) -> None:
        self._stack.close()
