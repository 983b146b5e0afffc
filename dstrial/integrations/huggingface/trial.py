"""Set up a Trainer script: core context, configuration, checkpoint to resume from."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deepspeed import DeepSpeedEngine
from determined import core

from dstrial.config.dotted_keys import dstrial_section
from dstrial.engine.state import optimizer_settings
from dstrial.errors import CheckpointError, CheckpointNotFoundError, ConfigError, ConfigProblem
from dstrial.integrations.huggingface import arguments
from dstrial.integrations.huggingface.checkpoints import RunDescription
from dstrial.integrations.huggingface.hf_args import keep_batch_sizes
from dstrial.integrations.huggingface.resume import OpenedCheckpoint, directory_for, load_engine, opened
from dstrial.local.run_directory import RUN_DIR_VARIABLE
from dstrial.local.script_variables import is_measuring, measuring_hyperparameters, read_experiment
from dstrial.local.train_context import LocalTrainContext
from dstrial.loop.checkpoint_loader import settle_optimizer_settings
from dstrial.ranks.accelerate_backend import show_ranks_to_accelerate
from dstrial.ranks.stop_signals import StopSignals
from dstrial.resume.locate import asked_checkpoint, resumed_run, trial_id_of
from dstrial.resume.metadata import RESUME_VARIABLE, SavedRun
from dstrial.runtime import RUNTIME_ATTRIBUTE, ProcessRuntime, cluster_info, core_context

if TYPE_CHECKING:
    from transformers import TrainerState, TrainingArguments

logger = logging.getLogger("dstrial.integrations.huggingface")

_MODEL_ONLY = "args.save_only_model is True: checkpoints hold no optimizer, and a trial that is paused cannot go on from them"

_OWN_LOGGERS = "data.dstrial.loggers is not for Hugging Face's Trainer, which has loggers of its own: name them in args.report_to"

_NOT_OVERRIDDEN = (
    "data.dstrial.override_optimizer has no effect on this Trainer, whose optimizer settings are the checkpoint's: it needs "
    "DeepSpeed, and dstrial.integrations.huggingface.train(trainer, callback) in place of trainer.train()"
)


@contextlib.contextmanager
def init(
    *, exp_conf: dict[str, Any] | None = None, run_dir: str | os.PathLike[str] | None = None
) -> Iterator[core.Context]:
    """Yield Determined's core context for a Trainer script, also without a master.

    Like :func:`dstrial.core_context`; on CPUs it also makes accelerate, which the Trainer uses, recognise all ranks.

    Args:
        exp_conf: experiment config, used only without a master. The default is the config of
            ``python -m dstrial.launch --config``.
        run_dir: run directory, used only without a master; by default a new directory under ``./runs``.

    Raises:
        RankIdentityError: environment variables contradict each other about this process's rank.

    Ranks: all, collectively.
    """
    known = read_experiment() if exp_conf is None else None
    if known is not None:
        exp_conf = {**known.config, "hyperparameters": known.hyperparameters}
    show_ranks_to_accelerate()
    with core_context(exp_conf=exp_conf, run_dir=run_dir) as made:
        yield made


@dataclasses.dataclass(frozen=True, slots=True)
class TrialFacts:
    """Configuration of a trial, and the checkpoint to resume from.

    Attributes:
        trial_id: id that the trial's checkpoints record.
        searcher: section ``searcher`` of the experiment config; empty if ``is_measuring``.
        exp_conf: the experiment config; {} if there is none.
        latest_checkpoint: the checkpoint to resume from; None for a new trial.
        signals: records SIGTERM and Ctrl-C as stop requests; None with a core context of ``det.core.init``.
        is_measuring: whether the autotuner (dsat) times training steps, so that nothing is evaluated or saved.
        resumed: the run that wrote ``latest_checkpoint``; None for a new run, or if only weights are loaded.
    """

    trial_id: int
    searcher: Mapping[str, Any]
    exp_conf: Mapping[str, Any]
    hparams: Mapping[str, Any]
    latest_checkpoint: str | None
    signals: StopSignals | None
    is_measuring: bool
    resumed: SavedRun | None

    @classmethod
    def of(cls, context: core.Context) -> TrialFacts:
        """Return the facts of the trial to which a core context belongs.

        ``context`` is dstrial's or Determined's.

        Raises:
            CheckpointNotFoundError: ``--resume latest`` was given, and the run has no checkpoint.
            ConfigError: ``dstrial run --resume`` was given, but the core context is not dstrial's.

        Ranks: all, collectively.
        """
        found: ProcessRuntime | None = getattr(context, RUNTIME_ATTRIBUTE, None)
        info = cluster_info() if found is None else found.info
        is_mirrored = info is not None and isinstance(context.train, LocalTrainContext)
        exp_conf = (info.trial._config if info is not None else None) or {}
        if found is not None and found.exp_conf is not None:
            exp_conf = found.exp_conf
        hparams = info.trial.hparams if info is not None else exp_conf.get("hyperparameters") or {}
        measures = is_measuring(measuring_hyperparameters() or hparams)
        latest = asked_checkpoint(info, None, is_mirrored=is_mirrored)
        if latest is None and info is not None and not is_mirrored:
            _require_no_named_checkpoint()
        if latest == "latest":
            latest = _newest_checkpoint(context)
        return cls(
            trial_id=trial_id_of(info, is_mirrored=is_mirrored),
            searcher={} if measures else exp_conf.get("searcher") or {},
            exp_conf=exp_conf,
            hparams=hparams,
            latest_checkpoint=latest,
            signals=None if found is None else found.signals,
            is_measuring=measures,
            resumed=resumed_run(context, info, None, is_mirrored=is_mirrored),
        )


def _newest_checkpoint(context: core.Context) -> str:
    found: str | None = None
    if context.distributed.rank == 0 and hasattr(context.checkpoint, "newest"):
        newest = context.checkpoint.newest()
        found = None if newest is None else str(newest.uuid)
    found = context.distributed.broadcast(found)
    if found is None:
        directory = getattr(context, "run_directory", None)
        run = "the run" if directory is None else f"the run {directory.path}"
        raise CheckpointNotFoundError(
            f"{run} has no complete checkpoint; expected one to resume from. Start a new run, without resuming."
        )
    return found


def _require_no_named_checkpoint() -> None:
    named = os.environ.get(RESUME_VARIABLE)
    if not named or not os.environ.get(RUN_DIR_VARIABLE):
        return
    raise ConfigError(
        [
            ConfigProblem(
                RESUME_VARIABLE,
                f"{named} with a core context of det.core.init(), which ignores it",
                "the core context of dstrial, which resumes from it",
                "Write `with dstrial.integrations.huggingface.init() as core_context:`.",
            )
        ]
    )


def hyperparameters(
    core_context: core.Context,
    arguments: Sequence[str] | None = None,
    hparams: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return hyperparameters with which a resumed run keeps its batch size.

    Pass the result to ``dstrial.dsat.get_hf_args_with_overwrites``, and only then parse the script's arguments. If a resumed run
    would have another total batch size, because the number of ranks has changed, ``overwrite_deepspeed_args`` in the result has
    three batch sizes that keep the total. Arguments that the user has changed are not overwritten; ``DetCallback`` rejects them.

    Args:
        core_context: the trial's core context.
        arguments: the script's command line, by default ``sys.argv[1:]``.
        hparams: hyperparameters, by default the trial's; not changed.

    Raises:
        ConfigError: the batch cannot be divided evenly among the ranks, or ``dstrial run --resume`` was given, but
            the core context is not dstrial's.
        CheckpointNotFoundError: ``--resume latest`` was given, and the run has no checkpoint.

    Ranks: all, collectively.
    """
    facts = TrialFacts.of(core_context)
    result: dict[str, Any] = copy.deepcopy(dict(facts.hparams if hparams is None else hparams))
    if facts.resumed is not None and facts.resumed.engines:
        words = sys.argv[1:] if arguments is None else arguments
        keep_batch_sizes(words, result, core_context.distributed.size, facts.resumed)
    return result


class Startup:
    """Checks a Trainer's arguments; if the run resumes, opens the checkpoint.

    Raises:
        ConfigError: the arguments contradict the experiment config, the number of ranks or the checkpoint.

    Ranks: all, collectively.
    """

    def __init__(self, context: core.Context, args: TrainingArguments) -> None:
        self._distributed = context.distributed
        self.facts = TrialFacts.of(context)
        saved = self.facts.resumed
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
        """The directory from which the Trainer resumes; None if it starts at step 0."""
        if self.opened is None or not self.opened.continues:
            return None
        return str(self._resumed_from)

    def run_description(self, user_data: Mapping[str, Any] | None) -> RunDescription:
        facts = self.facts
        return RunDescription(
            facts.trial_id, facts.exp_conf, facts.hparams, user_data, self._given, self._limit
        )

    def load_engine(self, engine: DeepSpeedEngine) -> None:
        """Load the opened checkpoint into a new engine. Ranks: all, collectively."""
        assert self.opened is not None, "there is a checkpoint to load"
        self._overrides = False
        before = optimizer_settings(engine)
        load_engine(engine, self.opened, self._distributed)
        is_chief = self._distributed.rank == 0
        settle_optimizer_settings(engine, before, self.facts.exp_conf, "Trainer", is_chief=is_chief)

    def require_resumed(self, step: int, *, is_attached: bool) -> None:
        """Raise CheckpointError if the Trainer has not loaded the checkpoint.

        ``step`` is the step at which training starts. ``is_attached``: whether ``huggingface.train`` runs the Trainer, which
        loads another trial's weights. A no-op if there is no checkpoint to resume from.
        """
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
        """Clear ``state.best_model_checkpoint`` if the directory is missing on any rank.

        The Trainer would otherwise try to load this directory at the end of training. A no-op in a new run. Ranks: all,
        collectively.
        """
        best = state.best_model_checkpoint
        if self.checkpoint_path is None:
            return
        # Where the directory is missing, transformers 5 has already set the attribute to None.
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
