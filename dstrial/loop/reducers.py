"""The attributes of a user's metric reducers: kept aside while something else uses them, and checkpointed."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from dstrial.trial.context import DeepSpeedTrialContext
from dstrial.trial.runtime import TrialRuntime
from dstrial.trial.trial import DeepSpeedTrial

logger = logging.getLogger("dstrial.loop")

# What a reducer may hold a reference to, but what is never part of its state.
_NOT_STATE = (torch.nn.Module, DeepSpeedTrialContext, DeepSpeedTrial)


class Snapshot:
    """The attributes of some reducers as they are now.

    What cannot be copied (locks, process groups, models, the context) is kept by reference.

    Args:
        reducers: the user's reducer objects.
    """

    def __init__(self, reducers: Iterable[Any]) -> None:
        self._kept = [
            (reducer, {name: _copied(value) for name, value in vars(reducer).items()}) for reducer in reducers
        ]

    def restore(self) -> None:
        """Put every attribute back and remove those that came since."""
        for reducer, attributes in self._kept:
            vars(reducer).clear()
            vars(reducer).update(attributes)


def _copied(value: Any) -> Any:
    if isinstance(value, _NOT_STATE):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001  # user objects fail to copy in any way they like
        return value


def reducer_state(reducer: Any) -> dict[str, Any]:
    """Return what of a reducer goes into a checkpoint: every attribute that can be written and is state.

    Functions, models and the context come back with the trial and are left out; of anything else that cannot
    be written, one warning is logged.
    """
    state = {}
    for name, value in vars(reducer).items():
        if isinstance(value, _NOT_STATE):
            continue
        try:
            torch.save(value, io.BytesIO())
        except Exception:  # noqa: BLE001  # user objects fail to pickle in any way they like
            if not callable(value):
                logger.warning("reducer attribute %s.%s cannot be checkpointed", type(reducer).__name__, name)
            continue
        state[name] = _copied(value)
    return state


def training_reductions(runtime: TrialRuntime, states: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return what another rank's training reducers would contribute to the next report.

    Args:
        runtime: whose reducers compute it; they are as before afterwards.
        states: what ``reducer_state`` returned on that rank, of each reducer in the order of wrapping.

    Returns:
        What ``per_slot_reduce`` returns for each training reducer, in the order of wrapping.

    Ranks: any; no communication.
    """
    reductions = []
    for wrapped, state in zip(runtime.wrapped_reducers, states, strict=True):
        if wrapped.for_training:
            own = Snapshot([wrapped.reducer])
            restore_reducer(wrapped.reducer, state)
            reductions.append(_copied(wrapped.per_slot_reduce()))
            own.restore()
    return reductions


def restore_reducer(reducer: Any, state: Mapping[str, Any]) -> None:
    """Put back what ``reducer_state`` returned."""
    vars(reducer).update(state)
