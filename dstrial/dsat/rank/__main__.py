"""Measure a trial class: ``python -m dstrial.dsat.rank --trial module:Trial``.

The ranks measure their trial's hyperparameters and report the result; with ``--tasks`` they are persistent ranks, which measure
one task of a search after the other. Experiment and hyperparameters come from Determined on a cluster, else from ``--config``
and ``--context-dir``. The search runs this command, not the user.
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
    """Measure a trial class once, or the tasks of a search. Ranks: all, collectively."""
    parser = argparse.ArgumentParser(prog="python -m dstrial.dsat.rank")
    parser.add_argument("--trial", required=True)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--context-dir", type=Path, default=Path())
    parser.add_argument("--tasks", type=Path, help="directory of the files of persistent ranks")
    parser.add_argument("--search", help="PID:START_TICKS of the search that writes the tasks")
    options = parser.parse_args(arguments)
    import dstrial.launch.imported_ahead  # noqa: F401  # already imported in a fork
    from dstrial.config.experiment_config.config import load_experiment

    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    tasks = None if options.tasks is None else options.tasks.absolute()
    exp_conf: dict[str, Any] | None = None
    hparams: dict[str, Any] | None = None
    if options.config is not None:
        experiment = load_experiment(
            options.config, options.context_dir, slots=identify(os.environ).world_size
        )
        exp_conf, hparams = experiment.raw, experiment.hyperparameters
        os.chdir(options.context_dir)
    if tasks is not None:
        from dstrial.dsat.rank.rank_server import serve

        serve(options.trial, exp_conf, tasks, options.search)
    _measure_once(options.trial, exp_conf, hparams)


def _measure_once(trial: str, exp_conf: dict[str, Any] | None, hparams: dict[str, Any] | None) -> None:
    from dstrial.dsat.rank.context import failures_reported, hyperparameters_of_trial, limits_from, report
    from dstrial.dsat.rank.rank_server import measure_trial
    from dstrial.dsat.rank.step_timer import StepTimer
    from dstrial.engine.engine_hooks import observe_engines
    from dstrial.launch.trial_import import import_trial
    from dstrial.trainer import init
    from dstrial.trial.context import runtime_of

    settings = hparams if hparams is not None else hyperparameters_of_trial()
    timer = StepTimer(limits_from(settings))
    with failures_reported(timer):
        trial_class = import_trial(trial, Path())
        with init(hparams=hparams, exp_conf=exp_conf) as context, observe_engines(timer):
            measured = measure_trial(trial_class(context), context, timer)
            report(measured, runtime_of(context).core, int(measured.metrics["num_steps"]))


if __name__ == "__main__":
    main()
