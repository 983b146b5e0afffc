"""List the DeepSpeed keys whose ``"auto"`` the Trainer or Accelerate replaces.

transformers' Trainer uses Accelerate, which rejects every ``"auto"`` that remains when Accelerate creates the engine.
With these libraries, an ``"auto"`` at a key that is not listed here is therefore an error.

Source: transformers 4.56 and 5.23 ``integrations/deepspeed.py`` (``trainer_config_process``, ``trainer_config_finalize``);
accelerate 1.11 and 1.15 ``utils/dataclasses.py`` (``DeepSpeedPlugin``), ``accelerator.py`` (``_prepare_deepspeed``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from dstrial.config.batch import AUTO, BATCH_KEYS, BatchSolution, solve_batch
from dstrial.config.command_line import CommandLine
from dstrial.config.experiment_config.entrypoint import ScriptSource
from dstrial.errors import ConfigError

DEFAULT_MICRO_BATCH = 8
"""Default of the Trainer's ``per_device_train_batch_size``, transformers 4.56 and 5.23."""

_TOTAL, _MICRO, _STEPS = BATCH_KEYS
MICRO_FLAG, STEPS_FLAG = "per_device_train_batch_size", "gradient_accumulation_steps"
SIZE_FLAGS = {_MICRO: MICRO_FLAG, _STEPS: STEPS_FLAG}
"""Batch size in a DeepSpeed config -> Trainer argument with the same meaning."""


@dataclasses.dataclass(frozen=True, slots=True)
class NumberPair:
    """A Trainer argument and the DeepSpeed keys that must have the same value."""

    argument: str
    keys: tuple[str, ...]  # dotted; if two keys differ and neither is overwritten, the first takes precedence
    also_removed: tuple[str, ...] = ()  # equivalent arguments, removed too if the key takes precedence


# Two arguments of the Trainer, and the DeepSpeed key with a list of both.
BETAS = ("adam_beta1", "adam_beta2")
BETAS_KEY = "optimizer.params.betas"
# For this pair the argument takes precedence; for `PAIRS` the DeepSpeed key does.
LENGTH = NumberPair("max_steps", ("scheduler.params.total_num_steps",))
PAIRS = (
    NumberPair("max_grad_norm", ("gradient_clipping",)),
    # DeepSpeed's WarmupLR and its like set the optimizer's learning rate from the first step on.
    NumberPair("learning_rate", ("scheduler.params.warmup_max_lr", "optimizer.params.lr")),
    NumberPair("adam_epsilon", ("optimizer.params.eps",)),
    NumberPair("weight_decay", ("optimizer.params.weight_decay",)),
    NumberPair(
        "warmup_steps",
        ("scheduler.params.warmup_num_steps",),
        also_removed=("warmup_ratio",),
    ),
)
_BY_BOTH = frozenset(
    {
        *BATCH_KEYS,
        "steps_per_print",
        "gradient_clipping",
        "fp16.enabled",
        "bf16.enabled",
        "optimizer.params.lr",
        "optimizer.params.weight_decay",
        *(
            f"scheduler.params.{name}"
            for name in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
        ),
        *(
            f"zero_optimization.{name}"
            for name in (
                "stage",
                "offload_optimizer.device",
                "offload_optimizer.nvme_path",
                "offload_param.device",
                "offload_param.nvme_path",
                "stage3_gather_16bit_weights_on_model_save",
                "reduce_bucket_size",
                "stage3_prefetch_bucket_size",
                "stage3_param_persistence_threshold",
            )
        ),
    }
)
"""Keys at which both the Trainer and Accelerate replace ``"auto"``."""

_BY_TRAINER = frozenset({"optimizer.params.eps", BETAS_KEY})
"""Keys at which the Trainer, but not Accelerate alone, replaces ``"auto"``."""


@dataclasses.dataclass(frozen=True, slots=True)
class AutoValues:
    """How a script's library (the Trainer or Accelerate) replaces ``"auto"``."""

    name: str  # the library, for messages
    is_trainer: bool  # True for the Trainer, False for Accelerate alone
    arguments: CommandLine  # passed to the script by the entrypoint

    @classmethod
    def of(cls, script: ScriptSource | None) -> AutoValues | None:
        """Return a script's ``AutoValues``; None if it uses neither of the libraries."""
        if script is None or script.library is None:
            return None
        is_trainer = script.library == "trainer"
        return cls("Hugging Face's Trainer" if is_trainer else "Accelerate", is_trainer, script.arguments)

    def fills_in(self, key: str) -> bool:
        """Return whether the library replaces ``"auto"`` at a dotted key."""
        return key in _BY_BOTH or (self.is_trainer and key in _BY_TRAINER)

    def solve(
        self, sizes: Mapping[str, object], num_replicas: int, where: Mapping[str, str]
    ) -> BatchSolution | None:
        """Return batch sizes for which DeepSpeed's batch equation holds.

        Returns None if the script uses Accelerate and the config has neither total nor micro batch size. The script's data
        loader then determines the micro batch size.

        Args:
            sizes: the batch sizes in the DeepSpeed config. A number there takes precedence over the script's command-line
                argument, which is ignored if it contradicts the number.
            num_replicas: data-parallel size.
            where: name of each size -> its ``file:line: key``, for messages.

        Raises:
            ConfigError: the batch equation has no solution.
        """
        total, micro, steps = (None if (size := sizes.get(key)) == AUTO else size for key in BATCH_KEYS)
        from_flags = [self._number(flag) if self.is_trainer else None for flag in (MICRO_FLAG, STEPS_FLAG)]
        if total is None and micro is None and from_flags[0] is None:
            if not self.is_trainer:
                return None
            from_flags[0] = DEFAULT_MICRO_BATCH
        micro_flag, steps_flag = from_flags
        for flags in ((micro_flag, steps_flag), (micro_flag, None), (None, steps_flag), (None, None)):
            attempt = (flags[0] if micro is None else micro, flags[1] if steps is None else steps)
            try:
                return solve_batch(total, *attempt, num_replicas, where=where)  # type: ignore[arg-type]  # what is no size is said so
            except ConfigError as error:
                problem = error
        raise problem

    def _number(self, flag: str) -> int | None:
        text = self.arguments.value(flag) or ""
        return int(text) or None if text.isdecimal() else None
