"""``reconcile``: precedence of arguments, DeepSpeed config and overwrites."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sample_layouts import plain_saved_run

from dstrial.config.deepspeed_source import read_deepspeed
from dstrial.config.diagnostics import Diagnostics
from dstrial.errors import ConfigError
from dstrial.integrations.huggingface.argument_table import ArgumentDraft, reconcile
from dstrial.resume.metadata import SavedRun

AUTO_BATCH = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"
)


def reconciled(
    arguments: str,
    config: dict[str, Any],
    overwrite: dict[str, Any] | None = None,
    *,
    world_size: int = 1,
    resumed: SavedRun | None = None,
) -> ArgumentDraft:
    hparams = {"deepspeed_config": config, "overwrite_deepspeed_args": overwrite or {}}
    before = copy.deepcopy(hparams)
    source = read_deepspeed("deepspeed_config", hparams, Path(), {}, "exp.yaml", Diagnostics({}, "exp.yaml"))
    assert source is not None
    merged = copy.deepcopy(source.merged)
    words = arguments.split()
    found = reconcile(words, source, world_size, resumed=resumed)
    assert (words, hparams, source.merged) == (arguments.split(), before, merged)
    return found


def sizes(found: ArgumentDraft) -> tuple[int, int, int]:
    return tuple(found.config[key] for key in AUTO_BATCH)  # type: ignore[return-value]


def flags(found: ArgumentDraft) -> tuple[str | None, str | None]:
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    micro, steps = (found.arguments.value(name) for name in names)
    return micro, steps


MICRO, STEPS = "--per_device_train_batch_size", "--gradient_accumulation_steps"
FIXED = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
ON_ONE_RANK = plain_saved_run(replicas=1, micro=4, accumulation=2)
ON_TWO_RANKS = plain_saved_run(replicas=2, micro=4, accumulation=1)


@pytest.mark.parametrize(
    ("arguments", "config", "world_size", "expected"),
    [
        (f"{MICRO} 4", {**AUTO_BATCH, "train_batch_size": 64}, 2, (64, 4, 8)),
        (
            f"{MICRO}=4 {STEPS}=2",
            {"train_batch_size": 32},
            2,
            (32, 4, 4),
        ),  # accumulation is changed first: not 8 x 2
        (f"{MICRO} 5 {STEPS} 4", {"train_batch_size": 32}, 1, (32, 8, 4)),  # 5 does not divide the batch
    ],
)
def test_reconcile_solves_batch_from_arguments(
    arguments: str, config: dict[str, Any], world_size: int, expected: tuple[int, int, int]
) -> None:
    found = reconciled(arguments, config, world_size=world_size)

    assert sizes(found) == expected
    assert flags(found) == (str(expected[1]), str(expected[2]))
    listed = " ".join(found.contradictions)
    if STEPS in arguments and MICRO + "=4" in arguments:
        assert "train_batch_size is 32 and --gradient_accumulation_steps is 2" in listed
        assert 'set train_batch_size to "auto"' in listed


def test_reconcile_leaves_unspecified_batch_auto() -> None:
    found = reconciled("--seed 1", {})

    assert sizes(found) == ("auto", "auto", "auto")
    assert flags(found) == (None, None)


@pytest.mark.parametrize(
    ("arguments", "config", "overwrite", "world_size", "resumed", "expected"),
    [
        (f"{MICRO} 4 {STEPS} 2", AUTO_BATCH, None, 2, ON_ONE_RANK, ("4", "1")),
        # Overwritten sizes that already keep the batch.
        (f"{MICRO} 4 {STEPS} 2", AUTO_BATCH, FIXED, 2, ON_ONE_RANK, ("4", "1")),
        ("", FIXED, None, 1, ON_TWO_RANKS, ("4", "2")),
        # Without the checkpoint the solution would be 8 x 1, which may exceed device memory.
        ("", {"train_batch_size": 8}, None, 1, ON_TWO_RANKS, ("4", "2")),
        (f"{MICRO} 8", {"train_batch_size": 8}, None, 1, ON_TWO_RANKS, ("8", "1")),
        (f"{MICRO} 16", AUTO_BATCH, None, 2, ON_ONE_RANK, ("16", "1")),  # changed on purpose
    ],
)
def test_reconcile_resumed_run_keeps_unchanged_batch(
    arguments: str,
    config: dict[str, Any],
    overwrite: dict[str, Any] | None,
    world_size: int,
    resumed: SavedRun,
    expected: tuple[str, str],
) -> None:
    found = reconciled(arguments, config, overwrite, world_size=world_size, resumed=resumed)

    assert flags(found) == expected
    assert tuple(map(str, sizes(found)[1:])) == expected
    assert sizes(found)[0] == int(expected[0]) * int(expected[1]) * world_size
    if STEPS in arguments:
        assert not found.contradictions


def adamw(**parameters: Any) -> dict[str, Any]:
    return {"type": "AdamW", "params": parameters}


def scheduler(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": parameters}}


ON, OFF = {"enabled": True}, {"enabled": False}


def config_accepted_by_trainer(found: ArgumentDraft) -> None:
    """Let transformers compare the arguments and the config, as ``Trainer`` does."""
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    words = [*found.arguments.words, "--use_cpu", "True"]
    (args,) = parser.parse_args_into_dataclasses(words)
    processed = HfTrainerDeepSpeedConfig(copy.deepcopy(found.config))
    processed.trainer_config_process(args)
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=8))
    processed.trainer_config_finalize(args, model, num_training_steps=100)


@pytest.mark.parametrize(
    ("arguments", "config", "overwrite", "words", "effective", "contradictions"),
    [
        pytest.param(
            "--learning-rate=1e-05 --max_grad_norm 0.5",
            {"optimizer": adamw(lr=0.1), "gradient_clipping": 0.5},
            {"optimizer": {"params": {"lr": 0.01}}},
            "--learning-rate=0.01 --max_grad_norm 0.5",
            {"optimizer": adamw(lr=0.01)},
            ["--learning_rate"],
            id="overwrite, then config, then argument",
        ),
        pytest.param(
            "--learning_rate 1e-05",
            {"optimizer": adamw(lr=0.1)},
            {"optimizer": {"params": {"lr": "auto"}}},
            "--learning_rate 1e-05",
            {"optimizer": adamw(lr="auto")},
            [],
            id="auto lets the argument win",
        ),
        pytest.param(
            "",
            {"optimizer": adamw(lr=0.1), **scheduler("WarmupLR", warmup_max_lr=0.1)},
            {"optimizer": {"params": {"lr": 0.01}}},
            "--learning_rate 0.01",
            scheduler("WarmupLR", warmup_max_lr=0.01),
            ["--learning_rate"],
            id="overwritten learning rate reaches the scheduler",
        ),
        pytest.param(
            "--adam_beta1 0.5 --weight_decay 0.1",
            {"optimizer": {"type": "SGD", "params": {}}},
            {},
            "--adam_beta1 0.5 --weight_decay 0.1",
            {"optimizer": {"type": "SGD", "params": {"weight_decay": "auto"}}},
            [],
            id="parameter that the optimizer does not take",
        ),
        pytest.param(
            "--bf16",
            {"bf16": OFF, "fp16": ON},
            {},
            "--bf16 False --fp16 True",
            {"bf16": OFF, "fp16": ON},
            ["--bf16"],
            id="precision of the config wins",
        ),
        pytest.param(
            "--warmup_ratio 0.1 --seed 2",
            scheduler("WarmupLR", warmup_num_steps=10),
            {},
            "--seed 2 --warmup_steps 10",
            scheduler("WarmupLR", warmup_num_steps=10),
            ["--warmup_ratio"],
            id="warmup ratio yields to a number of steps",
        ),
        pytest.param(
            "--num_train_epochs 3",
            scheduler("WarmupDecayLR", total_num_steps=100, warmup_num_steps=5),
            {},
            "--num_train_epochs 3 --warmup_steps 5",
            scheduler("WarmupDecayLR", total_num_steps="auto", warmup_num_steps=5),
            ["--max_steps"],
            id="length of training wins over the schedule",
        ),
    ],
)
def test_reconcile_precedence(
    arguments: str,
    config: dict[str, Any],
    overwrite: dict[str, Any],
    words: str,
    effective: dict[str, Any],
    contradictions: list[str],
) -> None:
    found = reconciled(arguments, config, overwrite)

    assert " ".join(found.arguments.words) == words
    assert {key: found.config[key] for key in effective} == effective
    assert len(found.contradictions) == len(contradictions)
    assert all(flag in text for flag, text in zip(contradictions, found.contradictions, strict=True))
    config_accepted_by_trainer(found)


def test_reconcile_rejects_unsolvable_batch() -> None:
    with pytest.raises(ConfigError, match="train_batch_size is 9"):
        reconciled("", {"train_batch_size": 9}, world_size=2)
    with pytest.raises(ConfigError, match="train_batch_size is 0"):
        reconciled("", {"train_batch_size": 0})
    resumed = plain_saved_run(replicas=2, micro=4, accumulation=1)
    with pytest.raises(ConfigError, match="a-checkpoint"):
        reconciled("--per_device_train_batch_size 4", AUTO_BATCH, world_size=3, resumed=resumed)
