"""Hugging Face Trainer scripts without dstrial code use DeepSpeed when launched."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
import warm_start
import yaml

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None,
        reason="Requires: [accelerate, transformers]",
    ),
]

TRAINER_SCRIPT = """
import sys, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

records = torch.utils.data.TensorDataset(torch.randint(0, 32, (32, 8)))
sizes = dict(per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=1)
quiet = dict(report_to=[], save_strategy="no", disable_tqdm=True)
for own in ({"deepspeed": "ds.json"}, {}):
    args = TrainingArguments("out", **sizes, **quiet, **own)
    sizes_of_model = dict(vocab_size=32, n_positions=8, n_embd=32, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(GPT2Config(**sizes_of_model, bos_token_id=None, eos_token_id=None))
    collate = lambda found: dict.fromkeys(("input_ids", "labels"), torch.stack([one for (one,) in found]))
    trainer = Trainer(model, args, train_dataset=records, data_collator=collate)
    trainer.train()
    engine = trainer.model_wrapped
    print(f"{own}: {type(engine).__name__}, {trainer.accelerator.num_processes} ranks, {engine.train_batch_size()} records")
"""


def test_hugging_face_trainer_trains_with_deepspeed_unchanged(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINER_SCRIPT)
    auto = dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"
    )
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}
    config = {**auto, "optimizer": optimizer, "zero_optimization": {"stage": 2}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    experiment = {
        "name": "trainer",
        "entrypoint": "python3 -m dstrial.launch train.py",
        "hyperparameters": {"deepspeed_config": "ds.json"},
        "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 1}},
    }
    (tmp_path / "e.yaml").write_text(yaml.safe_dump(experiment))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}

    ended = warm_start.run(
        ["dstrial.launch", "--config", "e.yaml", "--slots", "2", "train.py"],
        cwd=tmp_path,
        env={**kept, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"},
        timeout=200,
        is_merged=True,
    )

    assert ended.returncode == 0, ended.stdout
    # The script passes its own DeepSpeed config or uses the launcher's; batch 8 = micro batch 2 x accumulation 2 x 2 ranks.
    for own in ("{'deepspeed': 'ds.json'}", "{}"):
        assert ended.stdout.count(f"{own}: DeepSpeedEngine, 2 ranks, 8 records") == 2, ended.stdout
    assert json.loads((tmp_path / "ds.json").read_text()) == config
