"""Build models with shapes and types, without values, to be made fake."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import deepspeed
import torch
from torch import nn
from torch.utils._pytree import tree_map_only


def make_fake(arguments: dict[str, Any]) -> None:
    """Give ``deepspeed.initialize``'s model fake parameters wherever the old ones are."""
    renewed = renew_parameters(arguments["model"])
    if arguments.get("model_parameters") is not None:
        arguments["model_parameters"] = _renewed(arguments["model_parameters"], renewed)
    optimizer = arguments.get("optimizer")
    if isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            group["params"] = _renewed(group["params"], renewed)


def renew_parameters(model: nn.Module) -> dict[int, nn.Parameter]:
    """Give parameters and buffers memory; inside ``FakeTensorMode`` they are fake.

    Returns ``id`` of each old parameter -> the new one; tied parameters stay tied.
    """
    renewed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is None:
                continue
            if id(old) not in renewed:
                new = nn.Parameter(torch.empty(old.shape, dtype=old.dtype), requires_grad=old.requires_grad)
                new.__dict__.update(old.__dict__)
                renewed[id(old)] = new
            module._parameters[name] = renewed[id(old)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return renewed


def _renewed(parameters: Any, renewed: Mapping[int, nn.Parameter]) -> Any:
    return tree_map_only(nn.Parameter, lambda old: renewed.get(id(old), old), parameters)


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Keep only shapes and types of parameters of modules built in the block.

    The memory of a parameter is given back as soon as its module has it, before it is ever written. ``deepspeed.zero.Init``,
    with which transformers builds models for ZeRO 3, does nothing: there is nothing to divide, and the engine divides all of it.
    """
    register = nn.Module.register_parameter

    def register_shape(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if type(parameter) is nn.Parameter and parameter.device.type != "meta":
            shape = nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)
            shape.__dict__.update(parameter.__dict__)
            module._parameters[name] = shape

    convert: Callable[..., nn.Module] = nn.Module._apply

    def convert_shapes(module: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        def of_shape(tensor: torch.Tensor) -> Any:
            if not tensor.is_meta:
                return fn(tensor)
            # A shape stays where it is, whatever device is asked for; its type may change.
            return torch.empty(
                tensor.shape, dtype=fn(torch.empty(0, dtype=tensor.dtype)).dtype, device="meta"
            )

        return convert(module, of_shape, recurse)

    fillers = [name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(nn.Module, "register_parameter", register_shape))
        stack.enter_context(mock.patch.object(nn.Module, "_apply", convert_shapes))
        for name in ("__init__", "__enter__", "__exit__"):
            stack.enter_context(mock.patch.object(deepspeed.zero.Init, name, _not_yet))
        for name in fillers:
            stack.enter_context(mock.patch.object(nn.init, name, _unfilled))
        yield


def _not_yet(_init: Any, *_args: object, **_kwargs: object) -> None:
    """Stand in for each method of ``deepspeed.zero.Init``."""


def _unfilled(tensor: torch.Tensor, *_args: object, **_kwargs: object) -> torch.Tensor:
    return tensor
