"""Reporter: makes a training loop written with Accelerate a trial.

It counts optimizer steps, reports metrics, saves and loads through the accelerator, stops where all ranks agree to, and
goes on from a checkpoint on any number of ranks. The loop itself stays the script's.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
import types
from collections.abc import Iterator, Mapping
from typing import Any

from determined import pytorch

from dstrial.config import overwrite_deepspeed_config
from dstrial.config.deepspeed_source import MAIN_KEY
from dstrial.config.saved_run import RESUME_VARIABLE, given_settings
from dstrial.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    TrialContractError,
)
from dstrial.integrations.accelerate.accelerated import Accelerated, prepared_engines, require_all_ranks
from dstrial.integrations.accelerate.loaders import length_of, require_micro_batch, warn_of_unrepeatable_order
from dstrial.integrations.accelerate.plan import Plan
from dstrial.integrations.accelerate.reports import Reports
from dstrial.integrations.extras import require
from dstrial.local.experiment_file import read_experiment
from dstrial.local.mirror import MirroredTrainContext
from dstrial.local.run_directory import TEST_VARIABLE, RunState
from dstrial.local.train_context import LocalTrainContext
from dstrial.loop.agreement import AgreementPoints, StopReason
from dstrial.loop.boundaries import Boundary, due, total_batches
from dstrial.loop.callbacks import Callbacks
from dstrial.loop.checkpointing import Checkpointing
from dstrial.loop.events import EventFiles
from dstrial.loop.metrics import MetricWindow, combine
from dstrial.loop.progress import Progress
from dstrial.loop.resumed_run import trial_id_of
from dstrial.loop.saving import Saving
from dstrial.ranks.identity import identify
from dstrial.surroundings import cluster_info
from dstrial.trainer import init

logger = logging.getLogger("dstrial.integrations.accelerate")


class Reporter:
    """What an Accelerate loop tells dstrial, and asks it.

    Example::

        accelerator = Accelerator()
        with Reporter(accelerator) as reporter:
            model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
            reporter.resume()
            for batch in reporter.batches(loader):
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                reporter.step({"loss": loss})
                if reporter.should_validate:
                    reporter.report_validation(evaluate(model))

    A batch is one optimizer step. Under a master or on a cluster everything goes there; otherwise it is kept in a run
    directory, as for ``dstrial.init``. At the end there is always a checkpoint.

    Args:
        accelerator: the script's, made but not necessarily prepared; it uses DeepSpeed.
        length: how long to train, ``Batch(int)`` or ``Epoch(int)``; the searcher's length if left out.
        exp_conf: experiment config, for off a cluster; what ``dstrial.launch --config`` was given if left out.
        hparams: hyperparameters, likewise.
        run_dir: where an off-cluster run keeps its files; a new directory below ``./runs`` if left out.

    Raises:
        MissingExtraError: accelerate is not installed.

    Source: accelerate 1.15.
    """

    def __init__(
        self,
        accelerator: Any,
        *,
        length: pytorch.TrainUnit | None = None,
        exp_conf: Mapping[str, Any] | None = None,
        hparams: Mapping[str, Any] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        require("accelerate", extra="huggingface", who="dstrial.integrations.accelerate")
        known = None if cluster_info() is not None else read_experiment()
        if known is not None:
            exp_conf = known.config if exp_conf is None else exp_conf
            hparams = known.hyperparameters if hparams is None else hparams
        self._accelerator = accelerator
        self._asked_length = length
        self._exp_conf = None if exp_conf is None else dict(exp_conf)
        self._hparams = None if hparams is None else dict(hparams)
        self._run_dir = run_dir
        self._stack = contextlib.ExitStack()
        self._info = cluster_info()
        # Known to the loop only when batches() sees the loader, so that a checkpoint keeps it beside the counters.
        self._progress = Progress(epoch_length=None)
        self._epoch_length: int | None = None
        self._window = MetricWindow("reporter.step")
        self._window_start = 0
        self._window_seconds = 0.0
        self._mark_s = 0.0
        self._due: set[Boundary] = set()
        self._stopped: StopReason | None = None
        self._batches_total: int | None = None
        self._is_resumed = False
        self._has_pending_random_states = False
        self._has_batch_to_finish = False

    # ---- the block -----------------------------------------------------------------------------------

    def __enter__(self) -> Reporter:
        """Set up the core context and seed everything.

        Raises:
            RankError: the accelerator does not see the ranks that were launched.
            TrialContractError: it does not use DeepSpeed.

        Ranks: all, collectively.
        """
        require_all_ranks(self._accelerator, identify(os.environ))
        with contextlib.ExitStack() as stack:
            self._context = stack.enter_context(
                init(hparams=self._hparams, exp_conf=self._exp_conf, run_dir=self._run_dir)
            )
            self._core = self._context._core
            self._distributed = self._context.distributed
            self._is_chief = bool(self._distributed.rank == 0)
            self._agreements = AgreementPoints(self._distributed, self._wish_to_stop)
            self._events = EventFiles(self._context)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        """Save what is not saved, wait for the last checkpoint, and say how training ended. Ranks: all, collectively."""
        is_leaving = isinstance(error, SystemExit) and not error.code
        if error is not None and not is_leaving:
            if self._is_resumed:
                self._saving.close()
            self._stack.__exit__(kind, error, traceback)
            return
        with self._stack:
            if self._is_resumed:
                try:
                    self._end()
                finally:
                    self._saving.close()

    def _end(self) -> None:
        if self._progress.batches_trained and not self._progress.checkpoint_is_current:
            self.save()
        self._saving.finish()
        self._events.upload()
        is_complete = self._stopped is None
        if not self._is_chief:
            return
        if is_complete and self._progress.batches_trained:
            self._reports.progress(self._progress.batches_trained, self._batches_total)
            self._core.train.report_progress(1.0)
        self._core.train.set_status(
            "completed" if self._stopped is None else f"stopped: {self._stopped.value}"
        )
        if self._info is not None and self._stopped is StopReason.SIGNAL:
            # To the master, exit code 0 without this means that the trial is complete.
            self._core.preempt.acknowledge_preemption_signal()
        if self._context._own_run is not None and self._stopped is not None:
            self._context._own_run.end_attempt(RunState.STOPPED)

    # ---- what the script asks ------------------------------------------------------------------------

    @property
    def core_context(self) -> Any:
        """Determined's Core API: the cluster's, or on a run directory."""
        return self._core

    @property
    def hparams(self) -> dict[str, Any]:
        """The trial's hyperparameters; empty if nobody gave any."""
        return dict(self._context.get_hparams() or {}) if self._context._hparams is not None else {}

    @property
    def batches_trained(self) -> int:
        """Optimizer steps since the start of the run, over all resumes."""
        return self._progress.batches_trained

    @property
    def batches_total(self) -> int | None:
        """Length of the run in batches; None before ``batches`` where it is counted in epochs."""
        return self._batches_total

    @property
    def epoch_idx(self) -> int:
        """Epoch of the batch to train next, from 0; 0 before ``batches`` knows the loader."""
        return self._progress.batches_trained // self._epoch_length if self._epoch_length else 0

    @property
    def should_validate(self) -> bool:
        """Whether it is time to validate the weights of now, the same on all ranks."""
        wanted = {Boundary.VALIDATE} if self._stopped is not None else {Boundary.VALIDATE, Boundary.END}
        return bool(self._due & wanted) and not self._progress.validation_is_current

    @property
    def should_stop(self) -> bool:
        """Whether training is over, at its length or because it was asked to stop; the same on all ranks."""
        return self._stopped is not None or Boundary.END in self._due

    @property
    def stopped(self) -> StopReason | None:
        """Why training stopped before its length; None if it did not."""
        return self._stopped

    # ---- starting and going on -----------------------------------------------------------------------

    def resume(self) -> int:
        """Go on from the newest checkpoint of the run, if there is one; call it after ``accelerator.prepare``.

        Weights, optimizer, schedulers, registered objects, counters and random states are the checkpoint's; on another
        number of ranks, or in another ZeRO stage, they are brought into the new layout. A checkpoint of another trial gives its
        weights only.

        Returns:
            Batches trained so far; 0 for a new run.

        Raises:
            TrialContractError: nothing is prepared yet, or an engine is not DeepSpeed's.
            CheckpointError: the checkpoint cannot be loaded; training never starts anew then.
            ConfigError: the DeepSpeed config cannot be right for these ranks, or asks for another batch than the run's.

        Ranks: all, collectively.
        """
        context, accelerator = self._context, self._accelerator
        if self._is_resumed:
            raise TrialContractError(
                "reporter.resume() is called a second time; expected one call after accelerator.prepare. Remove the second."
            )
        for engine_idx, engine in enumerate(prepared_engines(accelerator)):
            context.wrap_model_engine(engine)
            # What Accelerate was given has all sizes solved for these ranks, or taken from the script.
            context._given_settings[engine_idx] = self._as_given(engine_idx)
        adapter = context._adapters[0]
        accelerator.gradient_accumulation_steps = adapter.micro_batches_per_batch
        size = adapter.micro_batch_size * adapter.micro_batches_per_batch * adapter.data_parallel_world_size
        self._plan = Plan.from_config(
            context._exp_conf or {},
            global_batch_size=size,
            length=self._asked_length,
            is_test=os.environ.get(TEST_VARIABLE) == "1",
        )
        self._records_per_batch = size
        self._reports = Reports(self._core, self._events, self._plan)
        saved_as = Accelerated(accelerator)
        is_mirrored = isinstance(self._core.train, MirroredTrainContext)
        trial_id = trial_id_of(self._info, is_mirrored=is_mirrored)
        parts = (saved_as, context, Callbacks({}), self._progress, self._window, trial_id)
        self._checkpointing = Checkpointing(*parts)
        self._saving = Saving(
            *parts, self._checkpointing.current_layouts, in_background=self._plan.saves_in_background
        )
        self._is_resumed = True
        self._load(self._checkpoint_to_resume(is_mirrored=is_mirrored))
        self._count_total()
        if isinstance(self._core.train, (LocalTrainContext, MirroredTrainContext)):
            self._core.train.rewind_to(self._progress.batches_trained)
        self._agreements.start(self._progress.batches_trained)
        self._mark_s = time.monotonic()
        if self._is_chief:
            self._core.train.set_status("training")
        return self._progress.batches_trained

    def _as_given(self, engine_idx: int) -> dict[str, Any]:
        """Return the batch sizes as the experiment gives them, with which a later resume compares its config."""
        context = self._context
        given = context._given_hparams or {}
        source = given.get(MAIN_KEY)
        if engine_idx or not isinstance(source, (str, Mapping)):
            return context._given_settings[engine_idx]
        try:
            merged = overwrite_deepspeed_config(
                source if isinstance(source, str) else dict(source),
                dict(given.get("overwrite_deepspeed_args") or {}),
            )
        except ConfigError:
            return context._given_settings[engine_idx]
        own = context._given_settings[engine_idx]
        kinds = {key: value for key, value in own.items() if isinstance(value, str)}
        return {**kinds, **given_settings(merged)}

    def _checkpoint_to_resume(self, *, is_mirrored: bool) -> str | None:
        asked = os.environ.get(RESUME_VARIABLE)
        if self._info is not None:
            latest: str | None = self._info.latest_checkpoint
            return latest or (asked if is_mirrored else None)
        if asked != "latest":
            return asked or None
        newest = self._core.checkpoint.newest()
        if newest is None:
            raise CheckpointNotFoundError(
                f"the run {self._core.run_directory.path} has no complete checkpoint; expected one to resume from. Start a "
                "new run, without resuming."
            )
        return str(newest.uuid)

    def _load(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        context = self._context
        before = self._micro_batch_before()
        loop_state, continues = self._checkpointing.restore(checkpoint, None)
        self._accelerator.step = 0
        if not continues:
            return
        now = context._adapters[0].micro_batch_size
        if not self._accelerator.split_batches:
            require_micro_batch(self._accelerator._dataloaders, before, now)
        self._window_start = int(loop_state.get("window_start", self._progress.batches_trained))
        self._window_seconds = float(loop_state.get("window_seconds", 0.0))
        self._epoch_length = loop_state.get("epoch_length")
        self._checkpointing.restore_random_states()
        self._has_pending_random_states = True
        if self._is_chief:
            logger.info(
                "resumed from checkpoint %s at batch %d on %d ranks",
                checkpoint,
                self._progress.batches_trained,
                context.distributed.size,
            )

    def _micro_batch_before(self) -> int | None:
        resumed = self._context._resumed
        return None if resumed is None else resumed.saved.engines[0].micro_batch_size

    def _set_epoch_length(self, epoch_length: int) -> None:
        """Take over how many batches the loader has.

        Raises:
            CheckpointError: it had another number when the checkpoint was written.
        """
        if self._epoch_length not in (None, epoch_length):
            raise CheckpointError(
                f"the checkpoint was written with epochs of {self._epoch_length} batches, and the training loader now has "
                f"{epoch_length}; expected the same records and batch size. Restore them, or start a new run."
            )
        self._epoch_length = epoch_length
        self._count_total()

    def _count_total(self) -> None:
        length = self._plan.require_length()
        is_known = isinstance(length, pytorch.Batch) or self._epoch_length is not None
        self._batches_total = total_batches(length, self._epoch_length) if is_known else None
        if self._batches_total is not None and self._progress.batches_trained >= self._batches_total:
            self._due.add(Boundary.END)

    # ---- the loop ------------------------------------------------------------------------------------

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield micro batches, epoch after epoch, from where the run stands until it is over.

        Records that were trained before a resume are skipped. Checkpoints that are due are saved between two items, after
        what the script did with the first.

        Args:
            loader: what ``accelerator.prepare`` made of the training loader; it has a length.

        Raises:
            DataError: it has no length, or no micro batch.
            TrialContractError: ``resume`` was not called.

        Ranks: all, collectively.
        """
        self._require_resumed("batches()")
        steps = self._context._adapters[0].micro_batches_per_batch
        length = length_of(loader)
        self._set_epoch_length(-(-length // steps))
        warn_of_unrepeatable_order(loader, is_chief=self._is_chief)
        while not self.should_stop:
            epoch, done = divmod(self._progress.batches_trained, -(-length // steps))
            this_epoch = self._accelerator.skip_first_batches(loader, done * steps) if done else loader
            this_epoch.set_epoch(epoch)
            for item in this_epoch:
                if self._has_pending_random_states:
                    # Starting the loader has drawn random numbers that the uninterrupted run did not draw.
                    self._checkpointing.restore_random_states()
                    self._has_pending_random_states = False
                yield item
                if self._between_batches():
                    break

    def step(self, metrics: Mapping[str, Any] | None = None) -> bool:
        """Tell of one micro batch; call it after every ``accelerator.accumulate`` block.

        Counts a batch where the accelerator has made an optimizer step. Training metrics are averaged over the micro batches
        of all ranks and reported every ``scheduling_unit`` batches. Between reports and points of agreement
        nothing is communicated and no device is synchronised.

        Args:
            metrics: metric name -> value of this micro batch: number, array or tensor; the same names every time.

        Returns:
            Whether an optimizer step was made.

        Raises:
            TrialContractError: ``resume`` was not called, or the names of the metrics change.

        Ranks: all, equally often.
        """
        self._require_resumed("step()")
        if metrics:
            self._window.add(metrics)
        if not self._accelerator.sync_gradients:
            return False
        self._progress.batches_trained += 1
        batches = self._progress.batches_trained
        total = math.inf if self._batches_total is None else self._batches_total
        self._due = due(self._plan.periods, batches, total, self._epoch_length)  # type: ignore[arg-type] # inf: no end
        self._has_batch_to_finish = True
        is_alone = self._agreements.is_alone and self._agreements.is_wished()
        if self._due or batches >= self._agreements.next_batch or is_alone:
            self._exchange()
        return True

    def _exchange(self) -> None:
        """Agree on stopping, and in the same exchange report metrics and hear of the save under way. Ranks: all."""
        batches = self._progress.batches_trained
        reports = Boundary.REPORT in self._due or (Boundary.END in self._due and batches > self._window_start)
        share = self._window.totals() if reports and len(self._window) else None
        self._window_seconds += time.monotonic() - self._mark_s
        agreement = self._agreements.agree(batches, (share, self._saving.status()))
        self._saving.settle([status for _, status in agreement.shares])
        if reports:
            averages = combine([share for share, _ in agreement.shares], "reporter.step")
            if self._is_chief:
                num_batches = batches - self._window_start
                self._reports.training(
                    dict(averages), batches, num_batches, self._records_per_batch, self._window_seconds
                )
            self._events.upload(at_once=False)
            self._window.reset()
            self._window_seconds = 0.0
            self._window_start = batches
        if self._is_chief:
            self._reports.progress(self._progress.batches_trained, self._batches_total)
        self._mark_s = time.monotonic()
        if agreement.stop is not None and Boundary.END not in self._due:
            self._stopped = agreement.stop
            if self._is_chief:
                logger.warning(
                    "stopping after batch %d (%s), with a checkpoint", batches, agreement.stop.value
                )

    def _between_batches(self) -> bool:
        """Save what is due once the script has done its part of a batch; says whether training is over. Ranks: all."""
        if not self._has_batch_to_finish:
            return False
        self._has_batch_to_finish = False
        is_due = Boundary.CHECKPOINT in self._due or self.should_stop
        if is_due and not self._progress.checkpoint_is_current:
            self.save()
        if self._due - {Boundary.REPORT}:
            self._agreements.start(self._progress.batches_trained)
            self._mark_s = time.monotonic()
        return self.should_stop

    def _require_resumed(self, what: str) -> None:
        if not self._is_resumed:
            raise TrialContractError(
                f"reporter.{what} is called before reporter.resume(); expected the checkpoint of the run to be loaded first. "
                "Add reporter.resume() after accelerator.prepare(...)."
            )

    # ---- reports and checkpoints of the script's own --------------------------------------------------

    def report_training(self, metrics: Mapping[str, Any]) -> None:
        """Report training metrics now, beside what ``step`` reports: the mean over ranks of each.

        Args:
            metrics: metric name -> value on this rank: number, array or tensor.

        Ranks: all, collectively (one ``allgather``).
        """
        self._require_resumed("report_training()")
        averages = self._reports.mean_over_ranks(metrics, "report_training")
        if self._is_chief:
            self._reports.training(averages, self._progress.batches_trained)

    def report_validation(self, metrics: Mapping[str, Any]) -> None:
        """Report validation metrics of the weights of now: the mean over ranks of each. Saves if the policy says so.

        Args:
            metrics: metric name -> value on this rank: number, array or tensor. What ``gather_for_metrics`` has made the
                same on all ranks stays what it is.

        Raises:
            TrialContractError: the searcher's metric is not among them, or is no number.

        Ranks: all, collectively.
        """
        self._require_resumed("report_validation()")
        averages = self._reports.mean_over_ranks(metrics, "report_validation")
        self._reports.require_searcher_metric(averages)
        progress = self._progress
        progress.last_validation = progress.batches_trained
        saves = self._is_chief and self._reports.validation(
            averages, progress.batches_trained, self.epoch_idx
        )
        self._events.upload()
        if self._distributed.broadcast(saves) and not progress.checkpoint_is_current:
            self.save()
        self._mark_s = time.monotonic()

    def save(self) -> str:
        """Save a checkpoint of now, between two optimizer steps; checksums, upload and registration happen behind the loop.

        Returns:
            Its uuid; it is complete when training goes on from the next save or ends.

        Raises:
            CheckpointError: it cannot be written, or the one before it was not completed.

        Ranks: all, collectively.
        """
        self._require_resumed("save()")
        if self._is_chief:
            self._core.train.set_status("checkpointing")
        uuid = self._saving.save({"window_seconds": self._window_seconds, "window_start": self._window_start})
        self._mark_s = time.monotonic()
        if self._is_chief:
            self._core.train.set_status("training")
        return uuid

    def _wish_to_stop(self) -> StopReason | None:
        if self._info is not None and self._is_chief and self._core.preempt.should_preempt():
            return StopReason.PREEMPTED
        signals = self._context._stop_signals
        return StopReason.SIGNAL if signals is not None and signals.requested is not None else None
