"""``determined.pytorch.deepspeed._deepspeed_trial`` with dstrial's classes."""

from __future__ import annotations

import os
from typing import Any

from dstrial import DeepSpeedTrial, Trainer

__all__ = ["DeepSpeedTrial", "DeepSpeedTrialController"]


class DeepSpeedTrialController:
    """Determined's class that trains a trial, implemented with dstrial's ``Trainer``.

    Args:
        trial_inst: the trial.
        context: the trial's context.
        arguments: other arguments of Determined's class. Arguments of ``Trainer.fit`` are passed on. The others (metric, steps
            completed, batch size) are ignored, because dstrial reads these values elsewhere.

    Source: ``determined/pytorch/deepspeed/_deepspeed_trial.py:44`` (0.38.1).
    """

    _FIT_NAMES = (
        "checkpoint_period",
        "validation_period",
        "reporting_period",
        "max_length",
        "latest_checkpoint",
        "checkpoint_policy",
        "step_zero_validation",
        "test_mode",
        "profiling_enabled",
    )

    def __init__(self, trial_inst: Any, context: Any, **arguments: Any) -> None:
        assert isinstance(trial_inst, DeepSpeedTrial), "DeepSpeedTrialController needs a DeepSpeedTrial"
        self.trial = trial_inst
        self.context = context
        self._arguments = {
            name: arguments[name] for name in self._FIT_NAMES if arguments.get(name) is not None
        }

    @classmethod
    def pre_execute_hook(cls, trial_seed: int, distributed_backend: Any) -> None:
        """Create the process group and seed random states.

        Create no process group if ``DET_MANUAL_INIT_DISTRIBUTED`` is set. ``distributed_backend`` is ignored. Ranks: all,
        collectively.
        """
        del distributed_backend
        import deepspeed

        from dstrial.trainer import seed_everything

        if not os.environ.get("DET_MANUAL_INIT_DISTRIBUTED"):
            deepspeed.init_distributed(auto_mpi_discovery=False)
        seed_everything(trial_seed)

    def run(self) -> None:
        """Call ``Trainer.fit``. Ranks: all, collectively."""
        Trainer(self.trial, self.context).fit(**self._arguments)
