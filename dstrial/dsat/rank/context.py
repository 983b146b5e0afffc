"""Measure the training loop of a trial, and report the result to the search."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import determined as det
import torch.distributed

from dstrial.dsat.core.outcome import Failure, FailureKind, Measured, classify, failure_line, outcome_to_json
from dstrial.dsat.rank.microbench import measure_machine
from dstrial.dsat.rank.statistics import SamplingLimits
from dstrial.dsat.rank.step_timer import MeasurementDone, NumericError, StepTimer
from dstrial.engine.engine_hooks import observe_engines
from dstrial.local.json_files import write_json_atomically
from dstrial.local.script_variables import (
    BENCHMARK_KEY,
    MEASURING_KEY,
    RESULT_VARIABLE,
    SETTINGS_KEY,
    measuring_hyperparameters,
)
from dstrial.ranks import process_group
from dstrial.visible_text import cut_text

_TIMER_ATTRIBUTE = "_dstrial_step_timer"  # of the core context: the timer that all blocks of a trial share


@contextlib.contextmanager
def dsat_reporting_context(core_context: Any, op: Any, steps_completed: int | None = None) -> Iterator[None]:
    """Measure the engine's steps in the block if a dsat search runs this trial.

    Outside a search the block just runs. When enough steps are measured, the metrics are reported as validation metrics, and
    ``op`` is completed. Then ``engine.step()`` raises ``SystemExit`` with status 0. If the loop ends earlier, the steps so far
    are reported. Then the end of the block raises ``SystemExit``, because the code after it belongs to a full training.

    The block may contain the whole loop, or one step or micro batch, as in Determined's example of the Core API. In the second
    case all blocks are measured together, and the loop must make enough steps.

    Args:
        core_context: the core context of ``determined.core.init``.
        op: the searcher's operation to complete; None if there is none.
        steps_completed: number of steps to report; by default, that of the engine.

    Ranks: all, collectively.
    """
    hparams = _hyperparameters_of_trial()
    if not hparams.get(MEASURING_KEY):
        yield
        return
    timer: StepTimer | None = getattr(core_context, _TIMER_ATTRIBUTE, None)
    if timer is None:
        names = {field.name for field in dataclasses.fields(SamplingLimits)}
        given = dict(hparams.get(SETTINGS_KEY) or {})
        timer = StepTimer(SamplingLimits(**{name: value for name, value in given.items() if name in names}))
        setattr(core_context, _TIMER_ATTRIBUTE, timer)
    num_before = timer.num_observed_steps
    with _failures_reported(timer):
        try:
            with observe_engines(timer):
                yield
        except MeasurementDone:
            _finish(timer, core_context, op, steps_completed)
            raise
        if timer.num_observed_steps - num_before > 1:
            _finish(timer, core_context, op, steps_completed)
            raise MeasurementDone(0)


def around_fit(core_context: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that measures ``Trainer.fit`` in its block.

    Ranks: all, collectively.
    """
    return dsat_reporting_context(core_context, None)


def _hyperparameters_of_trial() -> Mapping[str, Any]:
    """Return the hyperparameters of this process's trial; empty outside a trial."""
    if (measured := measuring_hyperparameters()) is not None:
        return measured
    info = det.get_cluster_info()
    return info.trial.hparams if info is not None and info.task_type == "TRIAL" else {}


def _report(measured: Measured, core_context: Any, steps_completed: int) -> None:
    """Report a measurement to the core context, and to a local search's result file.

    Ranks: any; only rank 0 reports.
    """
    if _rank() != 0:
        return
    metrics = outcome_to_json(measured)["metrics"]
    core_context.train.report_validation_metrics(steps_completed=steps_completed, metrics=metrics)
    path = os.environ.get(RESULT_VARIABLE)
    if path:
        write_json_atomically(Path(path), {"metrics": metrics})


@contextlib.contextmanager
def _failures_reported(timer: StepTimer) -> Iterator[None]:
    """Print exceptions of the block to standard error for the search; re-raise them."""
    try:
        yield
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in (0, None)):
            _report_failure(error, timer)
        raise


def _report_failure(error: BaseException, timer: StepTimer) -> None:
    failure = classify("".join(traceback.format_exception(error)), phase=timer.phase)
    if isinstance(error, NumericError):
        failure = Failure(FailureKind.NUMERIC, str(error), timer.phase)
    if isinstance(error, KeyboardInterrupt):
        failure = Failure(FailureKind.CANCELED, "interrupted", timer.phase)
    allocated = timer.allocated_bytes() if failure.kind is FailureKind.DEVICE_OOM else None
    message = cut_text(failure.message, 2000)  # logs split longer lines
    failure = dataclasses.replace(failure, message=message, rank=_rank(), allocated_bytes=allocated)
    sys.stderr.write(f"{failure_line(failure)}\n")
    sys.stderr.flush()


def _finish(timer: StepTimer, core_context: Any, op: Any, steps_completed: int | None) -> None:
    measured = timer.result()
    if (_hyperparameters_of_trial().get(SETTINGS_KEY) or {}).get(BENCHMARK_KEY):
        measured = Measured({**measured.metrics, **measure_machine(timer.dtype)})
    steps = steps_completed if steps_completed is not None else int(measured.metrics["num_steps"])
    _report(measured, core_context, steps)
    # A loop that ends by itself may have completed the operation, which must not be completed twice.
    if op is not None and _rank() == 0 and not getattr(op, "_completed", False):
        op.report_completed(measured.metrics["throughput"])
    # The process exits now: gloo's threads may abort if the group is destroyed at the interpreter's exit.
    process_group.keep()


def _rank() -> int:
    return (
        torch.distributed.get_rank()
        if torch.distributed.is_initialized()
        else int(os.environ.get("RANK", "0"))
    )
