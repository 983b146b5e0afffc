"""Trials described under fake tensors, and by a real batch where those do not do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dstrial.dsat.description import describe, script_request, trial_request
from dstrial.engine.dryrun.process import DryRunError
from dstrial.engine.dryrun.values import DryRunResult

pytestmark = pytest.mark.process

HERE = Path(__file__).parent / "described"
MODEL_DEFS = Path(__file__).parents[2] / "model_defs"
WIDTH = 64
CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 10_000, "allgather_bucket_size": 10_000},
}


def described(trial: str) -> DryRunResult:
    hparams = {"width": WIDTH, "deepspeed_config": CONFIG}
    asked = trial_request(f"described_trials:{trial}", HERE, hparams, CONFIG, world_size=4)
    return describe(asked, deadline_s=120)


def test_an_ordinary_trial_is_described_without_values() -> None:
    result = described("Ordinary")

    assert result.is_fake
    assert result.is_linear
    # The output layer shares its weight with the embedding.
    assert result.parameters == 100 * WIDTH + WIDTH * WIDTH + WIDTH
    assert result.tokens is not None
    assert result.tokens.at(8) == 8 * 16
    assert [Path(each.place.rsplit(":", 1)[0]).name for each in result.bypasses] == ["described_trials.py"]
    # Weights on every rank, Adam's two moments on a quarter of them.
    assert result.device.settled == pytest.approx((4 + (4 + 8) / 4) * result.parameters, rel=0.1)


def test_a_trial_that_goes_by_values_is_measured_by_a_real_batch_and_its_line_is_named() -> None:
    result = described("ByValue")

    assert not result.is_fake
    assert "described_trials.py" in result.notes[0]
    assert result.device.peak(8) > described("Ordinary").device.settled


def test_a_trial_that_fails_anyway_is_told_so_with_its_line() -> None:
    with pytest.raises(DryRunError, match=r"described_trials\.py:\d+ by ValueError: no loss today"):
        described("Broken")


def test_a_trial_with_two_engines_keeps_both_configs() -> None:
    folder = MODEL_DEFS / "digits_gan"
    config = json.loads((folder / "generator.json").read_text(encoding="utf-8"))
    hparams = {
        "deepspeed_config": "generator.json",
        "discriminator_deepspeed_config": "discriminator.json",
        "noise_size": 16,
        "num_hidden": 32,
        "dropout": 0.3,
        "split_seed": 1,
    }

    asked = trial_request("model_def:DigitsGanTrial", folder, hparams, config, world_size=2)
    result = describe(asked, may_be_real=False)

    assert result.is_fake
    # Both engines reduce their gradients with buckets of DeepSpeed's default size.
    assert result.device.peak(8) >= 2 * 500_000_000


def test_a_script_is_described_by_its_model_and_first_batch() -> None:
    hparams = {"width": WIDTH, "deepspeed_config": "ds_config.json", "overwrite_deepspeed_args": {}}
    words = ["core_api_script.py", "--records", "40"]

    result = describe(script_request(words, HERE, hparams, CONFIG, world_size=4), may_be_real=False)

    assert result.is_fake
    assert result.parameters == 16 * WIDTH + WIDTH + WIDTH * 4 + 4
    assert result.flops.model.at(8) == pytest.approx(2 * 8 * result.flops.model.at(4) / 8)
    assert result.flops.model.at(1) >= 6 * (16 * WIDTH / 2 + WIDTH * 4)
    assert any("loss is not part of its model" in note for note in result.notes)
