"""Look for the searcher's metric before training: one batch, evaluated and undone."""

from __future__ import annotations

import collections
import logging
import random
import types
from collections.abc import Callable, Iterable
from typing import Any

import determined as det
import numpy as np
import torch

from dstrial.engine.state import engine_extra_state, restore_engine_extra_state
from dstrial.errors import PeerFailedError, RankError, TrialContractError
from dstrial.loop import sync_point
from dstrial.loop.run_state import Snapshot, random_states, restore_random_states
from dstrial.loop.settings import LoopSettings
from dstrial.loop.validation import Validation
from dstrial.trial.context import DeepSpeedTrialContext, runtime_of
from dstrial.trial.determined_errors import SearcherMetricError

logger = logging.getLogger("dstrial.loop")

NEVER_MISSING = ("batches", "epochs")
"""Metrics that the loop itself adds to every validation."""


def is_wanted(settings: LoopSettings, context: DeepSpeedTrialContext) -> bool:
    """Say whether the metric is to be looked for; the same on all ranks.

    By default it is not for pipelines, whose stages exchange activations of a round's shape for it.
    """
    searched = settings.searcher_metric
    if searched is None or searched in NEVER_MISSING or settings.is_rewrite:
        return False
    asked = settings.checks.early_metric_check
    return not context.use_pipeline_parallel if asked is None else asked


def check_metric(
    searched: str, validation: Validation, context: DeepSpeedTrialContext, objects: Iterable[Any]
) -> None:
    """Evaluate one round, put everything back, and refuse a missing metric.

    User code that raises is no reason not to train, as it may need what only training sets up, unless it says ``InvalidHP``.

    Args:
        searched: the searcher's metric.
        validation: of the trial, its extent agreed on.
        context: of the trial.
        objects: whose attributes are put back: the trial and the data sets.

    Raises:
        TrialContractError: the metric is missing, or ``evaluate_batch`` breaks its contract; the same on all ranks.
        InvalidHP: ``evaluate_batch`` has raised it.

    Ranks: all, collectively.
    """
    snapshot = StateSnapshot(context, objects)
    names: set[str] | None = None
    error: Exception | None = None
    try:
        names = validation.sample()
    except (TrialContractError, det.InvalidHP):
        raise
    except Exception as caught:  # noqa: BLE001  # user code fails as it likes
        error = caught
    if error is not None and (not validation.is_agreed or _is_final(error)):
        raise error
    snapshot.restore()
    is_chief = context.distributed.rank == 0
    if error is not None:
        if is_chief:
            logger.warning(
                "searcher.metric %r is looked for at the first validation: evaluating one batch before training has failed "
                "(%s)",
                searched,
                sync_point.described(error),
            )
    elif names is not None and searched not in names:
        raise SearcherMetricError(
            f"the searcher's metric is {searched!r}, but validation returned {sorted(names)} for its first batch, before "
            "training; expected it among them. Return it from evaluate_batch, or set searcher.metric to one of them."
        )


def _is_final(error: Exception) -> bool:
    """Say whether another rank ends with it: lost, contract broken, or ``InvalidHP``."""
    if isinstance(error, PeerFailedError):
        return any(f"({kind.__name__}: " in str(error) for kind in (TrialContractError, det.InvalidHP))
    return isinstance(error, RankError)


_MOST_OBJECTS = 10_000
_MOST_ITEMS = 10_000
_MOST_DEPTH = 6

# Libraries whose objects are not looked into; data sets of torch only wrap others.
_LEFT_ALONE = ("torch.", "deepspeed.", "determined.core", "dstrial.", "threading", "_thread")
_LOOKED_INTO = ("torch.utils.data", "dstrial.trial.device_transfer")


class StateSnapshot:
    """How things are now, and the way back there.

    Not put back: tensors and arrays of user objects that are changed in place, files, and what lies outside of this process.

    Args:
        context: of the trial; its engines and reducers.
        objects: whose attributes are put back, and those of what they hold: the trial, the data sets.

    Ranks: all; communicates only for pipelines with tied layers, when it is undone.
    """

    def __init__(self, context: DeepSpeedTrialContext, objects: Iterable[Any]) -> None:
        self._context = context
        self._random_states = random_states(context.device)
        self._engines = [engine_extra_state(engine) for engine in context.models]
        self._reducers = Snapshot(wrapped.reducer for wrapped in runtime_of(context).wrapped_reducers)
        self._attributes = AttributeSnapshot(objects)

    def restore(self) -> None:
        """Put everything back. Ranks: all."""
        for engine, state in zip(self._context.models, self._engines, strict=True):
            restore_engine_extra_state(engine, state)
        self._reducers.restore()
        self._attributes.restore()
        restore_random_states(self._random_states, self._context.device)


class AttributeSnapshot:
    """Attributes, containers and random generators of objects and what they hold.

    Modules, optimizers and objects of libraries are left alone. Ranks: any; no communication.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self._restorers: list[Callable[[], object]] = []
        self._kept: list[Any] = []  # so that no id is given a second time
        self._seen: set[int] = set()
        for one in objects:
            self._visit(one, 0)

    def restore(self) -> None:
        """Put everything back."""
        for restore in self._restorers:
            restore()

    def _visit(self, value: Any, depth: int) -> None:
        if depth > _MOST_DEPTH or len(self._seen) > _MOST_OBJECTS or id(value) in self._seen:
            return
        if isinstance(value, (int, float, str, bytes, bool, type(None), type, torch.Tensor, np.ndarray)):
            return
        self._seen.add(id(value))
        self._kept.append(value)
        generator = _generator_restorer(value)
        if generator is not None:
            self._restorers.append(generator)
        elif isinstance(value, (list, dict, set, collections.deque)):
            if len(value) <= _MOST_ITEMS:
                self._container(value, depth)
        elif isinstance(value, tuple):
            for item in value[:_MOST_ITEMS]:
                self._visit(item, depth + 1)
        elif _is_user_defined(value):
            attributes = vars(value)
            before = dict(attributes)

            def restore() -> None:
                attributes.clear()
                attributes.update(before)

            self._restorers.append(restore)
            for item in before.values():
                self._visit(item, depth + 1)

    def _container(self, value: Any, depth: int) -> None:
        items = list(value.values() if isinstance(value, dict) else value)
        before = dict(value) if isinstance(value, dict) else items
        add = value.update if isinstance(value, (dict, set)) else value.extend

        def restore() -> None:
            value.clear()
            add(before)

        self._restorers.append(restore)
        for item in items:
            self._visit(item, depth + 1)


def _generator_restorer(value: Any) -> Callable[[], object] | None:
    """Return what puts a random generator back; None if the value is none."""
    if isinstance(value, np.random.Generator):
        bits, state = value.bit_generator, value.bit_generator.state
        return lambda: setattr(bits, "state", state)
    if isinstance(value, np.random.RandomState):
        legacy = value.get_state()
        return lambda: value.set_state(legacy)
    if isinstance(value, random.Random):
        python = value.getstate()
        return lambda: value.setstate(python)
    if isinstance(value, torch.Generator):
        tensor = value.get_state()
        return lambda: value.set_state(tensor)
    return None


def _is_user_defined(value: Any) -> bool:
    """Say whether an object's attributes are state of the user's."""
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer, DeepSpeedTrialContext, types.ModuleType)):
        return False
    if (
        callable(value)
        and not hasattr(type(value), "__getitem__")
        and isinstance(value, (types.FunctionType, types.MethodType, types.BuiltinFunctionType))
    ):
        return False
    module = type(value).__module__ or ""
    if module.startswith(_LEFT_ALONE) and not module.startswith(_LOOKED_INTO):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)
