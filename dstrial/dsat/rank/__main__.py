"""Measure a trial class: ``python -m dstrial.dsat.rank --trial module:Trial``.

Experiment and hyperparameters come from Determined on a cluster, else from ``--config`` and ``--context-dir``. The search runs
this command, not the user.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrial.ranks.identity import identify

if TYPE_CHECKING:
    from dstrial.dsat.core.outcome import Measured
    from dstrial.dsat.rank.step_timer import StepTimer
    from dstrial.trial.context import DeepSpeedTrialContext
    from dstrial.trial.trial import DeepSpeedTrial


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure a trial class, and report the result. Ranks: all, collectively."""
    parser = argparse.ArgumentParser(prog="python -m dstrial.dsat.rank")
    parser.add_argument("--trial", required=True)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--context-dir", type=Path, default=Path())
    options = parser.parse_args(arguments)
    import dstrial.launch.imported_ahead  # noqa: F401  # already imported in a fork
    from dstrial.config.experiment_config.config import load_experiment
    from dstrial.dsat.rank.context import failures_reported, hyperparameters_of_trial, limits_from, report
    from dstrial.dsat.rank.step_timer import StepTimer
    from dstrial.engine.engine_hooks import observe_engines
    from dstrial.launch.trial_import import import_trial
    from dstrial.trainer import init
    from dstrial.trial.context import runtime_of

    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    exp_conf: dict[str, Any] | None = None
    hparams: dict[str, Any] | None = None
    if options.config is not None:
        slots = identify(os.environ).world_size
        experiment = load_experiment(options.config, options.context_dir, slots=slots)
        exp_conf, hparams = experiment.raw, experiment.hyperparameters
        os.chdir(options.context_dir)
    timer = StepTimer(limits_from(hparams if hparams is not None else hyperparameters_of_trial()))
    with failures_reported(timer):
        trial_class = import_trial(options.trial, Path())
        with init(hparams=hparams, exp_conf=exp_conf) as context, observe_engines(timer):
            measured = _measure(trial_class(context), context, timer)
            report(measured, runtime_of(context).core, int(measured.metrics["num_steps"]))


def _measure(trial: DeepSpeedTrial, context: DeepSpeedTrialContext, timer: StepTimer) -> Measured:
    """Train until ``timer`` is done, without validation, reports or checkpoints.

    Ranks: all, collectively.
    """
    from dstrial.dsat.rank.microbench import with_machine
    from dstrial.local.script_variables import SETTINGS_KEY
    from dstrial.loop.data.training import TrainingStream, agreed_epoch_length
    from dstrial.loop.loop import require_engine
    from dstrial.trial.context import runtime_of

    require_engine(trial, context)
    runtime = runtime_of(context)
    loader = trial.build_training_data_loader() if runtime.mpu.should_build_data_loader else None
    stream = TrainingStream(
        loader,
        runtime.adapter,
        context.distributed.rank,
        runtime.trial_seed or 0,
        runtime.repro_checks_disabled,
    )
    lengths = (runtime.mpu.should_build_data_loader, loader is not None, stream.epoch_length, None)
    epoch_length = runtime.epoch_length = agreed_epoch_length(context.distributed.allgather(lengths))
    iterator = stream.open(0)
    runtime.bind_training_iterator(iterator)
    runtime.set_training(True)
    try:
        for batch_idx in itertools.count():
            if timer.is_done:
                break
            runtime.current_batch_idx = batch_idx
            for _ in range(runtime.train_calls_per_batch):
                trial.train_batch(iterator, batch_idx // epoch_length if epoch_length else 0, batch_idx)
    finally:
        runtime.bind_training_iterator(None)
    return with_machine(timer.result(), context.get_hparams().get(SETTINGS_KEY), timer.dtype)


if __name__ == "__main__":
    main()
