"""Values with which transformers' Trainer or Accelerate replaces ``"auto"``. Pure.

The Trainer uses Accelerate, which rejects every ``"auto"`` that remains when Accelerate creates the engine. With these libraries,
an ``"auto"`` at a key that is not listed here is therefore an error. Source: transformers 4.56 and 5.23
``integrations/deepspeed.py`` (``trainer_config_process``, ``trainer_config_finalize``); accelerate 1.11 and 1.15
``utils/dataclasses.py`` (``DeepSpeedPlugin``), ``accelerator.py`` (``_prepare_deepspeed``).
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


@dataclasses.dataclass(frozen=True, slots=True)
class NumberPair:
    """A Trainer argument and the DeepSpeed keys that must have the same value."""

    argument: str
    keys: tuple[str, ...]  # dotted; if two keys differ and neither is overwritten, the first takes precedence
    also_removed: tuple[str, ...] = ()  # equivalent arguments, removed too if the key takes precedence


BETAS = ("adam_beta1", "adam_beta2")
BETAS_KEY = "optimizer.params.betas"
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
_BY_TRAINER_ARGUMENT: Mapping[str, tuple[str, ...]] = {
    **{key: (pair.argument,) for pair in PAIRS for key in pair.keys},
    BETAS_KEY: BETAS,
    "fp16.enabled": ("fp16",),
    "bf16.enabled": ("bf16",),
}
_BY_TRAINER: Mapping[str, str] = {
    "scheduler.params.warmup_min_lr": "the Trainer fills in 0",
    "scheduler.params.total_num_steps": "the Trainer fills in the number of steps that it is going to train",
}
_HIDDEN_SIZE = "from the hidden size in the model's config"
_BY_HIDDEN_SIZE = (
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
)
_BY_PLUGIN: Mapping[str, str] = {
    "steps_per_print": "infinity",
    "zero_optimization.stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE, or 2",
    "zero_optimization.offload_optimizer.device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE, or none",
    "zero_optimization.offload_optimizer.nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH, or none",
    "zero_optimization.offload_param.device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE, or none",
    "zero_optimization.offload_param.nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH, or none",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL, or false",
}
_BY_ACCELERATE: Mapping[str, str] = {
    _TOTAL: "the product of the two others and the ranks",
    _MICRO: "the batch_size of the DataLoader that the script prepares",
    _STEPS: "Accelerator(gradient_accumulation_steps=...), or 1",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING, or 1.0",
    "optimizer.params.lr": "the lr of the script's DummyOptim",
    "optimizer.params.weight_decay": "the weight_decay of the script's DummyOptim",
    "scheduler.params.warmup_min_lr": "0, with the script's DummyScheduler",
    "scheduler.params.warmup_max_lr": "the lr of the script's DummyOptim, with its DummyScheduler",
    "scheduler.params.warmup_num_steps": "the warmup_num_steps of the script's DummyScheduler",
    "scheduler.params.total_num_steps": "the total_num_steps of the script's DummyScheduler",
    "fp16.enabled": "Accelerator(mixed_precision=...)",
    "bf16.enabled": "Accelerator(mixed_precision=...)",
}


@dataclasses.dataclass(frozen=True, slots=True)
class AutoValues:
    """Values with which a script's Trainer, or Accelerate alone, replaces ``"auto"``."""

    name: str  # for messages
    is_trainer: bool
    arguments: CommandLine  # passed to the script by the entrypoint

    @classmethod
    def of(cls, script: ScriptSource | None) -> AutoValues | None:
        """Return a script's ``"auto"`` values; None if no Trainer or Accelerate is used."""
        if script is None or script.library is None:
            return None
        is_trainer = script.library == "trainer"
        return cls("Hugging Face's Trainer" if is_trainer else "Accelerate", is_trainer, script.arguments)

    def says(self, key: str) -> str | None:
        """Return how the library replaces ``"auto"`` at a dotted key; None if it does not."""
        if key in _BY_PLUGIN:
            return f"Accelerate fills in {_BY_PLUGIN[key]}"
        if key in _BY_HIDDEN_SIZE:
            return f"{self._library} fills it in {_HIDDEN_SIZE}"
        if not self.is_trainer:
            return f"Accelerate fills in {_BY_ACCELERATE[key]}" if key in _BY_ACCELERATE else None
        if key == _TOTAL:
            return "the Trainer fills in the product of the two others and the ranks"
        if key in SIZE_FLAGS:
            default = f"{DEFAULT_MICRO_BATCH}" if key == _MICRO else "1"
            return self._from_arguments((SIZE_FLAGS[key],), default)
        if key in _BY_TRAINER_ARGUMENT:
            return self._from_arguments(_BY_TRAINER_ARGUMENT[key], None)
        return _BY_TRAINER.get(key)

    def solve(
        self, sizes: Mapping[str, object], num_replicas: int, where: Mapping[str, str]
    ) -> BatchSolution | None:
        """Return the batch sizes that solve DeepSpeed's batch equation.

        None if only the script knows the micro batch. ``sizes`` are the batch sizes in the DeepSpeed config; a number there
        takes precedence over the script's command-line argument. ``where`` maps the name of each size to its ``file:line: key``.
        """
        total, micro, steps = (None if (size := sizes.get(key)) == AUTO else size for key in BATCH_KEYS)
        from_flags = [self._number(flag) if self.is_trainer else None for flag in (MICRO_FLAG, STEPS_FLAG)]
        if total is None and micro is None and from_flags[0] is None:
            if not self.is_trainer:
                return None
            from_flags[0] = DEFAULT_MICRO_BATCH
        micro_flag, steps_flag = from_flags
        for asked in ((micro_flag, steps_flag), (micro_flag, None), (None, steps_flag), (None, None)):
            attempt = (asked[0] if micro is None else micro, asked[1] if steps is None else steps)
            try:
                return solve_batch(total, *attempt, num_replicas, where=where)  # type: ignore[arg-type]  # what is no size is said so
            except ConfigError as error:
                problem = error
        raise problem

    def _number(self, flag: str) -> int | None:
        text = self.arguments.value(flag) or ""
        return int(text) or None if text.isdecimal() else None

    @property
    def _library(self) -> str:
        return "the Trainer" if self.is_trainer else "Accelerate"

    def _from_arguments(self, names: tuple[str, ...], default: str | None) -> str:
        said = []
        for name in names:
            flag = self.arguments.find(name)
            if flag is not None:
                value = "true" if flag.value is None else flag.value
                said.append(f"--{name} ({value} in the entrypoint)")
            else:
                otherwise = "" if default is None else f" of {default}"
                said.append(
                    f"--{name} (not in the entrypoint: the script's own or the Trainer's default{otherwise})"
                )
        return f"the Trainer fills it in from {' and '.join(said)}"
