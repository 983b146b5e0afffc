"""Describe a PEFT model's adapter, so that it can be exported from checkpoints.

This module does not import PEFT, which is an optional dependency.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
from typing import Any

import torch

from dstrial.engine.parameter_names import plain_name

logger = logging.getLogger("dstrial.engine")


def is_peft_model(module: torch.nn.Module) -> bool:
    return _peft_model(module) is not None


def _peft_model(module: torch.nn.Module) -> Any:
    peft = sys.modules.get("peft")
    inner = getattr(module, "_orig_mod", module)
    return inner if peft is not None and isinstance(inner, peft.PeftModel) else None


def adapter_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return names and settings with which PEFT would save a model's active adapter.

    Returns:
        A dict with the three entries below. The dict is empty if the model has no adapter, or if the adapter is prompt tuning.
        If PEFT fails to name the tensors, a warning is logged, and the dict is empty too.
        ``config``: the content of ``adapter_config.json``.
        ``keys``: name of a parameter or buffer in the model -> name in the adapter's file.
        ``linear``: name of a linear layer with plain LoRA -> (scaling, whether the weight is transposed, adapter's name).
    """
    model = _peft_model(module)
    if model is None:
        return {}
    peft = sys.modules["peft"]
    active = model.active_adapter
    adapter = active if isinstance(active, str) else active[0]
    config = model.peft_config[adapter]
    if config.is_prompt_learning:  # PEFT saves computed values, which are not parameters
        return {}
    try:
        keys = _names_in_file(model, adapter)
    except Exception as error:  # noqa: BLE001  # some PEFT methods compute with the values, which are placeholders here
        logger.warning(
            "the adapter of %s cannot be exported from this run's checkpoints: PEFT does not name its weights (%r). The run "
            "itself goes on",
            config.peft_type,
            error,
        )
        return {}
    values = {**config.to_dict(), "inference_mode": True}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in values.items()}
    return {
        "config": json.loads(json.dumps(plain, default=str)),
        "keys": keys,
        "linear": {
            plain_name(name): (float(layer.scaling[adapter]), bool(layer.fan_in_fan_out), adapter)
            for name, layer in model.named_modules()
            if type(layer) is peft.tuners.lora.Linear
            and adapter in layer.lora_A
            and adapter not in getattr(layer, "lora_variant", {})
        },
    }


def _names_in_file(model: Any, adapter: str) -> dict[str, str]:
    """Return name in the model -> name in the adapter file that PEFT would write.

    The names are those of the adapter's parameters and buffers.
    """
    # PEFT accepts any values in a state dict; numbers as values identify the renamed tensors.
    names = [plain_name(name) for name in model.state_dict()]
    tags = {name: torch.tensor(idx) for idx, name in enumerate(names)}
    config = model.peft_config[adapter]
    model.peft_config[adapter] = copy.deepcopy(config)  # AdaLoRA changes its config
    try:
        renamed = sys.modules["peft"].get_peft_model_state_dict(
            model, state_dict=tags, adapter_name=adapter, save_embedding_layers=False
        )
    finally:
        model.peft_config[adapter] = config
    return {names[int(tag)]: key for key, tag in renamed.items()}
