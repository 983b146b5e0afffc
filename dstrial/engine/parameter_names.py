"""Remove the prefix that ``torch.compile`` adds to parameter and buffer names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_WRAPPER = "_orig_mod"  # attribute of torch._dynamo.OptimizedModule that holds the compiled module
_NAMED = ("module", "frozen_param_fragments")  # entries of DeepSpeed's model files that map parameter names


def plain_name(name: str) -> str:
    """Return a parameter's or buffer's name without ``torch.compile``'s prefix."""
    return ".".join(part for part in name.split(".") if part != _WRAPPER)


def named_parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield (name, parameter), with names as if without ``torch.compile``.

    A tied parameter is yielded under each of its names.
    """
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield plain_name(name), parameter


def named_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {plain_name(name): buffer for name, buffer in module.named_buffers()}


def with_plain_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a state dict without ``torch.compile``'s prefix in names.

    In the content of a DeepSpeed model file, the nested state dicts are renamed too.
    """
    return {
        plain_name(key): with_plain_names(value) if key in _NAMED and isinstance(value, Mapping) else value
        for key, value in state.items()
    }


def with_names_of(module: torch.nn.Module, state: Any) -> Any:
    """Return a copy of a DeepSpeed model file's content with ``module``'s names.

    Parameter names in the copy have ``torch.compile``'s prefix where ``module`` has it.
    """
    if not isinstance(state, Mapping):
        return state
    named = itertools.chain(module.named_parameters(remove_duplicate=False), module.named_buffers())
    own = {plain_name(name): name for name, _ in named}
    renamed = dict(state)
    for key in _NAMED:
        values = state.get(key)
        if isinstance(values, Mapping) and any(own.get(plain_name(name), name) != name for name in values):
            renamed[key] = {own.get(plain_name(name), name): value for name, value in values.items()}
    return renamed
