"""Hints that dstrial adds to errors of DeepSpeed 0.19."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dstrial.testing.ranks import run_function

pytestmark = pytest.mark.ranks


def config(stage: int = 0) -> dict[str, Any]:
    optimizer = {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}
    return {"train_batch_size": 4, "optimizer": optimizer, "zero_optimization": {"stage": stage}}


class RaisingArgs(dict[str, Any]):
    """A dictionary whose missing attributes raise KeyError, as in some packages."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def two_configs(is_raising: bool) -> str:
    import deepspeed
    import torch

    import dstrial

    args: Any = SimpleNamespace(deepspeed_config="ds.json")
    if is_raising:
        args = RaisingArgs(deepspeed_config="ds.json")
    try:
        with dstrial.init():
            model = torch.nn.Linear(2, 1)
            deepspeed.initialize(args=args, model=model, model_parameters=model.parameters(), config=config())
    except (AssertionError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def two_engines(stage: int, calls_module: bool) -> str:
    import deepspeed
    import torch

    import dstrial
    from dstrial.engine.engine_hooks import LostGradientCheck, observe_engines

    try:
        with dstrial.init(), observe_engines(LostGradientCheck()):
            engines = []
            for sizes in ((2, 3), (3, 1)):
                model = torch.nn.Linear(*sizes)
                engines.append(
                    deepspeed.initialize(
                        model=model, model_parameters=model.parameters(), config=config(stage)
                    )[0]
                )
            generator, discriminator = engines
            for _ in range(2):
                fake = generator(torch.randn(4, 2))
                discriminator.backward(discriminator(fake.detach()).mean())
                discriminator.step()
                if calls_module:
                    discriminator.module.requires_grad_(False)
                    loss = discriminator.module(fake).mean()
                else:
                    loss = discriminator(fake).mean()
                generator.backward(loss)
                generator.step()
                discriminator.module.requires_grad_(True)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize("is_raising", [False, True])
def test_duplicate_config_error_suggests_omitting_args(is_raising: bool) -> None:
    (result,) = run_function(two_configs, 1, is_raising)
    assert result.value.startswith("KeyError" if is_raising else "AssertionError: Not sure how to proceed")
    assert "Leave args out of the call" in result.value


def test_loss_through_second_engine_error_suggests_module() -> None:
    (result,) = run_function(two_engines, 1, 0, False)
    assert result.value.startswith("RuntimeError: Direct calls to tensor.backward() are not supported")
    assert "engine.module(...)" in result.value


@pytest.mark.parametrize("stage", [0, 2])
def test_loss_through_second_module_trains(stage: int) -> None:
    (result,) = run_function(two_engines, 1, stage, True)
    assert result.value == "trained"


def lora_under_autotp(stage: int) -> str:
    import deepspeed
    import peft
    import torch

    import dstrial
    from dstrial.errors import TrialContractError

    layers = [{"patterns": [".*0.weight"], "partition_type": "column"}]
    partition = {"use_default_specs": False, "layer_specs": layers}
    given = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": config()["optimizer"],
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"autotp_size": 2, "partition_config": partition},
    }
    try:
        with dstrial.init() as context:
            lora = peft.LoraConfig(r=2, target_modules=["0"])
            model = peft.inject_adapter_in_model(lora, torch.nn.Sequential(torch.nn.Linear(4, 4)))
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=given)
            context.wrap_model_engine(engine)
    except (KeyError, TrialContractError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [0, 1])
def test_lora_inside_autotp_layers_is_refused(stage: int) -> None:
    pytest.importorskip("peft")
    for result in run_function(lora_under_autotp, 2, stage, deadline_s=300):
        assert "AutoTP does not train adapters (LoRA) inside the layers that it cuts" in result.value
