"""``Reporter``: run a training loop written with Accelerate as a trial."""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed
from determined import pytorch

from dstrial.errors import TrialContractError
from dstrial.integrations import require
from dstrial.integrations.accelerate.accelerator import micro_batch_of, require_deepspeed_on_all_ranks
from dstrial.integrations.accelerate.progress_tracker import ProgressTracker
from dstrial.integrations.accelerate.trial_run import TrialRun
from dstrial.local.run_directory import RunState
from dstrial.local.script_variables import read_experiment
from dstrial.loop.sync_point import StopReason
from dstrial.ranks.identity import identify
from dstrial.runtime import cluster_info
from dstrial.trainer import init
from dstrial.trial.context import runtime_of


class Reporter:
    """Runs a training loop written with Accelerate as a trial. Needs accelerate 1.15.

    Example::

        accelerator = Accelerator()
        with Reporter(accelerator) as reporter:
            loader = DataLoader(records, batch_size=reporter.micro_batch_size(8), shuffle=True)
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

    A batch is one optimizer step. Reports and checkpoints go to the master (Determined's or dstrial's) that started the trial;
    without a master, they go to a run directory. Training always ends with a checkpoint.

    Args:
        accelerator: the script's accelerator, which must use DeepSpeed; ``prepare`` may be called later.
        length: how long to train, ``Batch(int)`` or ``Epoch(int)``; by default ``searcher.max_length`` of the experiment config.
        exp_conf: experiment config, used only without a master; by default that of ``dstrial.launch --config``.
        hparams: hyperparameters, used only without a master; by default those of ``dstrial.launch --config``.
        run_dir: run directory, used only without a master; by default a new directory below ``./runs``.
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
        self._info = cluster_info()
        known = None if self._info is not None else read_experiment()
        if known is not None:
            exp_conf = known.config if exp_conf is None else exp_conf
            hparams = known.hyperparameters if hparams is None else hparams
        self._accelerator = accelerator
        self._asked_length = length
        self._exp_conf = None if exp_conf is None else dict(exp_conf)
        self._hparams = None if hparams is None else dict(hparams)
        self._run_dir = run_dir
        self._stack = contextlib.ExitStack()
        self._tracker = ProgressTracker()
        self._run: TrialRun | None = None

    # ---- the block -----------------------------------------------------------------------------------

    def __enter__(self) -> Reporter:
        """Set up Determined's core context; seed random states. Ranks: all, collectively."""
        if torch.distributed.is_initialized() and torch.distributed.get_backend() == "fake":
            raise TrialContractError(
                "a loop with Reporter cannot be dry-run; expected a trial class, or a script that calls deepspeed.initialize."
            )
        require_deepspeed_on_all_ranks(self._accelerator, identify(os.environ), os.environ)
        with contextlib.ExitStack() as stack:
            self._context = stack.enter_context(
                init(hparams=self._hparams, exp_conf=self._exp_conf, run_dir=self._run_dir)
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        """Save a last checkpoint; report that training is complete or stopped.

        After an exception, only close the run. Ranks: all, collectively.
        """
        is_leaving = isinstance(error, SystemExit) and not error.code
        if error is not None and not is_leaving:
            try:
                if self._run is not None:
                    self._run.close(has_failed=True)
            finally:
                self._stack.__exit__(kind, error, traceback)
            return
        with self._stack:
            if self._run is None:
                return
            has_ended = False
            try:
                self._run.end()
                has_ended = True
            finally:
                self._run.close(has_failed=not has_ended)
            own_run = runtime_of(self._context).own_run
            if own_run is not None and self.stopped is not None:
                own_run.end_attempt(RunState.STOPPED)

    # ---- what the script asks ------------------------------------------------------------------------

    @property
    def core_context(self) -> Any:
        """Determined's core context; without a master, one that uses a run directory."""
        return runtime_of(self._context).core

    @property
    def hparams(self) -> dict[str, Any]:
        """The trial's hyperparameters; empty if there are none."""
        return dict(runtime_of(self._context).hparams or {})

    def micro_batch_size(self, own: int | None = None) -> int:
        """Return the DeepSpeed config's micro batch size, else the script's size ``own``.

        ``own`` is used if the config's value is missing or ``"auto"``.

        Pass the result as ``batch_size`` to the loader, so that a resumed run keeps its total batch size on any number of ranks.

        Raises:
            ConfigError: neither the config nor ``own`` has a size.
        """
        return micro_batch_of(self._accelerator, own)

    @property
    def batches_trained(self) -> int:
        """Number of optimizer steps of the run so far, including those before a resume."""
        return self._tracker.batches_trained

    @property
    def batches_total(self) -> int | None:
        """Total batches of the run; None if the length is in epochs of unknown length.

        The length of an epoch is known after the call of ``batches()`` or after a resume from a checkpoint.
        """
        return self._tracker.batches_total

    @property
    def epoch_idx(self) -> int:
        """Index of the next batch's epoch, from 0; 0 before ``batches()`` in a new run."""
        return self._tracker.epoch_idx

    @property
    def should_validate(self) -> bool:
        """Whether a validation is due; equal on all ranks."""
        return self._tracker.needs_validation

    @property
    def should_stop(self) -> bool:
        """Whether training has reached its length or must stop; equal on all ranks."""
        return self._tracker.is_over

    @property
    def stopped(self) -> StopReason | None:
        """Why training stopped early; None while training or if it is complete."""
        return self._tracker.stopped

    # ---- the loop ------------------------------------------------------------------------------------

    def resume(self) -> int:
        """Resume from the run's checkpoint if there is one; call this after ``prepare``.

        Restores weights, optimizer, schedulers, registered objects, counters and random states. The state is resharded for
        another number of ranks or ZeRO stage. From another trial's checkpoint only the weights are loaded.

        Returns:
            Number of batches trained so far; 0 for a new run.

        Raises:
            CheckpointError: the checkpoint cannot be loaded.
            ConfigError: the DeepSpeed config is invalid for this number of ranks, or gives another batch size than the
                checkpoint's.

        Ranks: all, collectively.
        """
        if self._run is not None:
            raise TrialContractError(
                "reporter.resume() is called a second time; expected one call after accelerator.prepare. Remove the second."
            )
        self._run = TrialRun(self._accelerator, self._context, self._info, self._tracker, self._asked_length)
        self._run.start()
        return self._tracker.batches_trained

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield micro batches, epoch after epoch, until training ends.

        Skips records that were trained before a resume. Saves checkpoints between two micro batches. Without ``drop_last``, the
        last batch of an epoch may be smaller. ``loader`` must be prepared, and have the same length on every rank and at every
        resume. Ranks: all, collectively.
        """
        yield from self._resumed("batches()").batches(loader)

    def step(self, metrics: Mapping[str, Any] | None = None) -> bool:
        """Record one micro batch; call this after every ``accelerator.accumulate`` block.

        Returns whether this micro batch completed an optimizer step, which is one batch. ``metrics`` maps names, the same in
        every call, to numbers, arrays or tensors. Their means over the micro batches of all ranks are reported every
        ``scheduling_unit`` batches. Most calls neither communicate nor synchronise the device. Ranks: all, equally often.
        """
        return self._resumed("step()").step(metrics)

    # ---- reports and checkpoints of the script's own --------------------------------------------------

    def report_training(self, metrics: Mapping[str, Any]) -> None:
        """Report training metrics now, each as its mean over ranks.

        Ranks: all, collectively.
        """
        self._resumed("report_training()").report_training(metrics)

    def report_validation(self, metrics: Mapping[str, Any]) -> None:
        """Report validation metrics, each as its mean over ranks.

        Saves a checkpoint if ``checkpoint_policy`` of the experiment config asks for one. Ranks: all, collectively.
        """
        self._resumed("report_validation()").report_validation(metrics)

    def save(self) -> str:
        """Save a checkpoint between two optimizer steps; return its uuid.

        Checksums and upload run in the background and end at the latest when the next save begins or the run ends. Ranks: all,
        collectively.
        """
        return self._resumed("save()").save()

    def _resumed(self, what: str) -> TrialRun:
        if self._run is None:
            raise TrialContractError(
                f"reporter.{what} is called before reporter.resume(); expected the checkpoint of the run to be loaded first. "
                "Add reporter.resume() after accelerator.prepare(...)."
            )
        return self._run
