"""What every rank of a measuring trial runs.

``python -m dstrial.dsat.rank --trial model_def:MyTrial``.

On a cluster everything else comes from there; off a cluster from ``--config`` and ``--context-dir``. Not meant to be typed.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dstrial.ranks.identity import identify


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure a trial class by this trial's hyperparameters. Ranks: all, collectively."""
    parser = argparse.ArgumentParser(prog="python -m dstrial.dsat.rank")
    parser.add_argument("--trial", required=True)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--context-dir", type=Path, default=Path())
    options = parser.parse_args(arguments)
    import dstrial.launch.imported_ahead  # noqa: F401  # which a fork has imported
    from dstrial.dsat.rank.context import failures_reported, hyperparameters_of_trial, limits_from, report
    from dstrial.dsat.rank.measure import measure_trial
    from dstrial.dsat.rank.step_timer import StepTimer
    from dstrial.engine.engine_hooks import observe_engines
    from dstrial.launch.trial_import import import_trial
    from dstrial.trainer import init
    from dstrial.trial.context import runtime_of

    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    exp_conf: dict[str, Any] | None = None
    hparams: dict[str, Any] | None = None
    if options.config is not None:
        from dstrial.config import load_experiment

        slots = identify(os.environ).world_size
        experiment = load_experiment(options.config, options.context_dir, slots=slots)
        exp_conf, hparams = experiment.raw, experiment.hyperparameters
        os.chdir(options.context_dir)
    settings = hparams if hparams is not None else hyperparameters_of_trial()
    timer = StepTimer(limits_from(settings), measures_bare=True)
    with failures_reported(timer):
        trial_class = import_trial(options.trial, Path())
        with init(hparams=hparams, exp_conf=exp_conf) as context, observe_engines(timer):
            trial = trial_class(context)
            measured = measure_trial(trial, context, timer)
            report(measured, runtime_of(context).core, int(measured.metrics["num_steps"]))


if __name__ == "__main__":
    main()
