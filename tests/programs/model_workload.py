"""A dry run's workload for a model whose forward returns the loss."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import deepspeed

from dstrial.engine.dryrun.fake_world import FakeWorld


class ModelWorkload:
    """Trains ``model`` on ``batch(micro_batch_size)``, both ``module:function`` names."""

    def __init__(
        self,
        world: FakeWorld,
        model: str,
        batch: str,
        config: Mapping[str, Any],
        shape: Mapping[str, Any] | None = None,
    ) -> None:
        make_model, self._make_batch = map(_load, (model, batch))
        self._shape = dict(shape or {})
        self.engines: list[Any] = []
        with world.building(self.engines.append, pipeline_refusal=None):
            net = make_model(**self._shape)
            deepspeed.initialize(model=net, model_parameters=net.parameters(), config=dict(config))

    def train_micro_batch(self, micro_batch_size: int) -> Any:
        (engine,) = self.engines
        batch = self._make_batch(micro_batch_size, **self._shape)
        engine.backward(engine(*batch))
        engine.step()
        return batch


def _load(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
