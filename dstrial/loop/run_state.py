"""State of a run that is saved besides its engines: counters, reducers, callbacks."""

from __future__ import annotations

import dataclasses
import io
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dstrial.checkpoint.layout import Layout
from dstrial.engine.frozen_parameters import frozen_checksums, leaves_out_frozen
from dstrial.loop.boundaries import Progress
from dstrial.loop.callbacks import Callbacks
from dstrial.loop.metrics import MetricWindow, copied
from dstrial.trial.context import DeepSpeedTrialContext, runtime_of
from dstrial.trial.runtime import TrialRuntime
from dstrial.trial.trial import Checkpointable, DeepSpeedTrial

logger = logging.getLogger("dstrial.loop")

# Types of objects that a reducer may refer to, but that are not saved with it.
_NOT_STATE = (torch.nn.Module, DeepSpeedTrialContext, DeepSpeedTrial)


@dataclasses.dataclass(slots=True)
class RunState:
    """The objects whose state is saved in checkpoints; shared by saver and loader.

    Attributes:
        trial: object that saves and loads the engines: the user's trial, or an adapter of another library's objects.
        trial_id: id of the running trial; from another trial's checkpoint, only weights are loaded.
    """

    trial: Checkpointable
    context: DeepSpeedTrialContext
    callbacks: Callbacks
    progress: Progress
    window: MetricWindow
    trial_id: int
    _frozen: list[list[str]] = dataclasses.field(default_factory=list, init=False)
    _frozen_checksums: list[dict[str, str]] = dataclasses.field(default_factory=list, init=False)

    @property
    def runtime(self) -> TrialRuntime:
        return runtime_of(self.context)

    def layouts(self) -> list[Layout]:
        """Return how engines' state is split over ranks. Ranks: all, collectively."""
        gather = self.context.distributed.allgather
        return [adapter.layout(gather) for adapter in self.runtime.adapters]

    def layouts_to_save(self) -> list[dict[str, Any]]:
        """Return ``layouts()`` as JSON values, to save in a checkpoint.

        If the config leaves frozen parameters out of checkpoints, the layouts have checksums of these parameters. The checksums
        are computed again only if the set of frozen parameters has changed. Ranks: all, collectively.
        """
        layouts = self.layouts()
        if leaves_out_frozen(self.runtime.exp_conf):
            frozen = [[one.name for one in layout.parameters if not one.trainable] for layout in layouts]
            if frozen != self._frozen:
                gather = self.context.distributed.allgather
                engines = zip(self.context.models, layouts, strict=True)
                self._frozen_checksums = [
                    frozen_checksums(engine, layout, gather) for engine, layout in engines
                ]
                self._frozen = frozen
            layouts = [
                dataclasses.replace(layout, frozen_checksums=checksums)
                for layout, checksums in zip(layouts, self._frozen_checksums, strict=True)
            ]
        return [layout.to_json() for layout in layouts]


class Snapshot:
    """A copy of metric reducers' attributes; ``restore`` writes the copy back.

    Attributes that cannot be copied (locks, process groups, models, the context) are kept by reference.
    """

    def __init__(self, reducers: Iterable[Any]) -> None:
        self._kept = [
            (reducer, {name: _copied(value) for name, value in vars(reducer).items()}) for reducer in reducers
        ]

    def restore(self) -> None:
        for reducer, attributes in self._kept:
            vars(reducer).clear()
            vars(reducer).update(attributes)


def _copied(value: Any) -> Any:
    return value if isinstance(value, _NOT_STATE) else copied(value)


def reducer_state(reducer: Any) -> dict[str, Any]:
    """Return a reducer's attributes for a checkpoint.

    Functions, models and the context are left out, because the trial creates them again. Other attributes that cannot be
    pickled are left out with a warning.
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
        state[name] = copied(value)
    return state


def restore_reducer(reducer: Any, state: Mapping[str, Any]) -> None:
    vars(reducer).update(state)
