"""Measure a DeepSpeedTrial: build it, train as in the loop, with a step timer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from dstrial.dsat.core.outcome import Measured
from dstrial.dsat.rank.microbench import with_machine
from dstrial.dsat.rank.step_timer import Mode, StepTimer
from dstrial.local.script_variables import SETTINGS_KEY
from dstrial.loop.data.training import CountingIterator, TrainingStream, agreed_epoch_length
from dstrial.loop.loop import require_engine
from dstrial.trial.context import DeepSpeedTrialContext, runtime_of
from dstrial.trial.trial import DeepSpeedTrial


def measure_trial(trial: DeepSpeedTrial, context: DeepSpeedTrialContext, timer: StepTimer) -> Measured:
    """Train until ``timer`` has enough; nothing is validated, reported or saved.

    The trial was built while ``observe_engines(timer)`` was entered; the timer measures bare steps, too.

    Ranks: all, collectively.
    """
    require_engine(trial, context)
    runtime = runtime_of(context)
    stream, epoch_length = _open_stream(trial, context)
    iterator = stream.open(0)
    runtime.bind_training_iterator(iterator)
    runtime.set_training(True)
    calls = range(runtime.train_calls_per_batch)
    is_repeating = False
    source: Iterator[Any] | None = iterator
    try:
        for batch_idx in itertools.count():
            if timer.is_done:
                break
            if timer.mode is Mode.BARE and not is_repeating:
                is_repeating = True
                source = _repeated(iterator)
                runtime.bind_training_iterator(source)
            runtime.current_batch_idx = batch_idx
            for _ in calls:
                trial.train_batch(source, batch_idx // epoch_length if epoch_length else 0, batch_idx)
    finally:
        runtime.bind_training_iterator(None)
    return with_machine(timer.result(), context.get_hparams().get(SETTINGS_KEY), timer.dtype)


def _open_stream(trial: DeepSpeedTrial, context: DeepSpeedTrialContext) -> tuple[TrainingStream, int | None]:
    runtime = runtime_of(context)
    reads = runtime.mpu.should_build_data_loader
    loader = trial.build_training_data_loader() if reads else None
    rank = context.distributed.rank
    stream = TrainingStream(
        loader, runtime.adapter, rank, runtime.trial_seed or 0, runtime.repro_checks_disabled
    )
    gathered = context.distributed.allgather((reads, loader is not None, stream.epoch_length, None))
    runtime.epoch_length = agreed_epoch_length(gathered)
    return stream, runtime.epoch_length


def _repeated(iterator: CountingIterator | None) -> Iterator[Any] | None:
    """Yield one micro batch forever, with no time to read; None on ranks without data."""
    return None if iterator is None else itertools.repeat(next(iterator))
