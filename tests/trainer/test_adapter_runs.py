"""Trials that train LoRA adapters: checkpoints, export and predicted memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process_fits import EXP_CONF, fit
from safetensors.torch import load_file
from small_runs import deepspeed_config

from dstrial import Batch
from dstrial.cli.app import main as dstrial
from dstrial.errors import CheckpointLayoutError
from dstrial.local.checkpoint_directory import newest_checkpoint

peft = pytest.importorskip("peft")
adapter_trials = pytest.importorskip("adapter_trials")
pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("definitions_and_runs")]

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_FROZEN = {**EXP_CONF, "data": {"dstrial": {"save_frozen_parameters": False}}}


def checkpoint_of(outcome: Any) -> Path:
    newest = newest_checkpoint(outcome.directory.checkpoints_path)
    assert newest is not None
    return newest.path


def lora_class(**options: Any) -> type:
    class Trial(adapter_trials.LoraTrial):
        def model(self) -> Any:
            return adapter_trials.lora_model(self.context.get_hparams().get("seed", 5), **options)

    return Trial


def export(checkpoint: Path, output: Path, *options: str) -> int:
    return dstrial(["checkpoint", "export", str(checkpoint), str(output), *options])


def test_checkpoint_without_frozen_parameters_refuses_other_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint is smaller by the frozen weights, and resumes bitwise."""
    sizes = {}
    for name, exp_conf in (("whole", EXP_CONF), ("trained", WITHOUT_FROZEN)):
        outcome = fit(lora_class(), exp_conf=exp_conf, run_dir=tmp_path / name)
        sizes[name] = checkpoint_of(outcome).joinpath("model0", "mp_rank_00_model_states.pt").stat().st_size
    frozen_bytes = 4 * sum(one.numel() for one in adapter_trials.base_model().parameters())
    assert sizes["trained"] < sizes["whole"] - frozen_bytes

    resumed = fit(
        lora_class(),
        exp_conf=WITHOUT_FROZEN,
        run_dir=tmp_path / "trained",
        latest_checkpoint="latest",
        max_length=Batch(6),
        reporting_period=Batch(1),
    )
    whole = fit(
        lora_class(), run_dir=tmp_path / "uninterrupted", max_length=Batch(6), reporting_period=Batch(1)
    )
    last = [outcome.rows("training")[6]["loss"] for outcome in (resumed, whole)]
    assert last[0] == last[1]
    with pytest.raises(CheckpointLayoutError, match="differ from those it was trained with"):
        fit(
            lora_class(),
            {"seed": 6},
            WITHOUT_FROZEN,
            tmp_path / "trained",
            latest_checkpoint="latest",
            max_length=Batch(8),
        )
    capsys.readouterr()
    assert export(checkpoint_of(resumed), tmp_path / "m", "--merged") == 1
    assert "Export the adapter (--format adapter)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"modules_to_save": ["lm_head"], "bias": "lora_only", "use_rslora": True},
        {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"v_proj": 8}},
        {"fan_in_fan_out": False, "target_modules": "all-linear"},
        {"is_tied": True, "target_modules": ["q_proj", "lm_head"]},
        {"is_tied": True, "modules_to_save": ["embed_tokens"]},
        {"is_tied": True, "modules_to_save": ["lm_head"]},
    ],
    ids=["plain", "more modules", "patterns", "all layers", "tied lora", "tied embedding", "tied head"],
)
def test_exported_adapter_and_merge_equal_peft(tmp_path: Path, options: dict[str, Any]) -> None:
    outcome = fit(lora_class(**options), {"deepspeed_config": deepspeed_config(1)}, max_length=Batch(4))
    checkpoint = checkpoint_of(outcome)
    assert export(checkpoint, tmp_path / "adapter") == 0
    assert export(checkpoint, tmp_path / "merged", "--merged") == 0

    base = adapter_trials.base_model(is_tied=options.get("is_tied", False))
    # If the layers stayed tied, PEFT would add the adapter of one layer to both.
    base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.detach().clone())
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    state = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any(float(value.abs().max()) > 0 for key, value in state.items() if "lora_B" in key)
    wanted_names = peft.get_peft_model_state_dict(loaded, save_embedding_layers=False).keys()
    assert wanted_names == state.keys()
    wanted = loaded.merge_and_unload().state_dict()
    merged = load_file(tmp_path / "merged")
    assert merged.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(merged[name], value, rtol=1e-6, atol=1e-7, msg=name)


def test_export_of_dora_and_plain_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dora = checkpoint_of(fit(lora_class(use_dora=True), max_length=Batch(2)))
    assert export(dora, tmp_path / "merged", "--merged") == 1
    assert "merge it with PEFT's merge_and_unload()" in capsys.readouterr().err
    assert export(dora, tmp_path / "adapter") == 0
    peft.PeftModel.from_pretrained(adapter_trials.base_model(), tmp_path / "adapter")
    plain = checkpoint_of(fit(adapter_trials.FrozenTrial, max_length=Batch(2)))
    for option in (["--merged"], ["--format", "adapter"]):
        assert export(plain, tmp_path / "none", *option) == 1
        assert "the checkpoint has no adapter of PEFT" in capsys.readouterr().err
    assert export(plain, tmp_path / "all") == 0


def test_exported_vera_adapter_has_its_buffers(tmp_path: Path) -> None:
    class Trial(adapter_trials.LoraTrial):
        def model(self) -> Any:
            config = peft.VeraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"], d_initial=0.3)
            return peft.get_peft_model(adapter_trials.base_model(), config)

    checkpoint = checkpoint_of(fit(Trial, max_length=Batch(2)))
    assert export(checkpoint, tmp_path / "adapter") == 0
    state = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    loaded = peft.PeftModel.from_pretrained(adapter_trials.base_model(), tmp_path / "adapter")
    wanted = peft.get_peft_model_state_dict(loaded, save_embedding_layers=False)
    assert any("vera_A" in name for name in state)
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], value) for name, value in wanted.items())


def test_parameters_unfrozen_during_run_are_saved(tmp_path: Path) -> None:
    class Thawing(adapter_trials.FrozenInOptimizerTrial):
        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            for name, parameter in self.engine.module.named_parameters():
                if "layers.0.mlp" in name and batch_idx == 2:
                    parameter.requires_grad = True
            metrics: dict[str, Any] = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
            return metrics

    outcome = fit(
        Thawing,
        {"deepspeed_config": deepspeed_config(0)},
        WITHOUT_FROZEN,
        tmp_path / "run",
        max_length=Batch(4),
        checkpoint_period=Batch(2),
    )
    found = {}
    for directory in outcome.directory.checkpoints_path.iterdir():
        values = json.loads((directory / "manifest.json").read_text())["layouts"][0]
        frozen = {one["name"] for one in values["parameters"] if not one["trainable"]}
        assert values["frozen_checksums"].keys() == frozen
        found[any("layers.0.mlp" in name for name in frozen)] = directory
    assert found.keys() == {True, False}


@pytest.mark.exhaustive
def test_memory_prediction_excludes_frozen_gradients_and_states(
    capsys: pytest.CaptureFixture[str],
) -> None:
    num_trained, num_all = 17_408, 137_984  # parameters of model_defs/lora_clm
    experiment, definition = ROOT / "experiment_configs" / "lora_clm.yaml", ROOT / "model_defs" / "lora_clm"
    assert dstrial(["memory", str(experiment), str(definition), "--slots", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    largest = answer["devices"][0]["largest"]
    assert "137.98 k parameters, 17.41 k of them trained" in answer["answer"][1]
    # ZeRO 2 in float32 divides master weights, both moments of Adam, and gradients by two ranks.
    assert largest["parameters"] == 4 * num_all
    assert largest["optimizer"] == 3 * 4 * num_trained / 2
    assert 4 * num_trained / 2 <= largest["gradients"] < 4 * num_trained  # undivided gradients exist briefly
