"""The batch sizes of a search whose DeepSpeed config leaves them to a library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from searching import settings_of, write_experiment

from dstrial.dsat.config import SearchConfig
from dstrial.errors import ConfigError

SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
ALL_AUTO = {
    **dict.fromkeys(SIZES, "auto"),
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
"""The example config of Hugging Face's documentation."""

FOR_ACCELERATE = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupLR", "params": {}},
    "zero_optimization": {"stage": 1},
}
TRAINER = "from transformers import HfArgumentParser, Trainer, TrainingArguments\n"
ACCELERATE = "from accelerate import Accelerator\n"
EIGHT = "--per_device_train_batch_size 8"
AMONG_OTHERS = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 5}


def _settings(
    directory: Path,
    arguments: str = "",
    *flags: str,
    script: str = TRAINER,
    hparams: dict[str, Any] | None = None,
    **sizes: object,
) -> SearchConfig:
    path = write_experiment(
        directory,
        {**ALL_AUTO, **sizes},
        entrypoint=f"python3 -m dstrial.launch train.py {arguments}",
        hyperparameters={"deepspeed_config": "ds.json", **(hparams or {})},
    )
    (directory / "model" / "train.py").write_text(script)
    (directory / "model" / "args.json").write_text("{}")
    return settings_of(path, *flags, method="predict")


def _own(settings: SearchConfig) -> tuple[int, ...]:
    """Return the total, micro batch and accumulation of the own configuration."""
    config = settings.space.config(settings.space.own())
    return tuple(config[key] for key in SIZES)


@pytest.mark.parametrize(
    ("arguments", "flags", "more", "own"),
    [
        ("--per-device-train-batch-size=8 --gradient_accumulation_steps 4", [], {}, (64, 8, 4)),
        # Precedence: a number in the config, then flags of the entrypoint, then hyperparameters.
        (f"{EIGHT} --gradient_accumulation_steps 3", [], {"train_batch_size": 64}, (64, 8, 4)),
        ("--gradient_accumulation_steps 2", [], {"hparams": AMONG_OTHERS}, (24, 6, 2)),
        (
            "--gradient_accumulation_steps 2",
            [],
            {"hparams": {"training_arguments": AMONG_OTHERS}},
            (24, 6, 2),
        ),
        (f"{EIGHT} --gradient_accumulation_steps 2", ["--train-batch-size", "64"], {}, (64, 8, 4)),
        ("", [], {"script": ACCELERATE, **FOR_ACCELERATE, "train_micro_batch_size_per_gpu": 4}, (8, 4, 1)),
    ],
)
def test_batch_sizes_come_from_arguments_or_hyperparameters(
    arguments: str, flags: list[str], more: dict[str, Any], own: tuple[int, ...], tmp_path: Path
) -> None:
    settings = _settings(tmp_path, arguments, *flags, **more)

    assert _own(settings) == own
    assert settings.warnings == ()
    if "script" not in more:  # the Trainer still fills in other "auto" values
        assert settings.space.config(settings.space.own())["optimizer"]["params"]["lr"] == "auto"


def test_trainer_default_batch_sizes_warn(tmp_path: Path) -> None:
    settings = _settings(tmp_path)

    assert _own(settings) == (16, 8, 1)
    micro, steps = settings.warnings
    assert "ds.json:" in micro
    assert "its default of 8 is taken" in micro
    assert "write --per_device_train_batch_size into the entrypoint" in micro
    assert "its default of 1 is taken" in steps


@pytest.mark.parametrize(
    ("arguments", "more", "problem"),
    [
        (
            "--per_device_train_batch_size $SIZE",
            {},
            r"entrypoint is a command with --per_device_train_batch_size \$SIZE.*"
            r"Write the number there, or set train_micro_batch_size_per_gpu in the DeepSpeed config",
        ),
        ("args.json", {}, r"a script with its arguments in args\.json.*Write the arguments themselves"),
        (
            "",
            {"script": ACCELERATE, **FOR_ACCELERATE},
            r"only the script's DataLoader knows it.*Write the batch_size",
        ),
    ],
)
def test_unreadable_batch_sizes_are_refused(
    arguments: str, more: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=problem):
        _settings(tmp_path, arguments, **more)
