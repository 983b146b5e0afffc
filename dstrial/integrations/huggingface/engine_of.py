"""Find the DeepSpeed engine that a Trainer trains with, which callbacks are not told of."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import DeepSpeedEngine


class EngineFinder:
    """Waits for the first forward pass of an engine around a model.

    An engine is a torch module whose ``module`` is the Trainer's model; torch tells of every module that is called, and is asked
    to do so only until the engine has been seen.

    Args:
        model: the Trainer's, not wrapped.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._engine: DeepSpeedEngine | None = None
        self._hook: Any = torch.nn.modules.module.register_module_forward_pre_hook(self._on_forward)

    @property
    def engine(self) -> DeepSpeedEngine | None:
        """The engine; None before its first forward pass, and for a Trainer without DeepSpeed."""
        return self._engine

    def close(self) -> None:
        """Wait no more."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _on_forward(self, module: torch.nn.Module, _args: Any) -> None:
        if isinstance(module, DeepSpeedEngine):
            # Others, such as a teacher's in distillation, may be called before it.
            if module.module is self._model:
                self._engine = module
                self.close()
        elif module is self._model:
            self.close()
