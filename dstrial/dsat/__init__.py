"""Tuning of DeepSpeed configs; so far what makes a Hugging Face script's arguments agree with one.

Names are resolved at first use: importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dstrial.dsat.hf_overwrites import get_hf_args_with_overwrites

__all__ = ["get_hf_args_with_overwrites"]

_HOMES = {"get_hf_args_with_overwrites": "hf_overwrites"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
