"""Accelerate integration: ``Reporter`` for loops, ``convert`` for config files."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dstrial.integrations.accelerate.reporter import Reporter

__all__ = ["Reporter"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.reporter"), name)
