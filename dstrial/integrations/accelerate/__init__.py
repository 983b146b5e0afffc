"""Accelerate's training loops as trials: :class:`Reporter`, and ``convert``.

``convert`` is for its config files and needs nothing but a YAML reader; ``Reporter`` is for the loop, needs accelerate and
deepspeed, and is imported at its first use.
"""

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
