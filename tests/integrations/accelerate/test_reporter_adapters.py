"""An Accelerate loop with a PEFT LoRA model; checkpoints omit frozen weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from launching import launch
from safetensors.torch import load_file

from dstrial.cli.app import main as dstrial

pytest.importorskip("peft")
pytest.importorskip("accelerate")
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).with_name("lora_reporter.py")


def experiment(stage: int, seed: int = 1) -> dict[str, Any]:
    return {
        "name": "lora",
        "entrypoint": "python3 -m dstrial.launch lora_reporter.py",
        "hyperparameters": {
            "base_seed": seed,
            "deepspeed_config": {
                "train_batch_size": 8,
                "gradient_accumulation_steps": 1,
                "zero_optimization": {"stage": stage},
            },
        },
        "data": {"dstrial": {"save_frozen_parameters": False}},
        "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 6}},
        "scheduling_unit": 1,
        "min_validation_period": {"batches": 3},
        "min_checkpoint_period": {"batches": 3},
        "checkpoint_policy": "none",
    }


def test_accelerate_lora_resumes_reshapes_and_exports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "whole").mkdir()
    whole = launch(tmp_path / "whole", PROGRAM, experiment(2))
    assert sorted(whole.checkpoints) == [3, 6]
    wanted = whole.values("training", "loss")
    for name, stage, slots in (("same", 2, 2), ("zero 3", 3, 2), ("one rank, zero 0", 0, 1)):
        directory = tmp_path / name
        directory.mkdir()
        run = shutil.copytree(whole.run, directory / "run")
        env = {"DSTRIAL_RUN_DIR": str(run), "DSTRIAL_RESUME": str(whole.checkpoints[3])}
        resumed = launch(directory, PROGRAM, experiment(stage), slots=slots, run=run, **env)
        assert resumed.values("training", "loss") == (
            wanted if name == "same" else pytest.approx(wanted, abs=1e-5)
        ), name

    assert dstrial(["checkpoint", "inspect", str(whole.checkpoints[6])]) == 0
    assert "left_out: 28" in capsys.readouterr().out
    output = tmp_path / "adapter"
    assert dstrial(["checkpoint", "export", str(whole.checkpoints[6]), str(output)]) == 0
    assert len(load_file(output / "adapter_model.safetensors")) == 4
