"""What a dry run trains: something that builds engines and trains one micro batch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import deepspeed
import torch
from torch.utils._pytree import tree_map_only


class Workload(Protocol):
    """Builds engines and trains with them in a dry run; tensors are fake by default."""

    def build(self, deepspeed_config: Mapping[str, Any], device: torch.device) -> Sequence[Any]:
        """Return the engines, with this merged config.

        Args:
            deepspeed_config: batch sizes solved for the micro batch that follows; not to be changed.
            device: where batches belong.
        """
        ...

    def train_micro_batch(self, micro_batch_size: int) -> Any:
        """Train one micro batch of that many records: forward, backward, step; return it."""
        ...


def load(reference: str) -> Callable[..., Any]:
    """Return what ``module:name`` refers to.

    Raises:
        ValueError: it is not of that form.
        ImportError: there is no such module, or it cannot be imported.
        AttributeError: the module has no such name.
    """
    module_name, separator, name = reference.partition(":")
    if not (separator and module_name and name):
        raise ValueError(f"workload is {reference!r}; expected module:callable. Name both.")
    found: Callable[..., Any] = getattr(importlib.import_module(module_name), name)
    return found


class ModelWorkload:
    """A model whose forward returns the loss, and a function that makes its batches.

    Args:
        model: ``module:callable`` that returns the model.
        batch: ``module:callable`` that returns the positional arguments of the forward pass, its first argument being the
            micro batch size.
        shape: keyword arguments of both.
    """

    def __init__(self, model: str, batch: str, shape: Mapping[str, Any] | None = None) -> None:
        self._make_model, self._make_batch = load(model), load(batch)
        self._shape = dict(shape or {})
        self._engine: Any = None
        self._device = torch.device("cpu")

    def build(self, deepspeed_config: Mapping[str, Any], device: torch.device) -> Sequence[Any]:
        """Return the one engine."""
        self._device = device
        model = self._make_model(**self._shape)
        self._engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=dict(deepspeed_config)
        )
        return [self._engine]

    def train_micro_batch(self, micro_batch_size: int) -> Any:
        """Train on a batch made for it."""
        batch = self._make_batch(micro_batch_size, **self._shape)
        batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to(self._device), batch)
        loss = self._engine(*batch)
        self._engine.backward(loss)
        self._engine.step()
        return batch
