"""``determined.pytorch.deepspeed`` with dstrial's classes.

Source of the names: ``determined/pytorch/deepspeed/__init__.py`` 0.38.1.
"""

from __future__ import annotations

from determined.pytorch.deepspeed._deepspeed_context import DeepSpeedTrialContext, overwrite_deepspeed_config
from determined.pytorch.deepspeed._deepspeed_trial import DeepSpeedTrial, DeepSpeedTrialController
from determined.pytorch.deepspeed._mpu import ModelParallelUnit, make_data_parallel_mpu, make_deepspeed_mpu
from determined.pytorch.deepspeed._trainer import Trainer, init

from dstrial import determined_imports

__all__ = [
    "DeepSpeedTrial",
    "DeepSpeedTrialContext",
    "DeepSpeedTrialController",
    "ModelParallelUnit",
    "Trainer",
    "init",
    "make_data_parallel_mpu",
    "make_deepspeed_mpu",
    "overwrite_deepspeed_config",
]

determined_imports.announce(__name__)
