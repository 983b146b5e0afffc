"""DeepSpeed features that dstrial passes to the engine unchanged."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from in_process_fits import fit, trial_class
from small_runs import deepspeed_config
from torch import nn

from dstrial import Batch
from dstrial.errors import ConfigError

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("definitions_and_runs")]

FEATURES: dict[str, tuple[dict[str, Any], str]] = {
    "DeepCompile": (
        {"compile": {"deepcompile": True}, "zero_optimization": {"stage": 1}},
        "is_deepcompile_enabled",
    ),
    "torch_autocast": (
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "zero_optimization": {"stage": 1}},
        "torch_autocast_enabled",
    ),
    "activation offload": (
        {"activation_checkpointing": {"cpu_checkpointing": True}},
        "_config.activation_checkpointing_config.cpu_checkpointing",
    ),
}
"""Name -> DeepSpeed config, engine attribute that becomes true."""


@pytest.mark.exhaustive("[torch_autocast]")
@pytest.mark.parametrize("name", FEATURES)
def test_feature_is_applied_by_deepspeed(name: str) -> None:
    sections, attribute = FEATURES[name]
    engines = []

    class Trial(trial_class()):  # type: ignore[misc]  # the base class is created dynamically
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            engines.append(self.model_engine)

    fit(Trial, {"deepspeed_config": deepspeed_config(**sections)}, max_length=Batch(2))
    found = functools.reduce(getattr, attribute.split("."), engines[0])
    assert (found() if callable(found) else found) is True


def last_loss(stage: int, backward: Any, **sections: Any) -> float:
    def train_batch(self: Any, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        features, targets = self.context.to_device(next(dataloader_iter))
        loss = nn.functional.mse_loss(self.model_engine(features), targets)
        backward(self.model_engine, loss)
        self.model_engine.step()
        return {"loss": loss}

    hparams = {"deepspeed_config": deepspeed_config(stage, **sections), "dropout": 0.0}
    return float(fit(trial_class(train_batch=train_batch), hparams).rows("training")[4]["loss"])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_loss_backward_trains_as_engine_backward(stage: int) -> None:
    assert last_loss(stage, lambda _engine, loss: loss.backward()) == last_loss(
        stage, lambda engine, loss: engine.backward(loss)
    )


def test_loss_backward_with_zero_0_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"using ZeRO stage 0\. Please use engine\.backward"):
        last_loss(0, lambda _engine, loss: loss.backward())


def test_unmanaged_accumulation_requires_single_micro_batch() -> None:
    unmanaged = {"managed_gradient_accumulation": False}
    with pytest.raises(ConfigError, match="expected true with gradient_accumulation_steps 2"):
        last_loss(2, lambda engine, loss: engine.backward(loss), **unmanaged)
    one = {"gradient_accumulation_steps": 1}
    losses = [
        last_loss(2, lambda engine, loss: engine.backward(loss), **one, **more) for more in ({}, unmanaged)
    ]
    assert losses[0] == losses[1]


def test_default_gradient_clipping_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    for given, count in (({}, 1), ({"gradient_clipping": 0.5}, 0)):
        caplog.clear()
        with caplog.at_level("INFO", logger="dstrial"):
            last_loss(0, lambda engine, loss: engine.backward(loss), **given)
        assert caplog.text.count("DeepSpeed's default (0.19.0 and 0.19.1 do not clip)") == count
