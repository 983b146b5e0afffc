"""A dry run's workload for a model whose forward returns the loss."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import deepspeed


class ModelWorkload:
    """``model`` and ``batch`` are ``module:function``; the batch's first argument is the micro batch size."""

    def __init__(self, _world: object, model: str, batch: str) -> None:
        self._make_model, self._make_batch = map(_load, (model, batch))
        self._shape: dict[str, Any] = {}
        self._engine: Any = None

    def prepare(self, shape: Mapping[str, Any] | None = None) -> None:
        self._shape = dict(shape or {})

    def build(self, deepspeed_config: Mapping[str, Any]) -> Sequence[Any]:
        model = self._make_model(**self._shape)
        self._engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=dict(deepspeed_config)
        )
        return [self._engine]

    def train_micro_batch(self, micro_batch_size: int) -> Any:
        batch = self._make_batch(micro_batch_size, **self._shape)
        self._engine.backward(self._engine(*batch))
        self._engine.step()
        return batch


def _load(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
