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
    """Yield (name, parameter), with names as without ``torch.compile``.

    A tied parameter is yielded under each of its names.
    """
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield plain_name(name), parameter


def named_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {plain_name(name): buffer for name, buffer in module.named_buffers()}


def with_plain_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a state dict without ``torch.compile``'s prefix in its keys.

    ``state`` may also be the content of a DeepSpeed model file; then the keys of its nested state dicts are changed too.
    """
    return {
        plain_name(key): with_plain_names(value) if key in _NAMED and isinstance(value, Mapping) else value
        for key, value in state.items()
    }


def with_names_of(module: torch.nn.Module, state: Any) -> Any:
    """Rename parameters in a DeepSpeed model file's content as ``module`` names them.

    Returns a copy in which names have ``torch.compile``'s prefix where the names in ``module`` have the prefix. A value that
    is no mapping is returned unchanged.
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
