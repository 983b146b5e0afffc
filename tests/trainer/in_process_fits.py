"""Train the small trials on one rank in the test's process."""

import json

from small_runs import TIMINGS, complete_steps, deepspeed_config

from dstrial import Batch, Trainer, init

EXP_CONF = {
    "name": "in process",
    "searcher": {"name": "single", "metric": "validation_loss", "smaller_is_better": True},
    "reproducibility": {"experiment_seed": 3},
}


def trial_class(**overrides):
    """Return a subclass of ``DataParallelTrial`` with these methods."""
    import small_trials

    return type("MyTrial", (small_trials.DataParallelTrial,), overrides)


class Outcome:
    def __init__(self, context, result):
        self.directory = context._core.run_directory
        self.result = result

    def rows(self, group):
        rows = map(json.loads, self.directory.metrics_path.read_text().splitlines())
        return {row["steps_completed"]: row["metrics"] for row in rows if row["group"] == group}

    def checkpoints(self):
        return complete_steps(self.directory.path)


def fit(trial=None, hparams=None, exp_conf=EXP_CONF, run_dir=None, **arguments):
    arguments.setdefault("max_length", Batch(4))
    all_hparams = {"deepspeed_config": deepspeed_config(), **(hparams or {})}
    with init(hparams=all_hparams, exp_conf=exp_conf, run_dir=run_dir) as context:
        result = Trainer((trial or trial_class())(context), context).fit(**arguments)
        return Outcome(context, result)


def values(rows):
    return {steps: {k: v for k, v in row.items() if k not in TIMINGS} for steps, row in rows.items()}
