"""``Reporter``: makes a training loop written with Accelerate a trial."""

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
from dstrial.integrations.accelerate.accelerator_checkpoint import require_deepspeed_on_all_ranks
from dstrial.integrations.accelerate.loaders import micro_batch_of
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
    """Makes a training loop written with Accelerate a trial. Needs accelerate 1.15.

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

    A batch is one optimizer step. Under a master or on a cluster everything goes there; otherwise it is kept in a run
    directory, as for ``dstrial.init``. At the end there is always a checkpoint.

    Args:
        accelerator: the script's, made but not necessarily prepared; it uses DeepSpeed.
        length: how long to train, ``Batch(int)`` or ``Epoch(int)``; the searcher's length if left out.
        exp_conf: experiment config, for off a cluster; that of ``dstrial.launch --config`` if left out.
        hparams: hyperparameters, likewise.
        run_dir: where an off-cluster run keeps its files; a new directory below ``./runs`` if left out.
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
        """Set up the core context and seed everything. Ranks: all, collectively."""
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
        """Save the rest, wait for it, report how training ended. Ranks: all, collectively."""
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
        """Determined's Core API: the cluster's, or on a run directory."""
        return runtime_of(self._context).core

    @property
    def hparams(self) -> dict[str, Any]:
        """The trial's hyperparameters; empty if nobody gave any."""
        return dict(runtime_of(self._context).hparams or {})

    def micro_batch_size(self, own: int | None = None) -> int:
        """Return the DeepSpeed config's micro batch; if that is ``"auto"``, ``own``.

        With it a resumed run keeps its batch on other ranks.
        """
        return micro_batch_of(self._accelerator, own)

    @property
    def batches_trained(self) -> int:
        """Optimizer steps since the start of the run, over all resumes."""
        return self._tracker.batches_trained

    @property
    def batches_total(self) -> int | None:
        """The run's batches; None before ``batches`` where it is counted in epochs."""
        return self._tracker.batches_total

    @property
    def epoch_idx(self) -> int:
        """Epoch of the batch to train next, from 0; 0 before ``batches`` knows the loader."""
        return self._tracker.epoch_idx

    @property
    def should_validate(self) -> bool:
        """Whether it is time to validate the weights of now, the same on all ranks."""
        return self._tracker.needs_validation

    @property
    def should_stop(self) -> bool:
        """Whether training reached its length or was asked to stop; alike on all ranks."""
        return self._tracker.is_over

    @property
    def stopped(self) -> StopReason | None:
        """Why training stopped before its length; None if it did not."""
        return self._tracker.stopped

    # ---- the loop ------------------------------------------------------------------------------------

    def resume(self) -> int:
        """Go on from the run's newest checkpoint; call it after ``accelerator.prepare``.

        Weights, optimizer, schedulers, registered objects, counters and random states are the checkpoint's; on another
        number of ranks, or in another ZeRO stage, they are brought into the new layout. A checkpoint of another trial gives its
        weights only.

        Returns:
            Batches trained so far; 0 for a new run.

        Raises:
            CheckpointError: the checkpoint cannot be loaded; training never starts anew then.
            ConfigError: the DeepSpeed config cannot be right for these ranks, or asks for another batch than the run's.

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
        """Yield micro batches, epoch after epoch, from now until the run's end.

        Records that were trained before a resume are skipped. A loader that drops its last records gives whole batches, as many
        on any number of ranks; otherwise the last one of an epoch may be smaller. Checkpoints that are due are saved between
        two items, after the script's work on the first. ``loader`` is prepared, and has a length, the same on every rank and at
        every resume.

        Ranks: all, collectively.
        """
        yield from self._resumed("batches()").batches(loader)

    def step(self, metrics: Mapping[str, Any] | None = None) -> bool:
        """Record one micro batch; call it after every ``accelerator.accumulate`` block.

        Counts a batch if the accelerator has made an optimizer step, and returns whether it has. Training metrics (name ->
        number, array or tensor; the same names every time) are averaged over the micro batches of all ranks and reported every
        ``scheduling_unit`` batches. Between reports and agreements nothing is communicated and no device is synchronised.

        Ranks: all, equally often.
        """
        return self._resumed("step()").step(metrics)

    # ---- reports and checkpoints of the script's own --------------------------------------------------

    def report_training(self, metrics: Mapping[str, Any]) -> None:
        """Report each metric's mean over ranks now. Ranks: all, collectively."""
        self._resumed("report_training()").report_training(metrics)

    def report_validation(self, metrics: Mapping[str, Any]) -> None:
        """Report each validation metric's mean over ranks; save if the policy says so.

        Values that ``gather_for_metrics`` has made equal on all ranks stay as they are.

        Ranks: all, collectively.
        """
        self._resumed("report_validation()").report_validation(metrics)

    def save(self) -> str:
        """Save between two optimizer steps and return the uuid.

        Checksums and upload follow in the background; the checkpoint is complete and registered when the next save begins,
        or the run ends.

        Ranks: all, collectively.
        """
        return self._resumed("save()").save()

    def _resumed(self, what: str) -> TrialRun:
        if self._run is None:
            raise TrialContractError(
                f"reporter.{what} is called before reporter.resume(); expected the checkpoint of the run to be loaded first. "
                "Add reporter.resume() after accelerator.prepare(...)."
            )
        return self._run
