"""DeepSpeed config sections that an optimizer or scheduler in code replaces."""

import logging

import pytest
import torch

import dstrial
from dstrial.errors import ConfigError

pytestmark = pytest.mark.ranks

OPTIMIZER = {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}}
SCHEDULER = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
LRS = {"type": "categorical", "vals": [0.1, 0.05]}


def wrap(specs, *, lr=None, schedules=False, **sections):
    """Wrap an engine; ``lr`` and ``schedules`` add an optimizer and scheduler in code."""
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": 4, **sections}
    hparams = {"deepspeed_config": config}
    with dstrial.init(hparams=hparams, exp_conf={"hyperparameters": {"deepspeed_config": specs}}) as context:
        model = torch.nn.Linear(2, 1)
        optimizer = None if lr is None else torch.optim.AdamW(model.parameters(), lr=lr)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if schedules else None
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            optimizer=optimizer,
            lr_scheduler=scheduler,
            config=context.get_deepspeed_config(),
        )
        return context.wrap_model_engine(engine)


@pytest.fixture(autouse=True)
def in_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_unused_sections_are_named_with_replacement(caplog):
    with caplog.at_level(logging.WARNING, "dstrial.trial"):
        wrap({}, lr=0.001, schedules=True, optimizer=OPTIMIZER, scheduler=SCHEDULER)
    optimizer, scheduler = (
        record.getMessage() for record in caplog.records if "is not used" in record.message
    )
    assert optimizer.startswith("DeepSpeed config of engine 0: optimizer is not used")
    assert "trains with AdamW (lr 0.001, betas (0.9, 0.999)" in optimizer
    assert scheduler.startswith("DeepSpeed config of engine 0: scheduler is not used")
    assert "trains with ExponentialLR" in scheduler


def test_used_and_missing_sections_are_not_mentioned(caplog):
    with caplog.at_level(logging.WARNING, "dstrial.trial"):
        wrap({"optimizer": {"params": {"lr": LRS}}}, optimizer=OPTIMIZER, scheduler=SCHEDULER)
        wrap({}, lr=0.001)
    assert "is not used" not in caplog.text


def test_search_over_unused_section_is_refused():
    specs = {"optimizer": {"type": "AdamW", "params": {"lr": LRS}}}
    with pytest.raises(
        ConfigError, match=r"searched over \(deepspeed_config.optimizer.params.lr: 0.05\), but not used"
    ):
        wrap(specs, lr=0.001, optimizer=OPTIMIZER)
    specs = {"scheduler": {"params": {"warmup_num_steps": LRS}}}
    with pytest.raises(ConfigError, match=r"this run trains with ExponentialLR, the lr_scheduler given to"):
        wrap(specs, lr=0.001, schedules=True, scheduler=SCHEDULER)


def test_search_value_used_by_code_is_allowed():
    specs = {
        "optimizer": {"type": "AdamW", "params": {"lr": LRS}},
        "scheduler": {"params": {"warmup_num_steps": 3}},
    }
    wrap(specs, lr=0.05, schedules=True, optimizer=OPTIMIZER)
